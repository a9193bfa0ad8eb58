"""What tests of sampling and verification feed them: settings, logits, and drafts drawn as a drafter draws them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pard_jax.decoding.sampling import Role, SamplingState, role_keys, sample

POSITION = 6  # absolute index of the first token that a block decides


def settings(
    temperature: np.ndarray | list[float],
    seeds: np.ndarray | list[int] | None = None,
    *,
    top_k: np.ndarray | int = 0,
    top_p: np.ndarray | float = 1.0,
    min_p: np.ndarray | float = 0.0,
) -> SamplingState:
    """One row a temperature; seeds count up from 0 unless given; a scalar holds for all rows."""
    batch = len(temperature)
    return SamplingState(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(np.broadcast_to(top_k, batch), jnp.int32),
        top_p=jnp.asarray(np.broadcast_to(top_p, batch), jnp.float32),
        min_p=jnp.asarray(np.broadcast_to(min_p, batch), jnp.float32),
        seed=jnp.asarray(np.arange(batch) if seeds is None else seeds, jnp.uint32),
    )


def at(batch: int, position: int = POSITION) -> jax.Array:
    return jnp.full(batch, position, jnp.int32)


def softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, over the last axis."""
    e = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def repeat(values: np.ndarray | Sequence[np.ndarray], batch: int) -> jax.Array:
    """The same float32 values in every row."""
    return jnp.asarray(np.broadcast_to(np.asarray(values, np.float32), (batch, *np.shape(values))))


@partial(jax.jit, static_argnames="role")
def drafted(draft_logits: jax.Array, seed: jax.Array, position: jax.Array, role: Role = Role.DRAFT) -> jax.Array:
    """[B, K] tokens drawn from [B, K, V]; column k is the token at ``position + k``. ``role`` puts a fault in."""
    columns = position[:, None] + jnp.arange(draft_logits.shape[1])[None, :]
    return sample(draft_logits, role_keys(seed, columns, role))
