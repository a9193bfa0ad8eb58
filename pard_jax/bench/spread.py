"""A figure that was measured several times: its median, and how far the measurements lie apart."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the measurements, in their unit."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """The spread of ``values``; None where any of them is, as nothing could be measured then."""
        known = list(values)
        if not known or any(value is None for value in known):
            return None
        numbers = [value for value in known if value is not None]
        return cls(statistics.median(numbers), min(numbers), max(numbers))


def rate(count: float, seconds: float) -> float | None:
    """Things a second; None where nothing was counted or no time went by."""
    return count / seconds if count and seconds > 0 else None
