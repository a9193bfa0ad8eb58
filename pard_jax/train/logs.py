"""The curves of a run: ``train.csv``, ``eval.csv``, TensorBoard's event files if asked for, and an image of them.

A resumed run repeats the steps after its checkpoint. Their rows are cut before it does, so that every curve has one
value a step.
"""

from __future__ import annotations

import contextlib
import csv
import os
from pathlib import Path
from typing import Any, SupportsFloat

TRAIN, EVALUATION, IMAGE = "train.csv", "eval.csv", "curves.png"
INSTALL = "install it with: pip install 'pard-jax[train]'"


class Log:
    """Writes the rows of a run, each at once: a run that is killed loses none.

    Args:
        directory: made when it is missing; the files that are there are gone on with.
        tensorboard: write event files too, to ``DIR/tensorboard``.

    Raises:
        ValueError: ``tensorboard`` without tensorboardX.
    """

    def __init__(self, directory: str | Path, *, tensorboard: bool) -> None:
        self.directory = Path(directory).expanduser()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._columns: dict[str, list[str]] = {}  # of the files that have been looked at; none yet where empty
        self._last: dict[str, float] = {}  # step of the last row
        self._open_events: Any = None
        self._events: Any = None  # opened by the first row, or by `resume`
        if tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ImportError as e:
                raise ValueError(f"TensorBoard's files need tensorboardX, which is not there; {INSTALL}") from e
            self._open_events = SummaryWriter

    def resume(self, step: int) -> None:
        """Cut all rows of later steps than ``step``, from which the run goes on; 0 starts anew."""
        for name in (TRAIN, EVALUATION):
            self._cut(name, step)
        if self._open_events is not None:
            self._open(purge_step=step + 1)

    def write(self, step: int, **values: SupportsFloat) -> None:
        """A row of ``train.csv``. All rows of a file have the columns of its first.

        Raises:
            ValueError: other columns.
        """
        self._append(TRAIN, "train", step, values)

    def write_evaluation(self, step: int, **values: SupportsFloat) -> None:
        """A row of ``eval.csv``, see :meth:`write`."""
        self._append(EVALUATION, "eval", step, values)

    def plot(self) -> Path:
        """See :func:`plot`."""
        return plot(self.directory)

    def close(self) -> None:
        """Write out what is left."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, name: str, group: str, step: int, values: dict[str, SupportsFloat]) -> None:
        path = self.directory / name
        columns = ["step", *values]
        if name not in self._columns or step <= self._last[name]:
            self._cut(name, step - 1)  # a run that was at its end evaluates once more
        if set(self._columns[name] or columns) != set(columns):
            raise ValueError(
                f"{path} has the columns {', '.join(self._columns[name])}; got a row with {', '.join(columns)}"
            )
        self._columns[name] = self._columns[name] or columns
        self._last[name] = step
        row = {"step": step} | values
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if not file.tell():
                writer.writerow(self._columns[name])
            writer.writerow([_cell(row[column]) for column in self._columns[name]])
        if self._open_events is not None:
            events = self._events or self._open(purge_step=None)
            for column, value in values.items():
                events.add_scalar(f"{group}/{column}", float(value), step)
            events.flush()

    def _cut(self, name: str, step: int) -> None:
        """Remove a file's rows of later steps."""
        path = self.directory / name
        columns, rows = _read(path)
        kept = [row for row in rows if row["step"] <= step]
        if kept:
            partial = path.with_name(f".{name}.partial")
            with partial.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([columns, *([_cell(row[column]) for column in columns] for row in kept)])
            os.replace(partial, path)
        else:
            path.unlink(missing_ok=True)
        self._columns[name] = columns if kept else []
        self._last[name] = kept[-1]["step"] if kept else -1

    def _open(self, purge_step: int | None) -> Any:
        self.close()
        # TensorBoard leaves out what earlier files say of steps from purge_step on. The file's name has only seconds.
        self._events = self._open_events(
            str(self.directory / "tensorboard"), purge_step=purge_step, filename_suffix=f".{purge_step or 0}"
        )
        return self._events


def plot(directory: str | Path) -> Path:
    """Draw the loss (in training, held out) and the acceptance length over the steps, into ``DIR/curves.png``.

    Returns:
        The image's path.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no rows.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError(f"an image of the curves needs matplotlib, which is not there; {INSTALL}") from e
    directory = Path(directory).expanduser()
    train, evaluation = (_curves(directory / name) for name in (TRAIN, EVALUATION))
    panels = [("loss (nats a token)", [("training", train, "loss"), ("held out", evaluation, "loss")])]
    panels += [("acceptance length (tokens a step)", [("held out", evaluation, "acceptance_length")])]
    panels = [(title, [line for line in lines if line[2] in line[1]]) for title, lines in panels]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        raise ValueError(f"{directory} holds no curves; expected rows in {TRAIN} or {EVALUATION}")
    # A Figure of its own, not pyplot's: no window system, and nothing left behind.
    figure = Figure(figsize=(7 * len(panels), 4.5), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, curves, column in lines:
            few = len(curves["step"]) < 50
            axes.plot(curves["step"], curves[column], label=label, marker="." if few else "", linewidth=1.2)
        axes.set(xlabel="step", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(directory / IMAGE, dpi=120)
    return directory / IMAGE


def _curves(path: Path) -> dict[str, list[float]]:
    columns, rows = _read(path)
    return {column: [row[column] for row in rows] for column in columns} if rows else {}


def _read(path: Path) -> tuple[list[str], list[dict[str, float]]]:
    """Columns and rows of a file, without a last row that was not written to its end; nothing where there is none."""
    if not path.is_file():
        return [], []
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(line for line in file if line.endswith("\n")))
    columns = lines[0] if lines else []
    rows = []
    for number, line in enumerate(lines[1:], 2):
        row: dict[str, float] = {}
        with contextlib.suppress(ValueError):
            row = dict(zip(columns, map(float, line), strict=True))
        if "step" not in row:
            raise ValueError(f"{path}, line {number}: expected numbers for {', '.join(columns)}; got {', '.join(line)}")
        rows.append(row)
    return columns, rows


def _cell(value: SupportsFloat) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() else f"{number:.8g}"
