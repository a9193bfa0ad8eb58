"""K that changes from dispatch to dispatch: the same tokens, drafts as good as ever, and nothing compiles."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.decoding.drafters import Drafter, PardDrafter, SequentialDrafter
from pard_jax.engine.adaptive import Adaptive, Choice, Policy, Scheduled
from pard_jax.engine.engine import Engine
from pard_jax.engine.memory import Speculation
from tests.engine.alphabets import DIGITS, LOWER
from tests.engine.test_compiling import mixed_workload
from tests.engine.test_faults_sampling import HALF, TARGETS, drawn, sampling_engine
from tests.helpers.engine import (
    ScriptedEngine,
    count_compiles,
    generate,
    params_of_request,
    plan_for,
    tokens_of,
)
from tests.helpers.models import full_forward, tiny_pair
from tests.helpers.reference import greedy, pard_drafts, sequential_drafts
from tests.helpers.statistics import assert_follows

PAIR = tiny_pair()
MASK, LENGTH, CHUNK, K = 63, 150, 32, 4
TARGET = full_forward(PAIR.target, PAIR.params["target"], 256)
SEQUENCE = (0, 0, 0, 4, 2, 4, 0, 2, 2, 4, *[0] * 10, 2, 4)  # the long rest: more than a pass catches up


class Told(Policy):
    """Any K in turn; remembers what came of it."""

    measures = True

    def __init__(self, sequence: Sequence[int]) -> None:
        self.widths = tuple(sorted(set(sequence)))
        self.sequence, self.seen = sequence, []
        self._next = 0

    def choose(self, num_running: int, steps: int, window: int, greedy: bool) -> Choice:
        self._next += 1
        return Choice(self.sequence[(self._next - 1) % len(self.sequence)], window, greedy)

    def observe(self, choice: Choice, steps: int, seconds: float | None, accepted: Any) -> None:
        self.seen.append((choice.k, accepted.tolist()))


def drafter_of(kind: str) -> Drafter:
    """The target is its own draft."""
    model: dict[str, Any] = {
        "num_speculative_tokens": K, "config": PAIR.target, "target_vocab_size": 64, "max_model_len": LENGTH + K,
    }  # fmt: skip
    return PardDrafter(**model, mask_token_id=MASK) if kind == "pard" else SequentialDrafter(**model)


def drafts_of(kind: str, context: list[int], k: int) -> list[int]:
    return pard_drafts(TARGET, context, k, MASK) if kind == "pard" else sequential_drafts(TARGET, context, k)


@functools.cache
def engine_of(kind: str) -> Engine:
    spare = {"pard": K, "sequential": 1}[kind]
    engine = Engine(
        PAIR.target,
        drafter_of(kind),
        jax.device_put({"target": PAIR.params["target"], "draft": PAIR.params["target"]}, jax.devices()[0]),
        # Two windows for one of them: each is compiled.
        plan_for(
            PAIR.target,
            Speculation(K, spare, PAIR.target),
            LENGTH,
            3,
            CHUNK,
            smallest_window=128 if kind == "pard" else 4096,
        ),
        num_rows=3,
        chunk_size=CHUNK,
        steps_per_dispatch=2,
        dtype=jnp.float32,
        speculative_slots=K + spare,
        policy=Told(SEQUENCE),
    )
    engine.warm_up()
    return engine


KINDS = ("pard", "sequential")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_the_targets_own_whatever_k_is(kind):
    engine = engine_of(kind)
    prompts = [np.random.default_rng(n).integers(0, MASK, n).tolist() for n in (1, 5, 40, 33, 110, LENGTH - 1)]
    with count_compiles() as compiled:
        outputs = generate(engine, prompts, params_of_request(max_tokens=40))
    assert not compiled
    assert tokens_of(outputs) == [greedy(TARGET, p, min(LENGTH, len(p) + 40)) for p in prompts]
    assert set(engine.steps_by_k) == {0, 2, 4} and engine.num_steps == engine.steps_by_k.total()


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_what_the_whole_context_says(kind):
    """Step by step, after any K: the draft's cache lacks nothing."""
    engine = engine_of(kind)
    policy = engine._policy
    assert isinstance(policy, Told)
    for prompt in ([7], [3, 1, 4, 1, 5, 9, 2, 6] * 5):
        policy.seen = []
        (output,) = generate(engine, [prompt], params_of_request(max_tokens=90))
        text, at = prompt + output.outputs[0].token_ids, len(prompt)
        steps = [(k, accepted) for k, counts in policy.seen for accepted in counts]
        assert len({k for k, _ in steps}) == 3
        for k, accepted in steps:
            drafts = drafts_of(kind, text[:at], k) if k else []
            rest = greedy(TARGET, text[:at], min(at + k, LENGTH))[:k]
            expected = next((i for i, (d, t) in enumerate(zip(drafts, rest, strict=False)) if d != t), len(drafts))
            assert accepted == expected, (k, at)
            at += accepted + 1
            if at + K >= len(text):
                break


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_as_its_own_draft_is_right_again_after_plain_steps(kind):
    engine = engine_of(kind)
    policy = engine._policy
    assert isinstance(policy, Told)
    policy.seen = []
    generate(engine, [[5, 8, 2]], params_of_request(max_tokens=140))
    drafted = [(k, accepted) for k, counts in policy.seen for accepted in counts if k][:-1]  # the end cuts the last
    if kind == "sequential":
        assert all(accepted == k for k, accepted in drafted)
    else:  # only the first draft does not hang on masks
        assert all(accepted >= 1 for _, accepted in drafted)
    assert len(drafted) > 10


class Contrary(Told):
    """Drafts after little was accepted, and not after much."""

    def choose(self, num_running: int, steps: int, window: int, greedy: bool) -> Choice:
        accepted = sum(self.seen[-1][1]) if self.seen else 0
        return Choice(3 if accepted < 3 else 0, window, greedy)


def test_samples_follow_the_target_although_k_hangs_on_what_was_accepted():
    engine = sampling_engine(Contrary([0, 3]))
    (output,) = generate(engine, [[0]], drawn(max_tokens=1800, seed=1))
    tokens = np.asarray(output.outputs[0].token_ids)
    assert min(engine.steps_by_k[k] for k in (0, 3)) > 50
    assert_follows(tokens, TARGETS[0])
    assert_follows(tokens[:-1:2] * HALF + tokens[1::2], np.outer(TARGETS[0], TARGETS[0]).ravel(), "pairs")


# -- one engine, whose drafts are scripted, by several policies ----------------------------------------------------


@functools.cache
def compiled_engine() -> ScriptedEngine:
    engine = ScriptedEngine(2, num_rows=3, policy=Told([0, 2]))
    engine.warm_up()
    return engine


def engine_with(policy: Policy, drafts: str = "right") -> ScriptedEngine:
    engine = compiled_engine()
    engine._policy, engine._measured_up_to = policy, 0
    engine.say(LOWER, DIGITS, drafts=drafts)
    engine.steps_by_k.clear()
    return engine


def test_the_table_is_asked_for_the_requests_that_run():
    engine = engine_with(Scheduled([(1, 2, 2), (3, 9, 0)]))
    with count_compiles() as compiled:
        for running, k in ((1, 2), (3, 0), (2, 2)):
            engine.steps_by_k.clear()
            generate(engine, ["a"] * running, params_of_request(max_tokens=10))
            assert set(engine.steps_by_k) == {k}
    assert not compiled


def test_counts_are_vllms_where_k_changes():
    """Steps without drafts do not count."""
    engine = engine_with(Told([0, 2, 2]))
    (output,) = generate(engine, ["a"], params_of_request(max_tokens=1 + 3 + 3 + 1 + 3))
    metrics = output.metrics.speculative_decoding
    assert metrics.acceptance_histogram == [0, 0, 3] and metrics.num_draft_tokens == 6
    assert metrics.num_spec_steps == engine.acceptance.num_drafts == 3
    assert engine.steps_by_k[2] >= 3 and engine.steps_by_k[0] >= 2


def test_auto_measures_before_its_first_requests_and_not_again():
    policy = Adaptive((0, 2))
    engine = engine_with(policy)
    outputs = generate(engine, ["a", "c"], params_of_request(max_tokens=9))
    assert tokens_of(outputs) == [list(b"bcdefghij"), list(b"defghijkl")]
    costs = policy.costs(engine.plan.windows[0], False)
    assert set(costs) == {0, 2} and all(0 < seconds < 1 for seconds in costs.values())
    engine.warm_up = lambda *_: pytest.fail("measures again")  # type: ignore[method-assign]
    with count_compiles() as compiled:
        mixed_workload(engine, 256, 11, text=True)
    del engine.warm_up
    assert not compiled


def test_auto_stops_drafting_where_drafts_are_wrong():
    policy = Adaptive((0, 2))
    engine = engine_with(policy, drafts="wrong")
    engine.warm_up()
    policy.measure([Choice(k, engine.plan.windows[0], False) for k in (0, 2)], lambda choice: 1.0 + choice.k)
    engine.steps_by_k.clear()
    generate(engine, ["a"], params_of_request(max_tokens=60))
    assert engine.steps_by_k[0] > 40
