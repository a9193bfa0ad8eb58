"""The host side: requests join, leave, stream and are aborted while others run, and nothing compiles on the way."""

from __future__ import annotations

import itertools
import string
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.decoding.drafters import NoDrafter
from pard_jax.decoding.state import MAX_STOP_TOKEN_IDS
from pard_jax.engine.engine import Engine
from pard_jax.engine.memory import Speculation
from tests.helpers.engine import (
    ScriptedEngine,
    count_compiles,
    drain,
    generate,
    params_of_request,
    plan_for,
    scripted,
    submit,
    table_config,
    table_params,
    tokens_of,
)
from tests.helpers.models import full_forward, model_config, random_params
from tests.helpers.reference import greedy

LOWER, UPPER, DIGITS = string.ascii_lowercase, string.ascii_uppercase, string.digits


@pytest.fixture(params=[(12, 1), (3, 4)], ids=["12 drafts", "3 drafts, 4 steps a dispatch"])
def engine(request: pytest.FixtureRequest) -> ScriptedEngine:
    engine = scripted(*request.param)
    engine.say(LOWER, UPPER, DIGITS, drafts=2)
    return engine


def follows(text: str, count: int) -> str:
    """What the script says behind ``text``."""
    cycle = next(c for c in (LOWER, UPPER, DIGITS) if text[-1] in c)
    at = cycle.index(text[-1]) + 1
    return (cycle * (2 + count // len(cycle)))[at : at + count]


def text_of(output: Any) -> str:
    return output.outputs[0].text


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


# -- rows ---------------------------------------------------------------------------------------------------------


def test_more_requests_than_rows(engine):
    """Each gets its own output, whoever was in its row before; shorter ones do not wait for longer ones."""
    prompts = [(c * 7)[i : i + 1 + 11 * (i % 4)] for i, c in enumerate([LOWER, UPPER, DIGITS] * 6)]
    lengths = [1 + 9 * (i % 5) for i in range(len(prompts))]
    outputs = generate(engine, prompts, [params_of_request(max_tokens=n) for n in lengths])
    assert [text_of(o) for o in outputs] == [follows(p, n) for p, n in zip(prompts, lengths, strict=True)]
    assert all(o.outputs[0].finish_reason == "length" and o.finished for o in outputs)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt == prompt and output.prompt_token_ids == list(prompt.encode())
    # The last ones had not been admitted when the first ones ended.
    order = sorted(range(len(outputs)), key=lambda i: outputs[i].metrics.finished_time)
    assert order[0] < 3 and order[-1] > 10


def test_requests_join_and_leave_between_dispatches(engine):
    submit(engine, {"first": ("a", params_of_request(max_tokens=100))})
    outputs, joined = {}, 0
    while engine.has_work():
        for update in engine.step():
            if update.output is not None:
                outputs[update.request_id] = update.output
        if joined < 12:
            submit(engine, {f"{joined}": (UPPER[joined] * 20, params_of_request(max_tokens=5 + joined))})
            joined += 1
    assert text_of(outputs.pop("first")) == follows("a", 100)
    assert {k: text_of(o) for k, o in outputs.items()} == {str(i): follows(UPPER[i], 5 + i) for i in range(12)}


def test_a_long_prompt_does_not_stall_the_others(engine):
    """24 chunks of prompt come in between the steps of a request that is decoding."""
    submit(engine, {"short": ("a", params_of_request(max_tokens=150))})
    for _ in range(2):
        engine.step()
    submit(engine, {"long": ("A" * 385, params_of_request(max_tokens=3))})
    meanwhile, outputs = 0, {}
    while engine.has_work():
        for update in engine.step():
            if update.request_id == "short" and "long" not in outputs and update.token_ids:
                meanwhile += 1
            if update.output is not None:
                outputs[update.request_id] = update.output
    assert meanwhile >= 5
    assert text_of(outputs["long"]) == "BCD" and text_of(outputs["short"]) == follows("a", 150)


def test_nothing_to_do(engine):
    assert not engine.has_work() and engine.step() == [] and not engine.has_work()


def test_times_are_in_order(engine):
    output = generate(engine, ["a"], params_of_request(max_tokens=30))[0]
    m = output.metrics
    assert m.arrival_time <= m.first_token_time <= m.last_token_time <= m.finished_time
    assert m.num_generation_tokens == 30 and m.tokens_per_second > 0


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "keys", "message"),
    [
        ([], {}, "The decoder prompt cannot be empty"),
        ([1] * 401, {}, r"maximum context length is 400 tokens\. However, your prompt contains 401 input tokens"),
        ([1] * 400, {}, r"The prompt \(400 input tokens\) plus the number of requested output tokens \(at least 1\)"),
        ([1, 256], {}, "Token id 256 is out of vocabulary; expected 0 to 255"),
        ([1, -1], {}, "Token id -1 is out of vocabulary"),
        ([1], {"stop_token_ids": list(range(100, 131))}, "33 stop token ids .* at most 32"),
    ],
)
def test_what_cannot_run_is_refused_and_not_queued(engine, prompt, keys, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request("x", prompt, params_of_request(**keys))
    assert not engine.has_work()
    engine.add_request("x", [97] * 399, params_of_request(stop_token_ids=list(range(100, 130))))
    assert drain(engine)["x"].outputs[0].token_ids == [98]


def test_as_many_stop_ids_as_the_state_holds(engine):
    ids = [ord("d"), *range(128, 128 + MAX_STOP_TOKEN_IDS - 3)]
    for order in (ids, ids[::-1]):
        got = generate(engine, ["a"], params_of_request(stop_token_ids=order))[0].outputs[0]
        assert (got.text, got.stop_reason) == ("bc", ord("d"))


def test_an_id_in_use_is_refused(engine):
    submit(engine, {"x": ("a", params_of_request(max_tokens=60))})
    for _ in range(2):  # waiting, then running
        with pytest.raises(ValueError, match="request id 'x' is in use"):
            submit(engine, {"x": ("A", params_of_request())})
        engine.step()
    assert text_of(drain(engine)["x"]) == follows("a", 60)
    submit(engine, {"x": ("A", params_of_request(max_tokens=3))})
    assert text_of(drain(engine)["x"]) == "BCD"


def test_stop_strings_need_a_tokenizer():
    engine = ScriptedEngine(1, num_rows=1, vocab_size=16, eos_token_ids=())
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        engine.add_request("x", [1], params_of_request(stop="a"))
    assert not engine.has_work()


# -- aborts and failures ------------------------------------------------------------------------------------------


def test_abort_a_waiting_request(engine):
    submit(engine, {f"{i}": (LOWER[i], params_of_request(max_tokens=40)) for i in range(5)})
    engine.step()
    engine.abort(["4", "unknown"])
    outputs = drain(engine)
    (aborted,) = outputs.pop("4").outputs
    assert (aborted.finish_reason, aborted.token_ids, aborted.text) == ("abort", [], "")
    assert {k: text_of(o) for k, o in outputs.items()} == {str(i): follows(LOWER[i], 40) for i in range(4)}


def test_abort_before_the_first_step(engine):
    submit(engine, {"x": ("a", params_of_request()), "y": ("A", params_of_request(max_tokens=2))})
    engine.abort(["x"])
    outputs = drain(engine)
    assert outputs["x"].outputs[0].finish_reason == "abort" and text_of(outputs["y"]) == "BC"


def test_abort_a_request_whose_prompt_is_being_read(engine):
    submit(engine, {"running": ("a", params_of_request(max_tokens=120))})
    engine.step()
    submit(engine, {"long": ("A" * 390, params_of_request())})
    engine.step()
    slot = next(s for s in engine._slots if s is not None and s.request.request_id == "long")
    assert 0 < slot.prefilled < 389
    engine.abort(["long"])
    # Its row is taken at once, by a prompt that is shorter than what was read of the other.
    submit(engine, {f"{i}": (DIGITS[i] * 20, params_of_request(max_tokens=8)) for i in range(6)})
    outputs = drain(engine)
    assert outputs.pop("long").outputs[0].finish_reason == "abort"
    assert text_of(outputs.pop("running")) == follows("a", 120)
    assert {k: text_of(o) for k, o in outputs.items()} == {str(i): follows(DIGITS[i], 8) for i in range(6)}


def test_abort_a_decoding_request(engine):
    """What it had is given, held-back text included; its row goes to another, and later requests are none the worse."""
    stop = f"{UPPER}never"
    submit(engine, {"x": ("A", params_of_request(max_tokens=300, stop=stop))})
    submit(engine, {"y": ("a", params_of_request(max_tokens=90))})
    seen, outputs = "", {}
    while engine.has_work():
        for update in engine.step():
            if update.request_id == "x":
                seen += update.text
            if update.output is not None:
                outputs[update.request_id] = update.output
        running = next((s.request for s in engine._slots if s and s.request.request_id == "x"), None)
        if running is not None and len(running.token_ids) > 40:
            engine.abort(["x"])
            submit(engine, {"z": ("0", params_of_request(max_tokens=30))})
    (x,) = outputs["x"].outputs
    assert x.finish_reason == "abort" and len(x.token_ids) > 40
    assert seen == x.text == follows("A", len(x.token_ids))
    assert text_of(outputs["y"]) == follows("a", 90) and text_of(outputs["z"]) == follows("0", 30)
    engine.abort(["x", "y"])  # long gone
    assert engine.step() == [] and not engine.has_work()


def test_what_the_host_ends_the_device_ends_too(engine):
    """A stop string or an abort is the host's to see; the row then computes nothing more."""
    submit(engine, {"x": ("a", params_of_request(max_tokens=380, stop="cd"))})
    submit(engine, {"y": ("A", params_of_request(max_tokens=380)), "z": ("0", params_of_request(max_tokens=90))})
    engine.step()
    engine.abort(["y"])
    outputs = drain(engine)
    assert [outputs[i].outputs[0].finish_reason for i in "xyz"] == ["stop", "abort", "length"]
    assert not np.asarray(engine._state.active).any()
    assert np.asarray(engine._state.length).max() < 200


def test_other_threads_add_and_abort(engine):
    """Two threads hand requests over, and abort some, while this one steps."""
    started, failures = threading.Event(), []

    def feed(cycle: str) -> None:
        try:
            started.wait(10)
            for i in range(25):
                request_id = f"{cycle[0]}{i}"
                prompt = cycle[i % 10] * (1 + 5 * (i % 3))
                submit(engine, {request_id: (prompt, params_of_request(max_tokens=4 + i % 7))})
                if i % 5 == 3:
                    engine.abort([request_id])
        except BaseException as e:  # reported by the thread that asserts
            failures.append(e)

    threads = [threading.Thread(target=feed, args=(cycle,)) for cycle in (UPPER, DIGITS)]
    for thread in threads:
        thread.start()
    submit(engine, {"long": ("a", params_of_request(max_tokens=380))})
    outputs = {}
    while engine.has_work() or any(thread.is_alive() for thread in threads):
        started.set()
        for update in engine.step():
            if update.output is not None:
                assert outputs.setdefault(update.request_id, update.output) is update.output
    assert not failures
    assert text_of(outputs["long"]) == follows("a", 380)
    assert len(outputs) == 51
    for cycle in (UPPER, DIGITS):
        for i in range(25):
            (got,) = outputs[f"{cycle[0]}{i}"].outputs
            whole = follows(cycle[i % 10], 4 + i % 7)
            if i % 5 == 3:
                assert whole.startswith(got.text) and got.finish_reason in ("abort", "length")
            else:
                assert got.text == whole


def test_usable_after_a_failure_on_the_host(engine, monkeypatch):
    """A tokenizer that fails once takes the step down, not the engine."""
    submit(engine, {"x": ("a", params_of_request(max_tokens=200)), "y": ("A", params_of_request(max_tokens=200))})
    engine.step()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(type(engine.tokenizer), "decode", lambda *_, **__: 1 // 0)
        drain(engine)
    engine.abort(["x", "y"])
    assert set(drain(engine)) == {"x", "y"}
    assert [text_of(o) for o in generate(engine, ["a", "A", "0", "b"])] == [follows(c, 16) for c in "aA0b"]


def test_usable_after_a_failure_of_a_dispatch(engine, monkeypatch):
    submit(engine, {"x": ("a", params_of_request(max_tokens=60)), "y": ("A" * 40, params_of_request(max_tokens=50))})
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine._programs, "decode", lambda *_, **__: (_ for _ in ()).throw(MemoryError()))
        engine.step()
    outputs = drain(engine)
    assert text_of(outputs["x"]) == follows("a", 60) and text_of(outputs["y"]) == follows("A", 50)


# -- streams ------------------------------------------------------------------------------------------------------

CHARACTERS = "é😀中"  # of 2, 4 and 3 bytes, none of them twice


@pytest.mark.parametrize("right", range(4))
@pytest.mark.parametrize("max_tokens", range(1, 20, 3))
def test_characters_are_streamed_whole(right, max_tokens):
    """Whichever blocks their bytes come in."""
    engine = scripted(3, 4)
    engine.say(b"p" + CHARACTERS.encode(), drafts=right)
    updates: list[Any] = []
    submit(engine, {"x": ("p", params_of_request(max_tokens=max_tokens))})
    output = drain(engine, updates)["x"]
    said = (CHARACTERS + "p").encode() * 3
    assert "".join(u.text for u in updates) == text_of(output) == said[:max_tokens].decode(errors="replace")
    assert not any("\ufffd" in u.text for u in updates[:-1])
    assert joined(u.token_ids for u in updates) == list(said[:max_tokens])
    assert [u.finished for u in updates] == [False] * (len(updates) - 1) + [True]


@pytest.mark.parametrize("stop", ["hij", "z", "yza", "bcx"])
def test_what_may_become_a_stop_string_is_held_back(engine, stop):
    updates: list[Any] = []
    submit(engine, {"x": ("a", params_of_request(max_tokens=40, stop=stop))})
    output = drain(engine, updates)["x"]
    whole = follows("a", 40)
    text = whole[: whole.index(stop)] if stop in whole else whole
    sent = ""
    for update in updates:
        sent += update.text
        assert text.startswith(sent)  # nothing that was sent had to be taken back
    assert sent == text_of(output) == text
    if len(text) > 20:
        assert len(updates) > 1 and sum(bool(u.text) for u in updates) > 1
    assert output.outputs[0].finish_reason == ("stop" if stop in whole else "length")


def test_streams_of_several_requests_do_not_mix(engine):
    updates: list[Any] = []
    submit(engine, {c: (c, params_of_request(max_tokens=33, logprobs=1)) for c in "aAbB01c"})
    outputs = drain(engine, updates)
    for request_id, output in outputs.items():
        mine = [u for u in updates if u.request_id == request_id]
        assert "".join(u.text for u in mine) == text_of(output) == follows(request_id, 33)
        assert joined(u.token_ids for u in mine) == output.outputs[0].token_ids
        assert joined(u.logprobs for u in mine) == output.outputs[0].logprobs
        assert len(mine) > 2


# -- small vocabularies, no speculation ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Engine:
    """No drafts, no tokenizer, 16 ids; the logits fall by one from each id to the next, from the following id on."""
    config = table_config(16, 256)
    logits = -((np.arange(16)[None, :] - np.arange(16)[:, None] - 1) % 16).astype(float)
    return Engine(
        config,
        NoDrafter(),
        {"target": table_params(config, logits)},
        plan_for(config, Speculation(), 256, 2, chunk_size=32),
        num_rows=2,
        chunk_size=32,
        steps_per_dispatch=3,
        dtype=jnp.float32,
    )


def test_without_speculation(plain):
    outputs = generate(plain, [[0], list(range(16)) * 4, [7, 3]], params_of_request(max_tokens=20))
    assert tokens_of(outputs) == [[(last + 1 + i) % 16 for i in range(20)] for last in (0, 15, 3)]
    for output in outputs:
        assert output.metrics.speculative_decoding is None and output.prompt is None and text_of(output) == ""
    assert plain.acceptance.num_drafts == 0


def test_fewer_ids_than_logprobs_asked_for(plain):
    """All 16, best first, and nothing made up behind them."""
    got = generate(plain, [[5]], params_of_request(max_tokens=3, logprobs=20))[0].outputs[0]
    for i, entry in enumerate(got.logprobs):
        assert list(entry) == [(6 + i + j) % 16 for j in range(16)]
        assert [value.rank for value in entry.values()] == list(range(1, 17))
        assert np.exp([value.logprob for value in entry.values()]).sum() == pytest.approx(1, abs=1e-5)


# -- compiling, and the host's time -------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def windowed() -> Engine:
    """A random model with three attention windows, and no spare slots that would hide one that is too short.

    The weights are committed to a device, as loaded ones are.
    """
    engine = Engine(
        CONFIG,
        NoDrafter(),
        jax.device_put({"target": TARGET}, jax.devices()[0]),
        plan_for(CONFIG, Speculation(), 200, 3, chunk_size=100, smallest_window=64),
        num_rows=3,
        chunk_size=100,
        steps_per_dispatch=4,
        dtype=jnp.float32,
    )
    assert engine.plan.windows == (64, 128, 256)
    return engine


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
    engine._run(keep, 2, engine.plan.num_slots)
    times.append(time.perf_counter() - start)
print(1e3 * float(np.median(times)))
"""


def test_a_dispatch_costs_the_host_less_than_a_millisecond():
    """However many layers there are: a few stacked arrays are passed, no modules. Without the tests' shape checks."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _HOST_TIME], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0
