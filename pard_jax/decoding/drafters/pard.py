"""PARD: K drafts from ONE forward pass over masked tokens (arXiv 2504.18583, section 3.1; AMD's ``pard_infer.py``).

The pass is 2K wide whatever was accepted, so that its shape is static (as TensorRT-LLM's ``PARDWorker`` has it)::

    [ the 1..K+1 tokens that the last step kept | K-1 mask tokens | padding ]

at consecutive positions, plainly causal. The row of the last real token predicts the first draft, mask row j the one
after it, so the K rows from the last real token on are gathered. Keys written by mask and padding rows lie behind the
draft's length: the next pass overwrites them, and no real token ever sees them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pard_jax.decoding.drafters.model import DraftState, ModelDrafter
from pard_jax.decoding.drafters.protocol import DraftContext, Proposal
from pard_jax.models import bind


@dataclasses.dataclass(frozen=True, kw_only=True)
class PardDrafter(ModelDrafter):
    """Parallel drafting with a model trained to continue from mask tokens."""

    mask_token_id: int

    def propose(
        self, params: Any, state: DraftState, context: DraftContext, *, window: int
    ) -> tuple[Proposal, DraftState]:
        """Draft K tokens a row in one forward pass of width 2K."""
        k = self.num_speculative_tokens
        offsets = jnp.arange(2 * k, dtype=jnp.int32)[None, :]
        num_real = (context.length - state.cached)[:, None]
        kept = jnp.take_along_axis(context.tokens, state.cached[:, None] + offsets, axis=1, mode="clip")
        masked = jnp.where(offsets < num_real + k - 1, self.mask_token_id, 0)
        tokens = jnp.where(offsets < num_real, self._known_ids(kept), masked)

        model = bind(self.config, params, self.implementation)
        out = model(tokens, state.cache, state.cached, window=window)
        drafted = jnp.arange(k, dtype=jnp.int32)[None, :]
        rows = num_real - 1 + drafted
        hidden = jnp.take_along_axis(out.hidden, rows[:, :, None], axis=1, mode="clip")
        picked, probs = self._pick(model, hidden, context.length[:, None] + drafted, context)

        cached = jnp.where(context.active, context.length, state.cached)
        return self._proposal(picked, probs, context), DraftState(out.cache, cached)
