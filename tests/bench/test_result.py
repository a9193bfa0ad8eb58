"""Figures of measurements that are written by hand."""

from __future__ import annotations

import json

import pytest

from pard_jax.bench.acceptance import Trace
from pard_jax.bench.result import Case, Measurement, Result, Timing
from pard_jax.bench.spread import Spread, rate

PLAIN = Case("p", "plain", "float32", None, 1, None)
PARD = Case("p", "pard", "float32", 2, 1, None)
OUTPUT = [[5, 6, 7, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6, 7]]  # the first falls into a loop at its fourth token


def timing(decode_seconds: float) -> Timing:
    return Timing(12, decode_seconds, prompt_tokens=30, prefill_seconds=0.5, first_token_seconds=0.4, num_prompts=2)


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([]) is None and Spread.of([1.0, None]) is None
    assert rate(6, 2.0) == 3.0 and rate(0, 2.0) is None and rate(6, 0.0) is None


def test_figures() -> None:
    plain = Measurement(PLAIN, [timing(4.0), timing(6.0), timing(3.0)], [OUTPUT] * 4, None)
    traces = [Trace.of([2, 2, 3]), Trace.of([1, 3, 3])]
    other = [OUTPUT[0], [1, 2, 3, 4, 5, 6, 8]]
    pard = Measurement(PARD, [timing(1.0), timing(2.0), timing(3.0)], [OUTPUT, other, OUTPUT, OUTPUT], traces)
    base, result = Result.of(plain, plain), Result.of(pard, plain)
    assert base.decode_tokens_per_second == Spread(3.0, 2.0, 4.0) and base.ratio_to_plain == 1.0
    assert base.acceptance is None and base.acceptance_before_loops is None
    assert result.decode_tokens_per_second == Spread(6.0, 4.0, 12.0) and result.ratio_to_plain == 2.0
    assert result.time_to_first_token == Spread(0.2, 0.2, 0.2)
    assert result.prefill_tokens_per_second == Spread(60.0, 60.0, 60.0)
    assert (result.num_prompts, result.num_tokens, result.num_looping) == (2, 14, 1)
    assert base.num_equal == 2 and result.num_equal == 1  # one pass of four differs in one prompt
    assert result.acceptance is not None and result.acceptance.length == 1 + 8 / 6
    # Of the first output 3 tokens count, in two steps: the second is cut to a draft, which counts as any accepted one.
    assert result.acceptance_before_loops is not None
    assert result.acceptance_before_loops.length == 1 + 6 / 5
    assert result.acceptance_before_loops.histogram == [1, 2, 2]
    record = json.loads(json.dumps(result.as_dict()))
    assert record["method"] == "pard" and record["decode_tokens_per_second"]["median"] == 6.0
    assert record["acceptance"]["histogram"] == [1, 2, 3]


def test_groups_together() -> None:
    one = Measurement(PARD, [timing(1.0), timing(2.0)], [OUTPUT] * 3, [Trace.of([7]), Trace.of([7])])
    other = Measurement(PARD, [timing(3.0), timing(4.0)], [[[8]]] * 3, [Trace.of([1])])
    both = one.join(other, "total")
    assert both.case.prompts == "total" and both.case.method == "pard"
    assert [t.decode_seconds for t in both.timings] == [4.0, 6.0]
    assert [t.num_prompts for t in both.timings] == [4, 4]
    assert both.outputs == [[*OUTPUT, [8]]] * 3
    assert both.traces is not None and len(both.traces) == 3


def test_an_output_of_one_token_has_no_decode_rate() -> None:
    none = Measurement(PLAIN, [Timing(0, 0.0, 3, 0.1, 0.1, 1)], [[[4]]] * 2, None)
    result = Result.of(none, none)
    assert result.decode_tokens_per_second is None and result.ratio_to_plain is None
    assert result.prefill_tokens_per_second is not None
    assert result.prefill_tokens_per_second.median == pytest.approx(30)
