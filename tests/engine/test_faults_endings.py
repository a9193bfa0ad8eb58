"""Faults that users of other engines reported, as black boxes: where a request ends.

A test's letter names the kind of fault, here A: ends inside an accepted block.
"""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import pytest

from pard_jax.engine.engine import Engine
from tests.helpers.engine import (
    BYTES,
    EOS,
    SECOND_EOS,
    drain,
    generate,
    one_hot_logits,
    params_of_request,
    submit,
    successors,
)

LETTERS = string.ascii_lowercase.replace("p", "")  # 25 of them; "p" is the prompt
DRAFTS = ("right", "wrong", "none", 2)


def completion(engine: Engine, **keys: Any) -> Any:
    """Of the prompt "p"."""
    return generate(engine, ["p"], params_of_request(**keys))[0].outputs[0]


def ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a1_a_stop_token_and_a_budget_in_one_block(engine, drafts):
    engine.say("pab.defghijklm", drafts=drafts)
    stop: dict[str, Any] = {"stop_token_ids": [ord(".")]}
    inside = completion(engine, max_tokens=5, **stop)
    assert (inside.token_ids, inside.finish_reason, inside.stop_reason) == (ids("ab."), "stop", ord("."))
    outside = completion(engine, max_tokens=2, **stop)
    assert (outside.token_ids, outside.finish_reason, outside.stop_reason) == (ids("ab"), "length", None)
    both = completion(engine, max_tokens=3, **stop)
    assert (both.token_ids, both.finish_reason, both.stop_reason) == (ids("ab."), "stop", ord("."))


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a2_eos_at_every_position_of_a_block(engine, drafts):
    for at in range(engine.k + 1):
        before, behind = LETTERS[:at], LETTERS[at:]
        engine.say(f"p{before}${behind}", drafts=drafts)
        ended, on = generate(
            engine,
            ["p", "p"],
            [params_of_request(max_tokens=2 * engine.k + 3), params_of_request(max_tokens=20, ignore_eos=True)],
        )
        (ended,), (on,) = ended.outputs, on.outputs
        assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (ids(before + "$"), "stop", None)
        assert ended.text == before
        assert (on.token_ids, on.finish_reason) == (ids(f"{before}${behind}"[:20]), "length")


@pytest.mark.parametrize("drafts", ["right", "none"])
def test_a_second_eos_is_a_stop_token(engine, drafts):
    """As vLLM has it: EOS ids of generation_config.json beside the primary one are named as the stop reason."""
    engine.say("pab%cd", drafts=drafts)
    one = completion(engine, max_tokens=9)
    assert (one.text, one.token_ids, one.finish_reason, one.stop_reason) == ("ab", ids("ab%"), "stop", SECOND_EOS)
    assert completion(engine, max_tokens=9, ignore_eos=True).token_ids == ids("ab%cdpab%")
    # A stop id that the request asks for ends it under ignore_eos all the same.
    own = completion(engine, max_tokens=9, ignore_eos=True, stop_token_ids=[SECOND_EOS])
    assert (own.token_ids, own.stop_reason) == (ids("ab%"), SECOND_EOS)


@pytest.mark.parametrize("include", [False, True])
def test_a4_stop_strings_anywhere_in_a_block(engine, include):
    """The first of 13 accepted tokens, the last, and strings that reach from one block into the next."""
    engine.say("p" + LETTERS)
    stops = [LETTERS[i : i + n] for i in range(0, 20) for n in (1, 2, 3)]
    params = [
        params_of_request(max_tokens=40, stop=["never", stop], include_stop_str_in_output=include, logprobs=0)
        for stop in stops
    ]
    for stop, output in zip(stops, generate(engine, ["p"] * len(stops), params), strict=True):
        (got,) = output.outputs
        end = LETTERS.index(stop) + len(stop)
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        assert got.text == (LETTERS[:end] if include else LETTERS[: end - len(stop)])
        # A6: nothing past the stop string leaks, in any of the lists.
        assert got.token_ids == ids(LETTERS[:end])
        assert len(got.logprobs) == end and output.metrics.num_generation_tokens == end


def test_a6_lengths_agree_whatever_ends_a_request(engine):
    engine.say(f"p{LETTERS[:9]}${LETTERS[9:]}")
    endings = [{"stop": "g"}, {"stop_token_ids": [ord("h")]}, {"max_tokens": 7}, {}]
    updates: list[Any] = []
    submit(engine, {str(i): ("p", params_of_request(**({"logprobs": 2} | keys))) for i, keys in enumerate(endings)})
    outputs = drain(engine, updates)
    for request_id, output in outputs.items():
        (got,) = output.outputs
        assert len(got.token_ids) == len(got.logprobs) == output.metrics.num_generation_tokens
        assert all(token in entry for token, entry in zip(got.token_ids, got.logprobs, strict=True))
        assert got.cumulative_logprob == pytest.approx(
            sum(entry[token].logprob for token, entry in zip(got.token_ids, got.logprobs, strict=True))
        )
        mine = [u for u in updates if u.request_id == request_id]
        assert [t for u in mine for t in u.token_ids] == got.token_ids
        assert [entry for u in mine for entry in u.logprobs] == got.logprobs
    assert [len(outputs[str(i)].outputs[0].token_ids) for i in range(4)] == [7, 8, 7, 10]


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a7_exactly_max_tokens(engine, drafts):
    engine.say("p" + LETTERS, drafts=drafts)
    k, cycle = engine.k, LETTERS + "p" + LETTERS
    budgets = [1, 2, k, k + 1, k + 2, 2 * k + 2, 2 * k + 3]
    params = [params_of_request(max_tokens=n, ignore_eos=True) for n in budgets]
    for n, output in zip(budgets, generate(engine, ["p"] * len(budgets), params), strict=True):
        (got,) = output.outputs
        assert (got.token_ids, got.finish_reason) == (ids(cycle[:n]), "length")


@pytest.mark.parametrize("stops", ["eos", "second eos", "stop token"])
def test_a10_min_tokens_beside_rows_without_drafts(engine, stops):
    """The target wants to end at every token; three rows draft the right tokens, the end itself, and nothing."""
    texts = [string.ascii_lowercase, string.ascii_uppercase, string.digits]
    end = {"eos": EOS, "second eos": SECOND_EOS, "stop token": ord("!")}[stops]
    follows = successors(*texts)
    logits = one_hot_logits(follows)
    logits[:, end] = 30.0
    drafts = np.full((BYTES, engine.k), -1)
    token = np.arange(BYTES)
    for i in range(engine.k):
        token = follows[token]
        drafts[:, i] = token
    drafts[ids(texts[1])] = end
    drafts[ids(texts[2])] = -1
    engine.play(logits, drafts)
    for m in (0, 1, engine.k, engine.k + 1):
        params = [
            params_of_request(max_tokens=30, min_tokens=n, stop_token_ids=[ord("!")]) for n in (m, m + 1, max(m - 1, 0))
        ]
        outputs = generate(engine, [text[0] for text in texts], params)
        for text, p, output in zip(texts, params, outputs, strict=True):
            (got,) = output.outputs
            expected = (ids(text) * 3)[1 : 1 + p.min_tokens]
            assert got.token_ids == [*expected, end]
            assert (got.finish_reason, got.stop_reason) == ("stop", None if stops == "eos" else end)


def test_min_tokens_hides_stop_strings_as_well(engine):
    engine.say("pab")
    for m in range(9):
        got = completion(engine, max_tokens=20, min_tokens=m, stop="b")
        ends = [n for n in range(1, 21) if n > m and n % 3 == 2]
        assert len(got.token_ids) == ends[0], f"min_tokens={m}"
