"""Cross-entropy of many rows over a large vocabulary without ever holding their logits.

The rows go through the head in chunks. A chunk's gradient is taken while its logits are there, in the forward pass, so
that the backward pass only scales it: three products over the vocabulary instead of four, and a chunk of logits as
peak memory.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

CHUNK_ROWS = 8192  # rows of hidden states that are scored at once


class Teacher(NamedTuple):
    """What distillation needs of the target: its states for the same rows, and its head."""

    hidden: Float[Array, "B R Dt"]
    head: Float[Array, "Vt Dt"]
    weight: float  # of the target's distribution; the data's tokens weigh the rest


def cross_entropy(
    hidden: Float[Array, "B R D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B R"],
    coefficients: Float[Array, "B R"],
    teacher: Teacher | None = None,
    *,
    head_rows: tuple[int, ...] | None = None,
) -> Float[Array, ""]:
    """``sum(coefficients * nll)``, float32.

    With a teacher, nll is the cross-entropy against ``weight * p_target + (1 - weight) * one_hot(targets)``, whose
    gradient is that of ``weight * KL(p_target || q) + (1 - weight) * CE``.

    Args:
        coefficients: 0 for rows that do not count. They carry the normalization, and get no gradient.
        head_rows: the rows of the head whose gradient is computed (that of the others is 0); None for all.
    """
    weight = 0.0 if teacher is None else teacher.weight
    extra = () if teacher is None else (teacher.hidden, teacher.head)
    return _cross_entropy(hidden, head, targets, coefficients, extra, weight, head_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _cross_entropy(hidden, head, targets, coefficients, teacher, weight: float, head_rows):
    return _forward(hidden, head, targets, coefficients, teacher, weight, head_rows)[0]


def _forward(hidden, head, targets, coefficients, teacher, weight: float, head_rows: tuple[int, ...] | None):
    b, r, d = hidden.shape
    chunks = num_chunks(b, r, CHUNK_ROWS)

    def split(x: Array) -> Array:  # [B, R, ...] -> [chunks, B, R / chunks, ...]
        return x.reshape(b, chunks, r // chunks, *x.shape[2:]).swapaxes(0, 1)

    def one(carry, xs):
        total, d_head = carry
        h, target, coefficient, *t = xs
        logits = jnp.einsum("brd,vd->brv", h, head, preferred_element_type=jnp.float32)
        log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        picked = jnp.take_along_axis(logits, target[:, :, None], axis=-1)[:, :, 0]
        nll = log_z[:, :, 0] - picked
        ids = jnp.arange(logits.shape[-1], dtype=target.dtype)[None, None, :]
        aim = (ids == target[:, :, None]).astype(jnp.float32)
        if t:
            probs = _teacher_probs(t[0], teacher[1], logits.shape[-1])
            soft = log_z[:, :, 0] - jnp.sum(probs * logits, axis=-1)
            nll = (1 - weight) * nll + weight * soft
            aim = (1 - weight) * aim + weight * probs
        error = ((jnp.exp(logits - log_z) - aim) * coefficient[:, :, None]).astype(h.dtype)
        d_h = jnp.einsum("brv,vd->brd", error, head)
        if head_rows is not None:
            error = error[:, :, jnp.asarray(head_rows, jnp.int32)]
        d_head = d_head + jnp.einsum("brv,brd->vd", error, h, preferred_element_type=jnp.float32)
        return (total + jnp.sum(coefficient * nll), d_head), d_h

    xs = [split(hidden), split(targets), split(coefficients)]
    if teacher:
        xs.append(split(teacher[0]))
    num_rows = head.shape[0] if head_rows is None else len(head_rows)
    start = (jnp.zeros((), jnp.float32), jnp.zeros((num_rows, d), jnp.float32))
    (total, d_head), d_hidden = lax.scan(one, start, tuple(xs))
    if head_rows is not None:
        d_head = jnp.zeros(head.shape, jnp.float32).at[jnp.asarray(head_rows, jnp.int32)].set(d_head)
    return total, (d_hidden.swapaxes(0, 1).reshape(b, r, d), d_head.astype(head.dtype))


def _backward(weight: float, head_rows, gradients, g):
    d_hidden, d_head = gradients
    return (d_hidden * g.astype(d_hidden.dtype), d_head * g.astype(d_head.dtype), None, None, None)


_cross_entropy.defvjp(_forward, _backward)


def _teacher_probs(hidden: Array, head: Array, vocab_size: int) -> Array:
    """The target's distribution over the draft's ``vocab_size`` ids (either vocabulary may be padded further)."""
    logits = jnp.einsum("brd,vd->brv", hidden, head[:vocab_size], preferred_element_type=jnp.float32)
    probs = jax.nn.softmax(logits, axis=-1)
    return jnp.pad(probs, ((0, 0), (0, 0), (0, vocab_size - probs.shape[-1])))


def num_chunks(batch: int, length: int, most_rows: int) -> int:
    """The fewest equal parts of an axis of ``length`` that hold at most ``most_rows`` rows each, over the batch."""
    parts = (n for n in range(1, length + 1) if length % n == 0)
    return next(n for n in parts if batch * length // n <= most_rows or n == length)


def coefficients(supervised: Array, block: Array, *, num_blocks: int, per_subtask: bool) -> Float[Array, "A B R"]:
    """What each row weighs in the loss.

    Pooled, as the reference code has it: all supervised rows alike, 1 over their number. Per subtask, as the paper has
    it: every block's mean weighs 1/K, whatever the number of its rows.

    Args:
        supervised: bool ``[A, B, R]``, over all that one update accumulates.
        block: of each row, int ``[R]``.
    """
    counted = supervised.astype(jnp.float32)
    if not per_subtask:
        return counted / jnp.maximum(jnp.sum(counted), 1.0)
    members = (block[None, :] == jnp.arange(num_blocks, dtype=block.dtype)[:, None]).astype(jnp.float32)
    totals = jnp.einsum("kr,abr->k", members, counted)
    present = jnp.maximum(jnp.sum(totals > 0), 1).astype(jnp.float32)
    share = jnp.where(totals > 0, 1.0 / jnp.maximum(totals, 1.0), 0.0) / present
    return counted * jnp.einsum("k,kr->r", share, members)[None, None, :]
