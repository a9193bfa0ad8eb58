"""Batches of plain greedy requests run a program of their own: chosen by what is in the rows, and never heard of."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.alphabets import DIGITS, LOWER, UPPER
from tests.engine.test_compiling import mixed_workload
from tests.helpers.engine import ScriptedEngine, count_compiles, drain, params_of_request, tokens_of

PLAIN: list[dict[str, Any]] = [{}, {"stop_token_ids": [ord("q")]}, {"max_tokens": 3}, {"stop": ["fg"]}]
OTHERS: list[dict[str, Any]] = [{"temperature": 1.0, "seed": 3}, {"logprobs": 2}, {"min_tokens": 4}]


def engine_of(specialize: bool, k: int = 2) -> ScriptedEngine:
    engine = ScriptedEngine(k, steps_per_dispatch=3, specialize=specialize)
    engine.say(LOWER, UPPER, DIGITS, drafts=2)
    return engine


def run(engine: ScriptedEngine, settings: list[dict[str, Any]]) -> tuple[list[list[int]], list[bool]]:
    """Each request's tokens, and of every dispatch whether it ran the greedy program."""
    programs: Any = engine._programs
    decode, chosen = programs.decode, []

    def observed(*args: Any, greedy: bool, **keys: Any) -> Any:
        chosen.append(greedy)
        return decode(*args, greedy=greedy, **keys)

    programs.decode = observed
    for i, keys in enumerate(settings):
        engine.add_request(str(i), [ord("abc"[i % 3])], params_of_request(**{"max_tokens": 9} | keys))
    outputs = drain(engine)
    programs.decode = decode
    return tokens_of([outputs[str(i)] for i in range(len(settings))]), chosen


@pytest.mark.parametrize("k", [1, 2])
def test_the_tokens_are_the_same(k):
    settings = [*PLAIN, *OTHERS, *PLAIN]
    expected, general = run(engine_of(False, k), settings)
    tokens, chosen = run(engine_of(True, k), settings)
    assert tokens == expected
    assert not any(general) and any(chosen) and not all(chosen)


@pytest.mark.parametrize("settings", PLAIN)
def test_plain_greedy_requests_run_it(settings):
    assert set(run(engine_of(True), [settings] * 4)[1]) == {True}


@pytest.mark.parametrize("settings", OTHERS)
def test_one_request_that_asks_for_more_keeps_the_batch_from_it(settings):
    assert run(engine_of(True), [{}, settings, {}])[1][0] is False


def test_nothing_compiles_after_the_warm_up_of_both():
    engine = engine_of(True)
    engine.warm_up()
    with count_compiles() as compiled:
        mixed_workload(engine, 256, 400, text=True)
        run(engine, PLAIN)
    assert not compiled
