"""Programs compiled for a TPU by PyPI's libtpu, on a machine that has none: from shapes alone, nothing is allocated."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pard_jax.bench import hlo
from pard_jax.bench.step_setup import Setup
from pard_jax.decoding.state import DecodeState, init_state
from pard_jax.decoding.step import Programs
from pard_jax.engine.memory import MemoryPlan
from pard_jax.models import KVCache, abstract_params, make_mesh
from pard_jax.models.sharding import cache_sharding, replicated

# Kinds of weights: the dtype that they, activations and caches have, and the quantization of weights beside it.
WEIGHTS = {"bfloat16": (jnp.bfloat16, None), "int8": (jnp.bfloat16, "int8"), "float32": (jnp.float32, None)}
PROGRAMS = ("prefill", "decode")

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no machine here to ask the cloud about
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",  # asked for, though the topology is what counts
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip to be held by one process alone
}
_OUT_OF_MEMORY = re.compile(
    r"required for HLO temporaries \(([\d.]+)([KMGTP]?)\) exceeds available HBM \(([\d.]+)([KMGTP]?)\)"
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program, in bytes of one device.

    Attributes:
        needed: of the chip's memory: arguments, also those of other programs, temporaries, and what is returned anew.
        arguments: weights and state, in tiles; as all of the rest, None where it does not fit.
        aliased: of the arguments, what is returned in place.
        peak: the most that is held at a time, in vector memory, too.
    """

    program: str
    needed: int
    arguments: int | None = None
    temporaries: int | None = None
    aliased: int | None = None
    peak: int | None = None
    hlo: hlo.Hlo | None = None
    seconds: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the compiler found room for it."""
        return self.arguments is not None


@dataclasses.dataclass(frozen=True)
class Analysis:
    """All programs of one case.

    Attributes:
        plan: what :mod:`pard_jax.engine.memory` takes it to need.
        cache_bytes: keys and values of target and draft on one device.
        memory_bytes: of one device.
        programs: prefill and decode, in the order of :data:`PROGRAMS`.
    """

    plan: MemoryPlan
    cache_bytes: int
    memory_bytes: int
    programs: tuple[Compiled, ...]

    @property
    def fits(self) -> bool:
        """Whether every program does."""
        return all(program.fits for program in self.programs)

    @property
    def needed(self) -> int:
        """Bytes that the device must hold."""
        return max(program.needed for program in self.programs)


def open_topology(name: str) -> Mesh:
    """The chips of a topology such as ``v5e:2x2``, along the axis of tensor parallelism.

    Raises:
        ValueError: libtpu is not installed, or does not know the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "compiling for a TPU needs its compiler, libtpu, which is not installed: pip install "
            f'"jax[tpu]=={jax.__version__}" (no TPU is needed)'
        )
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    # By default a host has four chips, which a topology of one cannot be divided into.
    one = re.fullmatch(r"[^:]+:1(x1)+", name) is not None
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **({"chips_per_host_bounds": (1, 1, 1)} if one else {})
        )
    except jax.errors.JaxRuntimeError as e:
        raise ValueError(
            f"libtpu cannot make the topology {name!r} (expected one such as v5e:1x1, v5e:2x2): {e}"
        ) from e
    return make_mesh(len(topology.devices), topology.devices)


def chip_memory(mesh: Mesh) -> int:
    """Bytes that the compiler lets a program use of each chip."""
    too_large = jax.ShapeDtypeStruct((1 << 50,), jnp.int8, sharding=replicated(mesh))
    try:
        jax.jit(jnp.copy).lower(too_large).compile()
    except jax.errors.JaxRuntimeError as e:
        if (sizes := _out_of_memory(e)) is not None:
            return sizes[1]
        raise
    raise RuntimeError("the compiler took a program of a pebibyte")


def analyse(setup: Setup, num_rows: int, k: int, memory_bytes: int) -> Analysis:
    """Compile prefill and decoding for the longest window: what needs the most.

    Args:
        setup: its ``mesh`` is of :func:`open_topology`, its ``memory_bytes`` None.
        memory_bytes: of one chip (:func:`chip_memory`).

    Raises:
        jax.errors.JaxRuntimeError: the compiler fails, other than for want of memory.
    """
    plan, drafter = setup.plan(num_rows, k), setup.drafter(k)
    state = _placed(
        jax.eval_shape(lambda: init_state(setup.target, drafter, num_rows, plan.num_slots, setup.dtype)), setup.mesh
    )
    models = {"target": setup.target} | ({"draft": setup.draft} if k and setup.draft is not None else {})
    params = {
        name: abstract_params(model, setup.dtype, setup.mesh, quantization=setup.quantization)
        for name, model in models.items()
    }
    programs = Programs(
        setup.target,
        drafter,
        chunk_size=setup.chunk_size,
        max_steps=setup.num_steps,
        implementation=setup.implementation,
        state_sharding=jax.tree.map(lambda leaf: leaf.sharding, state),
    )

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(setup.mesh))

    rows = () if plan.prefill_rows == 1 else (plan.prefill_rows,)
    chunk = (array(jnp.int32, *rows) for _ in range(3))  # row ids, where the chunks begin, how many tokens they have
    lowered = {
        "prefill": lambda: programs.prefill.lower(params, state, *chunk, window=plan.num_slots),
        "decode": lambda: programs.decode.lower(
            params, state, array(jnp.bool_, num_rows), array(jnp.int32), window=plan.num_slots
        ),
    }
    compiled = {name: _compile(name, lowered[name]) for name in PROGRAMS}
    # What prefill takes no part of, an output matrix, lies in memory all the same.
    prefill, decode = compiled["prefill"], compiled["decode"]
    if prefill.arguments is not None and decode.arguments is not None:
        compiled["prefill"] = dataclasses.replace(prefill, needed=prefill.needed + decode.arguments - prefill.arguments)
    caches = [cache for cache in jax.tree.leaves(state, is_leaf=_is_cache) if _is_cache(cache)]
    shards = (leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(caches))
    return Analysis(
        plan=plan,
        cache_bytes=sum(math.prod(shape) * setup.dtype.itemsize for shape in shards),
        memory_bytes=memory_bytes,
        programs=tuple(compiled.values()),
    )


def _compile(program: str, lower: Any) -> Compiled:
    begin = time.perf_counter()
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as e:
        if (sizes := _out_of_memory(e)) is None:
            raise
        return Compiled(program, needed=sizes[0])
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    aliased = memory.alias_size_in_bytes
    return Compiled(
        program,
        needed=arguments + temporaries + memory.output_size_in_bytes - aliased,
        arguments=arguments,
        temporaries=temporaries,
        aliased=aliased,
        peak=memory.peak_memory_in_bytes,
        hlo=hlo.read(compiled.as_text()),
        seconds=seconds,
    )


def _placed(state: DecodeState, mesh: Mesh) -> DecodeState:
    """Shapes with the shardings that the engine's state has (:func:`pard_jax.decoding.state.init_state` on a mesh)."""

    def place(part: Any) -> Any:
        sharding = cache_sharding(mesh) if _is_cache(part) else replicated(mesh)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part)

    return jax.tree.map(place, state, is_leaf=_is_cache)


def _is_cache(part: Any) -> bool:
    return isinstance(part, KVCache)


def _out_of_memory(error: Exception) -> tuple[int, int] | None:
    """Bytes that a program needs, and bytes that a chip has, where the compiler says that the first are too many."""
    if (found := _OUT_OF_MEMORY.search(str(error))) is None:
        return None
    needed, needed_unit, available, available_unit = found.groups()
    return _bytes(needed, needed_unit), _bytes(available, available_unit)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * 1024 ** " KMGTP".index(unit or " "))
