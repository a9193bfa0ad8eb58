"""Requests as arrays for the device: one a row, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pard_jax.decoding.state import MAX_STOP_TOKEN_IDS, Row
from pard_jax.engine.request import Request


def rows_of(requests: Sequence[Request], width: int, num_slots: int) -> Row:
    """What a program that admits ``width`` requests at once takes; those that are missing are zeros.

    Args:
        requests: ``width`` or fewer.
        num_slots: C, the size of a row's history.
    """
    params = [request.params for request in requests]
    prompts = [request.prompt_token_ids for request in requests]
    lengths = [len(prompt) for prompt in prompts]
    return Row(
        tokens=padded(prompts, width, num_slots, 0),
        length=column(lengths, width, np.int32),
        temperature=column([p.temperature for p in params], width, np.float32),
        top_k=column([max(p.top_k, 0) for p in params], width, np.int32),
        top_p=column([p.top_p for p in params], width, np.float32),
        min_p=column([p.min_p for p in params], width, np.float32),
        seed=column([request.seed for request in requests], width, np.uint32),
        stop_ids=padded([request.stop.token_ids for request in requests], width, MAX_STOP_TOKEN_IDS, -1),
        min_length=column([n + p.min_tokens for n, p in zip(lengths, params, strict=True)], width, np.int32),
        max_length=column([request.max_length for request in requests], width, np.int32),
        num_logprobs=column([-1 if p.logprobs is None else p.logprobs for p in params], width, np.int32),
    )


def column(values: list[Any], width: int, dtype: Any) -> Any:
    """One value a row, zeros behind: an array ``[width]``, or the scalar where ``width`` is 1."""
    column = np.zeros(width, dtype)
    column[: len(values)] = values
    return column if width > 1 else column[0]


def padded(lists: Sequence[Sequence[int]], width: int, size: int, fill: int) -> np.ndarray:
    """One list of ids a row, filled up: int32 ``[width, size]``, or ``[size]`` where ``width`` is 1."""
    padded = np.full((width, size), fill, np.int32)
    for row, ids in zip(padded, lists, strict=False):
        row[: len(ids)] = ids
    return padded if width > 1 else padded[0]
