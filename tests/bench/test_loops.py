"""Where an output begins to repeat itself, against a search that tries every beginning."""

from __future__ import annotations

import numpy as np
import pytest

from pard_jax.bench.loops import loop_onset


def by_trying(tokens: list[int], max_period: int, min_repeats: int) -> int | None:
    """The first index from which on the tokens repeat with some period, by comparing lists."""
    for start in range(len(tokens)):
        end = tokens[start:]
        for period in range(1, max_period + 1):
            if len(end) >= min_repeats * period and (end[:period] * len(end))[: len(end)] == end:
                return start
    return None


@pytest.mark.parametrize(
    ("tokens", "onset"),
    [
        ([], None),
        ([1], None),
        ([1, 2, 3, 4], None),
        ([5, 1, 1], None),  # twice is no loop
        ([5, 1, 1, 1], 1),
        ([7, 8, 1, 2, 1, 2, 1, 2], 2),
        ([7, 8, 1, 2, 1, 2, 1, 2, 1], 2),  # the last round is cut short
        ([7, 2, 1, 2, 1, 2, 1, 2], 1),  # and so may the first be
        ([1, 2, 1, 2, 1], None),
        ([1, 1, 1, 1, 2], None),  # it must go on to the end
        ([9, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 2], 1),
        ([1, 2, 9, 3, 3, 3], 3),
    ],
)
def test_onset(tokens: list[int], onset: int | None) -> None:
    assert loop_onset(tokens) == onset


def test_the_longest_period() -> None:
    round_ = list(range(64))
    assert loop_onset([99, *round_ * 3]) == 1
    assert loop_onset([99, *round_ * 3][:-1]) is None  # not three whole rounds
    longer = list(range(65))
    assert loop_onset(longer * 4) is None
    assert loop_onset(longer * 4, max_period=65) == 0


def test_against_trying_all() -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(300):
        start = rng.integers(0, 3, rng.integers(0, 8)).tolist()
        tokens = [*start, *(rng.integers(0, 3, rng.integers(1, 5)).tolist() * int(rng.integers(1, 6)))]
        tokens = tokens[: len(tokens) - int(rng.integers(0, 2))]
        expected = by_trying(tokens, 4, 3)
        assert loop_onset(tokens, max_period=4) == expected
        found += expected is not None
    assert 50 < found < 250
