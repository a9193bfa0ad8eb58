"""A script for the engine: behind a character comes the next one of its cycle, of the three that there are."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable
from typing import Any

LOWER, UPPER, DIGITS = string.ascii_lowercase, string.ascii_uppercase, string.digits


def follows(text: str, count: int) -> str:
    """What the script says behind ``text``."""
    cycle = next(c for c in (LOWER, UPPER, DIGITS) if text[-1] in c)
    at = cycle.index(text[-1]) + 1
    return (cycle * (2 + count // len(cycle)))[at : at + count]


def text_of(output: Any) -> str:
    return output.outputs[0].text


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))
