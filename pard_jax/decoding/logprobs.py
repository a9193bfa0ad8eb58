"""Log-probabilities that a request asks to see: of the chosen tokens and of the likeliest ones.

They are the model's own, from the logits before temperature, filters and masks (vLLM's ``raw_logprobs``).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pard_jax.models.argmax import first_argmax

MAX_LOGPROBS = 20  # the most likeliest tokens a request may ask for: vLLM's --max-logprobs


class TokenLogprobs(NamedTuple):
    """Natural logarithms. What was not asked for, or does not exist, reads -inf, rank 0 and id -1."""

    chosen: Float[Array, "B T"]
    rank: Int[Array, "B T"]  # 1 + the number of likelier tokens
    top_ids: Int[Array, "B T max"]  # likeliest first, the lower id first among equals
    top_values: Float[Array, "B T max"]


def token_logprobs(
    raw_logits: Float[Array, "B T V"],
    tokens: Int[Array, "B T"],
    num_logprobs: Int[Array, "B"],
    max_logprobs: int = MAX_LOGPROBS,
) -> TokenLogprobs:
    """The log-probabilities of ``tokens`` (-1: no token), and of each row's ``num_logprobs`` likeliest ids.

    ``num_logprobs`` is -1 for a row that asks for none, 0 for the chosen tokens alone, at most ``max_logprobs``.
    Nothing is computed when no row asks; else as many passes over the vocabulary as the largest number asked.
    """
    batch, width, vocab = raw_logits.shape
    nothing = TokenLogprobs(
        chosen=jnp.full((batch, width), -jnp.inf),
        rank=jnp.zeros((batch, width), jnp.int32),
        top_ids=jnp.full((batch, width, max_logprobs), -1, jnp.int32),
        top_values=jnp.full((batch, width, max_logprobs), -jnp.inf),
    )

    def computed() -> TokenLogprobs:
        normalizer = jax.nn.logsumexp(raw_logits, axis=-1)
        asked = (num_logprobs >= 0)[:, None] & (tokens >= 0)
        logit = jnp.take_along_axis(raw_logits, jnp.clip(tokens, 0, vocab - 1)[:, :, None], axis=2)
        rank = 1 + (raw_logits > logit).sum(axis=-1, dtype=jnp.int32)
        ids = lax.broadcasted_iota(jnp.int32, raw_logits.shape, 2)

        def next_best(n: Array, carry: tuple[Array, Array, TokenLogprobs]) -> tuple[Array, Array, TokenLogprobs]:
            last, last_id, found = carry
            # Read only: what follows the last one in order of (logit, id) is left, so nothing need be written out.
            left = (raw_logits < last[:, :, None]) | ((raw_logits == last[:, :, None]) & (ids > last_id[:, :, None]))
            remaining = jnp.where(left, raw_logits, -jnp.inf)
            best, best_id = remaining.max(axis=-1), first_argmax(remaining)
            wanted = asked & (n < num_logprobs)[:, None] & (best > -jnp.inf)
            found = found._replace(
                top_ids=found.top_ids.at[:, :, n].set(jnp.where(wanted, best_id, -1)),
                top_values=found.top_values.at[:, :, n].set(jnp.where(wanted, best - normalizer, -jnp.inf)),
            )
            return best, best_id, found

        found = nothing._replace(
            chosen=jnp.where(asked, logit[:, :, 0] - normalizer, -jnp.inf), rank=jnp.where(asked, rank, 0)
        )
        start = (jnp.full((batch, width), jnp.inf), jnp.full((batch, width), -1, jnp.int32), found)
        return lax.fori_loop(0, jnp.clip(num_logprobs.max(), 0, max_logprobs), next_best, start)[2]

    return lax.cond((num_logprobs >= 0).any(), computed, lambda: nothing)
