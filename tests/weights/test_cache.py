"""What is made once: whole or not at all, and never replaced under somebody who reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pard_jax.weights.cache import cache_home, cached_directory, stamp


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARD_JAX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make(content: str):
    def write(directory: Path) -> None:
        directory.mkdir()
        (directory / "file").write_text(content)

    return write


def test_where_it_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_home() == home
    monkeypatch.setenv("PARD_JAX_HOME", "")
    monkeypatch.setenv("HOME", str(home))
    assert cache_home() == home / ".cache" / "pard_jax"


def test_made_once(home: Path) -> None:
    made = cached_directory("name", make("first"))
    assert made == home / "name" and (made / "file").read_text() == "first"
    assert cached_directory("name", lambda _: pytest.fail("made again")) == made
    assert list(home.iterdir()) == [made]


def test_what_fails_leaves_nothing(home: Path) -> None:
    def fail(directory: Path) -> None:
        make("half")(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_directory("name", fail)
    assert list(home.iterdir()) == []


def test_two_at_once(home: Path) -> None:
    """The one that ends first stays: its reader's files are not replaced."""

    def overtaken(directory: Path) -> None:
        cached_directory("name", make("first"))
        make("second")(directory)

    assert (cached_directory("name", overtaken) / "file").read_text() == "first"
    assert [path.name for path in home.iterdir()] == ["name"]


def test_a_cache_that_cannot_be_written(home: Path) -> None:
    home.write_text("a file")
    with pytest.raises(OSError, match=r"cannot write to the cache .*; set PARD_JAX_HOME to a directory"):
        cached_directory("name", make(""))


def test_stamp(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("x"), b.write_text("x")
    first = stamp([a, b])
    assert stamp([b, a]) == first and len(first) == 12
    assert stamp([a]) != first
    b.write_text("longer")
    assert stamp([a, b]) != first
