"""Where the kernels of these tests run: by the interpreter, or on a GPU if ``JAX_PLATFORMS=cuda`` asks for it."""

from __future__ import annotations

import jax

INTERPRET = jax.default_backend() != "gpu"
IMPLEMENTATION = "interpret" if INTERPRET else "pallas"
