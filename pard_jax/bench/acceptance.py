"""Acceptance counted from what each step of a request gave: over all of an output, or up to some token of it.

The unit is a step of the target, whether anything was drafted for it or not. (The engine's own metrics, vLLM's, leave
out steps without drafts.) As vLLM counts it, the acceptance length is a token of the target's own and the drafts that
were accepted, a step: where the end of a request cuts off the target's token, the drafts before it count all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Trace:
    """One request, step by step.

    Attributes:
        emitted: tokens that each step added; at least 1.
        accepted: how many of them were drafts: all but the target's own, which the end of the request may cut off.
    """

    emitted: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, emitted: Iterable[int], num_accepted: int | None = None) -> Trace:
        """From the tokens of each step, and the drafts accepted in all, where they are known.

        Every step but the last ends with a token of the target's own; ``num_accepted`` tells whether the last one does.
        None: it does, too.

        Raises:
            ValueError: the two contradict each other.
        """
        steps = tuple(emitted)
        accepted = [count - 1 for count in steps]
        cut = 0 if num_accepted is None else num_accepted - sum(accepted)
        if cut not in (0, 1) or (cut and not steps):
            raise ValueError(f"{num_accepted} drafts cannot have been accepted in steps of {list(steps)} tokens")
        if cut:
            accepted[-1] += 1
        return cls(steps, tuple(accepted))

    def up_to(self, length: int) -> Trace:
        """The same as if the request had ended after ``length`` tokens."""
        emitted, accepted, left = [], [], length
        for tokens, drafts in zip(self.emitted, self.accepted, strict=True):
            if left <= 0:
                break
            emitted.append(min(tokens, left))
            accepted.append(min(drafts, left))
            left -= tokens
        return Trace(tuple(emitted), tuple(accepted))


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counts over the steps of many requests.

    Attributes:
        num_steps: passes of the target, a request's own each.
        num_tokens: what they emitted.
        length: 1 + accepted drafts a step, 1..K+1, which is 1 + the sum of ``per_position``; None without steps.
        per_position: for each of the K positions, the share of steps that accepted the draft there.
        histogram: entry j counts the steps that accepted exactly j drafts; K+1 entries.
    """

    num_steps: int
    num_tokens: int
    length: float | None
    per_position: list[float]
    histogram: list[int]

    @classmethod
    def count(cls, traces: Iterable[Trace], num_speculative_tokens: int) -> Acceptance:
        """Sum up the steps of ``traces``."""
        histogram, tokens = [0] * (num_speculative_tokens + 1), 0
        for trace in traces:
            tokens += sum(trace.emitted)
            for accepted in trace.accepted:
                histogram[accepted] += 1
        steps = sum(histogram)
        per_position = [sum(histogram[i + 1 :]) / steps if steps else 0.0 for i in range(num_speculative_tokens)]
        drafts = sum(accepted * count for accepted, count in enumerate(histogram))
        return cls(steps, tokens, 1 + drafts / steps if steps else None, per_position, histogram)
