"""The host side: requests join, leave and are aborted while others run."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.decoding.drafters import NoDrafter
from pard_jax.decoding.state import MAX_STOP_TOKEN_IDS
from pard_jax.engine.engine import Engine
from pard_jax.engine.memory import Speculation
from tests.engine.alphabets import DIGITS, LOWER, UPPER, follows, text_of
from tests.helpers.engine import (
    ScriptedEngine,
    drain,
    generate,
    params_of_request,
    plan_for,
    submit,
    table_config,
    table_params,
    tokens_of,
)


@pytest.fixture
def engine(engine: ScriptedEngine) -> ScriptedEngine:
    engine.say(LOWER, UPPER, DIGITS, drafts=2)
    return engine


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
