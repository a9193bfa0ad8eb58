"""What lives on the device between dispatches: one pytree, donated to every program and returned by it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    """One request as the device sees it: what :func:`admit` puts into a row. Scalars but for two arrays.

    For several at once, every field has a leading axis.
    """

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
        # Made on the host: a program for each of these small arrays would take longer than all of them.
        return jax.device_put(np.full((num_rows, *shape), value, dtype), device)

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


def all_active(state: DecodeState, length: int) -> DecodeState:
    """The state with ``length`` tokens in every row, decoding without end: for measuring, where no row is in use."""
    values = {"length": length, "cached": length - 1, "active": True, "stop_ids": -1, "max_length": 1 << 30}
    fields = [(name, getattr(state, name), value) for name, value in values.items()]
    # Placed as they were, so that no program compiles anew for them.
    filled = {name: jax.device_put(np.full(x.shape, value, x.dtype), x.sharding) for name, x, value in fields}
    return dataclasses.replace(state, **filled)


def admit(drafter: Drafter, state: DecodeState, index: Int[Array, "*R"], row: Row) -> DecodeState:
    """Put a request into a row. It decodes at once if there is nothing to prefill (a prompt of one token).

    Or several into as many rows, each field of ``row`` with a leading axis; an index of B or more drops the request.
    """
    s = state.sampling

    def put(field: Array, value: ArrayLike) -> Array:
        return field.at[index].set(value, mode="drop")

    return DecodeState(
        tokens=put(state.tokens, row.tokens),
        length=put(state.length, row.length),
        cached=put(state.cached, 0),
        active=put(state.active, row.length == 1),
        sampling=SamplingState(
            temperature=put(s.temperature, row.temperature),
            top_k=put(s.top_k, row.top_k),
            top_p=put(s.top_p, row.top_p),
            min_p=put(s.min_p, row.min_p),
            seed=put(s.seed, row.seed),
        ),
        stop_ids=put(state.stop_ids, row.stop_ids),
        min_length=put(state.min_length, row.min_length),
        max_length=put(state.max_length, row.max_length),
        num_logprobs=put(state.num_logprobs, row.num_logprobs),
        cache=state.cache,
        draft=drafter.admit(state.draft, index),
    )
