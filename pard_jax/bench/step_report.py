"""The figures of a decode step as numbers, as a line of a table, as a drawing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pard_jax.bench.spread import Spread
from pard_jax.bench.step_run import Measured
from pard_jax.bench.table import Column, Lines, median, number


@dataclasses.dataclass(frozen=True)
class Result:
    """A batch and K. Plain decoding is K = 0, and has no draft.

    Attributes:
        batch, num_speculative_tokens: B and K.
        measured: seconds, and the sizes that were compiled for.
        plain: seconds of a plain step of the same batch.
        bytes_per_step: what a step has to read.
        copy_bytes_per_second: of the device, read and written, in the same run.
        peak_bytes: the most that the process has held so far; None where the device does not tell.
    """

    batch: int
    num_speculative_tokens: int
    measured: Measured
    plain: Spread
    bytes_per_step: int
    copy_bytes_per_second: Spread
    peak_bytes: int | None

    @property
    def break_even(self) -> float:
        """A step's time in plain steps: the acceptance length from which on speculation gains."""
        return self.measured.step.median / self.plain.median

    @property
    def draft_share(self) -> float | None:
        """Of the step's time."""
        return None if self.measured.draft is None else self.measured.draft.median / self.measured.step.median

    @property
    def target_share(self) -> float:
        """Of the step's time."""
        return self.measured.target.median / self.measured.step.median

    @property
    def rest_share(self) -> float:
        """What the two passes alone do not account for; below 0 where they are slower alone than within the step."""
        return 1 - self.target_share - (self.draft_share or 0.0)

    @property
    def bytes_per_second(self) -> float:
        """At which a step reads what it has to."""
        return self.bytes_per_step / self.measured.step.median

    @property
    def share_of_copy(self) -> float:
        """Of the rate of a copy."""
        return self.bytes_per_second / self.copy_bytes_per_second.median

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Seconds, bytes, and what follows from them."""
        m = self.measured
        return {
            "batch": self.batch,
            "num_speculative_tokens": self.num_speculative_tokens,
            "window": m.window,
            "num_slots": m.num_slots,
            "step_seconds": dataclasses.asdict(m.step),
            "plain_seconds": dataclasses.asdict(self.plain),
            "break_even": self.break_even,
            "draft_seconds": None if m.draft is None else dataclasses.asdict(m.draft),
            "target_seconds": dataclasses.asdict(m.target),
            "draft_share": self.draft_share,
            "target_share": self.target_share,
            "rest_share": self.rest_share,
            "bytes_per_step": self.bytes_per_step,
            "bytes_per_second": self.bytes_per_second,
            "share_of_copy": self.share_of_copy,
            "host_seconds_per_dispatch": dataclasses.asdict(m.host),
            "compile_seconds": m.compilation,
            "peak_bytes": self.peak_bytes,
            "prefill_tokens_per_second": (
                None if m.prefill_tokens_per_second is None else dataclasses.asdict(m.prefill_tokens_per_second)
            ),
        }


def table(*, prefill: bool) -> Lines:
    """The table of results; a column for prefill where it is measured."""
    columns = [
        Column("batch", 5, lambda r: str(r.batch)),
        Column("K", 3, lambda r: str(r.num_speculative_tokens or "-")),
        Column("plain ms", 8, lambda r: number(r.plain.median * 1e3, 2)),
        Column("PARD ms", 8, lambda r: number(r.measured.step.median * 1e3, 2) if r.num_speculative_tokens else "-"),
        Column("ratio", 5, lambda r: number(r.break_even, 2)),
        Column("draft", 5, lambda r: _percent(r.draft_share)),
        Column("verify", 6, lambda r: _percent(r.target_share)),
        Column("rest", 4, lambda r: _percent(r.rest_share)),
        Column("GB/step", 7, lambda r: number(r.bytes_per_step / 1e9, 3)),
        Column("GB/s", 7, lambda r: number(r.bytes_per_second / 1e9, 1)),
        Column("of copy", 7, lambda r: _percent(r.share_of_copy)),
        Column("host ms", 7, lambda r: number(r.measured.host.median * 1e3, 2)),
        Column("compile s", 9, lambda r: number(r.measured.compilation, 1)),
        Column("peak GiB", 8, lambda r: number(None if r.peak_bytes is None else r.peak_bytes / (1 << 30), 2)),
    ]
    if prefill:
        columns.append(Column("prefill tok/s", 13, lambda r: number(median(r.measured.prefill_tokens_per_second), 0)))
    return Lines(columns)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def draw(results: Sequence[Result], title: str) -> Any:
    """The ``matplotlib.figure.Figure``: a step's time over K, a line a batch; and its parts, a bar a batch and K."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(13, 5), layout="constrained")
    figure.suptitle(title)
    times, parts = figure.subplots(1, 2)
    for i, batch in enumerate(dict.fromkeys(r.batch for r in results)):
        of_batch = [r for r in results if r.batch == batch]
        times.axhline(of_batch[0].plain.median * 1e3, linestyle="--", color=f"C{i}", label=f"plain, batch {batch}")
        if drafted := sorted((r for r in of_batch if r.num_speculative_tokens), key=lambda r: r.num_speculative_tokens):
            ks = [r.num_speculative_tokens for r in drafted]
            steps = [r.measured.step for r in drafted]
            errors = [[(s.median - s.min) * 1e3 for s in steps], [(s.max - s.median) * 1e3 for s in steps]]
            milliseconds = [s.median * 1e3 for s in steps]
            times.errorbar(ks, milliseconds, yerr=errors, marker="o", color=f"C{i}", label=f"PARD, batch {batch}")
    times.set(xlabel="K, tokens drafted a step", ylabel="ms a step (median; bars: min to max)", ylim=(0, None))
    times.xaxis.get_major_locator().set_params(integer=True)
    times.grid(alpha=0.3)
    times.legend(fontsize="small")

    left = [0.0] * len(results)
    for name in ("draft", "target", "rest"):
        widths = [max(getattr(r, f"{name}_share") or 0.0, 0.0) for r in results]
        parts.barh(range(len(results)), widths, left=left, label="verify" if name == "target" else name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    names = [f"K={r.num_speculative_tokens}" if r.num_speculative_tokens else "plain" for r in results]
    parts.set_yticks(range(len(results)), [f"{n}, batch {r.batch}" for n, r in zip(names, results, strict=True)])
    parts.invert_yaxis()
    parts.set(xlabel="share of the step")
    parts.legend(fontsize="small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure
