"""What the host gives the programs, row by row: arrays of one width, whatever there is to fill them with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def column(values: list[Any], width: int, dtype: Any) -> Any:
    """One value a row, zeros behind: an array ``[width]``, or the scalar where ``width`` is 1."""
    array = np.zeros(width, dtype)
    array[: len(values)] = values
    return array if width > 1 else array[0]


def padded(lists: Sequence[Sequence[int]], width: int, size: int, fill: int) -> np.ndarray:
    """One list of ids a row, filled up: int32 ``[width, size]``, or ``[size]`` where ``width`` is 1."""
    array = np.full((width, size), fill, np.int32)
    for row, ids in zip(array, lists, strict=False):
        row[: len(ids)] = ids
    return array if width > 1 else array[0]
