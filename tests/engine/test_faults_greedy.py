"""Faults that users of other engines reported, as black boxes: a real pair in caches without a slot to spare.

A test's letter names the kind of fault, here B: greedy equality, E:
log-probabilities, F: lengths.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.config import extra_slots
from pard_jax.decoding.drafters import Drafter, NgramDrafter, PardDrafter, SequentialDrafter
from pard_jax.engine.engine import Engine
from pard_jax.engine.memory import Speculation
from tests.helpers.engine import (
    forward_passes,
    generate,
    params_of_request,
    plan_for,
    tokens_of,
)
from tests.helpers.models import full_forward, model_config, random_params
from tests.helpers.reference import Propose, greedy, ngram_drafts, pard_drafts, sequential_drafts, speculate

V, MASK, SLOTS = 64, 63, 128
CONFIG = model_config("llama", num_hidden_layers=1, vocab_size=V, head_dim=8)
TARGET = random_params(CONFIG, 0)
NEAR = jax.tree.map(lambda x: x + jnp.asarray(np.random.default_rng(7).normal(0, 0.04, x.shape), x.dtype), TARGET)
# Another head alone: where a row of it is the target's likeliest token, the draft is wrong, and its cache is right.
ALTERED = TARGET | {"lm_head": TARGET["lm_head"].at[::7].multiply(-1.0)}
LOGITS = full_forward(CONFIG, TARGET, SLOTS)
METHODS = [("pard", 1), ("pard", 3), ("pard", 12), ("draft_model", 3), ("ngram", 4)]


@functools.cache
def real_engine(method: str, k: int, num_rows: int = 3) -> Engine:
    """One whose rows have exactly as many slots as the longest sequence may reach."""
    common: dict[str, Any] = {"num_speculative_tokens": k}
    if method != "ngram":
        common |= {"config": CONFIG, "target_vocab_size": V, "max_model_len": SLOTS}
    drafter: Drafter
    match method:
        case "pard":
            drafter = PardDrafter(**common, mask_token_id=MASK)
        case "draft_model":
            drafter = SequentialDrafter(**common)
        case _:
            drafter = NgramDrafter(**common, max_n=3, min_n=1)
    extra = extra_slots("ngram" if method == "ngram" else "draft_model", method == "pard", k)
    length = SLOTS - k - extra
    speculation = Speculation(k, extra, None if method == "ngram" else CONFIG)
    plan = plan_for(CONFIG, speculation, length, num_rows, chunk_size=length // 2)
    assert plan.num_slots == SLOTS and length % 2 == 0
    return Engine(
        CONFIG,
        drafter,
        {"target": TARGET, "draft": NEAR},
        plan,
        num_rows=num_rows,
        chunk_size=length // 2,
        steps_per_dispatch=2,
        dtype=jnp.float32,
        speculative_slots=k + extra,
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, V, length).tolist()


@functools.cache
def greedy_of(prompt: tuple[int, ...], max_length: int) -> list[int]:
    return greedy(LOGITS, prompt, max_length)


def expected_of(prompts: list[list[int]], max_tokens: int, limit: int) -> list[list[int]]:
    return [greedy_of(tuple(p), min(limit, len(p) + max_tokens)) for p in prompts]


@pytest.mark.parametrize(("method", "k"), METHODS)
def test_b1_greedy_output_is_the_targets_own(method, k):
    """The draft is right now and then; prompts of 1 to 70 tokens pass through three rows."""
    engine = real_engine(method, k)
    limit, chunk = engine.plan.max_model_len, engine.chunk_size
    prompts = [prompt_of(n) for n in (70, 1, 2, 3, 17, chunk - 1, chunk, chunk + 1, chunk + 2)]
    engine.acceptance.reset()
    outputs = generate(engine, prompts, params_of_request(max_tokens=24))
    assert tokens_of(outputs) == expected_of(prompts, 24, limit)
    assert engine.acceptance.num_accepted_tokens > 20
    rejected = engine.acceptance.num_draft_tokens - engine.acceptance.num_accepted_tokens
    assert rejected > 20, "nothing was rejected: the test says little"


@pytest.mark.parametrize(("method", "k"), METHODS)
def test_b7_acceptance_is_the_references_in_any_batch(method, k):
    """Step by step what a loop without a cache accepts, whatever is in the other rows."""
    engine = real_engine(method, k)
    draft = full_forward(CONFIG, NEAR, SLOTS)
    propose: Propose = {
        "pard": lambda context: pard_drafts(draft, context, k, MASK),
        "draft_model": lambda context: sequential_drafts(draft, context, k),
        "ngram": lambda context: ngram_drafts(context, k, 1, 3),
    }[method]
    prompts = [prompt_of(n, seed=1) for n in (1, 60, 2, 33, 5)]
    outputs = generate(engine, prompts, params_of_request(max_tokens=24))
    for prompt, output in zip(prompts, outputs, strict=True):
        run = speculate(LOGITS, propose, prompt, min(engine.plan.max_model_len, len(prompt) + 24))
        assert output.outputs[0].token_ids == run.tokens
        histogram = [0] * (k + 1)
        for kept, drafted, accepted in zip(run.kept, run.drafted, run.accepted, strict=True):
            histogram[min(kept, accepted)] += drafted > 0
        metrics = output.metrics.speculative_decoding
        assert metrics.acceptance_histogram == histogram
        assert metrics.num_draft_tokens == sum(run.drafted)


def test_b4_a_draft_that_is_the_target_is_always_right():
    """At every position, over hundreds of steps, in rows that come and go."""
    engine = real_engine("draft_model", 3)
    engine._params["draft"] = TARGET
    try:
        prompts = [prompt_of(n, seed=2) for n in (1, 2, 3, 40, 62, 63, 64, 11, 12, 13)]
        engine.acceptance.reset()
        before = engine.num_steps
        outputs = generate(engine, prompts, params_of_request(max_tokens=80))
        assert engine.num_steps - before > 50
        for output in outputs:
            # All but the last block are whole; the last is cut by the budget.
            metrics = output.metrics.speculative_decoding
            assert sum(metrics.acceptance_histogram[:3]) <= 1 and metrics.acceptance_histogram[0] == 0
    finally:
        engine._params["draft"] = NEAR


def test_b4_after_rejections_the_draft_is_right_again():
    """The draft is the target but for some tokens that it never says: it errs there alone, and at once recovers."""
    engine = real_engine("draft_model", 3)
    altered = full_forward(CONFIG, ALTERED, SLOTS)
    engine._params["draft"] = ALTERED
    try:
        prompts = [prompt_of(n, seed=3) for n in (1, 2, 30, 61, 7)]
        outputs = generate(engine, prompts, params_of_request(max_tokens=60))
    finally:
        engine._params["draft"] = NEAR
    rejected = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = prompt + output.outputs[0].token_ids
        best = altered(tokens).argmax(axis=1)  # what the draft says to every prefix of the output
        at, histogram = len(prompt), [0] * 4
        while at < len(tokens):
            accepted = 0
            while accepted < 3 and at + accepted < len(tokens) and best[at + accepted - 1] == tokens[at + accepted]:
                accepted += 1
            histogram[accepted] += 1
            at += accepted + 1
        assert output.metrics.speculative_decoding.acceptance_histogram == histogram
        rejected += sum(histogram[:3])
    assert rejected > 10


def test_b9_one_draft_pass_a_step():
    """12 drafts cost one forward pass of the draft beside the target's own; a sequential draft's three cost three."""

    def passes(engine: Engine) -> int:
        return forward_passes(
            functools.partial(engine._programs._decode, window=SLOTS),
            engine._params,
            engine._state,
            jnp.ones((3,), bool),
            jnp.int32(1),
        )

    assert passes(real_engine("pard", 12)) == 1 + 1
    assert passes(real_engine("draft_model", 3)) == 1 + 3
    assert passes(real_engine("ngram", 4)) == 1


@pytest.mark.parametrize(("method", "k"), METHODS)
def test_f1_f2_up_to_the_last_slot(method, k):
    """Rows are filled to the brim and end by length; an earlier prompt then gives what it gave."""
    engine = real_engine(method, k)
    limit = engine.plan.max_model_len
    early = [prompt_of(n, seed=4) for n in (5, 50, limit - k - 5)]
    first = generate(engine, early, params_of_request(max_tokens=k + 5))
    assert tokens_of(first) == expected_of(early, k + 5, limit)
    full = [prompt_of(limit - left, seed=5) for left in range(k + 2, 0, -1)]
    for max_tokens in (None, 1000):
        for prompt, output in zip(full, generate(engine, full, params_of_request(max_tokens=max_tokens)), strict=True):
            (got,) = output.outputs
            assert got.token_ids == greedy_of(tuple(prompt), limit)
            assert len(prompt) + len(got.token_ids) == limit and got.finish_reason == "length"
    again = generate(engine, early, params_of_request(max_tokens=k + 5))
    assert tokens_of(again) == tokens_of(first)


def test_f1_neighbours_of_a_full_row_are_untouched():
    """One row runs into its end while others, longer or shorter, decode on beside it."""
    engine = real_engine("pard", 12)
    limit = engine.plan.max_model_len
    prompts = [prompt_of(limit - 2, seed=6), prompt_of(40, seed=6), prompt_of(3, seed=6)]
    outputs = generate(engine, prompts, params_of_request(max_tokens=None))
    assert tokens_of(outputs) == expected_of(prompts, limit, limit)


# -- E: log-probabilities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "k"), [("pard", 3), ("draft_model", 3)])
def test_e1_logprobs_are_the_teacher_forced_ones(method, k):
    """Of greedy and of sampled tokens, with the ranks, whatever else is asked for in the same batch."""
    engine = real_engine(method, k)
    asked: list[dict[str, Any]] = [
        {"logprobs": 5},
        {"logprobs": 20, "temperature": 1.0, "seed": 1},
        {"logprobs": 0, "temperature": 0.7, "top_k": 5, "seed": 2},
        {"temperature": 1.3, "seed": 3},
        {"logprobs": 1, "min_tokens": 9, "stop_token_ids": list(range(0, 30))},
    ]
    prompts = [prompt_of(n, seed=7) for n in (9, 1, 30, 4, 6)]
    outputs = generate(engine, prompts, [params_of_request(**({"max_tokens": 17} | keys)) for keys in asked])
    for prompt, output, keys in zip(prompts, outputs, asked, strict=True):
        (got,) = output.outputs
        if "logprobs" not in keys:
            assert got.logprobs is None and got.cumulative_logprob is None
            continue
        rows = LOGITS(prompt + got.token_ids)[len(prompt) - 1 : -1].astype(np.float64)
        logprobs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        assert len(got.logprobs) == len(got.token_ids)
        for token, entry, row in zip(got.token_ids, got.logprobs, logprobs, strict=True):
            order = np.argsort(-row, kind="stable").tolist()
            assert list(entry) == list(dict.fromkeys([token, *order[: keys["logprobs"]]]))
            for candidate, value in entry.items():
                assert value.logprob == pytest.approx(row[candidate], abs=1e-4)
                assert value.rank == order.index(candidate) + 1
        assert got.cumulative_logprob == pytest.approx(sum(logprobs[np.arange(len(rows)), got.token_ids]), abs=1e-3)
