"""Programs are kept from one process to the next, unless the user wants otherwise; a broken cache breaks nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pard_jax.compilation_cache import SWITCH, directory, enable_compilation_cache

_DIRECTORY, _TIME = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A home of the test's own, and JAX as it is where nobody has configured it; the tests' own cache afterwards."""
    kept = {name: getattr(jax.config, name) for name in (_DIRECTORY, _TIME, "jax_enable_compilation_cache")}
    jax.config.update(_DIRECTORY, None)
    jax.config.update(_TIME, 1.0)
    monkeypatch.setenv("PARD_JAX_HOME", str(tmp_path / "home"))
    for name in (SWITCH, _TIME.upper()):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path / "home"
    for name, value in kept.items():
        jax.config.update(name, value)


def in_effect() -> tuple[str | None, float]:
    return getattr(jax.config, _DIRECTORY), getattr(jax.config, _TIME)


def test_on_by_default_in_the_home(home: Path) -> None:
    enable_compilation_cache()
    assert in_effect() == (str(home / "xla"), 0.0)
    assert directory() == home / "xla" and (home / "xla").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("value", ["off", "OFF"])
def test_off(home: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(SWITCH, value)
    enable_compilation_cache()
    assert in_effect() == (None, 1.0) and directory() is None and not home.exists()


def test_a_switch_that_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with pytest.raises(ValueError, match=f"{SWITCH}=0 was given; expected on or off"):
        enable_compilation_cache()


def test_a_directory_of_the_users_own_wins(home: Path) -> None:
    jax.config.update(_DIRECTORY, "/elsewhere")
    enable_compilation_cache()
    assert in_effect() == ("/elsewhere", 1.0) and directory() is None and not home.exists()


def test_jaxs_own_switch_wins(home: Path) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    enable_compilation_cache()
    assert in_effect() == (None, 1.0) and not home.exists()


def test_a_threshold_of_the_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_TIME.upper(), "1")
    enable_compilation_cache()
    assert directory() is not None and in_effect()[1] == 1.0


def test_a_home_that_cannot_be_written(home: Path) -> None:
    home.write_text("a file")
    enable_compilation_cache()
    assert in_effect() == (None, 1.0)


_PROCESS = """
import jax
from pard_jax.compilation_cache import enable_compilation_cache
enable_compilation_cache()
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rsplit("/", 1)[-1]))
print(float(jax.jit(lambda x: x * 3 + 1)(2.0)), events.count("cache_misses"), events.count("cache_hits"))
"""


def run(home: Path) -> subprocess.CompletedProcess[str]:
    """A process that compiles one program, with warnings as errors."""
    settings = {"JAX_COMPILATION_CACHE_DIR", _TIME.upper()}
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", _PROCESS],
        env=environment | {"PARD_JAX_HOME": str(home)},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )


def test_a_second_process_reads_what_the_first_has_compiled(home: Path) -> None:
    assert run(home).stdout == "7.0 1 0\n"
    again = run(home)
    assert again.stdout == "7.0 0 1\n" and not again.stderr  # XLA says nothing of the machine's features either

    (entry,) = (home / "xla").glob("*-cache")
    entry.write_bytes(entry.read_bytes()[:-100])  # as a process that was killed leaves it
    broken = run(home)
    assert broken.returncode == 0 and broken.stdout == "7.0 1 0\n"
    assert "Error reading persistent compilation cache entry" in broken.stderr
