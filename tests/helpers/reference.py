"""Speculative decoding as plainly as it can be written: no cache, no batch, a full forward pass for every question.

A model is a callable ``logits(tokens) -> [T, V]``, a drafter a callable ``propose(context) -> drafts``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Logits = Callable[[Sequence[int]], np.ndarray]
Propose = Callable[[list[int]], list[int]]


def greedy(logits: Logits, prompt: Sequence[int], max_length: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """The tokens that the model alone puts behind ``prompt``: up to ``max_length`` in all, or to the first stop id."""
    tokens = list(prompt)
    while len(tokens) < max_length:
        tokens.append(int(logits(tokens)[-1].argmax()))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def pard_drafts(logits: Logits, context: list[int], k: int, mask: int) -> list[int]:
    """One pass over the context and k - 1 masks: the last real row and every mask row say one draft each."""
    rows = logits([*context, *[mask] * (k - 1)])
    return [int(row.argmax()) for row in rows[len(context) - 1 :]]


def sequential_drafts(logits: Logits, context: list[int], k: int) -> list[int]:
    """k tokens, one after the other."""
    return greedy(logits, context, len(context) + k)


def ngram_drafts(context: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    """What followed the longest suffix of min_n..max_n tokens that stood before, at its earliest place."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(context) - n):
            if context[start : start + n] == context[len(context) - n :]:
                return context[start + n : start + n + k]
    return []


class Run(NamedTuple):
    """A run of the speculative loop."""

    tokens: list[int]  # behind the prompt
    kept: list[int]  # tokens kept of every step
    drafted: list[int]  # drafts made in every step
    accepted: list[int]  # drafts among them that the target agreed with, kept or not


def speculate(
    logits: Logits, propose: Propose, prompt: Sequence[int], max_length: int, stop_ids: Sequence[int] = ()
) -> Run:
    """Greedy speculative decoding: keep the drafts that equal the target's argmax, then add one of its own."""
    tokens, run = list(prompt), Run([], [], [], [])
    while len(tokens) < max_length and not (run.tokens and run.tokens[-1] in stop_ids):
        drafts = propose(tokens)
        best = [int(row.argmax()) for row in logits(tokens + drafts)[len(tokens) - 1 :]]
        agreed = next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))
        emitted = best[: min(agreed + 1, max_length - len(tokens))]
        stop = next((i for i, token in enumerate(emitted) if token in stop_ids), len(emitted))
        tokens += emitted[: stop + 1]
        run.tokens.extend(emitted[: stop + 1])
        run.kept.append(len(emitted[: stop + 1]))
        run.drafted.append(len(drafts))
        run.accepted.append(agreed)
    return run
