"""The table's lines and the figure's panels, of results that are written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pard_jax.bench import plot
from pard_jax.bench.acceptance import Acceptance, Trace
from pard_jax.bench.result import Case, Result
from pard_jax.bench.spread import Spread
from pard_jax.bench.table import Table, acceptance_lines


def result(method: str, k: int | None = None, speed: float | None = 10.0, batch: int = 1, num_equal: int = 3) -> Result:
    found = None if k is None else Acceptance.count([Trace.of([2, 1, k + 1])], k)
    return Result(
        case=Case("p", method, "float32", k, batch, None),
        decode_tokens_per_second=None if speed is None else Spread(speed, speed - 1, speed + 2),
        ratio_to_plain=None if speed is None else speed / 10,
        time_to_first_token=Spread(0.25, 0.2, 0.3),
        prefill_tokens_per_second=Spread(99.0, 98.0, 100.0),
        num_prompts=3,
        num_tokens=30,
        num_equal=num_equal,
        num_looping=0,
        acceptance=found,
        acceptance_before_loops=None if k is None else Acceptance.count([Trace.of([2, 1])], k),
    )


def test_rows_stand_below_their_headers() -> None:
    table = Table(["plain", "transformers-assisted"], ["p"], batches=True, contexts=False)
    rows = [result("plain", speed=None), result("transformers-assisted", 4, 2345.67, batch=8, num_equal=2)]
    plain, assisted = (table.row(row) for row in rows)
    assert "context" not in table.header and "prompts" not in table.header
    for header, value in (("decode tok/s", "2345.7"), ("ratio", "234.57"), ("first token", "0.250 s"), ("K", "4")):
        end = table.header.index(f"  {header}  ") + len(header) + 2
        assert assisted[:end].endswith(value)
    assert assisted.split() == [
        "transformers-assisted", "float32", "4", "8", "2345.7", "234.57", "0.250", "s", "99.0", "2.67", "1.50",
        "2/3", "equal",
    ]  # fmt: skip
    assert plain.split() == ["plain", "float32", "-", "1", "-", "-", "0.250", "s", "99.0", "-", "-", "equal"]


def test_acceptance_line() -> None:
    assert acceptance_lines([result("plain"), result("pard", 2)]) == [
        "p, pard, K=2, float32, batch 1: by position 0.667 0.333; steps that accepted 0..K drafts: 1 1 1"
    ]


def test_one_k_is_drawn_as_bars() -> None:
    pytest.importorskip("matplotlib")
    figure = plot.draw([result("plain"), result("pard", 2, 20.0), result("ngram", 2, None)], "title")
    speed, positions, lengths = figure.axes
    assert [bar.get_width() for bar in speed.patches] == [10.0, 20.0]
    assert [label.get_text() for label in speed.get_yticklabels()] == ["plain", "pard, K=2"]
    assert [text.get_text().strip() for text in speed.texts] == ["1.00×", "2.00×"]
    assert [list(line.get_ydata()) for line in positions.lines] == [[2 / 3, 1 / 3]] * 2
    assert [list(line.get_ydata()) for line in lengths.lines] == [[1 / 3] * 3] * 2


def test_several_k_are_drawn_as_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [result("plain", batch=b) for b in (1, 4)]
    results += [result("pard", k, 10.0 * k, batch=b) for b in (1, 4) for k in (4, 2)]
    speed, positions, _ = plot.draw(results, "title").axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in speed.lines}
    assert lines["pard, batch 4"] == lines["pard, batch 1"] == ([2, 4], [20.0, 40.0])
    assert lines["plain, batch 1"][1] == [10.0, 10.0] and len(lines) == 4
    assert [line.get_label() for line in positions.lines] == [f"pard, K={k}, batch {b}" for b in (1, 4) for k in (4, 2)]
    plot.write(tmp_path / "f.svg", results, "title")
    assert "<svg" in (tmp_path / "f.svg").read_text()


def test_without_drafts_the_panels_say_so() -> None:
    pytest.importorskip("matplotlib")
    _, positions, _ = plot.draw([result("plain")], "title").axes
    assert [text.get_text() for text in positions.texts] == ["no drafts"]
