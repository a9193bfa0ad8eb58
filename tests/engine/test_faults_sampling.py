"""Faults that users of other engines reported, as black boxes: samples, seeds and batches.

A test's letter names the kind of fault, here C and D: sampling and seeds.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from pard_jax.engine.adaptive import Policy
from pard_jax.sampling_params import SamplingParams
from tests.helpers.engine import (
    ScriptedEngine,
    drain,
    generate,
    params_of_request,
    submit,
    tokens_of,
)
from tests.helpers.statistics import assert_follows

# Two closed halves of a vocabulary of 16: a request stays in the half that its prompt lies in, and there every token
# is drawn from one known distribution. The drafts' distributions are others, and differ between the halves.
HALF = 8
_RNG = np.random.default_rng(0)
TARGETS, DRAFTED = _RNG.dirichlet(np.full(HALF, 2.0), 2), _RNG.dirichlet(np.full(HALF, 2.0), (2, 3))


@functools.cache
def sampling_engine(policy: Policy | None = None) -> ScriptedEngine:
    engine = ScriptedEngine(
        3, steps_per_dispatch=2, sampled=True, max_model_len=1900, vocab_size=2 * HALF, eos_token_ids=(), policy=policy
    )
    logits, probs = np.full((2 * HALF, 2 * HALF), -np.inf), np.zeros((2 * HALF, 3, 2 * HALF))
    for half in range(2):
        here = slice(half * HALF, (half + 1) * HALF)
        logits[here, here] = np.log(TARGETS[half])
        probs[here, :, here] = DRAFTED[half]
    engine.play(np.maximum(logits, -1e4), probs)
    return engine


def drawn(**keys: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": 24} | keys))


def test_c4_the_drafts_probabilities_stay_with_their_row():
    """Requests with other drafts come and go beside a long one; its tokens still follow the target."""
    engine = sampling_engine()
    engine.acceptance.reset()
    others = {f"{half}-{i}": ([half * HALF], drawn(max_tokens=5 + 7 * (i % 9))) for i in range(40) for half in (1, 0)}
    submit(engine, {"long": ([0], drawn(max_tokens=1800, seed=1))} | others)
    outputs = drain(engine)
    tokens = {name: np.asarray(output.outputs[0].token_ids) for name, output in outputs.items()}
    assert len(tokens["long"]) == 1800
    assert_follows(tokens["long"], TARGETS[0], "the long request")
    upper = np.concatenate([t for name, t in tokens.items() if name.startswith("1-")]) - HALF
    assert_follows(upper, TARGETS[1], "the others")
    # Independent draws, too: successive pairs.
    pairs = tokens["long"][:-1:2] * HALF + tokens["long"][1::2]
    assert_follows(pairs, np.outer(TARGETS[0], TARGETS[0]).ravel(), "pairs")
    assert 0.3 < engine.acceptance.draft_acceptance_rate < 0.9


def test_d1_a_seed_decides():
    engine = sampling_engine()
    outputs = tokens_of(generate(engine, [[0, 1]] * 5, [drawn(seed=s) for s in (5, 5, 6, 5 + 2**32, -3)]))
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs}) == 4
    assert tokens_of(generate(engine, [[0, 1]], drawn(seed=5)))[0] == outputs[0]


def test_d2_a_seeded_request_is_alone_in_any_batch():
    engine = sampling_engine()
    alone = tokens_of(generate(engine, [[3, 2, 1]], drawn(seed=9)))[0]
    for place in (0, 3, 7):
        params = [drawn(seed=9) if i == place else drawn(max_tokens=3 + i) for i in range(8)]
        prompts = [[3, 2, 1] if i == place else [8 + i % 8] * (1 + 5 * i) for i in range(8)]
        assert tokens_of(generate(engine, prompts, params))[place] == alone


def test_d4_unseeded_requests_differ():
    engine = sampling_engine()
    outputs = tokens_of(generate(engine, [[0]] * 8, drawn()))
    assert len({tuple(tokens) for tokens in outputs}) == 8
    assert not {tuple(t) for t in outputs} & {tuple(t) for t in tokens_of(generate(engine, [[0]] * 8, drawn()))}


def test_the_engines_seed_is_the_base_of_all_others():
    def seeds(seed: int | None) -> list[int]:
        engine = ScriptedEngine(1, num_rows=1, seed=seed, vocab_size=2 * HALF, eos_token_ids=())
        submit(engine, {str(i): ([0], drawn()) for i in range(3)})
        return [request.seed for request in engine._waiting]

    assert seeds(1) == seeds(1) != seeds(2)
    assert seeds(None) != seeds(None)


def test_c6_a_greedy_row_is_greedy_beside_sampled_ones():
    engine = sampling_engine()
    alone = tokens_of(generate(engine, [[0], [8]], params_of_request(max_tokens=24)))
    assert alone == [[int(TARGETS[0].argmax())] * 24, [HALF + int(TARGETS[1].argmax())] * 24]
    mixed = [params_of_request(max_tokens=24), drawn(max_tokens=15)] * 10
    outputs = tokens_of(generate(engine, [[0], [8]] * 10, mixed))
    assert outputs[::2] == [alone[0]] * 10
    assert len({tuple(tokens) for tokens in outputs[1::2]}) == 10


def test_filters_hold_for_every_token_of_a_block():
    engine = sampling_engine()
    best = np.argsort(-TARGETS[0])
    nucleus = best[: np.searchsorted(np.cumsum(TARGETS[0][best]), 0.6) + 1]
    outputs = tokens_of(generate(engine, [[0]] * 3, [drawn(max_tokens=300, **keys) for keys in (
        {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5})]))  # fmt: skip
    assert set(outputs[0]) == set(best[:2].tolist())
    assert set(outputs[1]) == set(nucleus.tolist())
    assert set(outputs[2]) == set(np.flatnonzero(TARGETS[0] >= 0.5 * TARGETS[0].max()).tolist())


@pytest.mark.parametrize(
    ("name", "value"),
    [("presence_penalty", 1.0), ("frequency_penalty", 0.5), ("repetition_penalty", 1.2), ("logit_bias", {1: 2})],
)
def test_c7_penalties_are_refused_and_never_ignored(name, value):
    with pytest.raises(ValueError, match=f"{name}.* is not supported"):
        drawn(**{name: value})
