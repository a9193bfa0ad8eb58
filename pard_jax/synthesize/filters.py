"""Which turns are not worth training on. Every filter looks at one turn alone, so that no order of work matters."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LONGEST_PERIOD = 32  # tokens of a stretch that is said over and over
_REPEATS = 4
_SHORTEST_LOOP = 16  # tokens of all repeats together: a row of dashes is no loop
_DISTINCT_SHARE = 0.5  # of a turn's 4-grams
# C0 and C1 controls but tab and line ends, private use, noncharacters and U+FFFD (bytes that are no character).
_BAD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\ufff0-\uffff]")


def fault_of(token_ids: Sequence[int], text: str, *, ended: bool, special: frozenset[int]) -> str | None:
    """Why a turn is dropped: "empty", "cut off", "special tokens", "repeating" or "bad characters"; None to keep it.

    Args:
        token_ids: what was written, without the token that ended it.
        text: the same, decoded.
        ended: whether such a token came, or it need not.
        special: ids that a turn may not hold.
    """
    if not text.strip():
        return "empty"
    if not ended:
        return "cut off"
    if not special.isdisjoint(token_ids):
        return "special tokens"
    if is_repeating(token_ids):
        return "repeating"
    if _BAD.search(text):
        return "bad characters"
    return None


def is_repeating(token_ids: Sequence[int]) -> bool:
    """Whether a text ends in a loop, or says the same again and again.

    A loop is a stretch of 1 to 32 tokens that fills the end four times, at least 16 tokens; and of the runs of four
    tokens less than half are different ones, once there are 32 of them.
    """
    ids = list(token_ids)
    n = len(ids)
    for period in range(1, min(_LONGEST_PERIOD, n // _REPEATS) + 1):
        length = max(_REPEATS * period, _SHORTEST_LOOP)
        # A sequence has this period where it equals itself, shifted by it.
        if length <= n and ids[n - length : n - period] == ids[n - length + period :]:
            return True
    grams = n - 3
    return grams >= 32 and len(set(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))) < _DISTINCT_SHARE * grams
