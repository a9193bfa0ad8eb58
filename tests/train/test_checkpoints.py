"""Checkpoints: what comes back, what a crash or a full disk leaves, damage, and runs with other settings."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
import textwrap
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pard_jax.train.checkpoints import Checkpoints, check_settings

SETTINGS = {"model": "draft", "optimizer": {"name": "adamw", "betas": (0.9, 0.999)}, "seed": 1}


def make_state(seed=0, mesh=None):
    """Parameters of two dtypes, one sharded; an optimizer with empty parts; scalars on the device and the host."""
    rng = np.random.default_rng(seed)
    w = jnp.asarray(rng.standard_normal((16, 8), np.float32))
    if mesh is not None:
        w = jax.device_put(w, NamedSharding(mesh, PartitionSpec("x")))
    params = {"w": w, "b": jnp.asarray(rng.standard_normal(3), jnp.bfloat16)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))
    return {"params": params, "opt": optimizer.init(params), "step": jnp.int32(seed), "best": 2.5, "note": np.arange(3)}


def mesh_of(count):
    return jax.make_mesh((count,), ("x",), devices=jax.devices()[:count], axis_types=(jax.sharding.AxisType.Auto,))


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture
def open_run(tmp_path):
    """Opens the run in ``tmp_path / "run"``, as often as it is called."""
    opened = []

    def open_it(settings=SETTINGS, **kwargs):
        opened.append(Checkpoints(tmp_path / "run", settings=settings, **kwargs))
        return opened[-1]

    yield open_it
    for checkpoints in opened:
        checkpoints.close()


def test_the_latest_comes_back_with_the_shardings_asked_for(open_run):
    four, two = mesh_of(4), mesh_of(2)
    checkpoints = open_run()
    assert checkpoints.restore(make_state()) is None
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step, four))
    assert checkpoints.steps == [2, 3]
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, make_state()
    )
    elsewhere = NamedSharding(two, PartitionSpec(None, "x"))
    abstract["params"]["w"] = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=elsewhere)
    step, state = open_run().restore(abstract)
    assert step == 3
    assert_same(state, make_state(3))
    assert state["params"]["w"].sharding == elsewhere
    assert state["params"]["b"].sharding.device_set == {jax.devices()[0]}
    assert type(state["best"]) is float and type(state["opt"]) is type(make_state()["opt"])
    _, same_mesh = open_run().restore(make_state(0, four))  # arrays serve as well as their descriptions
    assert same_mesh["params"]["w"].sharding == NamedSharding(four, PartitionSpec("x"))


def test_a_step_is_saved_once_and_in_order(open_run):
    first = open_run()
    first.save(10, make_state(1))
    first.save(10, make_state(2))
    step, state = first.restore(make_state())
    assert step == 10
    assert_same(state, make_state(1))
    second = open_run()  # has not restored what is there
    for wrong in (5, 10):
        with pytest.raises(ValueError, match=f"checkpoint of step 10, so step {wrong} cannot be saved after it"):
            second.save(wrong, make_state())
    assert second.restore(make_state())[0] == 10
    second.save(10, make_state(3))
    second.save(11, make_state(3))
    assert second.steps == [10, 11]


def test_what_a_killed_run_leaves_is_no_checkpoint(open_run, tmp_path):
    checkpoints = open_run()
    checkpoints.save(1, make_state(1))
    shutil.copytree(tmp_path / "run" / "1", tmp_path / "run" / "2.orbax-checkpoint-tmp")
    again = open_run()
    assert again.steps == [1]
    assert again.restore(make_state())[0] == 1
    assert not (tmp_path / "run" / "2.orbax-checkpoint-tmp").exists()


def test_a_checkpoint_without_its_list_is_taken_at_orbax_word(open_run, tmp_path):
    checkpoints = open_run()
    checkpoints.save(1, make_state(1))
    (tmp_path / "run" / "1" / "contents.json").unlink()
    assert_same(open_run().restore(make_state())[1], make_state(1))


def largest(root):
    return max(
        (f for f in root.rglob("*") if f.is_file() and f.name != "contents.json"), key=lambda f: f.stat().st_size
    )


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


DAMAGE = {
    "missing": (lambda root: largest(root).unlink(), "is missing"),
    "truncated": (
        lambda root: largest(root).write_bytes(largest(root).read_bytes()[:-7]),
        r"has \d+ bytes, and had \d+",
    ),
    "flipped": (lambda root: flip(largest(root)), "the contents of .* have changed"),
    "list": (lambda root: (root / "contents.json").write_text("{"), "contents.json cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_falls_back_to_the_one_before(open_run, tmp_path, caplog, kind):
    damage, message = DAMAGE[kind]
    checkpoints = open_run()
    for step in (100, 200):
        checkpoints.save(step, make_state(step))
    damage(tmp_path / "run" / "200")
    again = open_run()
    with caplog.at_level(logging.WARNING):
        step, state = again.restore(make_state())
    assert step == 100
    assert_same(state, make_state(100))
    assert "the checkpoint of step 200 is damaged" in caplog.text and "going on from step 100" in caplog.text
    (record,) = (r for r in caplog.records if r.name == "pard_jax.train.checkpoints")
    assert re.search(message, record.getMessage())
    assert (tmp_path / "run" / "damaged-200").is_dir()
    # The run goes on, over the same steps.
    again.save(200, make_state(7))
    assert again.steps == [100, 200]
    assert_same(open_run().restore(make_state())[1], make_state(7))


def test_nothing_left_to_fall_back_to(open_run, tmp_path):
    checkpoints = open_run()
    for step in (1, 2):
        checkpoints.save(step, make_state(step))
        largest(tmp_path / "run" / str(step)).unlink()
    with pytest.raises(ValueError, match=r"no checkpoint in .*run can be read \(step 2: .* is missing; step 1: "):
        open_run().restore(make_state())
    assert (tmp_path / "run" / "2").is_dir() and (tmp_path / "run" / "1").is_dir()


def test_another_state_is_not_damage(open_run):
    checkpoints = open_run()
    checkpoints.save(1, make_state(1))
    other = make_state()
    other["params"]["w"] = jnp.zeros((16, 9))
    other["params"]["extra"] = other["params"].pop("b").astype(jnp.float32)
    with pytest.raises(ValueError, match="another model or optimizer") as error:
        checkpoints.restore(other)
    for part in (
        "['params']['w']: float32[16, 8] there, float32[16, 9] expected",
        "['params']['b']: bfloat16[3] there, absent expected",
        "['params']['extra']: absent there, float32[3] expected",
    ):
        assert part in str(error.value)
    assert checkpoints.restore(make_state())[0] == 1


def test_a_disk_without_room(open_run, monkeypatch):
    checkpoints = open_run()
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
        with pytest.raises(
            OSError, match=r"step 1 could not be written .*there is none before it\): it takes 1\.05 MB"
        ):
            checkpoints.save(1, make_state(1))
    checkpoints.save(1, make_state(1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
        with pytest.raises(OSError, match=r"that of step 1 is intact\): .* and 1 MB are free"):
            checkpoints.save(2, make_state(2))
    checkpoints.save(2, make_state(2))
    assert checkpoints.steps == [1, 2]


def test_a_write_that_fails_half_way(tmp_path):
    """In a process of its own: the limit on a file's size is the process's, and Orbax's threads print."""
    program = """
        import resource, sys
        import numpy as np, jax.numpy as jnp
        from pard_jax.train.checkpoints import Checkpoints, check_settings

        def state(seed, size=64):
            return {"w": jnp.asarray(np.random.default_rng(seed).standard_normal((size, size), np.float32))}

        checkpoints = Checkpoints(sys.argv[1], settings={})
        checkpoints.save(1, state(1))
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        try:
            checkpoints.save(2, state(2, 512))
        except OSError as e:
            print(e)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        step, restored = checkpoints.restore(state(0))
        assert step == 1 and (restored["w"] == state(1)["w"]).all()
        checkpoints.save(2, state(2))
        assert checkpoints.restore(state(0))[0] == 2
    """
    pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "run")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "step 2 could not be written" in done.stdout and "that of step 1 is intact" in done.stdout
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["1", "2", "settings.json"]


def test_other_settings_are_refused_key_by_key(open_run, tmp_path):
    open_run().save(1, make_state())
    open_run(json.loads(json.dumps(SETTINGS)))  # a list for a tuple is no difference
    other = {"model": "draft", "optimizer": {"name": "sgd", "betas": (0.9, 0.999)}, "warmup": 10}
    with pytest.raises(ValueError, match="was started with other settings") as error:
        open_run(other)
    listed = str(error.value).partition("(")[2].partition(")")[0].split("; ")
    assert listed == [
        'optimizer.name: "adamw" there, "sgd" now',
        "seed: 1 there, absent now",
        "warmup: absent there, 10 now",
    ]
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["seed"] == 1
    (tmp_path / "run" / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"settings\.json cannot be read"):
        open_run()
    (tmp_path / "run" / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"settings\.json cannot be read"):
        open_run()


def test_settings_are_checked_without_touching_anything(open_run, tmp_path):
    check_settings(tmp_path / "none", {"seed": 2})
    assert not (tmp_path / "none").exists()
    run = open_run()
    check_settings(tmp_path / "run", {"seed": 2})  # no checkpoint yet
    run.save(1, make_state())
    check_settings(tmp_path / "run", SETTINGS)
    with pytest.raises(ValueError, match="seed: 1 there, 2 now"):
        check_settings(str(tmp_path / "run"), SETTINGS | {"seed": 2})


def test_settings_without_a_checkpoint_bind_nobody(open_run, tmp_path):
    open_run()
    open_run(SETTINGS | {"seed": 2})
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["seed"] == 2


def test_keep(open_run, tmp_path):
    checkpoints = open_run(keep=1)
    for step in (1, 2):
        checkpoints.save(step, make_state(step))
    assert checkpoints.steps == [2]
    with pytest.raises(ValueError, match="keep must be at least 1 checkpoint, got 0"):
        open_run(keep=0)
