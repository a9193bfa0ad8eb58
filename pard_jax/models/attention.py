"""Grouped-query attention: of new tokens over a row's cache, and of whole sequences in training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pard_jax.models.precision import precision_of


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
    m = k.shape[1]
    q = q.reshape(r, t, m, n // m, h)
    scores = jnp.einsum("rtmgh,rmwh->rmgtw", q, k, preferred_element_type=jnp.float32, precision=precision_of(q.dtype))
    scores = jnp.where(mask[:, None, None, :, :], scores * h**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("rmgtw,rmwh->rtmgh", weights, v, precision=precision_of(v.dtype))
    return out.reshape(r, t, n * h)


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
