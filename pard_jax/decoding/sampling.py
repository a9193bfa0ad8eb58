"""From logits to a token: warping, random streams and the draw itself, one row of the batch at a time.

Everything here is an array function with static shapes: settings are arrays, so no request's settings recompile a step,
and what a row draws depends on its own logits, settings, seed and position alone. Nothing sorts the vocabulary: what
top-k, top-p and min-p keep is always the tokens at or above one logit, the row's *floor*, and a floor is found by
bisecting the float32 number line (on a CPU a sort takes 30 times as long; on a TPU it compiles for 15 seconds).
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt, UInt32

from pard_jax.models.argmax import first_argmax
from pard_jax.pytree import pytree

GREEDY_BELOW = 1e-5  # temperatures under this are greedy (vLLM's _SAMPLING_EPS)


class Role(enum.IntEnum):
    """What a random number is for. A stream shared by two roles would bias the output: noise that chose a draft says
    something about which token the residual draws."""

    DRAFT = 0  # draws a draft token
    ACCEPT = 1  # the uniform that a draft's probability ratio is compared with
    RESIDUAL = 2  # draws the correction of a rejected draft
    BONUS = 3  # draws from the target itself: after a block kept whole, or where nothing was proposed


@pytree
class SamplingState:
    """The sampling settings of the batch, one entry a row."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]  # 0: off
    top_p: Float[Array, "B"]  # 1: off
    min_p: Float[Array, "B"]  # 0: off
    seed: UInt32[Array, "B"]

    @property
    def greedy(self) -> Bool[Array, "B"]:
        return self.temperature < GREEDY_BELOW


def role_keys(
    seed: UInt32[Array, "B"], position: Int[Array, "B"] | Int[Array, "B K"], role: Role | Int[Array, "B"]
) -> Key[Array, "B"] | Key[Array, "B K"]:
    """The random keys of the tokens at ``position`` (absolute, from 0), for one use each.

    The generator is pinned: JAX's others draw different numbers in a batch than alone.
    """

    def key(seed: Array, position: Array, role: Array) -> Array:
        stream = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.fold_in(stream, role)

    role = jnp.broadcast_to(jnp.asarray(role, jnp.int32), seed.shape)
    if position.ndim == 2:
        key = jax.vmap(key, in_axes=(None, 0, None))
    return jax.vmap(key)(seed, position, role)


def sample(logits: Float[Array, "*B V"], keys: Key[Array, "*B"]) -> Int[Array, "*B"]:
    """Draws one token a row from ``softmax(logits)`` (already warped; need not be normalised) by the Gumbel-max trick.

    A row whose logits are all -inf or NaN yields an arbitrary id below V.
    """

    def gumbel(key: Array) -> Array:
        # The winner among V tokens comes from the tail where u is about 1/V. There 32 random bits are enough to make a
        # tie of the two best rarer than 1 in 28,000 at V = 152k; jax.random.gumbel's 23 bits tie 1 draw in 55, and
        # ties go to the lower id. The cap keeps the noise finite: a lone token must beat the -inf of the others.
        bits = jax.random.bits(key, logits.shape[-1:], jnp.uint32)
        u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        return -jnp.log(-jnp.log1p(-u))

    noise = jax.vmap(gumbel)(keys.reshape(-1)).reshape(logits.shape)
    return first_argmax(logits + noise)


def warp_logits(logits: Float[Array, "B T V"], settings: SamplingState) -> Float[Array, "B T V"]:
    """Temperature, then top-k, then top-p, then min-p, as HF's warpers apply them: removed tokens become -inf.

    Ties at a floor are kept together; one token is always kept. A greedy row is left as it is. A filter that no row of
    the batch asks for is not computed.
    """
    logits = logits / jnp.where(settings.greedy, 1.0, settings.temperature)[:, None, None]
    floor = jnp.full(logits.shape[:2], -jnp.inf)

    def raised(asked: Bool[Array, "B"], higher: Callable[[], Float[Array, "B T"]]) -> Float[Array, "B T"]:
        asked = asked & ~settings.greedy
        return lax.cond(
            asked.any(), lambda: jnp.where(asked[:, None], jnp.maximum(floor, higher()), floor), lambda: floor
        )

    def top_k_floor() -> Float[Array, "B T"]:
        return _floor(logits, 1.0, settings.top_k.astype(jnp.float32))

    def top_p_floor() -> Float[Array, "B T"]:
        return _floor(logits, jax.nn.softmax(_drop_below(logits, floor)), settings.top_p)

    def min_p_floor() -> Float[Array, "B T"]:
        return logits.max(axis=-1) + jnp.log(settings.min_p)[:, None]  # p >= min_p * max p, in logits

    floor = raised(settings.top_k > 0, top_k_floor)
    floor = raised(settings.top_p < 1, top_p_floor)
    floor = raised(settings.min_p > 0, min_p_floor)
    return _drop_below(logits, floor)


def mask_below_min_tokens(
    logits: Float[Array, "B T V"],
    position: Int[Array, "B"],
    min_length: Int[Array, "B"],
    stop_ids: Int[Array, "B E"],
) -> Float[Array, "B T V"]:
    """Forbids a row's stop ids (padded with -1) while its sequence is shorter than ``min_length``.

    Column t decides the token at absolute index ``position + t``; it is masked where that is below ``min_length``
    (prompt length plus the smallest number of new tokens).
    """
    batch, width, vocab = logits.shape
    too_early = position[:, None] + jnp.arange(width)[None, :] < min_length[:, None]

    def stops() -> Bool[Array, "B V"]:
        rows = jnp.arange(batch)[:, None]
        ids = jnp.where(stop_ids < 0, vocab, stop_ids)  # -1 would count from the end; V is dropped
        return jnp.zeros((batch, vocab), bool).at[rows, ids].set(True, mode="drop")

    forbidden = lax.cond(too_early.any(), stops, lambda: jnp.zeros((batch, vocab), bool))
    return jnp.where(too_early[:, :, None] & forbidden[:, None, :], -jnp.inf, logits)


def _drop_below(logits: Float[Array, "B T V"], floor: Float[Array, "B T"]) -> Float[Array, "B T V"]:
    return jnp.where(logits < floor[:, :, None], -jnp.inf, logits)


def _floor(
    logits: Float[Array, "B T V"], weights: Float[Array, "B T V"] | float, limit: Float[Array, "B"]
) -> Float[Array, "B T"]:
    """The least float32 f such that the weights of the logits above f sum to less than ``limit`` (at most the largest).

    Weights of 1 and limit k: the k-th largest logit. Probabilities and limit p: the lowest logit of the nucleus.
    The answer's distance below the largest logit, counted in representable floats, is built up bit by bit.
    """
    top = _rank_of_float(logits.max(axis=-1))
    furthest = top - _rank_of_float(jnp.float32(-jnp.inf))

    def try_bit(i: Array, distance: UInt32[Array, "B T"]) -> UInt32[Array, "B T"]:
        further = distance | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        pivot = _float_of_rank(top - further)
        above = jnp.where(logits > pivot[:, :, None], weights, 0.0).sum(axis=-1)
        return jnp.where((further <= furthest) & (above < limit[:, None]), further, distance)

    return _float_of_rank(top - lax.fori_loop(0, 32, try_bit, jnp.zeros_like(top)))


def _rank_of_float(value: Float[Array, "*B"]) -> UInt[Array, "*B"]:
    """Maps float32 to uint32, keeping the order (-0.0 just below 0.0)."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits ^ jnp.uint32(1 << 31))


def _float_of_rank(rank: UInt[Array, "*B"]) -> Float[Array, "*B"]:
    bits = jnp.where(rank >> 31 == 1, rank ^ jnp.uint32(1 << 31), ~rank)
    return lax.bitcast_convert_type(bits, jnp.float32)
