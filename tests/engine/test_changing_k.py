"""K that changes from dispatch to dispatch: the same tokens, drafts as good as ever, and nothing compiles."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.decoding.drafters import Drafter, NgramDrafter, PardDrafter, SequentialDrafter
from pard_jax.engine.adaptive import Adaptive, Choice, Policy, Scheduled
from pard_jax.engine.engine import Engine
from pard_jax.engine.memory import Speculation
from tests.engine.alphabets import DIGITS, LOWER
from tests.engine.test_compiling import mixed_workload
from tests.helpers.engine import (
    ScriptedEngine,
    count_compiles,
    drain,
    generate,
    params_of_request,
    plan_for,
    submit,
    tokens_of,
)
from tests.helpers.models import full_forward, tiny_pair
from tests.helpers.reference import greedy, ngram_drafts, pard_drafts, sequential_drafts

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
    match kind:
        case "ngram":
            return NgramDrafter(num_speculative_tokens=K, max_n=3, min_n=1)
        case "pard":
            return PardDrafter(**model, mask_token_id=MASK)
        case _:
            return SequentialDrafter(**model)


def drafts_of(kind: str, context: list[int], k: int) -> list[int]:
    match kind:
        case "ngram":
            return ngram_drafts(context, k, 1, 3)
        case "pard":
            return pard_drafts(TARGET, context, k, MASK)
        case _:
            return sequential_drafts(TARGET, context, k)


@functools.cache
def engine_of(kind: str, steps_per_dispatch: int = 2) -> Engine:
    spare = {"ngram": 0, "pard": K, "sequential": 1}[kind]
    draft = None if kind == "ngram" else PAIR.target
    engine = Engine(
        PAIR.target,
        drafter_of(kind),
        jax.device_put({"target": PAIR.params["target"], "draft": PAIR.params["target"]}, jax.devices()[0]),
        # Two windows for one of them: each is compiled.
        plan_for(
            PAIR.target, Speculation(K, spare, draft), LENGTH, 3, CHUNK, smallest_window=128 if kind == "pard" else 4096
        ),
        num_rows=3,
        chunk_size=CHUNK,
        steps_per_dispatch=steps_per_dispatch,
        dtype=jnp.float32,
        speculative_slots=K + spare,
        policy=Told(SEQUENCE),
    )
    engine.warm_up()
    return engine


KINDS = ("pard", "sequential", "ngram")


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


@pytest.mark.parametrize("kind", ["pard", "sequential"])
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


def test_the_table_is_asked_for_the_requests_that_run():
    engine = ScriptedEngine(2, num_rows=3, policy=Scheduled([(1, 2, 2), (3, 9, 0)]))
    engine.warm_up()
    engine.say(LOWER, DIGITS)
    with count_compiles() as compiled:
        for running, k in ((1, 2), (3, 0), (2, 2)):
            engine.steps_by_k.clear()
            generate(engine, ["a"] * running, params_of_request(max_tokens=10))
            assert set(engine.steps_by_k) == {k}
    assert not compiled


def test_counts_are_vllms_where_k_changes():
    """Steps without drafts do not count, and a position is a share of all that drafted."""
    engine = ScriptedEngine(4, policy=Told([0, 2, 4, 4]))
    engine.say("p" + LOWER.replace("p", ""))
    (output,) = generate(engine, ["p"], params_of_request(max_tokens=1 + 3 + 5 + 5 + 1 + 3))
    metrics = output.metrics.speculative_decoding
    assert metrics.acceptance_histogram == [0, 0, 2, 0, 2] and metrics.num_draft_tokens == 2 * (2 + 4)
    assert metrics.num_spec_steps == engine.acceptance.num_drafts == 4 and metrics.num_spec_tokens == 4
    assert engine.acceptance.per_position_acceptance_rates == [1.0, 1.0, 0.5, 0.5]


# -- auto ----------------------------------------------------------------------------------------------------------


def auto_engine(**keys: Any) -> ScriptedEngine:
    engine = ScriptedEngine(2, policy=Adaptive((0, 2)), **keys)
    engine.say(LOWER, DIGITS)
    return engine


def test_the_warm_up_measures_every_k_and_nothing_compiles_after_it():
    engine = auto_engine(steps_per_dispatch=2, specialize=True)
    policy = engine._policy
    assert isinstance(policy, Adaptive)
    engine.warm_up()
    (window,) = engine.plan.windows
    for greedy_program in (False, True):
        costs = policy.costs(window, greedy_program)
        assert set(costs) == {0, 2} and all(0 < seconds < 1 for seconds in costs.values())
    with count_compiles() as compiled:
        mixed_workload(engine, 256, 400, text=True)
    assert not compiled
    assert tokens_of(generate(engine, ["a", "c"], params_of_request(max_tokens=9))) == [
        list(b"bcdefghij"), list(b"defghijkl"),
    ]  # fmt: skip


def test_without_a_warm_up_it_measures_before_its_first_requests_and_not_again():
    engine = auto_engine()
    generate(engine, ["abc"], params_of_request(max_tokens=5))
    assert set(engine._policy.costs(engine.plan.windows[0], False)) == {0, 2}  # type: ignore[attr-defined]
    with count_compiles() as compiled:
        submit(engine, {str(i): ("abc", params_of_request(max_tokens=5)) for i in range(5)})
        drain(engine)
    assert not compiled


def test_it_stops_drafting_where_drafts_are_wrong():
    engine = auto_engine()
    policy = engine._policy
    engine.warm_up()
    for (window, program), costs in list(policy._costs.items()):  # type: ignore[attr-defined]
        for k in costs:
            policy.learn(Choice(k, window, program), 1.0 + k)
    engine.say(LOWER, DIGITS, drafts="wrong")
    engine.steps_by_k.clear()
    generate(engine, ["a"], params_of_request(max_tokens=60, ignore_eos=True))
    assert engine.steps_by_k[0] > 40
