"""The memory that a Triton kernel touches, read from the code that Pallas makes of it: no GPU is needed.

Interpretation cannot show an access beyond an array: it pads and clamps, where a GPU reads and writes what lies behind.
So the kernels are lowered for CUDA, and the integers of their Triton IR (program ids, offsets, masks) are computed by
NumPy, program by program; floating-point numbers are never looked at.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh
from jaxlib.triton import dialect

_CALL = "__gpu$xla.gpu.triton"
_GPU = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
_MANY = 24  # programs
_INTEGERS = {"i1": np.bool_, "i32": np.int32, "i64": np.int64}
_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


class Access(NamedTuple):
    """What one load or store of one program touches."""

    store: bool
    argument: int  # inputs, then outputs
    offsets: np.ndarray  # elements from the argument's start, those masked left out


class Kernel(NamedTuple):
    """A kernel of a lowered function."""

    name: str
    grid: tuple[int, int, int]
    sizes: list[int]  # elements of each argument: inputs, then outputs
    body: Block

    def accesses(self, program: tuple[int, int, int], memory: dict[int, Sequence[int]]) -> list[Access]:
        """What the program ``program`` of the grid touches, where the arguments of integers hold ``memory``."""
        machine = _Machine(program, memory)
        machine.run(self.body, [_Pointer(i, np.zeros((), np.int64)) for i in range(len(self.sizes))])
        return machine.accesses

    def count(self, name: str) -> int:
        """Operations of that name, inner ones included."""

        def inside(block: Block) -> int:
            return sum((op.name == name) + sum(map(inside, op.blocks)) for op in block.operations)

        return inside(self.body)

    def programs(self, every: bool = False) -> list[tuple[int, int, int]]:
        """All programs of the grid, or of a large one some dozens, evenly spread, the last among them."""
        x, y, z = map(range, self.grid)
        programs = list(itertools.product(x, y, z))
        if every or len(programs) <= _MANY:
            return programs
        return [*programs[: -1 : -(-len(programs) // _MANY)], programs[-1]]

    def check_bounds(self, memory: dict[int, Sequence[int]], *, every: bool = False) -> list[Access]:
        """Every access of the programs lies inside its argument; returns them."""
        found = []
        for program in self.programs(every):
            for access in self.accesses(program, memory):
                low, high = access.offsets.min(initial=0), access.offsets.max(initial=0)
                what = "stores to" if access.store else "loads from"
                assert low >= 0 and high < self.sizes[access.argument], (
                    f"program {program} of {self.name} {what} {low}..{high} of argument {access.argument}, which has "
                    f"{self.sizes[access.argument]} elements"
                )
                found.append(access)
        return found


class Operation(NamedTuple):
    """One operation, with values as numbers."""

    name: str
    operands: list[int]
    results: list[int]
    shape: tuple[int, ...]  # of the first result
    kind: str  # its elements: "i32", "f32", "!tt.ptr<bf16>", ...
    attributes: dict[str, Any]
    blocks: list[Block]


class Block(NamedTuple):
    """A list of operations."""

    arguments: list[int]
    operations: list[Operation]


class _Pointer(NamedTuple):
    argument: int
    offsets: np.ndarray


def kernels_of(function: Callable[..., Any], *arguments: Any) -> list[Kernel]:
    """Lower ``function`` for an NVIDIA GPU; its Triton kernels."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=_GPU)):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    kernels = [_kernel(op) for op in _walk(module.operation) if op.name == "stablehlo.custom_call" and _is_triton(op)]
    if not kernels:
        pytest.skip(f"jax {jax.__version__} does not hand Triton IR to XLA as {_CALL}")
    return kernels


def _is_triton(op: Any) -> bool:
    return ir.StringAttr(op.attributes["call_target_name"]).value == _CALL


def _walk(op: Any) -> Iterator[Any]:
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _walk(inner.operation)


def _kernel(call: Any) -> Kernel:
    config = ir.DictAttr(call.attributes["mhlo.backend_config"])
    with call.context as context:
        dialect.register_dialect(context)
        module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
    function = module.body.operations[0]
    x, y, z = (ir.IntegerAttr(config[f"grid_{axis}"]).value for axis in "xyz")
    sizes = [math.prod(ir.RankedTensorType(value.type).shape) for value in (*call.operands, *call.results)]
    numbers: dict[Any, int] = {}
    body = _block(function.operation.regions[0].blocks[0], numbers)
    return Kernel(ir.StringAttr(config["name"]).value, (x, y, z), sizes, body)


def _block(block: Any, numbers: dict[Any, int]) -> Block:
    def number(value: Any) -> int:
        return numbers.setdefault(value, len(numbers))

    arguments = [number(value) for value in block.arguments]
    operations = []
    for view in block.operations:
        op = view.operation
        shape, kind = _type(op.results[0].type) if len(op.results) else ((), "")
        attributes = {name: op.attributes[name] for name in ("value", "start", "end", "axis", "predicate")
                      if name in op.attributes}  # fmt: skip
        operands, results = [number(v) for v in op.operands], [number(v) for v in op.results]
        inner = [_block(b, numbers) for region in op.regions for b in region.blocks]
        operations.append(
            Operation(op.name, operands, results, shape, kind, _plain(op.name, kind, attributes), inner)
        )  # fmt: skip
    return Block(arguments, operations)


def _plain(name: str, kind: str, attributes: dict[str, Any]) -> dict[str, int]:
    if name == "arith.constant" and kind not in _INTEGERS:
        return {}
    if name == "tt.get_program_id":
        return {"axis": ir.IntegerAttr(attributes["axis"]).value}
    plain = {}
    for key, value in attributes.items():
        one: Any = value.get_splat_value() if isinstance(value, ir.DenseElementsAttr) else value
        plain[key] = int(one.value)
    return plain


def _type(kind: Any) -> tuple[tuple[int, ...], str]:
    if isinstance(kind, ir.RankedTensorType):
        return tuple(kind.shape), str(kind.element_type)
    return (), str(kind)


class _Machine:
    """Runs one program."""

    def __init__(self, program: tuple[int, int, int], memory: dict[int, Sequence[int]]) -> None:
        self.program, self.memory = program, memory
        self.values: dict[int, Any] = {}
        self.accesses: list[Access] = []

    def run(self, block: Block, arguments: Sequence[Any]) -> list[Any]:
        """The values that the block ends with."""
        self.values.update(zip(block.arguments, arguments, strict=True))
        for op in block.operations:
            operands = [self.values[i] for i in op.operands]
            if op.name in ("scf.yield", "tt.return"):
                return operands
            self.values.update(zip(op.results, self.step(op, operands), strict=True))
        return []

    def step(self, op: Operation, operands: list[Any]) -> list[Any]:
        if op.name == "scf.for":
            first, end, by, *carry = operands
            for i in range(int(first), int(end), int(by)):
                carry = self.run(op.blocks[0], [np.int32(i), *carry])
            return carry
        if op.name == "scf.if":
            chosen = op.blocks[:1] if operands[0] else op.blocks[1:]
            return self.run(chosen[0], []) if chosen else []
        if op.name in ("tt.load", "tt.store"):
            return self.access(op, operands)
        if op.name == "tt.reduce" or not (op.kind in _INTEGERS or op.kind.startswith("!tt.ptr")):
            # Numbers that no address depends on. A value that one did depend on would be missing below.
            return [None] * len(op.results)
        with np.errstate(over="ignore"):
            return [self.integer(op, operands)]

    def access(self, op: Operation, operands: list[Any]) -> list[Any]:
        store = op.name == "tt.store"
        pointer, *masks = operands[:1] + operands[2:] if store else operands[:2]
        offsets = pointer.offsets if not masks else pointer.offsets[masks[0]]
        self.accesses.append(Access(store, pointer.argument, np.ravel(offsets)))
        if store:
            return []
        known = self.memory.get(pointer.argument)
        return [None if known is None else np.asarray(known, _INTEGERS[op.kind])[pointer.offsets]]

    def integer(self, op: Operation, operands: list[Any]) -> Any:
        name, a = op.name, operands[0] if operands else None
        if isinstance(a, _Pointer):
            moved = a.offsets + operands[1] if name == "tt.addptr" else _shaped(op, a.offsets)
            return _Pointer(a.argument, moved)
        dtype = _INTEGERS[op.kind]
        if name == "arith.constant":
            return np.full(op.shape, op.attributes["value"], dtype)
        if name == "tt.get_program_id":
            return dtype(self.program[op.attributes["axis"]])
        if name == "tt.make_range":
            return np.arange(op.attributes["start"], op.attributes["end"], dtype=dtype)
        if name in ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.trans"):
            return None if a is None else _shaped(op, a)
        if a is None or any(b is None for b in operands[1:]):
            return None
        if name == "arith.cmpi":
            predicate = op.attributes["predicate"]
            # Unsigned comparisons follow the signed ones, and no offset is negative.
            return _COMPARISONS[predicate if predicate < 6 else predicate - 4](a, operands[1])
        if name == "arith.select":
            return np.where(a, operands[1], operands[2])
        if name in ("arith.extui", "arith.extsi", "arith.trunci"):
            return a.astype(dtype)
        if name in ("arith.divsi", "arith.remsi", "arith.divui", "arith.remui"):
            quotient = np.trunc(a / operands[1]).astype(dtype)  # towards 0, as hardware has it
            return quotient if "div" in name else a - quotient * operands[1]
        return _BINARY[name](a, operands[1])


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "arith.addi": operator.add,
    "arith.subi": operator.sub,
    "arith.muli": operator.mul,
    "arith.andi": operator.and_,
    "arith.ori": operator.or_,
    "arith.xori": operator.xor,
    "arith.minsi": np.minimum,
    "arith.maxsi": np.maximum,
}


def _shaped(op: Operation, a: np.ndarray) -> np.ndarray:
    if op.name == "tt.expand_dims":
        return np.expand_dims(a, op.attributes["axis"])
    return np.transpose(a) if op.name == "tt.trans" else np.broadcast_to(a, op.shape)
