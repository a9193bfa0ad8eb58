"""What lives on the device between dispatches: one pytree, donated to every program and returned by it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from pard_jax.config.model import ModelConfig
from pard_jax.decoding.drafters import Drafter
from pard_jax.decoding.sampling import SamplingState
from pard_jax.models import KVCache
from pard_jax.models.sharding import replicated
from pard_jax.pytree import pytree

MAX_STOP_TOKEN_IDS = 32  # a row's EOS and stop ids together


@pytree
class DecodeState:
    """All rows of the batch. Settings are arrays, so that no setting ever compiles anything."""

    tokens: Int[Array, "B C"]  # committed ids of every row, prompt first; garbage at and beyond `length`
    length: Int[Array, "B"]  # committed tokens
    cached: Int[Array, "B"]  # tokens whose keys the target's cache holds: length - 1 while decoding
    active: Bool[Array, "B"]  # rows that decode; the others are empty, being prefilled, or finished
    sampling: SamplingState
    stop_ids: Int[Array, "B 32"]  # padded with -1
    min_length: Int[Array, "B"]  # no stop id before this many tokens, prompt included
    max_length: Int[Array, "B"]  # the row is finished at this many tokens
    num_logprobs: Int[Array, "B"]  # -1: none asked; 0: of the chosen token; n: of the n best too
    cache: KVCache  # the target's
    draft: Any  # the drafter's own


@pytree
class Row:
    """One request as the device sees it: what :func:`admit` puts into a row. Scalars but for two arrays."""

    tokens: ArrayLike  # int32 [C], the prompt, zero-padded
    length: ArrayLike  # int32, of the prompt
    temperature: ArrayLike  # float32
    top_k: ArrayLike  # int32
    top_p: ArrayLike  # float32
    min_p: ArrayLike  # float32
    seed: ArrayLike  # uint32
    stop_ids: ArrayLike  # int32 [32], padded with -1
    min_length: ArrayLike  # int32
    max_length: ArrayLike  # int32
    num_logprobs: ArrayLike  # int32


def init_state(
    config: ModelConfig, drafter: Drafter, num_rows: int, num_slots: int, dtype: Any, mesh: Mesh | None = None
) -> DecodeState:
    """An empty state. ``num_slots`` bounds history and caches alike; see engine/memory.py for how it is chosen."""
    device = None if mesh is None else replicated(mesh)

    def full(value: Any, dtype: Any, *shape: int) -> Array:
        return jnp.full((num_rows, *shape), value, dtype, device=device)

    shape = (config.num_layers, num_rows, config.num_kv_heads, num_slots, config.head_dim)
    return DecodeState(
        tokens=full(0, jnp.int32, num_slots),
        length=full(1, jnp.int32),
        cached=full(0, jnp.int32),
        active=full(False, jnp.bool_),
        sampling=SamplingState(
            temperature=full(0.0, jnp.float32),
            top_k=full(0, jnp.int32),
            top_p=full(1.0, jnp.float32),
            min_p=full(0.0, jnp.float32),
            seed=full(0, jnp.uint32),
        ),
        stop_ids=full(-1, jnp.int32, MAX_STOP_TOKEN_IDS),
        min_length=full(0, jnp.int32),
        max_length=full(1, jnp.int32),
        num_logprobs=full(-1, jnp.int32),
        cache=KVCache.zeros(shape, dtype, mesh),
        draft=drafter.init(num_rows, num_slots, dtype, mesh),
    )


def admit(drafter: Drafter, state: DecodeState, index: Int[Array, ""], row: Row) -> DecodeState:
    """Put a request into a row. It decodes at once if there is nothing to prefill (a prompt of one token)."""
    s = state.sampling
    return DecodeState(
        tokens=state.tokens.at[index].set(row.tokens),
        length=state.length.at[index].set(row.length),
        cached=state.cached.at[index].set(0),
        active=state.active.at[index].set(row.length == 1),
        sampling=SamplingState(
            temperature=s.temperature.at[index].set(row.temperature),
            top_k=s.top_k.at[index].set(row.top_k),
            top_p=s.top_p.at[index].set(row.top_p),
            min_p=s.min_p.at[index].set(row.min_p),
            seed=s.seed.at[index].set(row.seed),
        ),
        stop_ids=state.stop_ids.at[index].set(row.stop_ids),
        min_length=state.min_length.at[index].set(row.min_length),
        max_length=state.max_length.at[index].set(row.max_length),
        num_logprobs=state.num_logprobs.at[index].set(row.num_logprobs),
        cache=state.cache,
        draft=drafter.admit(state.draft, index),
    )
