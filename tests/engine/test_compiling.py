"""Nothing compiles after the warm-up, and the host takes little time for a dispatch."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.decoding.drafters import NoDrafter
from pard_jax.engine.engine import Engine
from pard_jax.engine.memory import Speculation
from tests.engine.alphabets import DIGITS, LOWER, UPPER
from tests.helpers.engine import (
    ScriptedEngine,
    count_compiles,
    drain,
    generate,
    params_of_request,
    plan_for,
    tokens_of,
)
from tests.helpers.models import full_forward, model_config, random_params
from tests.helpers.reference import greedy


@pytest.fixture
def engine(engine: ScriptedEngine) -> ScriptedEngine:
    engine.say(LOWER, UPPER, DIGITS, drafts=2)
    return engine


def mixed_workload(engine: Engine, vocab: int, longest: int, text: bool) -> None:
    """Lengths, settings, log-probabilities, ends, joins and aborts, all in one."""
    rng = np.random.default_rng(0)
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 3, "seed": 1},
        {"temperature": 1.5, "top_p": 0.5, "logprobs": 20},
        {"temperature": 1.0, "min_p": 0.1, "logprobs": 0},
        {"logprobs": 3, "min_tokens": 5},
        {"stop_token_ids": [1, 2, 3], "ignore_eos": True},
        {"max_tokens": longest},
    ]
    if text:
        settings.append({"stop": ["ab", "zz"], "include_stop_str_in_output": True})
    for i in range(3 * len(settings)):
        length = [1, 2, int(rng.integers(3, longest)), longest - 1][i % 4]
        prompt = rng.integers(0, vocab, length).tolist()
        keys = {"max_tokens": 9} | settings[i % len(settings)]
        keys["max_tokens"] = min(keys["max_tokens"], longest - length)
        keys["min_tokens"] = min(keys.get("min_tokens", 0), keys["max_tokens"])
        engine.add_request(str(i), prompt, params_of_request(**keys))
        engine.step()
        if i % 5 == 4:
            engine.abort([str(i), str(i - 2)])
    drain(engine)


def test_nothing_compiles_after_warm_up(engine):
    engine.warm_up()
    with count_compiles() as compiled:
        mixed_workload(engine, 256, 400, text=True)
    assert not compiled


CONFIG = model_config("llama", num_hidden_layers=1, vocab_size=64, head_dim=8)
TARGET = random_params(CONFIG, 0)


PLACED = jax.device_put({"target": TARGET}, jax.devices()[0])  # committed to a device, as loaded weights are


def make_windowed(params: Any) -> Engine:
    """A random model with three attention windows, and no spare slots that would hide one that is too short."""
    engine = Engine(
        CONFIG,
        NoDrafter(),
        params,
        plan_for(CONFIG, Speculation(), 200, 3, chunk_size=100, smallest_window=64),
        num_rows=3,
        chunk_size=100,
        steps_per_dispatch=4,
        dtype=jnp.float32,
    )
    assert engine.plan.windows == (64, 128, 256)
    return engine


@pytest.fixture(scope="module")
def windowed() -> Engine:
    return make_windowed(PLACED)


def test_warm_up_compiles_as_far_as_it_is_told(windowed):
    """A chunk of 100 tokens needs the second window, however short the sequences are."""
    assert windowed.warm_up(20) == 2
    with count_compiles() as compiled:
        mixed_workload(windowed, 64, 20, text=False)
    assert not compiled
    assert windowed.warm_up() == 3
    with count_compiles() as compiled:
        mixed_workload(windowed, 64, 200, text=False)
    assert not compiled


def test_programs_compile_before_there_are_weights():
    engine = make_windowed(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), PLACED))
    with count_compiles() as compiled:
        ahead = engine.start_compiling(20)
        ahead.wait()
    assert len(compiled) == ahead.num_to_compile == 5  # admission, and prefill and decoding of two windows
    engine.take_params(PLACED)
    with count_compiles() as compiled:
        assert engine.warm_up(20) == 2
        generate(engine, [[5, 7]], params_of_request(max_tokens=9))
    assert not compiled


def test_what_fails_to_compile_ahead_ends_the_warm_up(monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("too large a program")

    engine = make_windowed(PLACED)
    monkeypatch.setattr(engine._programs, "prefill", SimpleNamespace(lower=fail))
    engine.start_compiling(20)
    with pytest.raises(MemoryError, match="too large a program"):
        engine.warm_up(20)


def test_stopping_leaves_what_has_not_begun(monkeypatch):
    engine, stopped = make_windowed(PLACED), threading.Event()
    lowered = SimpleNamespace(compile=lambda: stopped.wait(10))
    monkeypatch.setattr(engine._programs, "admit", SimpleNamespace(lower=lambda *_: lowered))
    first, *rest = engine.start_compiling(20).tasks
    engine.stop_compiling()
    stopped.set()
    assert all(task.cancelled() for task in rest) and first.exception(10) is None


def test_windows_do_not_change_the_output(windowed):
    """Rows pass from one window into the next while they decode, two dispatches ahead of what the host knows."""
    logits = full_forward(CONFIG, TARGET, 256)
    prompts = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in (1, 40, 57, 58, 99, 101, 120, 199)]
    outputs = generate(windowed, prompts, params_of_request(max_tokens=40))
    assert tokens_of(outputs) == [greedy(logits, p, min(200, len(p) + 40)) for p in prompts]


def test_compiles_are_seen():
    """Else the tests above say nothing."""
    with count_compiles() as compiled:
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(7))
    assert compiled


_HOST_TIME = """
import time
import jax, jax.numpy as jnp, numpy as np
from pard_jax.decoding.drafters import PardDrafter
from pard_jax.engine.adaptive import Choice
from pard_jax.engine.engine import Engine
from pard_jax.engine.memory import Speculation
from tests.helpers.engine import plan_for
from tests.helpers.models import tiny_pair

pair = tiny_pair(num_layers=28)
drafter = PardDrafter(num_speculative_tokens=4, config=pair.draft, target_vocab_size=64, max_model_len=104,
                      mask_token_id=63)
engine = Engine(pair.target, drafter, pair.params, plan_for(pair.target, Speculation(4, 4, pair.draft), 100, 4, 32),
                num_rows=4, chunk_size=32, steps_per_dispatch=2, dtype=jnp.float32, speculative_slots=8)
engine.warm_up()
leaves = jax.tree.leaves((engine._params, engine._state))
assert all(type(x) is type(jnp.zeros(())) for x in leaves) and len(leaves) < 64, len(leaves)
keep, times = np.zeros(4, bool), []  # no row is active: what is left is the host's own part
for _ in range(300):
    start = time.perf_counter()
    engine._run(keep, 2, Choice(4, engine.plan.num_slots, greedy=False))
    times.append(time.perf_counter() - start)
print(1e3 * float(np.median(times)))
"""


def test_a_dispatch_costs_the_host_less_than_a_millisecond():
    """However many layers there are: a few stacked arrays are passed, no modules. Without the tests' shape checks."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _HOST_TIME], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0
