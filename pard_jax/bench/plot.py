"""The results as one figure: speed, acceptance by position, accepted lengths. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pard_jax.bench.result import Case, Result

FORMATS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Refuse early what cannot be drawn or written.

    Raises:
        ValueError: matplotlib is missing, or the file's name has another ending than :data:`FORMATS`.
        OSError: there is no such directory, or the name is a directory's.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; leave it out or install matplotlib")
    if path.suffix not in FORMATS:
        raise ValueError(f"--plot {path}: expected a name that ends in {', '.join(FORMATS)}")
    if path.is_dir():
        raise IsADirectoryError(f"--plot {path} is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"--plot {path}: there is no directory {path.absolute().parent}")


def write(path: Path, results: Sequence[Result], title: str) -> None:
    """Draw the results to a file. Of several groups of prompts, give the results of one, or of all together."""
    save(path, draw(results, title))


def save(path: Path, figure: Any) -> None:
    """Write a figure in the format that the file's name ends in."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=150)
    path.write_bytes(content.getvalue())


def draw(results: Sequence[Result], title: str) -> Any:
    """The ``matplotlib.figure.Figure``: tokens/s over K where several were measured, as bars elsewhere; then acceptance
    by position and accepted lengths, a line a method and K.
    """
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(16, 5), layout="constrained")
    figure.suptitle(title)
    speed, positions, lengths = figure.subplots(1, 3)
    if len({r.case.num_speculative_tokens for r in results} - {None}) > 1:
        _lines_over_k(speed, results)
    else:
        _bars(speed, results)
    drafted = [(r.case, r.acceptance) for r in results if r.acceptance is not None]
    for case, found in drafted:
        name = _name(case, results)
        positions.plot(range(1, len(found.per_position) + 1), found.per_position, marker="o", label=name)
        shares = [count / max(found.num_steps, 1) for count in found.histogram]
        lengths.plot(range(len(shares)), shares, marker="o", label=name)
    for axes, x, y in (
        (positions, "position of the draft", "share of steps that accept it"),
        (lengths, "drafts accepted", "share of steps"),
    ):
        axes.set(xlabel=x, ylabel=y, ylim=(0, 1.02))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if drafted:
            axes.legend(fontsize="small")
        else:
            axes.text(0.5, 0.5, "no drafts", ha="center", va="center", transform=axes.transAxes)
    return figure


def _bars(axes: Any, results: Sequence[Result]) -> None:
    known = [(r, r.decode_tokens_per_second) for r in results if r.decode_tokens_per_second is not None]
    at = list(range(len(known)))
    medians = [spread.median for _, spread in known]
    errors = [[s.median - s.min for _, s in known], [s.max - s.median for _, s in known]]
    axes.barh(at, medians, xerr=errors, color="tab:blue", alpha=0.8)
    for y, (result, spread) in zip(at, known, strict=True):
        note = "" if result.ratio_to_plain is None else f"  {result.ratio_to_plain:.2f}×"
        axes.text(spread.max, y, note, va="center")
    axes.set_yticks(at, [_name(r.case, results) for r, _ in known])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="decode tokens/s (median; bars: min to max)")


def _lines_over_k(axes: Any, results: Sequence[Result]) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        spread, k = result.decode_tokens_per_second, result.case.num_speculative_tokens
        if spread is None:
            continue
        name = _name(result.case, results, with_k=k == "auto")
        if k is None or k == "auto":
            axes.axhline(spread.median, linestyle="--", color=f"C{len(axes.lines)}", label=name)
        else:
            lines.setdefault(name, []).append((k, spread.median))
    for name, points in lines.items():
        ks, rates = zip(*sorted(points), strict=True)
        axes.plot(ks, rates, marker="o", color=f"C{len(axes.lines)}", label=name)
    axes.set(xlabel="K, tokens drafted a step", ylabel="decode tokens/s (median)", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _name(case: Case, results: Sequence[Result], *, with_k: bool = True) -> str:
    """The case by what tells it apart from the others."""
    parts = [case.label if with_k else case.method]
    if len({r.case.dtype for r in results}) > 1:
        parts.append(case.dtype)
    if len({r.case.max_num_seqs for r in results}) > 1:
        parts.append(f"batch {case.max_num_seqs}")
    if len({r.case.context for r in results}) > 1:
        parts.append(f"context {case.context}")
    return ", ".join(parts)
