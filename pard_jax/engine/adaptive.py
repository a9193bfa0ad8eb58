"""Which K the next dispatch runs with: a table's, or the one that promises the most tokens a second.

Host arithmetic only. A step of K drafts costs ``cost(K)`` seconds, measured in the warm-up, and yields
``1 + a_1 + a_1 a_2 + ... + a_1 .. a_K`` tokens a row, where ``a_i`` is the share of drafts at position i that are
accepted once those before it were. The best K has the largest quotient. (After SmartSpec's goodput, arXiv 2406.14066,
with a rate of its own for every position.)

What does not run is not seen: neither the acceptance while decoding plainly nor how the others' costs have changed. So
now and then a few dispatches run another K. The time that they lose is a debt, paid off at 1% of the time that passes,
and nothing is explored while there is one.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pard_jax.config import SpeculativeConfig

_TIMINGS = 5  # of a step, of which the fastest counts
_HYSTERESIS = 1.03  # gain that another K must promise, except 0: the draft has to catch up after a change
_FORGET = 0.98  # weight of what a step accepted after another one: some 50 steps are remembered
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0  # acceptance before any draft was seen, and the drafts that it counts for
_BUDGET = 0.01  # share of the time that exploring may lose
_EXPLORE_EVERY = 64  # steps between two times, at least
_EXPLORE_DRAFTS = 8  # blocks of drafts that one time looks at, at least; what was seen before weighs no more
_LEARN = 0.3  # of a deviation from the expected time, what a time of exploring, or a usual dispatch, is believed
_MAX_DEVIATION = 2.0  # what one dispatch may seem slower or faster than expected: beyond, it was something else


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a dispatch runs with: K, the attention window, and whether by the program for plain greedy rows."""

    k: int
    window: int
    greedy: bool
    exploring: bool = False
    settled: bool = True  # the dispatch before it had this K, too: no draft was catching up

    @property
    def static(self) -> dict[str, Any]:
        """The decode program's static arguments."""
        return {"k": self.k, "window": self.window, "greedy": self.greedy}


class Policy(abc.ABC):
    """Chooses K, dispatch by dispatch."""

    widths: tuple[int, ...]  # every K that may be chosen, ascending
    measures = False  # whether it must measure costs beforehand, and observe

    @abc.abstractmethod
    def choose(self, num_running: int, steps: int, window: int, greedy: bool) -> Choice:
        """K of the next dispatch, of up to ``steps`` steps of ``num_running`` rows that hold requests."""

    def measure(self, choices: Sequence[Choice], time_step: Callable[[Choice], float]) -> None:  # noqa: B027
        """Find out what a step of each costs. ``time_step`` runs one, and returns its seconds."""

    def observe(self, choice: Choice, steps: int, seconds: float | None, accepted: Any) -> None:  # noqa: B027
        """Take in how a dispatch went, a dispatch or two after it was chosen.

        Args:
            choice: what it ran with.
            steps: how many it ran.
            seconds: what it took; None where the device, or the host, had other things to do meanwhile.
            accepted: int [*], drafts accepted, one number a step and row that ran.
        """


def make_policy(speculative: SpeculativeConfig | None) -> Policy:
    """The policy that a configuration asks for."""
    if speculative is None:
        return Scheduled([(1, 1, 0)])
    if speculative.num_speculative_tokens == "auto":
        return Adaptive(speculative.widths)
    most = speculative.max_num_speculative_tokens
    schedule = speculative.num_speculative_tokens_per_batch_size or [(1, 1, most)]
    return Scheduled([(first, last, min(k, most)) for first, last, k in schedule])


class Scheduled(Policy):
    """K by the number of running requests (vLLM's ``num_speculative_tokens_per_batch_size``); or one K for all.

    Args:
        schedule: ``(first, last, K)``, ascending, from 1 on; a number in a gap takes the range before it.
    """

    def __init__(self, schedule: Sequence[tuple[int, int, int]]) -> None:
        self.widths = tuple(sorted({k for _, _, k in schedule}))
        self._schedule = schedule

    def choose(self, num_running: int, steps: int, window: int, greedy: bool) -> Choice:
        """See :class:`Policy`."""
        return Choice([k for first, _, k in self._schedule if first <= num_running][-1], window, greedy)


class Adaptive(Policy):
    """K by expected tokens a second.

    Args:
        widths: every K to choose from, ascending.
    """

    measures = True

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        # Seconds of a step by window and program, as measured in the warm-up.
        self._costs: dict[tuple[int, bool], dict[int, float]] = {}
        # What costs turn out to be, as multiples of these: each K's own share, which is learnt where two K run one
        # after the other, and the machine's, which may drift.
        self._factor = dict.fromkeys(widths, 1.0)
        self._pace = 1.0
        self._tries = np.zeros(widths[-1])  # per position, drafts whose predecessors were all accepted
        self._accepted = np.zeros(widths[-1])  # and those of them that were accepted as well
        self._best = self._last = widths[-1]
        self._since = dict.fromkeys(widths, 0)  # steps since each K has run
        # K under exploration, its dispatches, those of them that are left, and steps since.
        self._explored, self._dispatches, self._left, self._rested = 0, 1, 0, 0
        self._debt = 0.0  # seconds

    def measure(self, choices: Sequence[Choice], time_step: Callable[[Choice], float]) -> None:
        """See :class:`Policy`."""
        # One after the other, again and again: what disturbs the machine then disturbs them all.
        times = [[time_step(choice) for choice in choices] for _ in range(_TIMINGS)]
        for choice, seconds in zip(choices, map(min, zip(*times, strict=True)), strict=True):
            self._costs.setdefault((choice.window, choice.greedy), {})[choice.k] = seconds

    def costs(self, window: int, greedy: bool) -> dict[int, float]:
        """Expected seconds of a step by K, but for the machine's pace; of the program measured that is most like it."""
        like = min(self._costs, key=lambda p: (p[1] != greedy, abs(p[0] - window)))
        return {k: seconds * self._factor[k] for k, seconds in self._costs[like].items()}

    def expected_tokens(self) -> dict[int, float]:
        """Tokens that a step of each K is expected to yield a row.

        A position of which little is known is taken to be as the one before it.
        """
        rate, product, tokens = _PRIOR, 1.0, [1.0]
        for tries, accepted in zip(self._tries.tolist(), self._accepted.tolist(), strict=True):
            rate = (accepted + _PRIOR_WEIGHT * rate) / (tries + _PRIOR_WEIGHT)
            product *= rate
            tokens.append(tokens[-1] + product)
        return {k: tokens[k] for k in self.widths}

    def choose(self, num_running: int, steps: int, window: int, greedy: bool) -> Choice:
        """See :class:`Policy`."""
        costs, tokens = self.costs(window, greedy), self.expected_tokens()
        speed = {k: tokens[k] / costs[k] for k in self.widths}
        fastest = max(self.widths, key=lambda k: speed[k])
        if speed[fastest] > (_HYSTERESIS if fastest else 1.0) * speed[self._best]:
            self._best = fastest
        if not self._left and self._debt <= 0 and self._rested >= _EXPLORE_EVERY and len(self.widths) > 1:
            # What costs least for how long it has not been looked at.
            loss = {k: max(costs[k] - tokens[k] / speed[self._best], 0.01 * costs[k]) for k in self.widths}
            others = [k for k in self.widths if k != self._best]
            self._explored = max(others, key=lambda k: self._since[k] / loss[k])
            # The first dispatch may have the draft catch up, and tells no cost.
            self._left = self._dispatches = max(2, math.ceil(_EXPLORE_DRAFTS / (num_running * steps)))
            unseen = slice(self._best, None)
            self._accepted[unseen] *= (keep := np.minimum(1.0, _EXPLORE_DRAFTS / np.maximum(self._tries[unseen], 1.0)))
            self._tries[unseen] *= keep
        k = self._best
        if self._left:
            self._left, self._rested, k = self._left - 1, 0, self._explored
        settled, self._last = k == self._last, k
        return Choice(k, window, greedy, exploring=k != self._best, settled=settled)

    def observe(self, choice: Choice, steps: int, seconds: float | None, accepted: Any) -> None:
        """See :class:`Policy`."""
        k = choice.k
        if k and accepted.size:
            reached = np.array([np.sum(accepted >= i) for i in range(k + 1)])
            keep = _FORGET**steps
            self._tries[:k] = self._tries[:k] * keep + reached[:-1]
            self._accepted[:k] = self._accepted[:k] * keep + reached[1:]
        self._since = {width: 0 if width == k else since + steps for width, since in self._since.items()}
        self._rested += steps
        if seconds is None or not steps:
            return
        costs = self.costs(choice.window, choice.greedy)
        if choice.settled:
            deviation = seconds / (steps * costs[k] * self._pace)
            deviation = min(max(deviation, 1 / _MAX_DEVIATION), _MAX_DEVIATION)
            if choice.exploring:
                self._factor[k] *= deviation ** (_LEARN / self._dispatches)
            else:
                self._pace *= deviation**_LEARN
        self._debt -= _BUDGET * seconds
        if choice.exploring or not choice.settled:
            tokens = self.expected_tokens()
            self._debt += seconds - steps * self._pace * costs[self._best] * tokens[k] / tokens[self._best]
        self._debt = max(self._debt, 0.0)
