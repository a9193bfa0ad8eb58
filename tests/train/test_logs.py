"""The files of curves: what a row looks like, what a resumed run finds, TensorBoard's files, the image."""

from __future__ import annotations

import csv
import struct
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.train.logs import Log, plot


def rows(path):
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def write_run(log, steps):
    for step in steps:
        log.write(step, loss=10 / step, learning_rate=3e-5)
        if step % 2 == 0:
            log.write_evaluation(step, loss=11 / step, acceptance_length=1 + step / 10)


def test_rows_are_there_at_once(tmp_path):
    log = Log(tmp_path / "run", tensorboard=False)
    log.write(20, loss=np.float32(2.5), learning_rate=3e-5, tokens=1234567890, norm=jnp.float32(0.1))
    assert (tmp_path / "run" / "train.csv").read_text().splitlines() == [
        "step,loss,learning_rate,tokens,norm",
        "20,2.5,3e-05,1234567890,0.1",
    ]
    log.write(40, norm=float("nan"), tokens=1, learning_rate=0.0, loss=1 / 3)  # by name, in whatever order
    assert (tmp_path / "run" / "train.csv").read_text().splitlines()[2] == "40,0.33333333,0,1,nan"
    log.write_evaluation(40, loss=1.5)
    assert rows(tmp_path / "run" / "eval.csv") == [{"step": 40, "loss": 1.5}]
    with pytest.raises(ValueError, match=r"eval\.csv has the columns step, loss; got a row with step, los"):
        log.write_evaluation(60, los=1.5)
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_resumed_run_leaves_single_curves(tmp_path):
    first = Log(tmp_path, tensorboard=False)
    write_run(first, range(1, 8))
    first.close()
    second = Log(tmp_path, tensorboard=False)
    second.resume(5)
    assert [row["step"] for row in rows(tmp_path / "train.csv")] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows(tmp_path / "eval.csv")] == [2, 4]
    write_run(second, range(6, 10))
    assert [row["step"] for row in rows(tmp_path / "train.csv")] == list(range(1, 10))
    assert [row["step"] for row in rows(tmp_path / "eval.csv")] == [2, 4, 6, 8]
    for row in rows(tmp_path / "train.csv"):
        assert row["loss"] == pytest.approx(10 / row["step"]) and row["learning_rate"] == 3e-5
    with pytest.raises(ValueError, match="has the columns"):
        Log(tmp_path, tensorboard=False).write(10, loss=1.0)  # the columns of the run that is gone on with


def test_a_step_has_one_row(tmp_path):
    """A run that was at its end evaluates once more; whoever does not resume overwrites."""
    write_run(Log(tmp_path, tensorboard=False), range(1, 5))
    log = Log(tmp_path, tensorboard=False)
    log.resume(4)
    log.write_evaluation(4, loss=3.0, acceptance_length=2.0)
    assert [(row["step"], row["loss"]) for row in rows(tmp_path / "eval.csv")] == [(2, 5.5), (4, 3)]
    fresh = Log(tmp_path, tensorboard=False)
    fresh.write(3, loss=1.0, learning_rate=0)
    assert [(row["step"], row["loss"]) for row in rows(tmp_path / "train.csv")] == [(1, 10), (2, 5), (3, 1)]
    fresh.write(1, loss=2.0)  # nothing before it is left, so its columns may be others
    assert rows(tmp_path / "train.csv") == [{"step": 1, "loss": 2}]


def test_a_run_that_starts_anew(tmp_path):
    write_run(Log(tmp_path, tensorboard=False), range(1, 4))
    log = Log(tmp_path, tensorboard=False)
    log.resume(0)
    assert list(tmp_path.iterdir()) == []
    log.write(1, other=2.0)
    assert rows(tmp_path / "train.csv") == [{"step": 1, "other": 2}]


def test_a_row_that_was_not_written_to_its_end_is_cut(tmp_path):
    write_run(Log(tmp_path, tensorboard=False), range(1, 4))
    with (tmp_path / "train.csv").open("a") as file:
        file.write("4,2.5")
    log = Log(tmp_path, tensorboard=False)
    log.resume(10)
    log.write(4, loss=2.5, learning_rate=3e-5)
    assert [row["step"] for row in rows(tmp_path / "train.csv")] == [1, 2, 3, 4]
    (tmp_path / "train.csv").write_text("step,loss\n1,2.5\n2,x\n")
    with pytest.raises(ValueError, match=r"train\.csv, line 3: expected numbers for step, loss; got 2, x"):
        log.resume(1)


def events(path):
    """(step, tag, value) of an event file, and the steps from which on earlier files do not count."""
    proto = pytest.importorskip("tensorboardX.proto.event_pb2")
    data, scalars, purged = path.read_bytes(), [], []
    while data:  # a TFRecord: length, its checksum, the event, its checksum
        (length,) = struct.unpack("<Q", data[:8])
        event = proto.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        scalars += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        if event.HasField("session_log"):
            purged.append(event.step)
    return scalars, purged


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    with Log(tmp_path, tensorboard=True) as log:
        log.resume(0)
        write_run(log, [1, 2])
    with Log(tmp_path, tensorboard=True) as log:
        log.resume(1)
        write_run(log, [2])
    files = sorted((tmp_path / "tensorboard").iterdir(), key=lambda f: int(f.suffix[1:]))
    assert len(files) == 2
    scalars, _ = events(files[0])
    assert (1, "train/loss", 10.0) in scalars and (2, "eval/acceptance_length", pytest.approx(1.2)) in scalars
    scalars, purged = events(files[1])
    assert purged == [2] and {step for step, _, _ in scalars} == {2}
    with Log(tmp_path / "other", tensorboard=True) as log:  # one that is not resumed
        write_run(log, [1])
    (file,) = (tmp_path / "other" / "tensorboard").iterdir()
    assert events(file) == ([(1, "train/loss", 10.0), (1, "train/learning_rate", pytest.approx(3e-5))], [])


def test_without_the_optional_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"tensorboardX, which is not there; .*pip install 'pard-jax\[train\]'"):
        Log(tmp_path, tensorboard=True)
    log = Log(tmp_path, tensorboard=False)
    write_run(log, [1, 2])
    with pytest.raises(ImportError, match=r"matplotlib, which is not there; .*pip install 'pard-jax\[train\]'"):
        log.plot()


def drawn(monkeypatch):
    """The lines that are plotted from here on: label -> (x, y)."""
    axes = pytest.importorskip("matplotlib.axes")
    lines, plot_line = {}, axes.Axes.plot

    def record(self, x, y, **kwargs):
        lines[kwargs["label"], len(lines)] = (list(x), list(y))
        return plot_line(self, x, y, **kwargs)

    monkeypatch.setattr(axes.Axes, "plot", record)
    return lines


def test_the_image_shows_the_curves(tmp_path, monkeypatch):
    lines = drawn(monkeypatch)
    log = Log(tmp_path, tensorboard=False)
    write_run(log, range(1, 5))
    path = log.plot()
    assert path == tmp_path / "curves.png" and path.read_bytes().startswith(b"\x89PNG")
    assert lines == {
        ("training", 0): ([1, 2, 3, 4], pytest.approx([10, 5, 10 / 3, 2.5])),
        ("held out", 1): ([2, 4], [5.5, 2.75]),
        ("held out", 2): ([2, 4], pytest.approx([1.2, 1.4])),
    }


def test_an_image_of_what_there_is(tmp_path, monkeypatch):
    lines = drawn(monkeypatch)
    with pytest.raises(ValueError, match="holds no curves"):
        plot(tmp_path)
    Log(tmp_path, tensorboard=False).write(1, loss=2.0)
    plot(tmp_path)
    assert list(lines) == [("training", 0)]
