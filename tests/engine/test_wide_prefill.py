"""Many prompts at once: admitted and prefilled by wide calls, taken in dispatch by dispatch, with the same outcome."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.decoding.drafters import Drafter, NgramDrafter, NoDrafter, PardDrafter, SequentialDrafter
from pard_jax.engine.engine import Engine
from pard_jax.engine.memory import Speculation
from pard_jax.engine.stop import StopChecker
from pard_jax.sampling_params import SamplingParams
from tests.helpers.engine import (
    BYTES,
    ScriptedEngine,
    count_compiles,
    generate,
    one_hot_logits,
    params_of_request,
    plan_for,
    successors,
    tokens_of,
)
from tests.helpers.models import full_forward, tiny_pair
from tests.helpers.reference import greedy

PAIR = tiny_pair(vocab_size=48)
ROWS, CHUNK, LENGTH, K = 12, 8, 40, 3
KINDS = ("none", "ngram", "pard", "sequential")


def drafter_of(kind: str) -> Drafter:
    model: dict[str, Any] = {
        "num_speculative_tokens": K, "config": PAIR.draft, "target_vocab_size": 48, "max_model_len": LENGTH + K,
    }  # fmt: skip
    match kind:
        case "none":
            return NoDrafter()
        case "ngram":
            return NgramDrafter(num_speculative_tokens=K, max_n=3, min_n=1)
        case "pard":
            return PardDrafter(**model, mask_token_id=47)
        case _:
            return SequentialDrafter(**model)


@functools.cache
def engine_of(kind: str, wide: bool = True) -> Engine:
    drafter = drafter_of(kind)
    k = drafter.num_speculative_tokens
    draft = PAIR.draft if kind in ("pard", "sequential") else None
    smallest = 32 if kind == "none" else 4096  # several windows for one of them: each is compiled
    plan = plan_for(PAIR.target, Speculation(k, 2 * k, draft), LENGTH, ROWS, CHUNK, smallest_window=smallest)
    assert plan.prefill_rows == 6
    engine = Engine(
        PAIR.target,
        drafter,
        jax.device_put(PAIR.params, jax.devices()[0]),
        plan if wide else dataclasses.replace(plan, prefill_rows=1),
        num_rows=ROWS,
        chunk_size=CHUNK,
        steps_per_dispatch=2,
        dtype=jnp.float32,
        speculative_slots=3 * k,
    )
    engine.warm_up()
    return engine


def prompts_of(count: int) -> list[list[int]]:
    """Of one token, of a chunk, of several, up to the longest that leaves a token."""
    rng = np.random.default_rng(0)
    lengths = [1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1, LENGTH - 1, *rng.integers(1, LENGTH, count)]
    return [rng.integers(0, 47, n).tolist() for n in lengths[:count]]


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is called, and for how many rows."""
    seen: list[tuple[str, int]] = []
    for name in ("_admission", "_chunks"):
        original = getattr(Engine, name)

        def spy(self: Engine, rows: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            width = args[0] if name == "_admission" else args[2]
            assert len(rows) <= width
            seen.append((name, width))
            return original(self, rows, *args)

        monkeypatch.setattr(Engine, name, spy)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_the_targets_own(kind, widths):
    """In rows that are prefilled together while others decode; and nothing compiles."""
    logits = full_forward(PAIR.target, PAIR.params["target"], LENGTH)
    prompts = prompts_of(40)
    engine = engine_of(kind)
    widths.clear()
    with count_compiles() as compiled:
        outputs = generate(engine, prompts, params_of_request(max_tokens=12))
    assert not compiled
    assert tokens_of(outputs) == [greedy(logits, p, min(LENGTH, len(p) + 12)) for p in prompts]
    assert {("_admission", 6), ("_chunks", 6), ("_admission", 1), ("_chunks", 1)} == set(widths)


@pytest.mark.parametrize("kind", ["none", "pard"])
def test_width_does_not_change_samples(kind, widths):
    params = [
        params_of_request(
            max_tokens=9, temperature=1.0, seed=i, min_p=0.05 * (i % 2), top_k=i % 5, logprobs=i % 3 or None
        )
        for i in range(30)
    ]
    outputs = [generate(engine_of(kind, wide), prompts_of(30), params) for wide in (True, False)]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])
    assert {width for _, width in widths} == {1, 6}


def test_few_prompts_are_read_one_by_one(widths):
    """A wide pass would take as long for one as for all."""
    generate(engine_of("none"), prompts_of(4), params_of_request(max_tokens=2))
    assert {width for _, width in widths} == {1}


def test_a_small_batch_has_no_wide_pass():
    assert plan_for(PAIR.target, Speculation(), LENGTH, 3, CHUNK).prefill_rows == 1
    assert plan_for(PAIR.target, Speculation(), LENGTH, 8, 256).prefill_rows == 1


def test_the_wide_pass_is_planned_for():
    """Its activations and scores, where it takes in more tokens than a decoding step."""
    few, many = (plan_for(PAIR.target, Speculation(), LENGTH, ROWS, chunk) for chunk in (64, CHUNK))
    assert (few.prefill_rows, many.prefill_rows) == (1, 6)
    rows = (64, 6 * CHUNK)
    scores = 4 * ROWS * PAIR.target.vocab_size * 5
    per_row = (few.workspace_bytes - scores) // rows[0]
    assert many.workspace_bytes - scores == per_row * rows[1]


# -- several steps taken in at once -------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"max_tokens": 11},
    {"max_tokens": 8},
    {"max_tokens": 1},
    {"max_tokens": 30, "stop_token_ids": [ord("f")]},
    {"max_tokens": 30, "stop_token_ids": [ord("c")], "min_tokens": 6},
    {"max_tokens": 6, "stop_token_ids": [ord("f")]},
    {"max_tokens": None},
    {"max_tokens": 40, "ignore_eos": True},
]


def test_steps_are_taken_in_together_without_text_and_one_by_one_with_it():
    """With the same tokens, ends and reasons."""
    engine = ScriptedEngine(0, steps_per_dispatch=4, max_model_len=60)
    engine.play(one_hot_logits(successors("abcdefg", "xyz$w")), np.zeros((BYTES, 0)))
    prompts = ["a", "dea", "x", "yz"] * len(SETTINGS)
    results = []
    for detokenize in (False, True):
        params = [params_of_request(**SETTINGS[i // 4], detokenize=detokenize) for i in range(len(prompts))]
        outputs = [output.outputs[0] for output in generate(engine, prompts, params)]
        assert all(bool(output.text) <= detokenize for output in outputs)
        results.append([(o.token_ids, o.finish_reason, o.stop_reason) for o in outputs])
    assert results[0] == results[1]
    assert {reason for _, reason, _ in results[0]} == {"stop", "length"}


def test_none_ends_agrees_with_check():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(2000):
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 12)) if rng.random() < 0.8 else None,
            stop_token_ids=rng.integers(0, 40, 2).tolist(),
            ignore_eos=bool(rng.random() < 0.3),
        )
        stop = StopChecker(params, eos_token_id=5, extra_eos_token_ids=[6], max_model_len=int(rng.integers(5, 20)))
        before, prompt, tokens = int(rng.integers(0, 6)), 3, rng.integers(0, 40, rng.integers(1, 6)).tolist()
        ends = [stop.check(t, before + i, prompt + before + i) for i, t in enumerate(tokens, 1)]
        assert stop.none_ends(tokens, before, prompt + before) == (ends == [None] * len(tokens))
        seen.add(ends == [None] * len(tokens))
    assert seen == {True, False}
