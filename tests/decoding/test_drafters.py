"""Drafters: the incremental path, whatever was accepted before, says what a full pass over the context says."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.decoding.drafters import (
    DraftContext,
    Drafter,
    NgramDrafter,
    NoDrafter,
    PardDrafter,
    Proposal,
    SequentialDrafter,
)
from pard_jax.models import KVCache, bind
from tests.helpers.blocks import settings
from tests.helpers.models import full_forward, model_config, random_params
from tests.helpers.reference import ngram_drafts, pard_drafts, sequential_drafts

CONFIG = model_config("qwen3", vocab_size=64, head_dim=8)  # 2 layers
PARAMS = random_params(CONFIG, 0)
V, MASK, CHUNK, SLOTS, WINDOW, ROWS = CONFIG.vocab_size, 63, 8, 96, 88, 3
LOGITS = full_forward(CONFIG, PARAMS, SLOTS)
# Nothing to prefill, one token, whole chunks and one token on either side, several chunks.
PROMPT_LENGTHS = (1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1, 30)


def drafter_of(kind: str, k: int, **overrides: Any) -> PardDrafter | SequentialDrafter:
    given = {
        "num_speculative_tokens": k,
        "config": CONFIG,
        "target_vocab_size": V,
        "max_model_len": 512,
    } | overrides
    return PardDrafter(**given, mask_token_id=MASK) if kind == "pard" else SequentialDrafter(**given)


def reference(kind: str, context: list[int], k: int, logits=LOGITS) -> list[int]:
    return pard_drafts(logits, context, k, MASK) if kind == "pard" else sequential_drafts(logits, context, k)


@functools.cache
def prefill_program(drafter: Drafter):
    return jax.jit(functools.partial(drafter.prefill, window=WINDOW))


def context_of(tokens: np.ndarray, lengths: list[int], active: list[bool] | None = None) -> DraftContext:
    rows = len(lengths)
    return DraftContext(
        tokens=jnp.asarray(tokens, jnp.int32),
        length=jnp.asarray(lengths, jnp.int32),
        active=jnp.asarray([True] * rows if active is None else active),
        sampling=settings([0.0] * rows),
    )


class Batch:
    """A few rows that decode by script, each taking in the next prompt once it is through with one.

    Rows are prefilled a chunk at a time between the steps of the others, as an engine does it. A step keeps a random
    number of the drafts and adds a random token: for the drafter that is what acceptance looks like.
    """

    def __init__(self, drafter: Drafter, prompts: list[list[int]], max_length: int) -> None:
        self.drafter, self.waiting, self.max_length = drafter, list(prompts), max_length
        rng = np.random.default_rng(5)
        state = drafter.init(ROWS, SLOTS, jnp.float32)
        garbage = [jnp.asarray(rng.normal(scale=1e4, size=state.cache.k.shape), jnp.float32) for _ in range(2)]
        self.state = type(state)(KVCache(*garbage), state.cached)
        self.tokens = rng.integers(0, V, (ROWS, SLOTS))
        self.contexts: list[list[int]] = [[] for _ in range(ROWS)]
        self.filled = [0] * ROWS
        self.rng = rng
        self.propose = jax.jit(functools.partial(drafter.propose, window=WINDOW))
        # What a chunk does to the cache does not hang on K: one compile for all.
        self.prefill = prefill_program(drafter_of("sequential", 1))

    def run(self) -> Iterator[tuple[list[int], list[int]]]:
        """(context, drafts) of every row and step."""
        while self.waiting or any(self.contexts):
            for row in range(ROWS):
                self._feed(row)
            lengths = [max(1, len(c)) for c in self.contexts]
            active = [bool(c) and f >= len(c) - 1 for c, f in zip(self.contexts, self.filled, strict=True)]
            context = context_of(self.tokens, lengths, active)
            proposal, self.state = self.propose(PARAMS, self.state, context)
            for row in np.flatnonzero(active).tolist():
                drafts = np.asarray(proposal.tokens[row]).tolist()
                yield list(self.contexts[row]), drafts
                self._commit(row, drafts)

    def _feed(self, row: int) -> None:
        if not self.contexts[row] and self.waiting:
            self.contexts[row], self.filled[row] = self.waiting.pop(0), 0
            self.state = self.drafter.admit(self.state, jnp.int32(row))
            self.tokens[row] = self.rng.integers(0, V, SLOTS)
            self.tokens[row, : len(self.contexts[row])] = self.contexts[row]
        start, end = self.filled[row], len(self.contexts[row]) - 1
        if start < end:
            count = min(CHUNK, end - start)
            chunk = jnp.asarray(self.tokens[row : row + 1, start : start + CHUNK], jnp.int32)
            at = map(jnp.int32, (row, start, count))
            self.state = self.prefill(PARAMS, self.state, chunk, *at)
            self.filled[row] = start + count

    def _commit(self, row: int, drafts: list[int]) -> None:
        context = self.contexts[row]
        kept = 0 if -1 in drafts else self.rng.integers(0, len(drafts) + 1)
        new = [*drafts[:kept], int(self.rng.integers(0, V))][: self.max_length - len(context)]
        self.tokens[row, len(context) : len(context) + len(new)] = new
        self.contexts[row] = [] if len(context) + len(new) == self.max_length else context + new
        self.filled[row] = self.max_length


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, V, n).tolist() for n in lengths]


@pytest.mark.parametrize(
    ("kind", "k"), [("pard", 1), ("pard", 3), ("pard", 12), ("sequential", 1), ("sequential", 2), ("sequential", 5)]
)
def test_drafts_equal_a_full_pass_whatever_was_accepted(kind, k):
    seen = list(Batch(drafter_of(kind, k), random_prompts(*PROMPT_LENGTHS), max_length=60).run())
    wrong = [(context, drafts) for context, drafts in seen if drafts != reference(kind, context, k)]
    assert not wrong
    # Every prompt was drafted for, and drafts worth the name: they differ from step to step and within a step.
    assert set(PROMPT_LENGTHS) <= {len(context) for context, _ in seen}
    assert len({tuple(drafts) for _, drafts in seen}) > min(len(seen), V) / 2
    assert k == 1 or any(len(set(drafts)) > 1 for _, drafts in seen)


@pytest.mark.parametrize("kind", ["pard", "sequential"])
def test_only_committed_tokens_leave_keys(kind):
    """The cache up to a row's length equals that of one pass over its tokens: no mask, no rejected draft is in it."""
    drafter = drafter_of(kind, 4)
    batch = Batch(drafter, random_prompts(5), max_length=60)
    context = next(context for context, _ in batch.run() if len(context) > 40)
    cached = len(context) if kind == "pard" else len(context) + 3
    assert batch.state.cached[0] == cached
    whole = KVCache.zeros((CONFIG.num_layers, 1, CONFIG.num_kv_heads, len(context), CONFIG.head_dim), jnp.float32)
    run = jax.jit(lambda tokens, at: bind(CONFIG, PARAMS)(tokens, whole, at, window=len(context)).cache)
    cache = run(np.asarray([context], np.int32), np.zeros(1, np.int32))
    for mine, exact in ((batch.state.cache.k, cache.k), (batch.state.cache.v, cache.v)):
        np.testing.assert_allclose(mine[:, 0, :, : len(context)], exact[:, 0], atol=1e-4)


def test_inactive_rows_keep_their_place():
    drafter = drafter_of("pard", 3)
    tokens = np.random.default_rng(0).integers(0, V, (2, SLOTS))
    state = drafter.init(2, SLOTS, jnp.float32)
    _, state = jax.jit(functools.partial(drafter.propose, window=WINDOW))(
        PARAMS, state, context_of(tokens, [1, 1], [True, False])
    )
    assert state.cached.tolist() == [1, 0]


def forward_passes(function, *args: Any) -> int:
    """How often the jaxpr scans the draft's layers; inside another scan, as often as that one runs."""

    def count(jaxpr: Any) -> int:
        total = 0
        for equation in jaxpr.eqns:
            scans = equation.primitive.name == "scan"
            if scans and equation.params["length"] == CONFIG.num_layers:
                total += 1
                continue
            times = equation.params["length"] if scans else 1
            for value in equation.params.values():
                for item in value if isinstance(value, (tuple, list)) else [value]:
                    inner = getattr(item, "jaxpr", item)
                    total += times * count(inner) if hasattr(inner, "eqns") else 0
        return total

    return count(jax.make_jaxpr(function)(*args).jaxpr)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4, 12])
def test_pard_drafts_in_one_forward_pass(k, sampled):
    """And a sequential draft in K, so the count can tell the two apart."""
    context = context_of(np.zeros((2, SLOTS)), [1, 5])
    for kind, passes in (("pard", 1), ("sequential", k)):
        drafter = drafter_of(kind, k, sampled=sampled)
        state = drafter.init(2, SLOTS, jnp.float32)
        propose = functools.partial(drafter.propose, window=WINDOW)
        # A scan over the steps may not be mistaken for one over the layers.
        assert k - 1 != CONFIG.num_layers
        assert forward_passes(propose, PARAMS, state, context) == passes


@pytest.mark.parametrize("kind", ["pard", "sequential"])
def test_no_drafts_beyond_the_drafts_own_limit(kind):
    k, limit = 3, 50
    seen = list(Batch(drafter_of(kind, k, max_model_len=limit), random_prompts(30, 47, 48), max_length=60).run())
    for context, drafts in seen:
        assert drafts == (reference(kind, context, k) if len(context) + k <= limit else [-1] * k)
    drafted = {len(context) for context, drafts in seen if drafts[0] >= 0}
    assert max(drafted) == 47 and {len(context) for context, _ in seen} - drafted == set(range(48, 60))


@pytest.mark.parametrize(("kind", "sampled"), [("pard", False), ("pard", True), ("sequential", True)])
def test_ids_that_the_target_lacks_are_never_proposed(kind, sampled):
    """The draft's table is longer than the target's (padding), and its favourites lie in the tail."""
    k, known = 4, 40
    head = PARAMS["lm_head"] * jnp.where(jnp.arange(V)[:, None] < known, 1.0, 9.0)
    params = PARAMS | {"lm_head": head}
    drafter = drafter_of(kind, k, target_vocab_size=known, sampled=sampled)
    tokens = np.random.default_rng(2).integers(0, known, (8, SLOTS))
    context = context_of(tokens, [1] * 8)
    context = DraftContext(context.tokens, context.length, context.active, settings([2.0] * 8))
    proposal, _ = jax.jit(functools.partial(drafter.propose, window=WINDOW))(
        params, drafter.init(8, SLOTS, jnp.float32), context
    )
    logits = full_forward(CONFIG, params, 8)
    assert max(logits([int(t)])[-1].argmax() for t in tokens[:, 0]) >= known
    drafts = np.asarray(proposal.tokens)
    assert drafts.shape == (8, k) and (drafts >= 0).all() and (drafts < known).all()
    if sampled:
        assert proposal.probs is not None and proposal.probs.shape == (8, k, V)
        np.testing.assert_array_equal(proposal.probs[:, :, known:], 0.0)
        np.testing.assert_allclose(proposal.probs.sum(-1), 1.0, atol=1e-5)
    else:
        assert proposal.probs is None
        np.testing.assert_array_equal(drafts[:, 0], [logits([int(t)])[-1, :known].argmax() for t in tokens[:, 0]])


@pytest.mark.parametrize("kind", ["pard", "sequential"])
def test_ids_that_the_draft_lacks_can_be_committed(kind):
    """The target's table is longer: what it commits from its tail reads as the draft's last row."""
    k = 3
    drafter = drafter_of(kind, k, target_vocab_size=V + 32)
    tokens = np.random.default_rng(3).integers(0, V, (2, SLOTS))
    tokens[:, 3:6] = [V, V + 5, V + 31]
    state = drafter.init(2, SLOTS, jnp.float32)
    for row in range(2):
        chunk, at = jnp.asarray(tokens[row : row + 1, :CHUNK], jnp.int32), map(jnp.int32, (row, 0, 4 + row))
        state = prefill_program(drafter_of("sequential", 1))(PARAMS, state, chunk, *at)
    context = context_of(tokens, [5, 6])
    proposal, _ = jax.jit(functools.partial(drafter.propose, window=WINDOW))(PARAMS, state, context)
    clipped = np.minimum(tokens, V - 1).tolist()
    for row, n in enumerate((5, 6)):
        assert proposal.tokens[row].tolist() == reference(kind, clipped[row][:n], k)


@pytest.mark.parametrize("kind", ["pard", "sequential"])
def test_sampled_drafts_come_with_what_they_were_drawn_from(kind):
    """probs are the draft's warped distributions in the drafts' own context; a row's drafts hang on itself alone."""
    k, rows = 3, 64
    prompt = random_prompts(CHUNK)[0]
    tokens = np.zeros((rows, SLOTS), np.int32)
    tokens[:, :CHUNK] = prompt
    temperature = np.full(rows, 1.5)
    temperature[0] = 0.0  # one greedy row among the sampled
    top_k = np.where(np.arange(rows) % 2 == 0, 0, 4)
    sampling = settings(temperature, top_k=top_k)
    drafter = drafter_of(kind, k, sampled=True)
    context = context_of(tokens, [1] * rows)
    propose = jax.jit(functools.partial(drafter.propose, window=WINDOW))
    context = DraftContext(context.tokens, context.length, context.active, sampling)
    proposal, _ = propose(PARAMS, drafter.init(rows, SLOTS, jnp.float32), context)
    drafts, probs = np.asarray(proposal.tokens), np.asarray(proposal.probs)

    for row in range(rows):
        real = prompt[:1] if kind == "pard" else prompt[:1] + drafts[row, : k - 1].tolist()
        logits = LOGITS([*real, *[MASK] * (k - 1)] if kind == "pard" else real).astype(np.float64)
        if temperature[row]:
            logits = logits / temperature[row]
            if top_k[row]:
                logits[logits < np.sort(logits, -1)[:, -4:-3]] = -np.inf
            exact = np.exp(logits - logits.max(-1, keepdims=True))
            exact /= exact.sum(-1, keepdims=True)
            np.testing.assert_allclose(probs[row], exact, atol=1e-5)
            assert (np.take_along_axis(exact, drafts[row][:, None], axis=1) > 0).all()
        else:
            assert drafts[row].tolist() == logits.argmax(-1).tolist()
    # Other seeds draw other tokens, and the three places of a row have noise of their own.
    assert len({tuple(d) for d in drafts.tolist()}) > rows / 2
    assert len(set(drafts[2::2, 0])) > 5

    shuffled = np.random.default_rng(4).permutation(rows)
    sampling = settings(temperature[shuffled], np.arange(rows)[shuffled], top_k=top_k[shuffled])
    context = DraftContext(context.tokens, context.length, context.active, sampling)
    again, _ = propose(PARAMS, drafter.init(rows, SLOTS, jnp.float32), context)
    np.testing.assert_array_equal(again.tokens, drafts[shuffled])


NGRAM_VECTORS = [  # vLLM tests/v1/spec_decode/test_ngram.py
    ([1, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
    ([1, 3, 6, 2, 3, 4, 1, 2, 3], 1, 1, 2, [6, 2]),
    ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 3, 4, 2, [1, 2]),
    ([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], 3, 3, 2, [100, 1]),
    ([1, 2, 3, 4, 5], 1, 3, 2, []),
    ([7], 1, 3, 2, []),
    ([7, 7], 1, 3, 4, [7]),  # what follows runs into the end of the text
]


def ngram_proposals(texts: list[list[int]], min_n: int, max_n: int, k: int, width: int) -> list[list[int]]:
    drafter = NgramDrafter(num_speculative_tokens=k, min_n=min_n, max_n=max_n)
    # Behind the text lies what looks like a perfect continuation of a match.
    tokens = np.stack([np.resize(text, width) for text in texts])
    context = context_of(tokens, [len(text) for text in texts])
    proposal, state = jax.jit(functools.partial(drafter.propose, window=width))(None, (), context)
    assert proposal.probs is None and state == ()
    return np.asarray(proposal.tokens).tolist()


@pytest.mark.parametrize(("text", "min_n", "max_n", "k", "expected"), NGRAM_VECTORS)
def test_ngram_vectors_of_vllm(text, min_n, max_n, k, expected):
    assert ngram_proposals([text], min_n, max_n, k, 20) == [expected + [-1] * (k - len(expected))]
    assert ngram_drafts(text, k, min_n, max_n) == expected


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 4), (2, 3), (5, 5)])
def test_ngram_equals_the_reference(min_n, max_n):
    rng = np.random.default_rng(6)
    k, width = 4, 48
    texts = [rng.integers(0, rng.integers(1, 6), rng.integers(1, width + 1)).tolist() for _ in range(400)]
    expected = [ngram_drafts(text, k, min_n, max_n) for text in texts]
    assert ngram_proposals(texts, min_n, max_n, k, width) == [e + [-1] * (k - len(e)) for e in expected]
    assert sum(not e for e in expected) > 10 and sum(len(e) == k for e in expected) > 50


def test_ngram_looks_at_the_window_alone():
    """The cost follows the window; a window that holds the text gives the drafts of a longer one."""
    text = [1, 2, 3, 4, 1, 2]
    drafter = NgramDrafter(num_speculative_tokens=2, min_n=2, max_n=2)
    context = context_of(np.resize(text, (1, 32)), [len(text)])
    for window in (8, 32):
        assert drafter.propose(None, (), context, window=window)[0].tokens.tolist() == [[3, 4]]


def test_no_drafter_proposes_nothing():
    proposal, state = NoDrafter().propose(None, (), context_of(np.zeros((3, 8)), [1, 2, 3]), window=8)
    assert isinstance(proposal, Proposal)
    assert proposal.tokens.shape == (3, 0) and proposal.probs is None and state == ()
