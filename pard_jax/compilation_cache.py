"""JAX's persistent compilation cache, on by default: what one start compiles, the next one reads.

It lies in ``$PARD_JAX_HOME/xla`` (``~/.cache/pard_jax/xla``), grows without a limit and can be deleted at any time. JAX
files programs under all that they depend on, the processor's features included, so machines may share a home. The user
may choose a directory (``JAX_COMPILATION_CACHE_DIR``) or none (``JAX_ENABLE_COMPILATION_CACHE=false``).
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import jax

from pard_jax.switches import is_on
from pard_jax.weights.cache import cache_home

SWITCH = "PARD_JAX_COMPILATION_CACHE"
# JAX keeps what took a second to compile. An engine's start is many small programs as well, each of which takes ten
# times longer to compile than to read.
_THRESHOLD = "jax_persistent_cache_min_compile_time_secs"

logger = logging.getLogger(__name__)


def enable_compilation_cache() -> None:
    """Have JAX keep compiled programs in :func:`directory`; call it before anything is compiled.

    ``PARD_JAX_COMPILATION_CACHE=off`` leaves JAX as it is, and so does a directory that cannot be written to.

    Raises:
        ValueError: ``PARD_JAX_COMPILATION_CACHE`` is neither ``on`` nor ``off``.
    """
    config: Any = jax.config
    if not is_on(SWITCH) or config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache:
        return
    path = _home()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # whoever can write here can have us run anything
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as e:
        logger.info("no compilation cache: %s", e)
        return
    if not writable:
        logger.info("no compilation cache: %s cannot be written to", path)
        return
    # An entry that cannot be read or written costs a compilation and a line, also where warnings are errors.
    warnings.filterwarnings("default", r"Error (reading|writing) persistent compilation cache entry", UserWarning)
    config.update("jax_compilation_cache_dir", str(path))
    if _THRESHOLD.upper() not in os.environ:
        config.update(_THRESHOLD, 0.0)


def directory() -> Path | None:
    """Where compiled programs are kept; None where not by us: switched off, or JAX was given a directory of its own."""
    path = _home()
    return path if jax.config.jax_compilation_cache_dir == str(path) else None  # pyright: ignore[reportAttributeAccessIssue]


def _home() -> Path:
    return cache_home() / "xla"
