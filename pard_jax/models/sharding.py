"""Where every array lies on the mesh: one table of partition specs, one axis for tensor parallelism.

The model code never mentions a mesh. Parameters and caches are placed by these specs, and XLA's partitioner derives
the collectives (one all-reduce after ``o_proj`` and one after ``down_proj``, as in Megatron-LM).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

TENSOR_AXIS = "tensor"
_T = TENSOR_AXIS

# By parameter name (see decoder.py). Arrays under `layers` carry the layer axis in front.
PARAM_SPECS: dict[str, P] = {
    "embed": P(_T, None),
    "lm_head": P(_T, None),
    "norm": P(),
    "attn_norm": P(),
    "mlp_norm": P(),
    "q_norm": P(),
    "k_norm": P(),
    "q_proj": P(None, _T, None),
    "k_proj": P(None, _T, None),
    "v_proj": P(None, _T, None),
    "o_proj": P(None, None, _T),
    "q_bias": P(None, _T),
    "k_bias": P(None, _T),
    "v_bias": P(None, _T),
    "o_bias": P(),
    "gate_proj": P(None, _T, None),
    "up_proj": P(None, _T, None),
    "down_proj": P(None, None, _T),
    "gate_bias": P(None, _T),
    "up_bias": P(None, _T),
    "down_bias": P(),
}
CACHE_SPEC = P(None, None, _T, None, None)  # [L, B, M, S, H]: split by key/value heads


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of ``tensor_parallel_size`` devices along one axis.

    Raises:
        ValueError: fewer devices than asked for.
    """
    devices = jax.devices() if devices is None else devices
    if not 1 <= tensor_parallel_size <= len(devices):
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size}, but there are {len(devices)} {devices[0].platform} "
            f"device(s); choose a size from 1 to {len(devices)}"
        )
    return Mesh(np.asarray(devices[:tensor_parallel_size]), (TENSOR_AXIS,))


def param_sharding(mesh: Mesh, name: str) -> NamedSharding:
    """The sharding of the parameter called ``name``."""
    return NamedSharding(mesh, PARAM_SPECS[name])


def cache_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a key or value cache ``[L, B, M, S, H]``."""
    return NamedSharding(mesh, CACHE_SPEC)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, P())
