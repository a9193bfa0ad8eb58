"""Which K is chosen: on a simulated machine whose costs and acceptance are known."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from pard_jax.config import SpeculativeConfig
from pard_jax.engine.adaptive import Adaptive, Choice, Policy, Scheduled, make_policy

WINDOW = 256
REQUEST = 256  # steps that a request takes, plainly; the next one's prompt goes through the draft
# Seconds of a step by K: a 2-core CPU, a GPU at a small batch, and at a large one.
CPU = {0: 30e-3, 2: 50e-3, 4: 69e-3, 8: 110e-3, 12: 150e-3}
SMALL_BATCH = {0: 1.00e-3, 2: 1.15e-3, 4: 1.2e-3, 8: 1.3e-3, 12: 1.4e-3}
LARGE_BATCH = {0: 10e-3, 2: 18e-3, 4: 25e-3, 8: 40e-3, 12: 55e-3}


@dataclasses.dataclass
class Machine:
    """Runs dispatches, and is read one behind, as the engine reads its device."""

    costs: Mapping[int, float]
    acceptance: Callable[[float], float]  # of a draft once those before it were accepted, at a time
    rows: int = 1
    steps: int = 1
    noise: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        self.time, self.tokens = 0.0, 0
        self.steps_by_k: collections.Counter[int] = collections.Counter()
        self._rng = np.random.default_rng(self.seed)
        self._last, self._missed = 0, 0
        self._unread: list[tuple[Choice, int, float, np.ndarray]] = []

    def run(self, policy: Policy, seconds: float) -> float:
        """Tokens a second and row, over so much time."""
        start, tokens, end = self.time, self.tokens, self.time + seconds
        while self.time < end:
            choice = policy.choose(self.rows, self.steps, WINDOW, False)
            took, accepted = self._dispatch(choice.k)
            self._unread.append((choice, self.steps, took, accepted))
            if len(self._unread) > 1:
                policy.observe(*self._unread.pop(0))
        return (self.tokens - tokens) / (self.time - start) / self.rows

    def _dispatch(self, k: int) -> tuple[float, np.ndarray]:
        right = self._rng.random((self.steps * self.rows, k)) < self.acceptance(self.time)
        accepted = np.cumprod(right, axis=1).sum(axis=1)
        took = self.steps * self.costs[k] * (1 + self.noise * self._rng.standard_normal())
        if k and not 0 < self._last <= k:  # the draft catches up, 24 tokens a pass
            took += 0.3 * self.costs[0] * max(1, self._missed / 24)
        self._missed = 0 if k else (self._missed + self.steps) % REQUEST
        self._last = k
        self.time += took
        self.tokens += int(accepted.sum()) + len(accepted)
        self.steps_by_k[k] += self.steps
        return took, accepted


def adaptive(costs: Mapping[int, float]) -> Adaptive:
    policy = Adaptive(tuple(costs))
    policy.measure([Choice(k, WINDOW, False) for k in costs], lambda choice: costs[choice.k])
    return policy


def fixed_rates(costs: Mapping[int, float], acceptance: float) -> dict[int, float]:
    """Tokens a second and row, by K: what is to be expected of the machine without noise."""
    return {k: sum(acceptance**i for i in range(k + 1)) / seconds for k, seconds in costs.items()}


@pytest.mark.parametrize("costs", [CPU, SMALL_BATCH, LARGE_BATCH], ids=["cpu", "small batch", "large batch"])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (16, 8)])
def test_nearly_as_fast_as_the_best_fixed_k_and_never_slower_than_plain(costs, acceptance, rows, steps):
    machine = Machine(costs, lambda _: acceptance, rows, steps)
    rate = machine.run(adaptive(costs), 4000 * costs[0])
    fixed = fixed_rates(costs, acceptance)
    assert rate > 0.95 * max(fixed.values())
    assert rate > 0.98 * fixed[0]


@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (1, 8), (64, 8)])
def test_it_follows_the_text(rows, steps):
    """Drafts that are hopeless become good, and hopeless again; nothing tells but what is explored."""
    period = 4000 * CPU[0]
    machine = Machine(CPU, lambda time: 0.9 if period < time < 2 * period else 0.0, rows, steps)
    policy = adaptive(CPU)
    machine.run(policy, period)
    hopeless = machine.steps_by_k.copy()
    assert hopeless[0] > 0.95 * hopeless.total()
    machine.run(policy, period / 2)
    assert machine.run(policy, period / 2) > 0.93 * max(fixed_rates(CPU, 0.9).values())
    machine.run(policy, 500 * CPU[0])
    assert machine.run(policy, period) > 0.98 / CPU[0]


def test_what_the_warm_up_measured_wrongly_is_put_right():
    """It found plain steps slower than they are: drafting at 0.4 would seem to pay."""
    policy = adaptive(CPU | {0: 1.3 * CPU[0]})
    machine = Machine(CPU, lambda _: 0.4)
    assert fixed_rates(CPU, 0.4)[0] > 1.05 * fixed_rates(CPU, 0.4)[2]
    machine.run(policy, 3000 * CPU[0])
    assert machine.run(policy, 3000 * CPU[0]) > 0.97 / CPU[0]


def test_a_machine_that_slows_down_changes_nothing():
    policy = adaptive(LARGE_BATCH)
    slow = {k: 1.7 * seconds for k, seconds in LARGE_BATCH.items()}
    machine = Machine(slow, lambda _: 0.9, rows=16, steps=8)
    machine.run(policy, 500 * slow[0])
    before = machine.steps_by_k.copy()
    machine.run(policy, 2000 * slow[0])
    run = machine.steps_by_k - before
    assert run.most_common(1)[0][0] == 4 and run[4] > 0.8 * run.total()


def test_dispatches_without_a_clean_time_still_tell_acceptance():
    policy = adaptive(CPU)
    for _ in range(40):
        choice = policy.choose(1, 1, WINDOW, False)
        policy.observe(choice, 1, None, np.zeros(1, int))
    assert policy.choose(1, 1, WINDOW, False).k == 0
    assert policy.expected_tokens()[2] < 1.5


def test_a_window_that_was_not_measured_is_taken_for_the_nearest_one():
    policy = Adaptive((0, 2))
    seconds = iter([9.0, 9.0, 1.0, 3.0, *[5.0] * 6, *[3.0, 5.0] * 5])  # of several, the smallest
    for window in (256, 4096):
        policy.measure([Choice(k, window, False) for k in (0, 2)], lambda _: next(seconds))
    assert policy.costs(8192, False) == policy.costs(4096, True) == {0: 3.0, 2: 5.0}
    assert policy.costs(512, False) == {0: 1.0, 2: 3.0}


# -- by batch size, as vLLM has it ---------------------------------------------------------------------------------


def k_of(policy: Policy, running: int) -> int:
    return policy.choose(running, 1, WINDOW, False).k


def test_a_table_names_k_by_the_number_of_running_requests():
    keys = {"method": "ngram", "num_speculative_tokens": 5}
    table = [[32, 128, 2], [1, 16, 8], [200, 400, 0]]  # sorted by vLLM, too
    policy = make_policy(SpeculativeConfig(**keys, num_speculative_tokens_per_batch_size=table))
    assert policy.widths == (0, 2, 5) and not policy.measures
    expected = [5] * 31 + [2] * 168 + [0] * 301  # gaps inherit; 8 is cut to 5
    assert [k_of(policy, n) for n in range(1, 501)] == expected


def test_without_a_table_k_is_one():
    assert make_policy(None).widths == (0,) and k_of(make_policy(None), 7) == 0
    policy = make_policy(SpeculativeConfig(method="ngram", num_speculative_tokens=3))
    assert isinstance(policy, Scheduled) and policy.widths == (3,) and k_of(policy, 9) == 3
    auto = make_policy(SpeculativeConfig(method="ngram", num_speculative_tokens="auto"))
    assert isinstance(auto, Adaptive) and auto.widths == (0, 2, 4, 8, 12) and auto.measures
