"""No speculation: plain decoding as the case K = 0."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pard_jax.decoding.drafters.protocol import DraftContext, Drafter, Proposal


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoDrafter(Drafter):
    """Proposes nothing, so that every step yields one token of the target's own."""

    num_speculative_tokens: int = 0

    def propose(self, params: Any, state: Any, context: DraftContext, *, window: int) -> tuple[Proposal, Any]:
        """An empty proposal."""
        return Proposal(jnp.zeros((context.length.shape[0], 0), jnp.int32), None), state
