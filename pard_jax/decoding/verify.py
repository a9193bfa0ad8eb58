"""Rejection sampling: how much of a drafted block the target keeps, and the one token it adds.

Lossless for any draft: a kept token, a correction and a bonus token all follow the target's own distribution (Leviathan
et al. 2023, Algorithm 1). A draft without probabilities is a point mass, q(d) = 1, which is how vLLM verifies drafts
taken by argmax (vllm/v1/sample/rejection_sampler.py). This file knows nothing of how a draft was made.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pard_jax.decoding.sampling import Role, SamplingState, role_keys, sample
from pard_jax.models.argmax import first_argmax


class Verified(NamedTuple):
    """What one step emits."""

    tokens: Int[Array, "B K+1"]  # the kept drafts and one more token, then -1
    num_emitted: Int[Array, "B"]  # 1..K+1
    num_accepted: Int[Array, "B"]  # drafts among them, 0..K


def verify(
    target_logits: Float[Array, "B T V"],
    draft_tokens: Int[Array, "B K"],
    draft_probs: Float[Array, "B K V"] | None,
    settings: SamplingState,
    position: Int[Array, "B"],
    conditional_rates: Float[Array, "K"] | None = None,
) -> Verified:
    """Keeps a prefix of each row's drafts and adds one token.

    Greedy rows keep what equals the target's argmax. Other rows keep draft d with probability min(1, p(d) / q(d)) and
    correct the first rejected one from max(p - q, 0), normalised. A negative draft id says that nothing was proposed
    there: it ends the block, and the token comes from p itself, as in decoding without drafts. An id of V or more is
    rejected like one that the target never says.

    Args:
      target_logits: the target's float32 logits, T = K + 1 columns, masked and warped (``sampling.warp_logits``).
      draft_tokens: the proposals; K may be 0.
      draft_probs: what the drafts were drawn from (``fit_vocabulary`` adapts its width); None for one-hot drafts.
      settings: the rows' temperatures and seeds are read.
      position: absolute index, from 0, of the token that column 0 decides.
      conditional_rates: where given, draft i is kept at this rate whatever the target says (vLLM's "synthetic"
        rejection, for measuring speed at a chosen acceptance): the output is then no longer the target's.
    """
    (batch, width, vocab), depth = target_logits.shape, draft_tokens.shape[1]
    if width != depth + 1:
        raise ValueError(
            f"target_logits has {width} columns; {depth} drafts need {depth + 1}: one for each, and one more"
        )
    proposals = jnp.pad(draft_tokens, ((0, 0), (0, 1)), constant_values=-1)  # the bonus column proposes nothing

    in_vocab = (draft_tokens >= 0) & (draft_tokens < vocab)

    def uniforms() -> Float[Array, "B K"]:
        keys = role_keys(settings.seed, position[:, None] + jnp.arange(depth)[None, :], Role.ACCEPT)
        return jax.vmap(jax.random.uniform)(keys.reshape(-1)).reshape(batch, depth)

    def accepted_by_ratio() -> Bool[Array, "B K"]:
        logits, ids = target_logits[:, :-1], jnp.clip(draft_tokens, 0, vocab - 1)[:, :, None]
        p = jnp.exp(jnp.take_along_axis(logits, ids, axis=2)[:, :, 0] - jax.nn.logsumexp(logits, axis=-1))
        q = jnp.ones_like(p) if draft_probs is None else jnp.take_along_axis(draft_probs, ids, axis=2)[:, :, 0]
        # Strict, since u may be 0 and a token with p = 0 must not pass; u < 1 keeps p = q = 1 certain.
        return in_vocab & (q > 0) & (uniforms() * q < p)

    def drawn(kept: Int[Array, "B"]) -> Int[Array, "B"]:
        p = jax.nn.softmax(_column(target_logits, kept))
        proposal = _column(proposals, kept)
        if draft_probs is None or depth == 0:
            q = jax.nn.one_hot(proposal, vocab)  # all zero for an id outside the vocabulary
        else:
            q = jnp.where(proposal[:, None] < 0, 0.0, _column(draft_probs, jnp.minimum(kept, depth - 1)))
        residual = jnp.maximum(p - q, 0.0)
        # p = q leaves no residual, and rounding may still reject there: p itself is then the limit.
        weights = jnp.where(residual.sum(axis=-1, keepdims=True) > 0, residual, p)
        role = jnp.where(proposal < 0, Role.BONUS, Role.RESIDUAL)
        return sample(jnp.log(weights), role_keys(settings.seed, position + kept, role))

    best = first_argmax(target_logits)
    if conditional_rates is None:
        accepted = draft_tokens == best[:, :-1]
    else:
        accepted = in_vocab & (uniforms() < conditional_rates[None, :])

    def with_sampling() -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        kept = _leading(accepted)
        if conditional_rates is None:
            kept = jnp.where(settings.greedy, kept, _leading(accepted_by_ratio()))
        return kept, jnp.where(settings.greedy, _column(best, kept), drawn(kept))

    def by_argmax() -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        kept = _leading(accepted)
        return kept, _column(best, kept)

    kept, token = lax.cond(settings.greedy.all(), by_argmax, with_sampling)
    column = jnp.arange(width)[None, :]
    ended = jnp.where(column == kept[:, None], token[:, None], -1)
    return Verified(jnp.where(column < kept[:, None], proposals, ended), kept + 1, kept)


def verify_greedy(best: Int[Array, "B T"], draft_tokens: Int[Array, "B K"]) -> Verified:
    """What :func:`verify` gives where every row is greedy, from the target's likeliest tokens alone.

    A kept draft is the target's own token, so the tokens emitted are a prefix of ``best``.
    """
    kept = _leading(draft_tokens == best[:, :-1])
    column = jnp.arange(best.shape[1])[None, :]
    return Verified(jnp.where(column <= kept[:, None], best, -1), kept + 1, kept)


def fit_vocabulary(draft_probs: Float[Array, "B K W"], vocab: int) -> Float[Array, "B K V"]:
    """Draft probabilities over the target's V ids: ids the draft lacks have none, ids only the draft has are cut.

    A cut row need not sum to 1: what it lost is the chance of a proposal that ``verify`` always rejects.
    """
    missing = max(0, vocab - draft_probs.shape[-1])
    return jnp.pad(draft_probs[:, :, :vocab], ((0, 0), (0, 0), (0, missing)))


def _leading(accepted: Bool[Array, "B K"]) -> Int[Array, "B"]:
    """How many drafts are accepted before the first that is not."""
    depth = accepted.shape[1]
    first_rejected = jnp.where(accepted, depth, jnp.arange(depth, dtype=jnp.int32)[None, :])
    return first_rejected.min(axis=1, initial=depth)


def _column(values: Array, column: Int[Array, "B"]) -> Array:
    """Row b's entry at ``column[b]`` of axis 1: ``[B, T, ...] -> [B, ...]``."""
    index = column.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1)[:, 0]
