"""Prompt look-up: propose what followed the last tokens where they stood before (vLLM's ``ngram_proposer.py``)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pard_jax.decoding.drafters.protocol import DraftContext, Drafter, Proposal


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramDrafter(Drafter):
    """Drafts without a model: the longest suffix of ``min_n`` to ``max_n`` tokens, at its earliest occurrence."""

    max_n: int
    min_n: int

    def propose(
        self, params: Any, state: tuple[()], context: DraftContext, *, window: int
    ) -> tuple[Proposal, tuple[()]]:
        """Draft up to K tokens a row; fewer where the text ends before, none where nothing matches."""
        tokens, length = context.tokens[:, :window], context.length[:, None]
        b, width = tokens.shape
        at = jnp.arange(width, dtype=jnp.int32)[None, :]
        # run[b, i]: how many tokens ending at i equal the sequence's own last tokens, up to max_n.
        run = jnp.zeros((b, width), jnp.int32)
        alive = jnp.ones((b, width), bool)
        for back in range(self.max_n):
            suffix = jnp.take_along_axis(tokens, length - 1 - back, axis=1, mode="clip")
            before = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :width]
            alive = alive & (before == suffix) & (length - 1 - back >= 0)
            run = run + alive
        run = jnp.where((at < length - 1) & (run >= self.min_n), run, 0)
        end = jnp.argmax(run, axis=1).astype(jnp.int32)[:, None]  # the first of the longest
        found = jnp.max(run, axis=1)[:, None] > 0
        source = end + 1 + jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)[None, :]
        drafts = jnp.take_along_axis(tokens, source, axis=1, mode="clip")
        return Proposal(jnp.where(found & (source < length), drafts, -1), None), state
