"""Letting the next kernel start before this one has ended (programmatic dependent launch; NVIDIA's Hopper and later).

XLA (as of jax 0.11.2) starts kernels in a way that permits it, and has each wait, where it begins, for all that the
ones before it write. What a kernel itself can do is to say when the next may be placed on the processors. Our products
say so once their loops are done: programs that come earlier take places unevenly, and a product of large matrices then
waits for the fullest processor (docs/performance.md).
"""

from __future__ import annotations

import jax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float


def can_start_early() -> bool:
    """Whether this process' GPU has the instruction."""
    device = jax.local_devices()[0]
    return device.platform == "gpu" and float(device.compute_capability) >= 9.0


def let_next_start(value: Float[Array, "..."]) -> Float[Array, "..."]:
    """``value``, float32; once it is there, the next kernel may start."""
    (value,) = plgpu.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[value],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(value.shape, value.dtype)],
    )
    return value
