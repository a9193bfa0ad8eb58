"""Where an output falls into a loop: small models, decoded greedily, come to repeat themselves word for word.

A loop is easy to draft, so what is accepted within one says little of a draft. Acceptance is therefore counted a second
time, up to where the loop begins.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 64
MIN_REPEATS = 3


def loop_onset(tokens: Sequence[int], *, max_period: int = MAX_PERIOD, min_repeats: int = MIN_REPEATS) -> int | None:
    """The index at which the output's loop begins, its first round included; None where it has none.

    A loop is an end of the output that repeats a piece of at most ``max_period`` tokens, at least ``min_repeats`` times
    in whole; a last round that is cut short belongs to it.
    """
    longest = 0
    for period in range(1, min(max_period, len(tokens) // min_repeats) + 1):
        same = 0  # of the last tokens, how many equal the one a period before them
        while same < len(tokens) - period and tokens[-1 - same] == tokens[-1 - same - period]:
            same += 1
        if same + period >= min_repeats * period:
            longest = max(longest, same + period)
    return len(tokens) - longest if longest else None
