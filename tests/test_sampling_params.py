from __future__ import annotations

import logging
import math

import pytest

from pard_jax.outputs import CompletionOutput, RequestMetrics
from pard_jax.sampling_params import SamplingParams


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ([], [], False)
    assert params.skip_special_tokens and params.spaces_between_special_tokens and params.detokenize
    assert not params.include_stop_str_in_output and not params.greedy


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"temperature": -0.1}, "temperature must be non-negative, got -0.1"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": math.inf}, "temperature must be a finite number"),
        ({"temperature": 2.5}, r"temperature must be in \[0, 2\], got 2.5"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        ({"top_p": math.nan}, "top_p must be in"),
        ({"top_k": -2}, r"top_k must be 0 \(disable\), or at least 1, got -2"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\], got 1.5"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 16385}, "at most 16384"),
        ({"n": True}, "n must be an integer"),
        ({"n": 2, "temperature": 0.0}, "n must be 1 when using greedy sampling, got 2"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1"),
        ({"min_tokens": 17}, "min_tokens must be less than or equal to max_tokens=16, got 17"),
        ({"logprobs": 21}, "Requested sample logprobs of 21, which is greater than max allowed: 20"),
        ({"logprobs": -1}, "whole vocabulary"),
        ({"logprobs": -2}, "logprobs must be non-negative"),
        ({"stop": ""}, "stop cannot contain an empty string"),
        ({"stop": ["a", ""]}, "stop cannot contain an empty string"),
        ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
        ({"stop": "a", "detokenize": False}, "stop strings are only supported when detokenize is True"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids must contain only integers"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must not be negative"),
        ({"seed": 1.5}, "seed must be an integer or None"),
        ({"seed": 2**63}, "seed must fit in 64 bits"),
        ({"ignore_eos": None}, "ignore_eos must be True or False, got None"),
    ],
)
def test_values_out_of_range_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**keys)


@pytest.mark.parametrize(
    ("name", "neutral", "asked"),
    [
        ("presence_penalty", 0.0, 0.1),
        ("frequency_penalty", 0, -0.5),
        ("repetition_penalty", 1.0, 1.1),
        ("logit_bias", {}, {3: 1.0}),
        ("bad_words", [], ["no"]),
        ("allowed_token_ids", None, []),
        ("prompt_logprobs", None, 0),
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_never_ignored(name, neutral, asked):
    SamplingParams(**{name: neutral})
    with pytest.raises(ValueError, match=f"{name}=.* is not supported"):
        SamplingParams(**{name: asked})


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_small_temperature_is_raised_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        params = SamplingParams(temperature=1e-6)
    assert params.temperature == 0.01 and not params.greedy
    assert "temperature 1e-06 is less than 0.01" in caplog.text
    caplog.clear()
    assert SamplingParams(temperature=0.01).temperature == 0.01
    assert SamplingParams(temperature=0).temperature == 0
    assert not caplog.records


def test_greedy_turns_the_filters_off():
    params = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.2, seed=1)
    assert params.greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    kept = SamplingParams(temperature=0.7, top_p=0.5, top_k=3, min_p=0.2)
    assert (kept.top_p, kept.top_k, kept.min_p) == (0.5, 3, 0.2)


def test_stop_becomes_a_list_and_ids_lose_their_repeats():
    assert SamplingParams(stop="a").stop == ["a"]
    assert SamplingParams(stop=["b", "a"]).stop_strings == ["b", "a"]
    assert SamplingParams().stop_strings == []
    assert SamplingParams(stop_token_ids=[5, 3, 5]).stop_token_ids == [5, 3]


def test_the_callers_lists_are_not_shared():
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("")
    ids.append(-5)
    assert params.stop == ["a"] and params.stop_token_ids == [1]


def test_limits_themselves_are_allowed():
    SamplingParams(n=16384, temperature=2.0, top_p=1.0, top_k=-1, min_p=1.0, logprobs=20, seed=-(2**63))
    SamplingParams(logprobs=0, max_tokens=None, min_tokens=10**6)
    SamplingParams(max_tokens=1, min_tokens=1)


def test_seed_minus_one_is_no_seed():
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=0).seed == 0


def test_children_count_the_seed_up():
    params = SamplingParams(n=3, seed=-2, top_p=0.9, stop="x")
    assert [params.child(i).seed for i in range(3)] == [-2, -1, 0]
    assert params.child(1).n == 1 and params.n == 3
    assert params.child(2).top_p == 0.9 and params.child(2).stop == ["x"]
    assert [SamplingParams(n=2).child(i).seed for i in range(2)] == [None, None]


def test_request_metrics():
    fresh = RequestMetrics(arrival_time=10.0)
    assert fresh.time_to_first_token is None and fresh.e2e_latency is None
    assert fresh.tokens_per_second is None and fresh.time_per_output_token is None
    # The first step brought two tokens, the 1.5 seconds after it three more.
    done = RequestMetrics(
        arrival_time=10.0,
        first_token_time=10.5,
        last_token_time=12.0,
        finished_time=12.25,
        num_generation_tokens=5,
        num_first_tokens=2,
    )
    assert done.time_to_first_token == 0.5
    assert done.e2e_latency == 2.25
    assert done.tokens_per_second == 2.5
    assert done.time_per_output_token == 0.5


def test_completion_is_finished_once_it_has_a_reason():
    assert not CompletionOutput(0, "", []).finished()
    assert CompletionOutput(0, "", [1], finish_reason="length").finished()
