"""An ordinary draft model: K drafts from K forward passes, one token after the other (vLLM's ``draft_model``)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pard_jax.decoding.drafters.model import DraftState, ModelDrafter
from pard_jax.decoding.drafters.protocol import DraftContext, Proposal
from pard_jax.models import bind


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequentialDrafter(ModelDrafter):
    """Autoregressive drafting.

    The passes feed ``d_1..d_{K-1}`` back, so their keys are cached already when they are accepted. The next first
    pass then has one token to take in, or two where all K drafts were accepted: ``d_K`` was never fed.
    """

    def propose(
        self, params: Any, state: DraftState, context: DraftContext, *, window: int
    ) -> tuple[Proposal, DraftState]:
        """Draft K tokens a row: one pass of width 2, then K-1 of width 1."""
        k = self.num_speculative_tokens
        model = bind(self.config, params, self.implementation)
        # Drafts that were fed but not accepted lie at or beyond length - 1: they are to be overwritten.
        cached = jnp.minimum(state.cached, context.length - 1)
        num_real = context.length - cached
        offsets = jnp.arange(2, dtype=jnp.int32)[None, :]
        first = jnp.take_along_axis(context.tokens, cached[:, None] + offsets, axis=1, mode="clip")
        out = model(self._known_ids(first), state.cache, cached, window=window)
        last = jnp.take_along_axis(out.hidden, (num_real - 1)[:, None, None], axis=1, mode="clip")
        token, probs = self._pick(model, last, context.length[:, None], context)

        def draft(carry, position):
            token, cache = carry
            out = model(token, cache, position, window=window)
            token, probs = self._pick(model, out.hidden, position[:, None] + 1, context)
            return (token, out.cache), (token, probs)

        positions = context.length[None, :] + jnp.arange(k - 1, dtype=jnp.int32)[:, None]
        (_, cache), (tokens, more) = lax.scan(draft, (token, out.cache), positions)
        tokens = jnp.concatenate([token, tokens[:, :, 0].T], axis=1)
        if probs is not None and more is not None:
            probs = jnp.concatenate([probs, more[:, :, 0].swapaxes(0, 1)], axis=1)
        cached = jnp.where(context.active, context.length + k - 1, state.cached)
        return self._proposal(tokens, probs, context), DraftState(cache, cached)
