"""What makes a turn unfit, and what does not."""

from __future__ import annotations

import pytest

from pard_jax.synthesize.filters import fault_of, is_repeating

SPECIAL = frozenset({0, 1, 2})
FINE = list(range(1000, 1300))


def fault(ids: list[int] = FINE, text: str = "Fine.", ended: bool = True) -> str | None:
    return fault_of(ids, text, ended=ended, special=SPECIAL)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"text": "Grüße, 你好, 😀\n\t— “x”\r\n"}, None),
        ({"ids": []}, None),  # what is empty is told by the text
        ({"text": ""}, "empty"),
        ({"text": " \n\t"}, "empty"),
        ({"ended": False}, "cut off"),
        ({"ids": [10, 1, 11]}, "special tokens"),
        ({"ids": [10, 11] * 20}, "repeating"),
        ({"text": "half a char�"}, "bad characters"),
        ({"text": "a\x00b"}, "bad characters"),
        ({"text": "a\x1bb"}, "bad characters"),
        ({"text": "a\x85b"}, "bad characters"),
        ({"text": "a\ue123b"}, "bad characters"),
        # The first of several counts.
        ({"text": "", "ended": False}, "empty"),
        ({"ids": [1] * 50, "ended": False}, "cut off"),
        ({"ids": [1] * 50}, "special tokens"),
    ],
)
def test_faults(given, expected):
    assert fault(**given) == expected


@pytest.mark.parametrize("period", [1, 2, 3, 5, 17, 32])
def test_a_loop_at_the_end(period):
    repeats = max(4, -(-16 // period))
    loop = list(range(100, 100 + period)) * repeats
    assert is_repeating(FINE + loop)
    assert is_repeating(loop)
    assert not is_repeating(FINE + loop[-(max(4 * period, 16) - 1) :])  # one token less than it takes
    assert not is_repeating(loop + FINE)  # it went on


def test_longer_periods_are_no_loop():
    assert not is_repeating(list(range(33)) + list(range(33)))


def test_few_different_runs():
    """A loop that is broken now and then, or has ended."""
    loop = [[*range(40), i] for i in range(200, 205)]
    assert is_repeating([t for part in loop for t in part] + FINE[:20])
    assert not is_repeating([t for part in loop[:2] for t in part] + FINE[:20])


def test_short_texts_may_repeat():
    assert not is_repeating([5] * 15)
    assert not is_repeating([5, 6] * 7)
    assert not is_repeating([])
