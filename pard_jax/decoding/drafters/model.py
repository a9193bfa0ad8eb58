"""What the two drafters that run a draft model share: a cache of their own, and how ids are picked from logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pard_jax.config.model import ModelConfig
from pard_jax.decoding.drafters.protocol import DraftContext, Drafter, Proposal
from pard_jax.decoding.sampling import Role, role_keys, sample, warp_logits
from pard_jax.models import Decoder, KVCache, bind
from pard_jax.models.argmax import first_argmax
from pard_jax.models.cache import zeros
from pard_jax.models.sharding import replicated
from pard_jax.pytree import pytree


@pytree
class DraftState:
    """The draft model's cache, and how many tokens of each row it holds."""

    cache: KVCache
    cached: Int[Array, "B"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDrafter(Drafter):
    """Base of the drafters that run a draft model; see the protocol for what the methods mean."""

    config: ModelConfig
    target_vocab_size: int
    max_model_len: int  # rows that would draft beyond it get no drafts
    implementation: str = "xla"  # of the draft's passes; see pard_jax.models.bind
    sampled: bool = False  # draw drafts from the draft's distribution instead of taking its best token

    def init(self, num_rows: int, num_slots: int, dtype: Any, mesh: Any = None) -> DraftState:
        c = self.config
        shape = (c.num_layers, num_rows, c.num_kv_heads, num_slots, c.head_dim)
        # Placed on the mesh like all of the state: a program cannot return arrays of both one device and several.
        device = None if mesh is None else replicated(mesh)
        return DraftState(KVCache.zeros(shape, dtype, mesh), zeros((num_rows,), jnp.int32, device))

    def admit(self, state: DraftState, row: Int[Array, "*R"]) -> DraftState:
        return dataclasses.replace(state, cached=state.cached.at[row].set(0, mode="drop"))

    def prefill(
        self, params: Any, state: DraftState, tokens: Int[Array, "R C"], row: Int[Array, "*R"],
        start: Int[Array, "*R"], count: Int[Array, "*R"], *, window: int,
    ) -> DraftState:  # fmt: skip
        model = bind(self.config, params, self.implementation)
        out = model(self._known_ids(tokens), state.cache, jnp.atleast_1d(start), window=window, first_row=row)
        return DraftState(out.cache, state.cached.at[row].set(start + count, mode="drop"))

    def catch_up(self, params: Any, state: DraftState, context: DraftContext, *, width: int, window: int) -> DraftState:
        """Passes of ``width`` tokens, all rows at once, until every active row's cache lacks the last token alone."""
        model = bind(self.config, params, self.implementation)
        end = context.length - 1

        def is_behind(state: DraftState) -> Array:
            return jnp.any(context.active & (state.cached < end))

        def take_in(state: DraftState) -> DraftState:
            start = jnp.minimum(state.cached, end)  # a sequential draft's cache may hold drafts beyond it
            at = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
            tokens = jnp.take_along_axis(context.tokens, at, axis=1, mode="clip")
            out = model(self._known_ids(tokens), state.cache, start, window=window)
            cached = jnp.where(context.active, jnp.minimum(start + width, end), state.cached)
            return DraftState(out.cache, cached)

        return lax.while_loop(is_behind, take_in, state)

    def _known_ids(self, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Ids that the draft's table has: a target may emit an id of its padded tail, which a smaller draft lacks."""
        return jnp.minimum(tokens, self.config.vocab_size - 1)

    def _pick(
        self, model: Decoder, hidden: Float[Array, "B R D"], positions: Int[Array, "B R"], context: DraftContext
    ) -> tuple[Int[Array, "B R"], Float[Array, "B R Q"] | None]:
        """The drafts for ``positions`` and, where they are sampled, the distributions they were drawn from.

        A padded row of the vocabulary that the target does not have is never proposed.
        """
        if not self.sampled:
            return model.best(hidden, self.target_vocab_size), None
        logits = model.logits(hidden)
        known = jnp.arange(logits.shape[-1])[None, None, :] < self.target_vocab_size
        logits = jnp.where(known, logits, -jnp.inf)
        warped = warp_logits(logits, context.sampling)
        drawn = sample(warped, role_keys(context.sampling.seed, positions, Role.DRAFT))
        tokens = jnp.where(context.sampling.greedy[:, None], first_argmax(logits), drawn)
        return tokens, jax.nn.softmax(warped, axis=-1)

    def _proposal(self, tokens: Int[Array, "B K"], probs: Any, context: DraftContext) -> Proposal:
        """Void the drafts of rows that would reach beyond the draft's own limit."""
        fits = context.length + self.num_speculative_tokens <= self.max_model_len
        return Proposal(jnp.where(fits[:, None], tokens, -1), probs)
