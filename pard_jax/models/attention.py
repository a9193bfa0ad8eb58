"""Grouped-query attention: of new tokens over a row's cache, and of whole sequences in training."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pard_jax.models.precision import precision_of

# Slots at a time, for a prefill chunk. Two CPU cores read 64 tokens of SmolLM2 fastest with 512 or 1024, and a TPU's
# compiler keeps the scores of 256 tokens of 40 heads for so many in the chip's vector memory (docs/performance.md).
_BLOCK = 512
_MANY_TOKENS = 64  # fewer a row are a decoding step's


def block_slots(tokens: int, window: int) -> int:
    """Cache slots whose scores a pass of ``tokens`` new tokens a row holds at once: a block, or for few tokens all."""
    return min(window, _BLOCK) if tokens >= _MANY_TOKENS else window


def attend(
    q: Float[Array, "R T N H"],
    k: Float[Array, "R M W H"],
    v: Float[Array, "R M W H"],
    mask: Bool[Array, "R T W"],
) -> Float[Array, "R T N*H"]:
    """Softmax attention; each of the M key/value heads serves N/M query heads.

    Scores and softmax are float32. Every query sees at least its own slot, so no row of ``mask`` is empty.
    """
    r, t, n, h = q.shape
    weights = jax.nn.softmax(_scores(q, k, mask), axis=-1).astype(v.dtype)
    out = jnp.einsum("rmgtw,rmwh->rtmgh", weights, v, precision=precision_of(v.dtype))
    return out.reshape(r, t, n * h)


def attend_in_blocks(
    q: Float[Array, "R T N H"],
    read: Callable[[Array], tuple[Float[Array, "R M X H"], Float[Array, "R M X H"]]],
    positions: Int[Array, "R T"],
    *,
    window: int,
    block: int,
) -> Float[Array, "R T N*H"]:
    """Causal :func:`attend` of queries at ``positions``, over ``block`` slots at a time.

    The softmax is taken online, with its largest score and sum carried along (Milakov and Gimelshein, arXiv 1805.02867;
    as in FlashAttention), so that the scores held are those of one block. Blocks behind the last position are not read.

    Args:
        read: the keys and values of the ``block`` (X) slots from a given one on.
        window: slots that may be read, at least ``block`` (static).
    """
    r, t, n, h = q.shape

    def add(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, largest, total = carry
        start = jnp.minimum(i * block, window - block)  # a last block that overlaps the one before
        k, v = read(start)
        slots = (start + jnp.arange(block, dtype=jnp.int32))[None, None, :]
        scores = _scores(q, k, (slots >= i * block) & (slots <= positions[:, :, None]))
        # Slot 0, which every query sees, is in the first block: no block's largest score is that of nothing.
        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        scale = jnp.exp(largest - new_largest)
        weights = jnp.exp(scores - new_largest[..., None])
        values = jnp.einsum("rmgtw,rmwh->rmgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32,
                            precision=precision_of(v.dtype))  # fmt: skip
        return out * scale[..., None] + values, new_largest, total * scale + weights.sum(axis=-1)

    m = jax.eval_shape(read, jnp.int32(0))[0].shape[1]
    per_query = jnp.zeros((r, m, n // m, t), jnp.float32)
    first = (jnp.zeros((*per_query.shape, h), jnp.float32), per_query - jnp.inf, per_query)
    out, _, total = lax.fori_loop(0, jnp.max(positions) // block + 1, add, first)
    return (out / total[..., None]).astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(r, t, n * h)


def _scores(q: Array, k: Array, mask: Array) -> Float[Array, "R M G T W"]:
    """Of queries ``[R, T, N, H]`` for keys ``[R, M, W, H]``; the least float32 where ``mask`` ``[R, T, W]`` is not."""
    r, t, n, h = q.shape
    m = k.shape[1]
    q = q.reshape(r, t, m, n // m, h)
    scores = jnp.einsum("rtmgh,rmwh->rmgtw", q, k, preferred_element_type=jnp.float32, precision=precision_of(q.dtype))
    return jnp.where(mask[:, None, None, :, :], scores * h**-0.5, jnp.finfo(jnp.float32).min)


IMPLEMENTATIONS = ("auto", "xla", "cudnn")


def attend_sequence(
    q: Float[Array, "R T N H"],
    k: Float[Array, "R T M H"],
    v: Float[Array, "R T M H"],
    mask: Bool[Array, "R T T"],
    *,
    implementation: str = "xla",
) -> Float[Array, "R T N*H"]:
    """Softmax attention of sequences over themselves, under any mask, by ``jax.nn.dot_product_attention``.

    Args:
        mask: every query sees one key at least.
        implementation: ``"xla"`` holds the scores ``[R, N, T, T]``; ``"cudnn"`` (NVIDIA GPUs, bfloat16 or float16, even
            T) never does.
    """
    out = jax.nn.dot_product_attention(
        q, k, v, mask=mask[:, None, :, :], implementation="cudnn" if implementation == "cudnn" else "xla"
    )
    return out.reshape(*out.shape[:2], -1)


def is_nvidia(device: jax.Device) -> bool:  # pyright: ignore[reportInvalidTypeForm]
    """Whether ``device`` is an NVIDIA GPU."""
    return "cuda" in getattr(device.client, "platform_version", "").lower()


def resolve_implementation(implementation: str, dtype) -> str:
    """``"auto"`` is cuDNN's kernel on an NVIDIA GPU in a 16-bit dtype, and XLA elsewhere.

    Raises:
        ValueError: an unknown name, or cuDNN where it cannot run.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention implementation {implementation!r}; choose of {', '.join(IMPLEMENTATIONS)}")
    device = jax.devices()[0]
    runs = is_nvidia(device) and jnp.dtype(dtype).itemsize == 2
    if implementation == "cudnn" and not runs:
        raise ValueError(
            f"cuDNN attention needs an NVIDIA GPU and bfloat16 or float16; this is {device.platform} in "
            f"{jnp.dtype(dtype).name}: choose xla or auto"
        )
    if implementation != "auto":
        return implementation
    return "cudnn" if runs else "xla"
