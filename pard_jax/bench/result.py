"""What was measured of one method on one workload, and the figures that follow from it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pard_jax.bench.acceptance import Acceptance, Trace
from pard_jax.bench.loops import loop_onset
from pard_jax.bench.spread import Spread, rate
from pard_jax.config.speculative import AUTO_WIDTHS


@dataclasses.dataclass(frozen=True)
class Timing:
    """One pass over some prompts, by the clock. Timings add up.

    Attributes:
        decode_tokens, decode_seconds: what came after the first look at the device, and how long it took.
        prompt_tokens, prefill_seconds: until every prompt had its first token.
        first_token_seconds, num_prompts: the sum over prompts of the time from the request to its first token.
    """

    decode_tokens: int = 0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    num_prompts: int = 0

    def __add__(self, other: Timing) -> Timing:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Timing(*(a + b for a, b in pairs))


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table: which method, how, on what. None where it does not apply."""

    prompts: str
    method: str
    dtype: str
    num_speculative_tokens: int | Literal["auto"] | None
    max_num_seqs: int
    context: int | None

    @property
    def workload(self) -> tuple[str, int, int | None]:
        """What a method and its baseline must have in common."""
        return self.prompts, self.max_num_seqs, self.context

    @property
    def label(self) -> str:
        """Method and K, as a figure names them."""
        return self.method if self.num_speculative_tokens is None else f"{self.method}, K={self.num_speculative_tokens}"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured of a case.

    Attributes:
        timings: one a repeat.
        outputs: the tokens of every prompt, once for every pass over them.
        traces: one a prompt; None where nothing is drafted.
        steps_by_k: steps of the timed passes by K; empty where it was not counted.
    """

    case: Case
    timings: list[Timing]
    outputs: list[list[list[int]]]
    traces: list[Trace] | None
    steps_by_k: Counter[int] = dataclasses.field(default_factory=Counter)

    def join(self, other: Measurement, prompts: str) -> Measurement:
        """The two as one, over the prompts of both, under another name."""
        return Measurement(
            dataclasses.replace(self.case, prompts=prompts),
            [a + b for a, b in zip(self.timings, other.timings, strict=True)],
            [a + b for a, b in zip(self.outputs, other.outputs, strict=True)],
            None if self.traces is None or other.traces is None else self.traces + other.traces,
            self.steps_by_k + other.steps_by_k,
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """The figures of a case. A figure is None where it does not apply or nothing could be measured.

    Attributes:
        decode_tokens_per_second: after the first token, over all requests at once.
        ratio_to_plain: of the medians, to plain decoding of the same prompts, batch and context.
        time_to_first_token: seconds, the mean over prompts.
        prefill_tokens_per_second: prompt tokens, until every prompt of a batch has its first token.
        num_prompts, num_tokens: how many, and the tokens that were generated for them.
        num_equal: prompts whose tokens are plain decoding's, in every pass.
        num_looping: prompts whose plain output falls into a loop (:func:`pard_jax.bench.loops.loop_onset`).
        acceptance: over all steps.
        acceptance_before_loops: the same as if every output had ended where the loop of the plain one begins.
        steps_by_k: steps of the timed passes by the K that they ran with; empty for other projects' methods.
    """

    case: Case
    decode_tokens_per_second: Spread | None
    ratio_to_plain: float | None
    time_to_first_token: Spread | None
    prefill_tokens_per_second: Spread | None
    num_prompts: int
    num_tokens: int
    num_equal: int
    num_looping: int
    acceptance: Acceptance | None
    acceptance_before_loops: Acceptance | None
    steps_by_k: dict[int, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, measured: Measurement, plain: Measurement) -> Result:
        """The figures of a measurement, beside that of plain decoding on the same workload."""
        case, expected = measured.case, plain.outputs[0]
        onsets = [loop_onset(tokens) for tokens in expected]
        decode, base = _decode_rate(measured.timings), _decode_rate(plain.timings)
        whole = before = None
        if measured.traces is not None and (k := case.num_speculative_tokens) is not None:
            k = AUTO_WIDTHS[-1] if k == "auto" else k
            whole = Acceptance.count(measured.traces, k)
            cut = zip(measured.traces, onsets, strict=True)
            before = Acceptance.count([t if onset is None else t.up_to(onset) for t, onset in cut], k)
        return cls(
            case=case,
            decode_tokens_per_second=decode,
            ratio_to_plain=None if decode is None or base is None else decode.median / base.median,
            time_to_first_token=Spread.of(t.first_token_seconds / t.num_prompts for t in measured.timings),
            prefill_tokens_per_second=Spread.of(rate(t.prompt_tokens, t.prefill_seconds) for t in measured.timings),
            num_prompts=len(expected),
            num_tokens=sum(map(len, measured.outputs[0])),
            num_equal=sum(all(out[i] == tokens for out in measured.outputs) for i, tokens in enumerate(expected)),
            num_looping=sum(onset is not None for onset in onsets),
            acceptance=whole,
            acceptance_before_loops=before,
            steps_by_k=dict(sorted(measured.steps_by_k.items())),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the case's fields beside the figures."""
        record = dataclasses.asdict(self)
        return record.pop("case") | record


def _decode_rate(timings: Sequence[Timing]) -> Spread | None:
    return Spread.of(rate(t.decode_tokens, t.decode_seconds) for t in timings)
