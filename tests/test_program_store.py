"""A program is found again by what it follows from, without being traced; and nothing but that program is."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pard_jax import program_store
from pard_jax.program_store import KeptProgram, ProgramStore, is_kept, prepare

ONE, TWO = np.float32(1), np.arange(2, dtype=np.float32)


def add(tree: Any, x: Any, *, n: int) -> Any:
    return {"sum": tree["weight"] + x * n}


def never(tree: Any, x: Any, *, n: int) -> Any:
    raise AssertionError("traced")


def program(path: Path, function: Any = add, *, name: str = "add", made_of: Any = ("model", 3), devices=None):
    store = ProgramStore(path, devices or jax.devices()[:1])
    return store.keep(name, jax.jit(function, static_argnames="n"), made_of)


def run(program: KeptProgram, x: Any = ONE, n: int = 3, weight: Any = 1.0) -> Any:
    return program({"weight": jax.device_put(jnp.float32(weight), jax.devices()[0])}, x, n=n)["sum"]


def test_what_one_start_compiles_the_next_one_reads(tmp_path: Path) -> None:
    assert run(program(tmp_path)) == 4.0
    assert run(program(tmp_path, never), weight=5.0) == 8.0
    assert len(list(tmp_path.iterdir())) == 1


def test_one_program_for_each_shape_and_static_argument(tmp_path: Path) -> None:
    first = program(tmp_path)
    outputs = [(ONE, 3), (ONE, 4), (TWO, 3), (ONE, 3)]
    expected = [4.0, 5.0, [1.0, 4.0], 4.0]
    for got in (first, first, program(tmp_path, never)):
        for (x, n), value in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(run(got, x, n), value)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("change", ["name", "made_of", "devices", "dtype", "setting", "flags", "source", "version"])
def test_what_differs_is_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    run(program(tmp_path))
    keys: dict[str, Any] = {}
    argument = ONE
    if change == "name":
        keys = {"name": "other"}
    elif change == "made_of":
        keys = {"made_of": ("model", 4)}
    elif change == "devices":
        keys = {"devices": jax.devices()[1:2]}
    elif change == "dtype":
        argument = np.int32(1)
    elif change == "flags":
        monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other")
    elif change == "source":
        monkeypatch.setattr(program_store, "_source", lambda: "edited")
    elif change == "version":
        monkeypatch.setattr(program_store.jaxlib, "__version__", "99.0")
    other = program(tmp_path, **keys)
    weights = {"weight": jnp.float32(1)}
    if change == "setting":
        with jax.default_matmul_precision("bfloat16"):
            assert not is_kept(other, weights, argument, n=3)
    else:
        assert not is_kept(other, weights, argument, n=3)


def test_prepared_from_shapes(tmp_path: Path) -> None:
    placed = jax.device_put(jnp.float32(1), jax.devices()[0])
    shapes = {"weight": jax.ShapeDtypeStruct((), jnp.float32, sharding=placed.sharding)}
    first, again = program(tmp_path), program(tmp_path, never)
    assert not is_kept(first, shapes, ONE, n=3)
    prepare(first, shapes, ONE, n=3)
    assert is_kept(again, shapes, ONE, n=3) and again({"weight": placed}, ONE, n=3)["sum"] == 4.0

    traces = []
    jitted = jax.jit(lambda x: traces.append(x) or x + 1)
    prepare(jitted, ONE)
    assert not is_kept(jitted, ONE) and len(traces) == 1
    assert jitted(ONE) == 2.0 and len(traces) == 1


def test_a_program_of_several_devices(tmp_path: Path) -> None:
    devices = jax.devices()[2:4]
    sharding = NamedSharding(Mesh(np.asarray(devices), ("x",)), PartitionSpec("x"))
    weights = {"weight": jax.device_put(jnp.arange(4.0), sharding)}
    assert program(tmp_path, devices=devices)(weights, TWO[:1], n=3)["sum"].sharding == sharding
    again = program(tmp_path, never, devices=devices)(weights, TWO[1:], n=3)["sum"]
    assert again.sharding == sharding
    np.testing.assert_array_equal(again, [3.0, 4.0, 5.0, 6.0])


@pytest.mark.parametrize("content", [b"", b"rubbish", "truncated"])
def test_a_broken_entry_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: Any) -> None:
    run(program(tmp_path))
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-20] if content == "truncated" else content)
    with caplog.at_level(logging.WARNING):
        assert run(program(tmp_path)) == 4.0
    assert f"{entry} cannot be read and is made anew" in caplog.text
    assert run(program(tmp_path, never)) == 4.0


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    assert run(program(tmp_path / "absent")) == 4.0


def test_what_comes_from_jaxs_cache_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA for CPUs would serialize it without its functions, and the next start would end in an error."""
    original = jax.stages.Lowered.compile

    def hit(lowered: Any) -> Any:
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return original(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", hit)
    assert run(program(tmp_path)) == 4.0 and not list(tmp_path.iterdir())


def test_a_second_start_traces_nothing(tmp_path: Path) -> None:
    """The command line, from two processes."""
    settings = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    environment = {name: value for name, value in os.environ.items() if name not in settings}

    def generate() -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "pard_jax.generate", "--max-tokens", "20", "A fox."],
            env=environment | {"PARD_JAX_HOME": str(tmp_path), "JAX_LOG_COMPILES": "1"},
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    text, first = generate()
    assert f"pard decoding: 3 programs, kept in {tmp_path / 'xla'}: the next start is quicker" in first
    assert "Finished tracing _decode" in first
    again, second = generate()
    assert again == text and "reading      pard decoding, compiled by an earlier start" in second
    assert "Compiling jit" not in second and "Finished tracing _" not in second
