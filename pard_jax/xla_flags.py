"""XLA's flags that decoding on NVIDIA GPUs wants; the only place that touches ``XLA_FLAGS``.

A dispatch is a ``while`` loop of steps of hundreds of small kernels. Left to itself, XLA has the host launch them one
by one; told to, it runs the loop as one CUDA graph (``docs/performance.md`` has the figures).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import re

from jax._src import xla_bridge  # only it knows whether a backend has started without starting one

from pard_jax.switches import is_on

SWITCH = "PARD_JAX_XLA_FLAGS"
FLAGS = {
    # XLA's own choice, and the loop around it.
    "--xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
    # A whole dispatch is four commands at the top, which is fewer than XLA thinks worth a graph.
    "--xla_gpu_graph_min_graph_size": "1",
}
# XLA ends the process at a flag that it does not know. These versions know them.
_SINCE, _BEFORE = (0, 10), (0, 13)
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

logger = logging.getLogger(__name__)


def add_xla_flags() -> None:
    """Add the flags to ``XLA_FLAGS``, where JAX can run on NVIDIA GPUs; flags that are there already stay as they are.

    XLA reads them when JAX's backend starts: call this before. ``PARD_JAX_XLA_FLAGS=off`` keeps them out.

    Raises:
        ValueError: ``PARD_JAX_XLA_FLAGS`` is neither ``on`` nor ``off``.
    """
    if not is_on(SWITCH) or not any(importlib.util.find_spec(name) for name in _PLUGINS):
        return
    installed = importlib.metadata.version("jaxlib")
    version = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if not _SINCE <= version < _BEFORE:
        logger.info("XLA's flags are left alone: jaxlib %s is none that they were tried with", installed)
        return
    given = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.split("=", 1)[0] for flag in given}
    missing = [f"{name}={value}" for name, value in FLAGS.items() if name not in names]
    if not missing:
        return
    if xla_bridge.backends_are_initialized():
        # Not only in vain: JAX would file programs under flags that they were not compiled with.
        logger.debug("JAX's backend has started already: %s would come too late", " ".join(missing))
        return
    os.environ["XLA_FLAGS"] = " ".join([*given, *missing])
