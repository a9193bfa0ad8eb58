"""Faults that users of other engines reported, as black boxes: text, tokens and counts that come out of an engine.

A test's letter names the kind of fault: A ends inside an accepted block, B greedy equality, C and D sampling and seeds,
E log-probabilities, F lengths, G counts.
"""

from __future__ import annotations

import functools
import string
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.config import extra_slots
from pard_jax.decoding.drafters import Drafter, NgramDrafter, PardDrafter, SequentialDrafter
from pard_jax.engine.engine import Engine
from pard_jax.engine.memory import Speculation
from pard_jax.sampling_params import SamplingParams
from tests.helpers.engine import (
    BYTES,
    EOS,
    SECOND_EOS,
    ScriptedEngine,
    drain,
    forward_passes,
    generate,
    one_hot_logits,
    params_of_request,
    plan_for,
    scripted,
    submit,
    successors,
    tokens_of,
)
from tests.helpers.models import full_forward, model_config, random_params
from tests.helpers.reference import Propose, greedy, ngram_drafts, pard_drafts, sequential_drafts, speculate
from tests.helpers.statistics import assert_follows

LETTERS = string.ascii_lowercase.replace("p", "")  # 25 of them; "p" is the prompt
DRAFTS = ("right", "wrong", "none", 2)


@pytest.fixture(params=[(12, 1), (3, 4)], ids=["12 drafts", "3 drafts, 4 steps a dispatch"])
def engine(request: pytest.FixtureRequest) -> ScriptedEngine:
    return scripted(*request.param)


def completion(engine: Engine, **keys: Any) -> Any:
    """Of the prompt "p"."""
    return generate(engine, ["p"], params_of_request(**keys))[0].outputs[0]


def ids(text: str) -> list[int]:
    return list(text.encode())


# -- A: EOS, stop tokens, stop strings, budgets -------------------------------------------------------------------


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a1_a_stop_token_and_a_budget_in_one_block(engine, drafts):
    engine.say("pab.defghijklm", drafts=drafts)
    stop: dict[str, Any] = {"stop_token_ids": [ord(".")]}
    inside = completion(engine, max_tokens=5, **stop)
    assert (inside.token_ids, inside.finish_reason, inside.stop_reason) == (ids("ab."), "stop", ord("."))
    outside = completion(engine, max_tokens=2, **stop)
    assert (outside.token_ids, outside.finish_reason, outside.stop_reason) == (ids("ab"), "length", None)
    both = completion(engine, max_tokens=3, **stop)
    assert (both.token_ids, both.finish_reason, both.stop_reason) == (ids("ab."), "stop", ord("."))


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a2_eos_at_every_position_of_a_block(engine, drafts):
    for at in range(engine.k + 1):
        before, behind = LETTERS[:at], LETTERS[at:]
        engine.say(f"p{before}${behind}", drafts=drafts)
        ended, on = generate(
            engine,
            ["p", "p"],
            [params_of_request(max_tokens=2 * engine.k + 3), params_of_request(max_tokens=20, ignore_eos=True)],
        )
        (ended,), (on,) = ended.outputs, on.outputs
        assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (ids(before + "$"), "stop", None)
        assert ended.text == before
        assert (on.token_ids, on.finish_reason) == (ids(f"{before}${behind}"[:20]), "length")


@pytest.mark.parametrize("drafts", ["right", "none"])
def test_a_second_eos_is_a_stop_token(engine, drafts):
    """As vLLM has it: EOS ids of generation_config.json beside the primary one are named as the stop reason."""
    engine.say("pab%cd", drafts=drafts)
    one = completion(engine, max_tokens=9)
    assert (one.text, one.token_ids, one.finish_reason, one.stop_reason) == ("ab", ids("ab%"), "stop", SECOND_EOS)
    assert completion(engine, max_tokens=9, ignore_eos=True).token_ids == ids("ab%cdpab%")
    # A stop id that the request asks for ends it under ignore_eos all the same.
    own = completion(engine, max_tokens=9, ignore_eos=True, stop_token_ids=[SECOND_EOS])
    assert (own.token_ids, own.stop_reason) == (ids("ab%"), SECOND_EOS)


@pytest.mark.parametrize("include", [False, True])
def test_a4_stop_strings_anywhere_in_a_block(engine, include):
    """The first of 13 accepted tokens, the last, and strings that reach from one block into the next."""
    engine.say("p" + LETTERS)
    stops = [LETTERS[i : i + n] for i in range(0, 20) for n in (1, 2, 3)]
    params = [
        params_of_request(max_tokens=40, stop=["never", stop], include_stop_str_in_output=include, logprobs=0)
        for stop in stops
    ]
    for stop, output in zip(stops, generate(engine, ["p"] * len(stops), params), strict=True):
        (got,) = output.outputs
        end = LETTERS.index(stop) + len(stop)
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        assert got.text == (LETTERS[:end] if include else LETTERS[: end - len(stop)])
        # A6: nothing past the stop string leaks, in any of the lists.
        assert got.token_ids == ids(LETTERS[:end])
        assert len(got.logprobs) == end and output.metrics.num_generation_tokens == end


def test_a6_lengths_agree_whatever_ends_a_request(engine):
    engine.say(f"p{LETTERS[:9]}${LETTERS[9:]}")
    endings = [{"stop": "g"}, {"stop_token_ids": [ord("h")]}, {"max_tokens": 7}, {}]
    updates: list[Any] = []
    submit(engine, {str(i): ("p", params_of_request(**({"logprobs": 2} | keys))) for i, keys in enumerate(endings)})
    outputs = drain(engine, updates)
    for request_id, output in outputs.items():
        (got,) = output.outputs
        assert len(got.token_ids) == len(got.logprobs) == output.metrics.num_generation_tokens
        assert all(token in entry for token, entry in zip(got.token_ids, got.logprobs, strict=True))
        assert got.cumulative_logprob == pytest.approx(
            sum(entry[token].logprob for token, entry in zip(got.token_ids, got.logprobs, strict=True))
        )
        mine = [u for u in updates if u.request_id == request_id]
        assert [t for u in mine for t in u.token_ids] == got.token_ids
        assert [entry for u in mine for entry in u.logprobs] == got.logprobs
    assert [len(outputs[str(i)].outputs[0].token_ids) for i in range(4)] == [7, 8, 7, 10]


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a7_exactly_max_tokens(engine, drafts):
    engine.say("p" + LETTERS, drafts=drafts)
    k, cycle = engine.k, LETTERS + "p" + LETTERS
    budgets = [1, 2, k, k + 1, k + 2, 2 * k + 2, 2 * k + 3]
    params = [params_of_request(max_tokens=n, ignore_eos=True) for n in budgets]
    for n, output in zip(budgets, generate(engine, ["p"] * len(budgets), params), strict=True):
        (got,) = output.outputs
        assert (got.token_ids, got.finish_reason) == (ids(cycle[:n]), "length")


@pytest.mark.parametrize("stops", ["eos", "second eos", "stop token"])
def test_a10_min_tokens_beside_rows_without_drafts(engine, stops):
    """The target wants to end at every token; three rows draft the right tokens, the end itself, and nothing."""
    texts = [string.ascii_lowercase, string.ascii_uppercase, string.digits]
    end = {"eos": EOS, "second eos": SECOND_EOS, "stop token": ord("!")}[stops]
    follows = successors(*texts)
    logits = one_hot_logits(follows)
    logits[:, end] = 30.0
    drafts = np.full((BYTES, engine.k), -1)
    token = np.arange(BYTES)
    for i in range(engine.k):
        token = follows[token]
        drafts[:, i] = token
    drafts[ids(texts[1])] = end
    drafts[ids(texts[2])] = -1
    engine.play(logits, drafts)
    for m in (0, 1, engine.k, engine.k + 1):
        params = [
            params_of_request(max_tokens=30, min_tokens=n, stop_token_ids=[ord("!")]) for n in (m, m + 1, max(m - 1, 0))
        ]
        outputs = generate(engine, [text[0] for text in texts], params)
        for text, p, output in zip(texts, params, outputs, strict=True):
            (got,) = output.outputs
            expected = (ids(text) * 3)[1 : 1 + p.min_tokens]
            assert got.token_ids == [*expected, end]
            assert (got.finish_reason, got.stop_reason) == ("stop", None if stops == "eos" else end)


def test_min_tokens_hides_stop_strings_as_well(engine):
    engine.say("pab")
    for m in range(9):
        got = completion(engine, max_tokens=20, min_tokens=m, stop="b")
        ends = [n for n in range(1, 21) if n > m and n % 3 == 2]
        assert len(got.token_ids) == ends[0], f"min_tokens={m}"


# -- G8: counts ---------------------------------------------------------------------------------------------------


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


# -- B, F: a real pair, in caches without a slot to spare ---------------------------------------------------------

V, MASK, SLOTS = 64, 63, 128
CONFIG = model_config("llama", num_hidden_layers=1, vocab_size=V, head_dim=8)
TARGET = random_params(CONFIG, 0)
NEAR = jax.tree.map(lambda x: x + jnp.asarray(np.random.default_rng(7).normal(0, 0.04, x.shape), x.dtype), TARGET)
# Another head alone: where a row of it is the target's likeliest token, the draft is wrong, and its cache is right.
ALTERED = TARGET | {"lm_head": TARGET["lm_head"].at[::7].multiply(-1.0)}
LOGITS = full_forward(CONFIG, TARGET, SLOTS)
METHODS = [("pard", 1), ("pard", 3), ("pard", 12), ("draft_model", 3), ("ngram", 4)]


@functools.cache
def real_engine(method: str, k: int, num_rows: int = 3) -> Engine:
    """One whose rows have exactly as many slots as the longest sequence may reach."""
    common: dict[str, Any] = {"num_speculative_tokens": k}
    if method != "ngram":
        common |= {"config": CONFIG, "target_vocab_size": V, "max_model_len": SLOTS}
    drafter: Drafter
    match method:
        case "pard":
            drafter = PardDrafter(**common, mask_token_id=MASK)
        case "draft_model":
            drafter = SequentialDrafter(**common)
        case _:
            drafter = NgramDrafter(**common, max_n=3, min_n=1)
    extra = extra_slots("ngram" if method == "ngram" else "draft_model", method == "pard", k)
    length = SLOTS - k - extra
    speculation = Speculation(k, extra, None if method == "ngram" else CONFIG)
    plan = plan_for(CONFIG, speculation, length, num_rows, chunk_size=length // 2)
    assert plan.num_slots == SLOTS and length % 2 == 0
    return Engine(
        CONFIG,
        drafter,
        {"target": TARGET, "draft": NEAR},
        plan,
        num_rows=num_rows,
        chunk_size=length // 2,
        steps_per_dispatch=2,
        dtype=jnp.float32,
        speculative_slots=k + extra,
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, V, length).tolist()


@functools.cache
def greedy_of(prompt: tuple[int, ...], max_length: int) -> list[int]:
    return greedy(LOGITS, prompt, max_length)


def expected_of(prompts: list[list[int]], max_tokens: int, limit: int) -> list[list[int]]:
    return [greedy_of(tuple(p), min(limit, len(p) + max_tokens)) for p in prompts]


@pytest.mark.parametrize(("method", "k"), METHODS)
def test_b1_greedy_output_is_the_targets_own(method, k):
    """The draft is right now and then; prompts of 1 to 70 tokens pass through three rows."""
    engine = real_engine(method, k)
    limit, chunk = engine.plan.max_model_len, engine.chunk_size
    prompts = [prompt_of(n) for n in (70, 1, 2, 3, 17, chunk - 1, chunk, chunk + 1, chunk + 2)]
    engine.acceptance.reset()
    outputs = generate(engine, prompts, params_of_request(max_tokens=24))
    assert tokens_of(outputs) == expected_of(prompts, 24, limit)
    assert engine.acceptance.num_accepted_tokens > 20
    rejected = engine.acceptance.num_draft_tokens - engine.acceptance.num_accepted_tokens
    assert rejected > 20, "nothing was rejected: the test says little"


@pytest.mark.parametrize(("method", "k"), METHODS)
def test_b7_acceptance_is_the_references_in_any_batch(method, k):
    """Step by step what a loop without a cache accepts, whatever is in the other rows."""
    engine = real_engine(method, k)
    draft = full_forward(CONFIG, NEAR, SLOTS)
    propose: Propose = {
        "pard": lambda context: pard_drafts(draft, context, k, MASK),
        "draft_model": lambda context: sequential_drafts(draft, context, k),
        "ngram": lambda context: ngram_drafts(context, k, 1, 3),
    }[method]
    prompts = [prompt_of(n, seed=1) for n in (1, 60, 2, 33, 5)]
    outputs = generate(engine, prompts, params_of_request(max_tokens=24))
    for prompt, output in zip(prompts, outputs, strict=True):
        run = speculate(LOGITS, propose, prompt, min(engine.plan.max_model_len, len(prompt) + 24))
        assert output.outputs[0].token_ids == run.tokens
        histogram = [0] * (k + 1)
        for kept, drafted, accepted in zip(run.kept, run.drafted, run.accepted, strict=True):
            histogram[min(kept, accepted)] += drafted > 0
        metrics = output.metrics.speculative_decoding
        assert metrics.acceptance_histogram == histogram
        assert metrics.num_draft_tokens == sum(run.drafted)


def test_b4_a_draft_that_is_the_target_is_always_right():
    """At every position, over hundreds of steps, in rows that come and go."""
    engine = real_engine("draft_model", 3)
    engine._params["draft"] = TARGET
    try:
        prompts = [prompt_of(n, seed=2) for n in (1, 2, 3, 40, 62, 63, 64, 11, 12, 13)]
        engine.acceptance.reset()
        before = engine.num_steps
        outputs = generate(engine, prompts, params_of_request(max_tokens=80))
        assert engine.num_steps - before > 50
        for output in outputs:
            # All but the last block are whole; the last is cut by the budget.
            metrics = output.metrics.speculative_decoding
            assert sum(metrics.acceptance_histogram[:3]) <= 1 and metrics.acceptance_histogram[0] == 0
    finally:
        engine._params["draft"] = NEAR


def test_b4_after_rejections_the_draft_is_right_again():
    """The draft is the target but for some tokens that it never says: it errs there alone, and at once recovers."""
    engine = real_engine("draft_model", 3)
    altered = full_forward(CONFIG, ALTERED, SLOTS)
    engine._params["draft"] = ALTERED
    try:
        prompts = [prompt_of(n, seed=3) for n in (1, 2, 30, 61, 7)]
        outputs = generate(engine, prompts, params_of_request(max_tokens=60))
    finally:
        engine._params["draft"] = NEAR
    rejected = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = prompt + output.outputs[0].token_ids
        best = altered(tokens).argmax(axis=1)  # what the draft says to every prefix of the output
        at, histogram = len(prompt), [0] * 4
        while at < len(tokens):
            accepted = 0
            while accepted < 3 and at + accepted < len(tokens) and best[at + accepted - 1] == tokens[at + accepted]:
                accepted += 1
            histogram[accepted] += 1
            at += accepted + 1
        assert output.metrics.speculative_decoding.acceptance_histogram == histogram
        rejected += sum(histogram[:3])
    assert rejected > 10


def test_b9_one_draft_pass_a_step():
    """12 drafts cost one forward pass of the draft beside the target's own; a sequential draft's three cost three."""

    def passes(engine: Engine) -> int:
        return forward_passes(
            functools.partial(engine._programs._decode, window=SLOTS),
            engine._params,
            engine._state,
            jnp.ones((3,), bool),
            jnp.int32(1),
        )

    assert passes(real_engine("pard", 12)) == 1 + 1
    assert passes(real_engine("draft_model", 3)) == 1 + 3
    assert passes(real_engine("ngram", 4)) == 1


@pytest.mark.parametrize(("method", "k"), METHODS)
def test_f1_f2_up_to_the_last_slot(method, k):
    """Rows are filled to the brim and end by length; an earlier prompt then gives what it gave."""
    engine = real_engine(method, k)
    limit = engine.plan.max_model_len
    early = [prompt_of(n, seed=4) for n in (5, 50, limit - k - 5)]
    first = generate(engine, early, params_of_request(max_tokens=k + 5))
    assert tokens_of(first) == expected_of(early, k + 5, limit)
    full = [prompt_of(limit - left, seed=5) for left in range(k + 2, 0, -1)]
    for max_tokens in (None, 1000):
        for prompt, output in zip(full, generate(engine, full, params_of_request(max_tokens=max_tokens)), strict=True):
            (got,) = output.outputs
            assert got.token_ids == greedy_of(tuple(prompt), limit)
            assert len(prompt) + len(got.token_ids) == limit and got.finish_reason == "length"
    again = generate(engine, early, params_of_request(max_tokens=k + 5))
    assert tokens_of(again) == tokens_of(first)


def test_f1_neighbours_of_a_full_row_are_untouched():
    """One row runs into its end while others, longer or shorter, decode on beside it."""
    engine = real_engine("pard", 12)
    limit = engine.plan.max_model_len
    prompts = [prompt_of(limit - 2, seed=6), prompt_of(40, seed=6), prompt_of(3, seed=6)]
    outputs = generate(engine, prompts, params_of_request(max_tokens=None))
    assert tokens_of(outputs) == expected_of(prompts, limit, limit)


# -- E: log-probabilities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "k"), [("pard", 3), ("draft_model", 3)])
def test_e1_logprobs_are_the_teacher_forced_ones(method, k):
    """Of greedy and of sampled tokens, with the ranks, whatever else is asked for in the same batch."""
    engine = real_engine(method, k)
    asked: list[dict[str, Any]] = [
        {"logprobs": 5},
        {"logprobs": 20, "temperature": 1.0, "seed": 1},
        {"logprobs": 0, "temperature": 0.7, "top_k": 5, "seed": 2},
        {"temperature": 1.3, "seed": 3},
        {"logprobs": 1, "min_tokens": 9, "stop_token_ids": list(range(0, 30))},
    ]
    prompts = [prompt_of(n, seed=7) for n in (9, 1, 30, 4, 6)]
    outputs = generate(engine, prompts, [params_of_request(**({"max_tokens": 17} | keys)) for keys in asked])
    for prompt, output, keys in zip(prompts, outputs, asked, strict=True):
        (got,) = output.outputs
        if "logprobs" not in keys:
            assert got.logprobs is None and got.cumulative_logprob is None
            continue
        rows = LOGITS(prompt + got.token_ids)[len(prompt) - 1 : -1].astype(np.float64)
        logprobs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        assert len(got.logprobs) == len(got.token_ids)
        for token, entry, row in zip(got.token_ids, got.logprobs, logprobs, strict=True):
            order = np.argsort(-row, kind="stable").tolist()
            assert list(entry) == list(dict.fromkeys([token, *order[: keys["logprobs"]]]))
            for candidate, value in entry.items():
                assert value.logprob == pytest.approx(row[candidate], abs=1e-4)
                assert value.rank == order.index(candidate) + 1
        assert got.cumulative_logprob == pytest.approx(sum(logprobs[np.arange(len(rows)), got.token_ids]), abs=1e-3)


# -- C, D: sampling, seeds, batches -------------------------------------------------------------------------------

# Two closed halves of a vocabulary of 16: a request stays in the half that its prompt lies in, and there every token
# is drawn from one known distribution. The drafts' distributions are others, and differ between the halves.
HALF = 8
_RNG = np.random.default_rng(0)
TARGETS, DRAFTED = _RNG.dirichlet(np.full(HALF, 2.0), 2), _RNG.dirichlet(np.full(HALF, 2.0), (2, 3))


@functools.cache
def sampling_engine() -> ScriptedEngine:
    engine = ScriptedEngine(
        3, steps_per_dispatch=2, sampled=True, max_model_len=1900, vocab_size=2 * HALF, eos_token_ids=()
    )
    logits, probs = np.full((2 * HALF, 2 * HALF), -np.inf), np.zeros((2 * HALF, 3, 2 * HALF))
    for half in range(2):
        here = slice(half * HALF, (half + 1) * HALF)
        logits[here, here] = np.log(TARGETS[half])
        probs[here, :, here] = DRAFTED[half]
    engine.play(np.maximum(logits, -1e4), probs)
    return engine


def drawn(**keys: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": 24} | keys))


def test_c4_the_drafts_probabilities_stay_with_their_row():
    """Requests with other drafts come and go beside a long one; its tokens still follow the target."""
    engine = sampling_engine()
    engine.acceptance.reset()
    others = {f"{half}-{i}": ([half * HALF], drawn(max_tokens=5 + 7 * (i % 9))) for i in range(40) for half in (1, 0)}
    submit(engine, {"long": ([0], drawn(max_tokens=1800, seed=1))} | others)
    outputs = drain(engine)
    tokens = {name: np.asarray(output.outputs[0].token_ids) for name, output in outputs.items()}
    assert len(tokens["long"]) == 1800
    assert_follows(tokens["long"], TARGETS[0], "the long request")
    upper = np.concatenate([t for name, t in tokens.items() if name.startswith("1-")]) - HALF
    assert_follows(upper, TARGETS[1], "the others")
    # Independent draws, too: successive pairs.
    pairs = tokens["long"][:-1:2] * HALF + tokens["long"][1::2]
    assert_follows(pairs, np.outer(TARGETS[0], TARGETS[0]).ravel(), "pairs")
    assert 0.3 < engine.acceptance.draft_acceptance_rate < 0.9


def test_d1_a_seed_decides():
    engine = sampling_engine()
    outputs = tokens_of(generate(engine, [[0, 1]] * 5, [drawn(seed=s) for s in (5, 5, 6, 5 + 2**32, -3)]))
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs}) == 4
    assert tokens_of(generate(engine, [[0, 1]], drawn(seed=5)))[0] == outputs[0]


def test_d2_a_seeded_request_is_alone_in_any_batch():
    engine = sampling_engine()
    alone = tokens_of(generate(engine, [[3, 2, 1]], drawn(seed=9)))[0]
    for place in (0, 3, 7):
        params = [drawn(seed=9) if i == place else drawn(max_tokens=3 + i) for i in range(8)]
        prompts = [[3, 2, 1] if i == place else [8 + i % 8] * (1 + 5 * i) for i in range(8)]
        assert tokens_of(generate(engine, prompts, params))[place] == alone


def test_d4_unseeded_requests_differ():
    engine = sampling_engine()
    outputs = tokens_of(generate(engine, [[0]] * 8, drawn()))
    assert len({tuple(tokens) for tokens in outputs}) == 8
    assert not {tuple(t) for t in outputs} & {tuple(t) for t in tokens_of(generate(engine, [[0]] * 8, drawn()))}


def test_the_engines_seed_is_the_base_of_all_others():
    def seeds(seed: int | None) -> list[int]:
        engine = ScriptedEngine(1, num_rows=1, seed=seed, vocab_size=2 * HALF, eos_token_ids=())
        submit(engine, {str(i): ([0], drawn()) for i in range(3)})
        return [request.seed for request in engine._waiting]

    assert seeds(1) == seeds(1) != seeds(2)
    assert seeds(None) != seeds(None)


def test_c6_a_greedy_row_is_greedy_beside_sampled_ones():
    engine = sampling_engine()
    alone = tokens_of(generate(engine, [[0], [8]], params_of_request(max_tokens=24)))
    assert alone == [[int(TARGETS[0].argmax())] * 24, [HALF + int(TARGETS[1].argmax())] * 24]
    mixed = [params_of_request(max_tokens=24), drawn(max_tokens=15)] * 10
    outputs = tokens_of(generate(engine, [[0], [8]] * 10, mixed))
    assert outputs[::2] == [alone[0]] * 10
    assert len({tuple(tokens) for tokens in outputs[1::2]}) == 10


def test_filters_hold_for_every_token_of_a_block():
    engine = sampling_engine()
    best = np.argsort(-TARGETS[0])
    nucleus = best[: np.searchsorted(np.cumsum(TARGETS[0][best]), 0.6) + 1]
    outputs = tokens_of(generate(engine, [[0]] * 3, [drawn(max_tokens=300, **keys) for keys in (
        {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5})]))  # fmt: skip
    assert set(outputs[0]) == set(best[:2].tolist())
    assert set(outputs[1]) == set(nucleus.tolist())
    assert set(outputs[2]) == set(np.flatnonzero(TARGETS[0] >= 0.5 * TARGETS[0].max()).tolist())


@pytest.mark.parametrize(
    ("name", "value"),
    [("presence_penalty", 1.0), ("frequency_penalty", 0.5), ("repetition_penalty", 1.2), ("logit_bias", {1: 2})],
)
def test_c7_penalties_are_refused_and_never_ignored(name, value):
    with pytest.raises(ValueError, match=f"{name}.* is not supported"):
        drawn(**{name: value})
