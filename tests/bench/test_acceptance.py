"""What is counted of steps, on traces written by hand."""

from __future__ import annotations

import pytest

from pard_jax.bench.acceptance import Acceptance, Trace


def test_every_step_ends_with_the_targets_token_but_one_that_is_cut() -> None:
    assert Trace.of([3, 1, 2]).accepted == (2, 0, 1)
    assert Trace.of([3, 1, 2], 3).accepted == (2, 0, 1)
    assert Trace.of([3, 1, 2], 4).accepted == (2, 0, 2)
    assert Trace.of([]) == Trace((), ())


@pytest.mark.parametrize(("emitted", "accepted"), [([3, 1, 2], 2), ([3, 1, 2], 5), ([], 1)])
def test_counts_that_cannot_be(emitted: list[int], accepted: int) -> None:
    with pytest.raises(ValueError, match=f"{accepted} drafts cannot"):
        Trace.of(emitted, accepted)


def test_up_to_a_token() -> None:
    trace = Trace.of([3, 1, 4], 6)
    assert trace.up_to(0) == Trace((), ())
    assert trace.up_to(2) == Trace((2,), (2,))  # both are drafts
    assert trace.up_to(3) == Trace((3,), (2,))  # the third is the target's
    assert trace.up_to(4) == Trace((3, 1), (2, 0))
    assert trace.up_to(6) == Trace((3, 1, 2), (2, 0, 2))
    assert trace.up_to(8) == trace.up_to(100) == trace


def test_counts_and_rates() -> None:
    found = Acceptance.count([Trace.of([3, 1]), Trace.of([1, 2, 1])], 3)
    assert (found.num_steps, found.num_tokens, found.length) == (5, 8, 8 / 5)
    assert found.histogram == [3, 1, 1, 0]
    assert found.per_position == [2 / 5, 1 / 5, 0.0]


def test_one_count_gives_length_and_rates_where_an_end_is_cut() -> None:
    """The last step's two tokens are both drafts: it counts as the three that it would have given."""
    found = Acceptance.count([Trace.of([3, 1, 2], 4)], 3)
    assert (found.num_steps, found.num_tokens) == (3, 6)
    assert found.length == pytest.approx(1 + 4 / 3) == pytest.approx(1 + sum(found.per_position))
    assert found.per_position == [2 / 3, 2 / 3, 0.0]


def test_nothing_to_count() -> None:
    assert Acceptance.count([], 2) == Acceptance(0, 0, None, [0.0, 0.0], [0, 0, 0])
