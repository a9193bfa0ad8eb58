"""The whole loop of admission, prefill and speculative steps, driven as an engine drives it, against plain decoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.config import ModelConfig
from pard_jax.decoding.drafters import Drafter, NgramDrafter, NoDrafter, PardDrafter, SequentialDrafter
from pard_jax.decoding.step import Programs
from tests.helpers.blocks import settings
from tests.helpers.loop import Loop, Request
from tests.helpers.models import (
    LLAMA3_SCALING,
    full_forward,
    hf_config,
    hf_model,
    model_config,
    params_of,
    random_params,
    tiny_pair,
)
from tests.helpers.reference import greedy, ngram_drafts, pard_drafts, sequential_drafts, speculate
from tests.helpers.statistics import assert_follows

CONFIG = model_config("qwen3", num_hidden_layers=1, vocab_size=16, head_dim=8)
TARGET = random_params(CONFIG, 0)
V, MASK, CHUNK, MAX_LEN, ROWS = 16, 15, 8, 40, 3


def near(params: Any, scale: float, seed: int = 7) -> Any:
    """A draft that agrees with ``params`` now and then."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, scale, x.shape), x.dtype), params)


# One structure for all drafts: whichever weights a test gives it, a drafter's programs are compiled once.
DRAFTS = {"random": random_params(CONFIG, 1), "near": near(TARGET, 0.04), "target": TARGET}
LOGITS = full_forward(CONFIG, TARGET, 64)


def drafter_of(kind: str, k: int, **overrides: Any) -> Drafter:
    model = {"config": CONFIG, "target_vocab_size": V, "max_model_len": 512} | overrides
    match kind:
        case "none":
            return NoDrafter()
        case "ngram":
            return NgramDrafter(num_speculative_tokens=k, min_n=1, max_n=3)
        case "pard":
            return PardDrafter(num_speculative_tokens=k, mask_token_id=MASK, **model)
        case _:
            return SequentialDrafter(num_speculative_tokens=k, **model)


def proposer(kind: str, k: int, draft: str, size: int = 64):
    """The same drafter as the reference has it."""
    logits = full_forward(CONFIG, DRAFTS[draft], size)
    match kind:
        case "none":
            return lambda context: []
        case "ngram":
            return lambda context: ngram_drafts(context, k, 1, 3)
        case "pard":
            return lambda context: pard_drafts(logits, context, k, MASK)
        case _:
            return lambda context: sequential_drafts(logits, context, k)


def request(prompt: list[int], max_length: int = MAX_LEN, **settings: Any) -> Request:
    return Request(prompt, max_length, **settings)


def loop_of(programs: Programs, draft: str = "near", **options: Any) -> Loop:
    return Loop(programs, {"target": TARGET, "draft": DRAFTS[draft]}, max_len=MAX_LEN, rows=ROWS, **options)


@functools.cache
def programs_of(kind: str, k: int, max_steps: int = 1) -> Programs:
    return Programs(CONFIG, drafter_of(kind, k), chunk_size=CHUNK, max_steps=max_steps)


def prompt_of(length: int, seed: int = 3, vocab: int = V) -> list[int]:
    return np.random.default_rng(seed + length).integers(0, vocab, length).tolist()


@functools.cache
def greedy_of(prompt: tuple[int, ...], max_length: int) -> list[int]:
    return greedy(LOGITS, prompt, max_length)


# -- lossless -----------------------------------------------------------------------------------------------------

SWEEP = [
    ("none", 0),
    *[("pard", k) for k in range(1, 13)],
    *[("ngram", k) for k in (1, 4)],
    *[("sequential", k) for k in (1, 2, 3, 5, 12)],
]
SLOW_SWEEP = [(kind, k) for kind in ("ngram", "sequential") for k in range(1, 13) if (kind, k) not in SWEEP]


@pytest.mark.parametrize(("kind", "k"), [*SWEEP, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_SWEEP)])
def test_greedy_output_is_the_targets_own(kind, k):
    """Token for token, whatever the draft says, up to the very last slot, in rows that come and go."""
    lengths = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1]
    lengths += [MAX_LEN - k - 2, MAX_LEN - 2, MAX_LEN - 1]
    requests = [request(prompt_of(n)) for n in lengths]
    # Some rows end before the others.
    requests += [request(prompt_of(5), max_length=m) for m in (6, 7, 5 + max(k, 1), 6 + k)]
    served = {"near": requests}
    if kind in ("pard", "sequential"):
        served |= {"random": requests[:2], "target": requests[4:6]}
    accepted = 0
    for draft, some in served.items():
        runs = loop_of(programs_of(kind, k), draft).serve(some)
        assert [run.tokens for run in runs] == [greedy_of(tuple(r.prompt), r.max_length) for r in some]
        accepted += sum(sum(run.accepted) for run in runs)
    assert accepted > 20 or kind == "none"


@pytest.mark.parametrize("draft", ["random", "near"])
@pytest.mark.parametrize(("kind", "k"), [("none", 0), ("ngram", 4), ("pard", 1), ("pard", 4), ("sequential", 3)])
def test_every_step_is_the_references(kind, k, draft):
    """What was drafted, accepted and kept in each step equals the reference loop, which has no cache at all."""
    requests = [request(prompt_of(n)) for n in (1, CHUNK + 1, 2 * CHUNK + 3)]
    propose = proposer(kind, k, draft)
    expected = [speculate(LOGITS, propose, r.prompt, r.max_length) for r in requests]
    assert loop_of(programs_of(kind, k), draft).serve(requests) == expected


def test_greedy_output_is_transformers_own():
    """Against the other implementation: the same tokens from its forward passes as from the speculative loop."""
    hf = hf_config("llama", num_hidden_layers=1, vocab_size=96, rope_scaling=LLAMA3_SCALING)
    model, config = hf_model(hf, seed=5), ModelConfig.from_hf(hf)
    torch = pytest.importorskip("torch")

    def logits(tokens: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([list(tokens)])).logits[0].numpy()

    params = params_of(model, config)
    drafter = PardDrafter(
        num_speculative_tokens=4, mask_token_id=95, config=config, target_vocab_size=96, max_model_len=512
    )
    programs = Programs(config, drafter, chunk_size=CHUNK, max_steps=1)
    requests = [request(prompt_of(n, vocab=96)) for n in (1, CHUNK + 1, 20)]
    loop = Loop(programs, {"target": params, "draft": near(params, 0.01)}, max_len=MAX_LEN)
    runs = loop.serve(requests)
    assert [run.tokens for run in runs] == [greedy(logits, r.prompt, MAX_LEN) for r in requests]
    assert sum(sum(run.accepted) for run in runs) > 10


@pytest.mark.parametrize(("kind", "k"), [("pard", 4), ("ngram", 4)])
def test_windows_shorter_than_the_cache(kind, k):
    """Rows cross from one compiled window into the next in the middle of their decoding and of their prefill."""
    requests = [request(prompt_of(n)) for n in (1, 15, 23, 24, 25, 33)]
    loop = loop_of(programs_of(kind, k), windows=(32,))
    for asked, run in zip(requests, loop.serve(requests), strict=True):
        assert run.tokens == greedy_of(tuple(asked.prompt), MAX_LEN)


@pytest.mark.parametrize("k", [1, 4, 12])
def test_pard_with_the_target_as_its_draft_always_gets_the_first_token(k):
    """The first draft is the target's own next token: a draft cache that is rewound wrongly would lose some."""
    requests = [request(prompt_of(n, seed)) for n in (1, 3, CHUNK + 1, 14) for seed in range(10)]
    runs = loop_of(programs_of("pard", k), "target").serve(requests)
    accepted = [a for run in runs for a in run.accepted]
    assert len(accepted) > 300 and min(accepted) >= 1
    if k > 1:
        # After rejections, too, and after blocks of several tokens.
        assert sum(a < k for a in accepted) > 100 and sum(a > 1 for a in accepted) > 10


@pytest.mark.parametrize("k", [1, 3, 12])
def test_sequential_with_the_target_as_its_draft_gets_every_token(k):
    requests = [request(prompt_of(n, seed)) for n in (1, 3, CHUNK + 1, 14) for seed in range(10)]
    runs = loop_of(programs_of("sequential", k), "target").serve(requests)
    accepted = [a for run in runs for a in run.accepted]
    assert len(accepted) > 100 and set(accepted) == {k}
    assert all(kept == k + 1 for run in runs for kept in run.kept[:-1])


def test_prompt_lengths_do_not_matter_to_a_neighbour():
    """A row's tokens and acceptance are those of the row alone, however long its neighbours are."""
    programs = programs_of("pard", 4)
    requests = [request(prompt_of(n)) for n in (2, 38, 17, 9, 30)]
    together = loop_of(programs).serve(requests)
    assert together == [loop_of(programs).serve([alone])[0] for alone in requests]


@pytest.mark.parametrize(("kind", "k"), [("pard", 4), ("sequential", 3)])
def test_a_row_that_is_being_prefilled_is_left_alone(kind, k):
    """A step computes every row, but what an inactive one has committed and cached stays as it is."""
    loop = loop_of(programs_of(kind, k))
    loop.admit(0, request(prompt_of(1)))
    loop.admit(1, request(prompt_of(2 * CHUNK)))
    loop.prefill(1, 0, 2 * CHUNK - 1)

    def row() -> list[Any]:
        state, draft = loop.state, loop.state.draft
        sizes = [np.asarray(x[1]) for x in (state.length, state.cached, state.active, draft.cached)]
        keys = [np.asarray(x[:, 1, :, :CHUNK]) for c in (state.cache, draft.cache) for x in (c.k, c.v)]
        return [*sizes, np.asarray(state.tokens[1, : 2 * CHUNK]), *keys]

    before = row()
    for _ in range(3):
        assert (loop.decode()[1].num_kept[0] > 0).tolist() == [True, False, False]
    jax.tree.map(np.testing.assert_array_equal, row(), before)
    assert [int(x) for x in before[:4]] == [2 * CHUNK, CHUNK, 0, CHUNK]


# -- ends of rows -------------------------------------------------------------------------------------------------


def test_stop_id_at_every_place_of_a_block():
    """All drafts are the target's own, so blocks are K+1 long and a stop id can stand at any place of one."""
    k = 3
    places = set()
    requests, expected = [], []
    for seed in range(8):
        prompt = prompt_of(4, seed)
        output = greedy_of(tuple(prompt), MAX_LEN)
        for token in set(output):
            at = output.index(token)
            places.add(at % (k + 1))
            requests.append(request(prompt, stop_ids=(token, 99)))
            expected.append(output[: at + 1])
    assert places == set(range(k + 1))
    runs = loop_of(programs_of("sequential", k), "target").serve(requests)
    assert [run.tokens for run in runs] == expected
    for run in runs:
        assert set(run.kept[:-1]) <= {k + 1} and run.kept[-1] == (len(run.tokens) - 1) % (k + 1) + 1
        assert set(run.accepted) == {k}  # the target agreed with all of them, kept or not


def test_min_length_forbids_stop_ids():
    """As if the stop ids had no probability until the row is long enough; then the first one ends it."""
    requests, expected = [], []
    for seed in range(3):
        prompt = prompt_of(CHUNK + 1, seed)
        stop_ids = tuple(dict.fromkeys(greedy_of(tuple(prompt), MAX_LEN)[:4]))
        for min_tokens in (0, 1, 3, 4, 5, 11):
            min_length = len(prompt) + min_tokens

            def masked(tokens, stop_ids=stop_ids, min_length=min_length):
                logits = LOGITS(tokens).copy()
                if len(tokens) < min_length:
                    logits[-1, list(stop_ids)] = -np.inf
                return logits

            requests.append(request(prompt, stop_ids=stop_ids, min_length=min_length))
            expected.append(greedy(masked, prompt, MAX_LEN, stop_ids))
    runs = loop_of(programs_of("sequential", 3)).serve(requests)
    assert [run.tokens for run in runs] == expected
    assert len({len(tokens) for tokens in expected}) > 4


def test_max_length_at_every_place_of_a_block():
    prompt = prompt_of(6)
    requests = [request(prompt, max_length=6 + n) for n in range(1, 10)]
    runs = loop_of(programs_of("sequential", 3), "target").serve(requests)
    assert [run.tokens for run in runs] == [greedy_of(tuple(prompt), r.max_length) for r in requests]


def test_keep_ends_a_row_and_leaves_the_others():
    loop = loop_of(programs_of("pard", 4))
    requests = [request(prompt_of(1, seed)) for seed in range(ROWS)]
    for row, asked in enumerate(requests):
        loop.admit(row, asked)
    _, first = loop.decode()
    assert (first.num_kept[0] > 0).all()
    _, second = loop.decode(keep=[True, False, True])
    assert (second.num_kept[0] > 0).tolist() == [True, False, True]
    assert (second.tokens[0, 1] == -1).all() and second.num_drafts[0].tolist() == [4, 0, 4]
    assert np.asarray(loop.state.active).tolist() == [True, False, True]
    # It stays ended without `keep`, and the row takes the next request in.
    _, third = loop.decode()
    assert third.num_kept[0, 1] == 0
    loop.admit(1, requests[0])
    outputs = [loop.decode()[1] for _ in range(3)]
    tokens = [int(t) for out in outputs for t in out.tokens[0, 1] if t >= 0]
    assert tokens == greedy_of(tuple(requests[0].prompt), MAX_LEN)[: len(tokens)] and len(tokens) >= 3


def test_several_steps_a_dispatch_equal_single_steps():
    requests = [request(prompt_of(n), max_length=m) for n, m in ((1, 40), (9, 12), (17, 40), (3, 22), (2, 40))]
    single = loop_of(programs_of("pard", 4)).serve(requests)
    several = programs_of("pard", 4, 4)
    for steps in (1, 3, 4):
        assert loop_of(several).serve(requests, steps=steps) == single
    decode: Any = several.decode
    assert decode._cache_size() == 1  # the number of steps is an argument


def test_a_dispatch_ends_when_no_row_is_left():
    loop = loop_of(programs_of("pard", 4, 4))
    assert loop.decode(steps=4)[0] == 0
    loop.admit(1, request(prompt_of(1), max_length=2))
    ran, output = loop.decode(steps=4)
    assert ran == 1 and output.num_kept[:, 1].tolist() == [1, 0, 0, 0]
    assert loop.decode(keep=[True] * ROWS, steps=4)[0] == 0


# -- sampling -----------------------------------------------------------------------------------------------------


def test_sampled_rows_hang_on_themselves_alone():
    """Probabilistic drafts in a mixed batch: seeds repeat, greedy rows stay greedy, neighbours do not matter."""
    programs = Programs(CONFIG, drafter_of("pard", 2, sampled=True), chunk_size=CHUNK, max_steps=1)
    sampled = [request(prompt_of(n), temperature=1.0, seed=n, top_k=k) for n, k in ((1, 0), (9, 5), (12, 0))]
    requests = [*sampled, request(prompt_of(4)), sampled[1], sampled[1]._replace(seed=77)]
    runs = loop_of(programs).serve(requests)
    assert runs[3].tokens == greedy_of(tuple(requests[3].prompt), MAX_LEN)
    assert runs[4] == runs[1] and runs[5] != runs[1]
    order = (5, 3, 2, 1, 0)
    assert loop_of(programs).serve([requests[i] for i in order]) == [runs[i] for i in order]
    assert sum(sum(run.accepted) for run in runs) > 10


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["pard", "sequential"])
def test_sampled_output_follows_the_target(kind, sampled):
    """The first three tokens, over many seeds, have the target's joint distribution although the draft's differs."""
    vocab, n, k, first, temperature, rows, rounds = 5, 3, 2, 2, 1.3, 1024, 5
    pair = tiny_pair(vocab_size=vocab, seed=3)
    model = {"config": pair.draft, "target_vocab_size": vocab, "max_model_len": 99, "num_speculative_tokens": k}
    model |= {"sampled": sampled}
    drafter = PardDrafter(**model, mask_token_id=vocab - 1) if kind == "pard" else SequentialDrafter(**model)
    programs = Programs(pair.target, drafter, chunk_size=CHUNK, max_steps=n)
    drawn, first_accepted = [], []
    for seeds in np.arange(rows * rounds).reshape(rounds, rows):
        loop = Loop(programs, pair.params, max_len=1 + n, rows=rows)
        loop.state = dataclasses.replace(
            loop.state,
            tokens=loop.state.tokens.at[:, 0].set(first),
            active=jnp.ones((rows,), bool),
            sampling=settings(np.full(rows, temperature), seeds),
            max_length=jnp.full((rows,), 1 + n, jnp.int32),
        )
        _, out = loop.decode(steps=n)
        first_accepted.append(out.num_accepted[0] > 0)
        by_row = out.tokens.swapaxes(0, 1).reshape(rows, -1)
        drawn.append(by_row[by_row >= 0].reshape(rows, n))

    target, draft = (
        full_forward(c, pair.params[name], 8) for c, name in ((pair.target, "target"), (pair.draft, "draft"))
    )

    def softmax(logits: Any, context: list[int]) -> np.ndarray:
        e = np.exp(logits(context)[-1].astype(np.float64) / temperature)
        return e / e.sum()

    joint = np.zeros((vocab,) * n)
    for a, p_a in enumerate(softmax(target, [first])):
        for b, p_b in enumerate(softmax(target, [first, a])):
            joint[a, b] = p_a * p_b * softmax(target, [first, a, b])
    ids = np.ravel_multi_index(tuple(np.concatenate(drawn).T), joint.shape)
    assert_follows(ids, joint.ravel(), f"{kind}, sampled={sampled}")
    # A draft is kept as often as can be: sampled from q, by the overlap of p and q; taken by argmax, by its p.
    p, q = softmax(target, [first]), softmax(draft, [first])
    rate = np.minimum(p, q).sum() if sampled else p[q.argmax()]
    assert np.mean(first_accepted) == pytest.approx(rate, abs=0.035)
    assert np.minimum(p, q).sum() > (p * q).sum() + 0.1 and 0.1 < rate < 0.9


# -- pairs that do not fit quite ----------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_vocab_size", [11, 24])
def test_vocabularies_of_different_size(draft_vocab_size):
    """A padded table on either side: greedy rows are the target's own, sampled ones stay in its vocabulary."""
    pair = tiny_pair(vocab_size=16, draft_vocab_size=draft_vocab_size, seed=1)
    drafter = PardDrafter(
        num_speculative_tokens=3, mask_token_id=draft_vocab_size - 1, config=pair.draft, target_vocab_size=16,
        max_model_len=99, sampled=True,
    )  # fmt: skip
    programs = Programs(pair.target, drafter, chunk_size=CHUNK, max_steps=1)
    requests = [request(prompt_of(n)) for n in (1, 9, 12)]
    requests += [request(prompt_of(n), temperature=2.0, seed=n) for n in (1, 9, 12)]
    runs = Loop(programs, pair.params, max_len=MAX_LEN).serve(requests)
    logits = full_forward(pair.target, pair.params["target"], 64)
    for asked, run in zip(requests[:3], runs, strict=False):
        assert run.tokens == greedy(logits, asked.prompt, MAX_LEN)
    sampled = {token for run in runs[3:] for token in run.tokens}
    assert sampled <= set(range(16)) and max(sampled) >= 11
    assert sum(sum(run.accepted) for run in runs) > 5


def test_a_draft_shorter_than_its_target():
    """Beyond the draft's own limit the rows go on without drafts, and the output is the same."""
    k, limit = 3, 24
    programs = Programs(CONFIG, drafter_of("pard", k, max_model_len=limit), chunk_size=CHUNK, max_steps=1)
    requests = [request(prompt_of(n)) for n in (1, 21, 22, 30)]
    for asked, run in zip(requests, loop_of(programs).serve(requests), strict=True):
        assert run.tokens == greedy_of(tuple(asked.prompt), MAX_LEN)
        lengths = len(asked.prompt) + np.cumsum([0, *run.kept[:-1]])
        assert run.drafted == [k if n + k <= limit else 0 for n in lengths]
        assert all(kept == 1 for kept, drafted in zip(run.kept, run.drafted, strict=True) if not drafted)


def test_synthetic_rates_accept_whatever_the_models_say():
    rates = (1.0, 1.0, 0.0)
    programs = Programs(CONFIG, drafter_of("pard", 3), chunk_size=CHUNK, max_steps=1, synthetic_rates=rates)
    requests = [request(prompt_of(5), max_length=MAX_LEN - 2), request(prompt_of(9), temperature=1.0, seed=5)]
    for run in loop_of(programs, "random").serve(requests):
        assert set(run.accepted) == {2} and set(run.kept[:-1]) == {3}


def test_logprobs_are_the_targets_raw_ones():
    """Of rows that ask, for every token of a block, whatever temperature it was drawn at."""
    loop = loop_of(programs_of("pard", 4), "target")
    asked = [request(prompt_of(1), num_logprobs=2), request(prompt_of(1, 9), temperature=1.5, num_logprobs=0)]
    asked.append(request(prompt_of(1)))
    for row, one in enumerate(asked):
        loop.admit(row, one)
    contexts = [list(one.prompt) for one in asked]
    for _ in range(4):
        _, out = loop.decode()
        for row, context in enumerate(contexts):
            for t in range(out.num_kept[0, row]):
                token = int(out.tokens[0, row, t])
                logits = LOGITS(context)[-1].astype(np.float64)
                exact = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
                context.append(token)
                top = np.argsort(-exact)[: max(0, asked[row].num_logprobs)]
                assert out.logprobs.top_ids[0, row, t].tolist() == [*top.tolist(), *[-1] * (20 - len(top))]
                if asked[row].num_logprobs < 0:
                    assert out.logprobs.rank[0, row, t] == 0 and out.logprobs.chosen[0, row, t] == -np.inf
                    continue
                assert out.logprobs.chosen[0, row, t] == pytest.approx(exact[token], abs=1e-3)
                assert out.logprobs.rank[0, row, t] == 1 + (exact > exact[token]).sum()
                np.testing.assert_allclose(out.logprobs.top_values[0, row, t, : len(top)], exact[top], atol=1e-3)
    assert max(map(len, contexts)) > 6
