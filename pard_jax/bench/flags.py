"""Kinds of values that the flags of several measurements take."""

from __future__ import annotations

import argparse


def numbers_or_auto(text: str) -> list[int | str]:
    """The same, of which any may be "auto"."""
    parts = list(dict.fromkeys(text.split(",")))
    found = iter(numbers(",".join(part for part in parts if part != "auto"))) if parts != ["auto"] else iter(())
    return [part if part == "auto" else next(found) for part in parts]


def numbers(text: str) -> list[int]:
    """Whole numbers of at least 1 with commas between them, each once, as ``type=`` of a flag."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas between them, got {text!r}") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1, got {text!r}")
    return list(dict.fromkeys(found))


def names(text: str) -> list[str]:
    """Names with commas between them, each once, as ``type=`` of a flag."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    return list(dict.fromkeys(found))
