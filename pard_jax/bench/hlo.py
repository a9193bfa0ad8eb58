"""What the text of a compiled program tells: its layers' collectives, copies, sorts, the padding of its arguments."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
)  # fmt: skip
_COPIES = ("copy", "copy-start")  # a transpose may be a matter of names: where it is not, it is a copy by now
_LAYER_SCOPE = "/mlp/"  # of the decoder: every layer has it, and nothing else does
_SMALL = 1 << 16  # bytes; what the tiles add to smaller arguments is of no weight

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([^ ]+) .*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%[^ ]+ = (?P<type>.*?) (?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)$")
_NAME = re.compile(r"%([^ ,(){}]+)")
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([\d,]*)(?::T\(([\d,]+)\))?)?")


class Instruction(NamedTuple):
    """One line of a computation."""

    type: str  # of what it gives; a tuple's in parentheses
    opcode: str
    rest: str  # operands, attributes, metadata


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of the program, as one device holds it."""

    type: str  # such as bf16[36,2560]
    size: int  # bytes
    padded: int  # bytes in whole tiles


@dataclasses.dataclass(frozen=True)
class Hlo:
    """Facts of a compiled program.

    Attributes:
        layers: collectives of one turn of each loop over layers, by kind.
        others: all other collectives, by kind: how often they are written, not how often they run.
        largest_copy: bytes of the largest array that is copied into another order; moves to faster memory aside.
        longest_sort: length of the longest axis that is sorted; 0 where nothing is.
        arguments: in order.
    """

    layers: list[dict[str, int]]
    others: dict[str, int]
    largest_copy: int
    longest_sort: int
    arguments: list[Argument]

    @property
    def worst_padding(self) -> float:
        """The most that tiles multiply an argument of 64 KiB or more by."""
        return max((a.padded / a.size for a in self.arguments if a.size >= _SMALL), default=1.0)


def read(text: str) -> Hlo:
    """Read ``compiled.as_text()``."""
    computations = _computations(text)
    bodies = {
        body
        for instructions in computations.values()
        for instruction in instructions
        if instruction.opcode == "while"
        for body in re.findall(r"body=%([^ ,]+)", instruction.rest)
        if any(_LAYER_SCOPE in inner.rest for inner in computations[body])
    }
    # Neither a loop around the layers' nor what is called from one of theirs is a loop over layers itself.
    reached = {body: _reached(computations, body) for body in bodies}
    layers = [body for body in bodies if not any(other in reached[body] for other in bodies - {body})]
    within = {name for body in layers for name in reached[body]}
    every = [i for instructions in computations.values() for i in instructions]
    return Hlo(
        layers=[_collectives(computations, reached[body]) for body in sorted(layers)],
        others=_collectives(computations, computations.keys() - within),
        largest_copy=max((_largest(i.type) for i in _copies(computations)), default=0),
        longest_sort=max((_sorted_length(i) for i in every if i.opcode == "sort"), default=0),
        arguments=list(_arguments(text)),
    )


def _computations(text: str) -> dict[str, list[Instruction]]:
    found: dict[str, list[Instruction]] = {}
    instructions: list[Instruction] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            instructions = found[header[1]] = []
        elif match := _INSTRUCTION.match(line):
            instructions.append(Instruction(match["type"], match["opcode"], match["rest"]))
    return found


def _reached(computations: dict[str, list[Instruction]], root: str) -> set[str]:
    """``root`` and every computation that is called from it."""
    reached, waiting = {root}, [root]
    while waiting:
        for instruction in computations[waiting.pop()]:
            called = {name for name in _NAME.findall(instruction.rest) if name in computations} - reached
            reached |= called
            waiting += called
    return reached


def _collectives(computations: dict[str, list[Instruction]], names: set[str]) -> dict[str, int]:
    kinds = (i.opcode.removesuffix("-start") for name in names for i in computations[name])
    return dict(sorted(collections.Counter(kind for kind in kinds if kind in COLLECTIVES).items()))


def _copies(computations: dict[str, list[Instruction]]) -> Iterator[Instruction]:
    """Copies whose result lies in memory: within a fusion, that of its last instruction alone does."""
    every = [i for instructions in computations.values() for i in instructions]
    fused = {_called(i) for i in every if i.opcode == "fusion"}
    for name in computations.keys() - fused:
        for i in computations[name]:
            last = computations[_called(i)][-1] if i.opcode == "fusion" else i
            if last.opcode in _COPIES and not _only_moves(last):
                yield last


def _called(fusion: Instruction) -> str:
    return re.findall(r"calls=%([^ ,]+)", fusion.rest)[0]


def _only_moves(instruction: Instruction) -> bool:
    """Whether a copy leaves the layout as it is: from one memory to another, as a prefetch into vector memory does."""
    # The asynchronous form gives (destination, source, context).
    arrays = [match[0] for match in _ARRAY.finditer(instruction.type)]
    return instruction.opcode == "copy-start" and arrays[0] == arrays[1]


def _largest(type_: str) -> int:
    return max((_size(dtype, _numbers(dims)) for dtype, dims, *_ in _ARRAY.findall(type_)), default=0)


def _sorted_length(instruction: Instruction) -> int:
    axis = re.search(r"dimensions=\{(\d+)\}", instruction.rest)
    first = _ARRAY.search(instruction.type)
    return _numbers(first[2])[int(axis[1])] if axis and first else 0


def _arguments(text: str) -> Iterator[Argument]:
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->", text)
    for dtype, dims, order, tile in _ARRAY.findall(layout[1] if layout else ""):
        shape = _numbers(dims)
        physical = [shape[axis] for axis in reversed(_numbers(order))]  # the axis that runs fastest comes last
        for i, multiple in enumerate(reversed(_numbers(tile)[-len(shape) :]), 1):
            if shape:
                physical[-i] = -(-physical[-i] // multiple) * multiple
        yield Argument(f"{dtype}[{dims}]", _size(dtype, shape), _size(dtype, physical))


def _size(dtype: str, shape: list[int]) -> int:
    bits = re.search(r"\d+", dtype)  # pred has none, and takes a byte
    return math.prod(shape) * (int(bits[0]) if bits else 8) // 8


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
