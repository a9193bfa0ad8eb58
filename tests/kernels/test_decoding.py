"""Whole decoding by the kernels, interpreted, and the program for plain greedy requests against the general one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.decoding.drafters import Drafter, NoDrafter, PardDrafter
from pard_jax.decoding.sampling import SamplingState
from pard_jax.decoding.state import init_state
from pard_jax.decoding.step import Programs
from pard_jax.decoding.verify import verify, verify_greedy
from tests.helpers.jaxprs import primitives
from tests.helpers.loop import Loop, Request
from tests.helpers.models import Pair, full_forward, model_config, random_params
from tests.helpers.reference import Run
from tests.kernels.where import IMPLEMENTATION

CHUNK, SLOTS, K, VOCAB = 8, 64, 3, 64


def _pair() -> Pair:
    shape: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "vocab_size": VOCAB}
    target = model_config("qwen3", **shape, num_hidden_layers=1)
    # The draft's vocabulary is padded: what the target lacks is never proposed.
    draft = model_config("llama", **shape | {"vocab_size": 80}, num_hidden_layers=1, pard_token=VOCAB - 1)
    params = {"target": random_params(target, 0), "draft": random_params(draft, 1)}
    # So that drafts are accepted now and then: the draft embeds and reads out as the target does.
    for name in ("embed", "lm_head"):
        params["draft"][name] = params["draft"][name].at[:VOCAB].set(params["target"][name])
    return Pair(target, draft, jax.tree.map(lambda p: p.astype(jnp.bfloat16), params))


PAIR = _pair()


def drafter_of(name: str, implementation: str) -> Drafter:
    common: dict[str, Any] = {
        "num_speculative_tokens": K, "config": PAIR.draft, "target_vocab_size": VOCAB, "max_model_len": SLOTS,
        "implementation": implementation,
    }  # fmt: skip
    return NoDrafter() if name == "none" else PardDrafter(**common, mask_token_id=VOCAB - 1)


@functools.cache
def programs_of(name: str, implementation: str) -> Programs:
    return Programs(
        PAIR.target, drafter_of(name, implementation), chunk_size=CHUNK, max_steps=2, implementation=implementation
    )


def requests() -> list[Request]:
    rng = np.random.default_rng(5)
    lengths = (1, 9, 4, 20, 13)
    stops = ((), (), (3, 7, 11, 30), (), tuple(range(0, 64, 5)))
    return [
        Request(rng.integers(0, VOCAB - 1, n).tolist(), n + 12, stop_ids=s) for n, s in zip(lengths, stops, strict=True)
    ]


@functools.cache
def serve(name: str, implementation: str, greedy: bool) -> list[Run]:
    programs = programs_of(name, implementation)
    loop = Loop(programs, PAIR.params, max_len=40, rows=2, slots=SLOTS)
    loop.state = init_state(programs.config, programs.drafter, 2, SLOTS, jnp.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "decode", functools.partial(programs.decode, greedy=greedy))
        return loop.serve(requests(), steps=2)


@pytest.mark.parametrize(
    ("name", "implementation"), [("pard", IMPLEMENTATION), ("none", IMPLEMENTATION), ("pard", "xla")]
)
def test_the_greedy_program_says_what_the_general_one_says(name: str, implementation: str):
    """The same tokens, drafts and acceptance, step by step."""
    special, general = serve(name, implementation, True), serve(name, implementation, False)
    assert special == general
    assert all(run.tokens for run in special)
    if name == "pard":
        assert sum(map(sum, (run.accepted for run in special))) > 0


@pytest.mark.parametrize("name", ["pard", "none"])
def test_each_token_is_the_targets_own(name: str):
    """In float32 and without a cache, no other token is likelier by more than bfloat16 can tell."""
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), PAIR.params["target"])
    logits = full_forward(PAIR.target, wide, 40)
    for request, run in zip(requests(), serve(name, IMPLEMENTATION, True), strict=True):
        scores = logits([*request.prompt, *run.tokens])[len(request.prompt) - 1 : -1]
        chosen = scores[np.arange(len(run.tokens)), run.tokens]
        # 2^-8 a rounding, some dozens of them along the stream, of logits of this size.
        assert (scores.max(axis=1) - chosen < 0.05 * np.abs(scores).max()).all()
        assert (scores.argmax(axis=1) == run.tokens).mean() > 0.8
        ended = run.tokens[-1] in request.stop_ids
        assert ended or len(request.prompt) + len(run.tokens) == request.max_length
        assert not set(run.tokens[:-1]) & set(request.stop_ids)


def test_the_greedy_program_makes_no_scores_for_others():
    """No temperature, no random number, no log-probability; and the kernels are in it."""
    programs = programs_of("pard", IMPLEMENTATION)
    state = init_state(PAIR.target, programs.drafter, 2, SLOTS, jnp.bfloat16)

    def traced(greedy: bool) -> set[str]:
        def one(params, state):
            return programs._decode(params, state, jnp.ones(2, bool), jnp.int32(1), window=SLOTS, greedy=greedy)

        return primitives(one, PAIR.params, state)

    assert "random_bits" in traced(False) and "log" in traced(False)
    assert not traced(True) & {"random_bits", "log", "random_fold_in"}
    assert "pallas_call" in traced(True)


def greedy_settings(rows: int) -> SamplingState:
    zeros = jnp.zeros(rows)
    whole = jnp.zeros(rows, jnp.int32)
    return SamplingState(temperature=zeros, top_k=whole, top_p=zeros + 1, min_p=zeros, seed=whole.astype(jnp.uint32))


@pytest.mark.parametrize("depth", [0, 4])
def test_verification_by_the_likeliest_tokens_alone(depth: int):
    """Random drafts, most of them right, some void from a place on: the same as from the logits."""
    rng = np.random.default_rng(depth)
    rows, vocab = 64, 7
    logits = rng.standard_normal((rows, depth + 1, vocab)).astype(np.float32)
    best = logits.argmax(axis=-1).astype(np.int32)
    drafts = np.where(rng.random((rows, depth)) < 0.7, best[:, :-1], rng.integers(0, vocab, (rows, depth)))
    void = np.arange(depth)[None, :] >= rng.integers(0, 2 * depth + 1, rows)[:, None]
    drafts = np.where(void, -1, drafts).astype(np.int32)
    want = verify(jnp.asarray(logits), jnp.asarray(drafts), None, greedy_settings(rows), jnp.arange(rows))
    got = verify_greedy(jnp.asarray(best), jnp.asarray(drafts))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    accepted = np.asarray(got.num_accepted).tolist()
    by_hand = [
        next((i for i in range(depth) if drafts[r, i] != best[r, i]), depth) for r in range(rows)
    ]  # fmt: skip
    assert accepted == by_hand and set(accepted) == set(range(depth + 1))
