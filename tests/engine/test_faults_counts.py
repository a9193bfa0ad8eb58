"""Faults that users of other engines reported, as black boxes: what is counted of its steps.

A test's letter names the kind of fault, here G: counts.
"""

from __future__ import annotations

import string

import numpy as np
import pytest

from tests.helpers.engine import (
    EOS,
    generate,
    params_of_request,
    scripted,
)

LETTERS = string.ascii_lowercase.replace("p", "")  # 25 of them; "p" is the prompt


@pytest.mark.parametrize("right", range(4))
def test_counts_of_a_block_by_how_much_of_it_is_right(right):
    engine = scripted(3, 4)
    engine.say("p" + LETTERS, drafts=right)
    steps = 5
    output = generate(engine, ["p"], params_of_request(max_tokens=steps * (right + 1)))[0]
    metrics = output.metrics.speculative_decoding
    assert metrics.acceptance_histogram == [steps if j == right else 0 for j in range(4)]
    assert (metrics.num_spec_steps, metrics.num_draft_tokens) == (steps, 3 * steps)
    assert metrics.num_accepted_draft_tokens == right * steps and metrics.mean_acceptance_length == 1 + right
    assert metrics.draft_acceptance_rate == pytest.approx(right / 3)


def test_steps_without_drafts_are_not_counted():
    engine = scripted(3, 4)
    engine.say("p" + LETTERS, drafts="none")
    metrics = generate(engine, ["p"], params_of_request(max_tokens=7))[0].metrics.speculative_decoding
    assert (metrics.num_spec_steps, metrics.num_draft_tokens, metrics.mean_acceptance_length) == (0, 0, 1.0)
    assert engine.acceptance.num_drafts == 0


ENDINGS = [{}, {"ignore_eos": True, "stop_token_ids": [EOS]}, {"max_tokens": 2}, {"stop": "a"}]


@pytest.mark.parametrize("ending", ENDINGS)
def test_g8_only_kept_tokens_count(engine, ending):
    """A block accepted whole, of which the request keeps the first one or two tokens."""
    engine.say(f"pa${LETTERS[1:]}")
    output = generate(engine, ["p"], params_of_request(**ending))[0]
    kept = len(output.outputs[0].token_ids)
    assert kept == (1 if "stop" in ending else 2)
    metrics = output.metrics.speculative_decoding
    assert metrics.num_accepted_draft_tokens == kept == engine.acceptance.num_accepted_tokens
    assert metrics.num_spec_steps == engine.acceptance.num_drafts == 1
    assert metrics.num_draft_tokens == engine.k


def test_the_engines_counts_are_the_requests_sum(engine):
    engine.say(f"p{LETTERS[:7]}${LETTERS[7:]}", string.ascii_uppercase, drafts=2)
    outputs = generate(engine, ["p", "A", "Q", "p", "C"], params_of_request(max_tokens=11))
    each = [output.metrics.speculative_decoding for output in outputs]
    total = engine.acceptance
    assert total.num_drafts == sum(m.num_spec_steps for m in each) > 5
    assert total.num_draft_tokens == sum(m.num_draft_tokens for m in each)
    assert total.num_accepted_tokens == sum(m.num_accepted_draft_tokens for m in each)
    assert total.acceptance_histogram == np.sum([m.acceptance_histogram for m in each], axis=0).tolist()
