"""The results as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pard_jax.bench.result import Result
from pard_jax.bench.spread import Spread


class Column(NamedTuple):
    """What stands at the head of a column, and what in it for each row."""

    header: str
    width: int  # negative: text, aligned to the left
    value: Callable[[Any], str]


class Lines:
    """An aligned table whose rows are printed as they come."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns

    @property
    def header(self) -> str:
        """The first line."""
        return self._join([column.header for column in self._columns])

    def row(self, result: Any) -> str:
        """The line of one result."""
        return self._join([column.value(result) for column in self._columns])

    def _join(self, cells: Sequence[str]) -> str:
        pairs = zip(self._columns, cells, strict=True)
        return "  ".join(c.ljust(-col.width) if col.width < 0 else c.rjust(col.width) for col, c in pairs).rstrip()


class Table(Lines):
    """Methods side by side.

    Args:
        methods, groups: every name that will come, for the columns' widths; no column for a single group.
        batches, contexts: whether several are measured; a column each, then.
    """

    def __init__(self, methods: Sequence[str], groups: Sequence[str], *, batches: bool, contexts: bool) -> None:
        columns = [
            Column("prompts", -max(7, *map(len, groups)), lambda r: r.case.prompts) if len(groups) > 1 else None,
            Column("method", -max(6, *map(len, methods)), lambda r: r.case.method),
            Column("dtype", -8, lambda r: r.case.dtype),
            Column("K", 4, lambda r: text(r.case.num_speculative_tokens)),
            Column("batch", 5, lambda r: text(r.case.max_num_seqs)) if batches else None,
            Column("context", 7, lambda r: text(r.case.context)) if contexts else None,
            Column("decode tok/s", 12, lambda r: number(median(r.decode_tokens_per_second), 1)),
            Column("ratio", 6, lambda r: number(r.ratio_to_plain, 2)),
            Column("first token", 11, lambda r: number(median(r.time_to_first_token), 3, " s")),
            Column("prefill tok/s", 13, lambda r: number(median(r.prefill_tokens_per_second), 1)),
            Column("AL", 5, lambda r: number(None if r.acceptance is None else r.acceptance.length, 2)),
            Column("AL no loops", 11, _before_loops),
            Column("tokens", -12, lambda r: _equal(r)),
        ]
        super().__init__([column for column in columns if column is not None])


def acceptance_lines(results: Sequence[Result]) -> list[str]:
    """Of every result that drafts: the share of steps that accepted the draft at each position, and the histogram."""
    rows = [(r, r.acceptance) for r in results if r.acceptance is not None]
    lines = []
    for result, found in rows:
        case = result.case
        where = f"{case.prompts}, {case.label}, {case.dtype}, batch {case.max_num_seqs}"
        where += "" if case.context is None else f", context {case.context}"
        shares = " ".join(f"{share:.3f}" for share in found.per_position)
        counts = " ".join(map(str, found.histogram))
        if len(result.steps_by_k) > 1:
            where += f", steps by K {', '.join(f'{k}: {steps}' for k, steps in result.steps_by_k.items())}"
        lines.append(f"{where}: by position {shares}; steps that accepted 0..K drafts: {counts}")
    return lines


def text(value: int | str | None) -> str:
    """A whole number or a word as it is, or a dash."""
    return "-" if value is None else str(value)


def number(value: float | None, digits: int, unit: str = "") -> str:
    """A number with its unit, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def median(spread: Spread | None) -> float | None:
    """The median of what was measured, if anything was."""
    return None if spread is None else spread.median


def _before_loops(result: Result) -> str:
    return number(None if result.acceptance_before_loops is None else result.acceptance_before_loops.length, 2)


def _equal(result: Result) -> str:
    if result.num_equal == result.num_prompts:
        return "equal"
    return f"{result.num_equal}/{result.num_prompts} equal"
