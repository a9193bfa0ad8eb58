"""What the compiler says, as lines of a table, as the table of what fits, as numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from pard_jax.bench.aot_compile import Analysis, Compiled
from pard_jax.bench.table import Column, Lines, number

_MIB, _GIB = 1 << 20, 1 << 30


class Case(NamedTuple):
    """What is compiled."""

    topology: str
    target: str
    weights: str
    cache: int  # tokens that a row may hold


@dataclasses.dataclass(frozen=True)
class Result:
    """One case and what the compiler says of it."""

    case: Case
    analysis: Analysis

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Bytes of one device, seconds."""
        a = self.analysis
        return self.case._asdict() | {
            "fits": a.fits,
            "needed_bytes": a.needed,
            "memory_bytes": a.memory_bytes,
            "planned_bytes": a.plan.total_bytes,
            "cache_bytes": a.cache_bytes,
            "num_slots": a.plan.num_slots,
            "programs": [_as_dict(program) for program in a.programs],
        }


def _as_dict(program: Compiled) -> dict[str, Any]:
    found = program.hlo
    return {
        "program": program.program,
        "fits": program.fits,
        "needed_bytes": program.needed,
        "argument_bytes": program.arguments,
        "temporary_bytes": program.temporaries,
        "alias_bytes": program.aliased,
        "peak_bytes": program.peak,
        "compile_seconds": program.seconds,
    } | (
        {}
        if found is None
        else {
            "layer_collectives": found.layers,
            "other_collectives": found.others,
            "largest_copy_bytes": found.largest_copy,
            "longest_sort": found.longest_sort,
            "worst_padding": found.worst_padding,
        }
    )


class Line(NamedTuple):
    """A program of a result."""

    result: Result
    program: Compiled


def table(cases: Sequence[Case]) -> Lines:
    """A line a program; every case that will come, for the columns' widths."""

    def text(name: str, value: Any, texts: Sequence[str]) -> Column:
        return Column(name, -max(len(name), *map(len, texts)), value)

    return Lines(
        [
            text("topology", lambda line: line.result.case.topology, [case.topology for case in cases]),
            text("target", lambda line: line.result.case.target, [case.target for case in cases]),
            text("weights", lambda line: line.result.case.weights, [case.weights for case in cases]),
            Column("cache", 6, lambda line: str(line.result.case.cache)),
            Column("program", -7, lambda line: line.program.program),
            Column("fits", 4, lambda line: "yes" if line.program.fits else "no"),
            Column("needed GiB", 10, lambda line: number(line.program.needed / _GIB, 2)),
            Column("of", 6, lambda line: number(line.result.analysis.memory_bytes / _GIB, 2)),
            Column("plan", 6, lambda line: number(line.result.analysis.plan.total_bytes / _GIB, 2)),
            Column("peak", 6, lambda line: number(_scaled(line.program.peak, _GIB), 2)),
            Column("args", 6, lambda line: number(_scaled(line.program.arguments, _GIB), 2)),
            Column("padded", 6, lambda line: number(line.program.hlo and line.program.hlo.worst_padding, 2)),
            Column("temp MiB", 8, lambda line: number(_scaled(line.program.temporaries, _MIB), 1)),
            Column("alias MiB", 9, lambda line: number(_scaled(line.program.aliased, _MIB), 1)),
            Column("caches", 7, lambda line: number(line.result.analysis.cache_bytes / _MIB, 1)),
            Column(
                "copy MiB", 8, lambda line: number(_scaled(line.program.hlo and line.program.hlo.largest_copy, _MIB), 1)
            ),
            Column("compile s", 9, lambda line: number(line.program.seconds, 1)),
            Column("collectives a layer", -19, lambda line: _collectives(line.program)),
        ]
    )


def lines(result: Result) -> list[Line]:
    """A result's lines."""
    return [Line(result, program) for program in result.analysis.programs]


def what_fits(results: Sequence[Result]) -> str:
    """A Markdown table: a row for targets and weights, a column for topologies and caches, GiB a chip needs in it."""
    columns = list(dict.fromkeys((r.case.topology, r.case.cache) for r in results))
    memory = {r.case.topology: r.analysis.memory_bytes for r in results}
    rows: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for r in results:
        needed = number(r.analysis.needed / _GIB, 1)
        cell = needed if r.analysis.fits else f"no ({needed})"
        rows.setdefault((r.case.target, r.case.weights), {})[r.case.topology, r.case.cache] = cell
    head = ["target", "weights"]
    head += [f"{topology} ({memory[topology] / _GIB:.2f} GiB), {_tokens(cache)}" for topology, cache in columns]
    body = [[*key, *(cells.get(column, "-") for column in columns)] for key, cells in rows.items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])


def _collectives(program: Compiled) -> str:
    """Of each loop over layers, draft and target; once where they are alike."""
    if program.hlo is None:
        return "-"
    texts = [", ".join(f"{count} {kind}" for kind, count in layer.items()) or "none" for layer in program.hlo.layers]
    return " / ".join(dict.fromkeys(texts)) or "-"


def _scaled(size: int | None, unit: int) -> float | None:
    return None if size is None else size / unit


def _tokens(count: int) -> str:
    return f"{count >> 10}k" if count % 1024 == 0 else str(count)
