"""The flags are added where they serve, and nowhere else; the user's own settings win."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pard_jax import xla_flags
from pard_jax.xla_flags import FLAGS, SWITCH, add_xla_flags

COMMANDS, SIZE = (f"{name}={value}" for name, value in FLAGS.items())


@pytest.fixture(autouse=True)
def cuda_before_the_start(monkeypatch):
    """JAX has a CUDA plugin and has not started; nothing is in the environment."""
    monkeypatch.setattr(xla_flags.importlib.util, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    monkeypatch.setattr(xla_flags.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(xla_flags.importlib.metadata, "version", lambda name: "0.11.2")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv(SWITCH, raising=False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, f"{COMMANDS} {SIZE}"),
        ("--xla_dump_to=/d", f"--xla_dump_to=/d {COMMANDS} {SIZE}"),
        ("--xla_gpu_graph_min_graph_size=7", f"--xla_gpu_graph_min_graph_size=7 {COMMANDS}"),
        (f"{SIZE} {COMMANDS}", f"{SIZE} {COMMANDS}"),
    ],
)
def test_what_the_user_has_set_stays(monkeypatch, given, expected):
    if given is not None:
        monkeypatch.setenv("XLA_FLAGS", given)
    add_xla_flags()
    add_xla_flags()  # again: nothing is added twice
    assert os.environ["XLA_FLAGS"] == expected


@pytest.mark.parametrize("reason", ["off", "no plugin", "started", "older", "newer"])
def test_reasons_to_leave_them_alone(monkeypatch, reason):
    if reason == "off":
        monkeypatch.setenv(SWITCH, "off")
    elif reason == "no plugin":
        monkeypatch.setattr(xla_flags.importlib.util, "find_spec", lambda name: None)
    elif reason == "started":
        monkeypatch.setattr(xla_flags.xla_bridge, "backends_are_initialized", lambda: True)
    else:
        version = {"older": "0.9.9", "newer": "0.13.0"}[reason]
        monkeypatch.setattr(xla_flags.importlib.metadata, "version", lambda name: version)
    add_xla_flags()
    assert "XLA_FLAGS" not in os.environ


def test_a_switch_is_on_or_off(monkeypatch):
    monkeypatch.setenv(SWITCH, "no")
    with pytest.raises(ValueError, match=f"{SWITCH}=no was given; expected on or off"):
        add_xla_flags()


def test_this_jaxlib_knows_the_flags():
    """XLA ends a process that is given a flag it does not know; the flags of all platforms are in every jaxlib."""
    env = {**os.environ, "XLA_FLAGS": f"{COMMANDS} {SIZE}", "JAX_PLATFORMS": "cpu"}
    code = "import jax; print(jax.devices()[0].platform)"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "cpu\n"), done.stderr


def test_importing_the_package_starts_no_backend():
    """The flags come too late for a backend that the package itself has started."""
    code = "import pard_jax.generate; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
