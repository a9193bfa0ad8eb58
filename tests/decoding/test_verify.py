"""Rejection sampling case by case: vLLM's tables, a plain NumPy walk, the edges, and rows that know nothing of others.

``test_verify_statistics.py`` judges the distribution.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.decoding.sampling import Role, mask_below_min_tokens, role_keys, warp_logits
from pard_jax.decoding.verify import Verified, fit_vocabulary, verify
from tests.helpers.blocks import POSITION, at, drafted, repeat, settings, softmax
from tests.helpers.jaxprs import COSTLY, SORTING, primitives

check, warp, mask = jax.jit(verify), jax.jit(warp_logits), jax.jit(mask_below_min_tokens)


def wanting(ids: list[list[int]], vocab: int) -> jax.Array:
    """Logits that are 100 at the wanted id of each column and -100 elsewhere: vLLM's greedy helper."""
    return jnp.where(jax.nn.one_hot(jnp.array(ids), vocab) > 0, 100.0, -100.0)


def padded(ids: list[int], width: int) -> list[int]:
    return ids + [-1] * (width - len(ids))


# ---- vLLM's tables: tests/v1/sample/test_rejection_sampler.py ----

# Drafts, what the target wants (the bonus last), what is emitted.
CASES = {
    "perfect match": ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
    "early mismatch": ([1, 2, 3], [1, 5, 3, 4], [1, 5]),
    "multiple sequences, first": ([1, 2], [1, 2, 5], [1, 2, 5]),
    "multiple sequences, second": ([3], [3, 4], [3, 4]),
    "single token": ([1], [1, 2], [1, 2]),
    "empty": ([], [5], [5]),
    "multiple mismatches, first": ([1, 2, 3], [1, 2, 7, 6], [1, 2, 7]),
    "multiple mismatches, second": ([4, 5, 6], [4, 8, 6, 9], [4, 8]),
    "parametrized 1": ([1, 2], [1, 2, 3], [1, 2, 3]),
    "parametrized 2": ([1], [2, 3], [2]),
    "parametrized 3, first": ([1, 2], [1, 5, 6], [1, 5]),
    "parametrized 3, second": ([3, 4], [3, 4, 7], [3, 4, 7]),
    "placeholder": ([-1], [7, 3], [7]),
    "placeholder blocks": ([1, -1, 3], [1, 2, 3, 4], [1, 2]),
    "id beyond the vocabulary": ([1, 12, 3], [1, 2, 3, 4], [1, 2]),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "random"])
@pytest.mark.parametrize("case", CASES)
def test_table(case: str, temperature: float) -> None:
    """In a batch of all cases, shorter blocks padded. At temperature 1 the wanted ids are certain: the same outcome."""
    drafts = jnp.array([padded(drafts, 3) for drafts, _, _ in CASES.values()], jnp.int32)
    logits = wanting([padded(wanted, 4) for _, wanted, _ in CASES.values()], 12)
    out = check(logits, drafts, None, settings([temperature] * len(CASES)), at(len(CASES)))
    row, (_, _, expected) = list(CASES).index(case), CASES[case]
    assert np.asarray(out.tokens)[row].tolist() == padded(expected, 4)
    assert (int(out.num_emitted[row]), int(out.num_accepted[row])) == (len(expected), len(expected) - 1)


@pytest.mark.parametrize("case", ["empty", "single token", "parametrized 1"])
def test_table_at_its_own_width(case: str) -> None:
    drafts, wanted, expected = CASES[case]
    tokens = jnp.array([drafts], jnp.int32).reshape(1, -1)
    out = check(wanting([wanted], 12), tokens, None, settings([0.0]), at(1))
    assert np.asarray(out.tokens).tolist() == [padded(expected, len(wanted))]


@pytest.mark.parametrize(("depth", "batch"), [(1, 1), (3, 4), (5, 8)])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_deterministic_when_seeded(depth: int, batch: int, fraction: float) -> None:
    """Seeded rows are the same in 20 repetitions, though the others' seeds and drafts change every time."""
    rng = np.random.default_rng(depth)
    logits, fixed = repeat(rng.normal(0, 1, (depth + 1, 1000)), batch), rng.integers(0, 1000, (batch, depth))
    seeded, seen = np.arange(batch) < max(1, fraction * batch), []
    for _ in range(20):
        drafts = np.where(seeded[:, None], fixed, rng.integers(0, 1000, (batch, depth)))
        seeds = np.where(seeded, np.arange(batch), rng.integers(0, 2**32, batch))
        out = check(logits, jnp.asarray(drafts, jnp.int32), None, settings([1.0] * batch, seeds), at(batch))
        seen.append(np.asarray(out.tokens))
    assert all((tokens[seeded] == seen[0][seeded]).all() for tokens in seen)
    assert seeded.all() or not all((tokens == seen[0]).all() for tokens in seen)


@pytest.mark.parametrize("top_k", [1, 5, 99])
def test_top_k(top_k: int) -> None:
    rng = np.random.default_rng(top_k)
    logits = np.zeros((100, 4, 100), np.float32)
    allowed = np.argsort(rng.random(logits.shape), axis=-1)[:, :, :top_k]
    np.put_along_axis(logits, allowed, 0.1, axis=-1)
    assert_emitted_are_allowed(logits, allowed, top_k=top_k)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_top_p(top_p: float) -> None:
    logits = np.random.default_rng(1).normal(0, 1, (100, 4, 100)).astype(np.float32)
    order = np.argsort(logits, axis=-1)
    masked = np.cumsum(np.take_along_axis(softmax(logits), order, axis=-1), axis=-1) <= 1 - top_p
    masked[:, :, -1] = False
    assert_emitted_are_allowed(logits, np.where(masked, -1, order), top_p=top_p)


def assert_emitted_are_allowed(logits: np.ndarray, allowed: np.ndarray, **filters: Any) -> None:
    """100 blocks of 3 drafts drawn from random distributions; ``allowed`` lists each column's ids."""
    draft_logits = np.random.default_rng(2).normal(0, 1, (100, 3, 100)).astype(np.float32)
    state = settings([1.0] * 100, **filters)
    drafts = drafted(jnp.asarray(draft_logits), state.seed, at(100))
    probs = jnp.asarray(softmax(draft_logits), jnp.float32)
    tokens = np.asarray(check(warp(jnp.asarray(logits), state), drafts, probs, state, at(100)).tokens)
    assert (tokens[:, 0] >= 0).all()
    assert all(token in allowed[b, k] for b, row in enumerate(tokens) for k, token in enumerate(row) if token >= 0)


# ---- a plain walk over one row, in float64, with the same random numbers ----


@jax.jit
def uniform(seed: jax.Array, position: jax.Array, role: jax.Array) -> jax.Array:
    return jax.random.uniform(role_keys(seed[None], position[None], role[None])[0])


@partial(jax.jit, static_argnames="vocab")
def bits(seed: jax.Array, position: jax.Array, role: jax.Array, vocab: int) -> jax.Array:
    return jax.random.bits(role_keys(seed[None], position[None], role[None])[0], (vocab,), jnp.uint32)


def walk(
    logits: np.ndarray, drafts: np.ndarray, probs: np.ndarray | None, temperature: float, seed: int, position: int
) -> list[int]:
    """One row by the book: what ``verify`` must emit."""
    vocab, emitted = logits.shape[-1], []

    def key(k: int, role: Role) -> tuple[Any, ...]:
        return np.uint32(seed), np.int32(position + k), np.int32(role)

    for k in range(len(drafts) + 1):
        draft = int(drafts[k]) if k < len(drafts) else -1
        p, q = softmax(logits[k]), np.zeros(vocab)
        if draft >= 0:
            q = np.eye(vocab)[draft] if probs is None else probs[k].astype(np.float64)
        if temperature == 0:
            accepted = draft == logits[k].argmax()
        else:
            accepted = draft >= 0 and float(uniform(*key(k, Role.ACCEPT))) < p[draft] / q[draft]
        if accepted:
            emitted.append(draft)
            continue
        if temperature == 0:
            return [*emitted, int(logits[k].argmax())]
        noise = np.asarray(bits(*key(k, Role.BONUS if draft < 0 else Role.RESIDUAL), vocab))
        exponentials = -np.log1p(-(noise.astype(np.float64) + 0.5) / 2**32)
        return [*emitted, int((np.maximum(p - q, 0) / exponentials).argmax())]
    raise AssertionError("the bonus column accepts nothing")


@pytest.mark.parametrize(
    ("batch", "vocab", "depth", "soft"),
    [(1, 100, 1, True), (100, 100, 3, False), (100, 100, 3, True), (30, 8193, 3, True)],
)
def test_equals_the_plain_walk(batch: int, vocab: int, depth: int, soft: bool) -> None:
    """Accepted, recovered and bonus tokens, row by row; greedy rows and placeholders among them."""
    rng = np.random.default_rng(batch + vocab + depth)
    logits = rng.normal(0, 2, (batch, depth + 1, vocab)).astype(np.float32)
    draft_logits = logits[:, :-1] + rng.normal(0, 1, (batch, depth, vocab)).astype(np.float32)
    probs = softmax(draft_logits).astype(np.float32)
    position, seeds = rng.integers(0, 10_000, batch), rng.integers(0, 2**32, batch)
    temperature = (np.arange(batch) % 4 != 3).astype(float)
    state, start = settings(temperature, seeds), jnp.asarray(position, jnp.int32)
    drafts = np.array(drafted(jnp.asarray(draft_logits), state.seed, start)) if soft else draft_logits.argmax(axis=-1)
    drafts[rng.random(drafts.shape) < 0.1] = -1
    q = jnp.asarray(probs) if soft else None
    tokens = np.asarray(check(jnp.asarray(logits), jnp.asarray(drafts, jnp.int32), q, state, start).tokens)
    for b in range(min(batch, 30)):
        row = walk(logits[b], drafts[b], probs[b] if soft else None, temperature[b], seeds[b], position[b])
        assert tokens[b].tolist() == padded(row, depth + 1)


# ---- edges ----


@pytest.mark.parametrize("vocab", [100, 8193, 10_000, 151_936])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_stay_in_the_vocabulary(vocab: int, temperature: float) -> None:
    """Nothing to draw from, or nothing but the head or the end: GHSA-8wr5-jm2h-8r4f was an id past the end."""
    logits = np.random.default_rng(0).normal(0, 1, (6, 2, vocab)).astype(np.float32)
    logits[0], logits[1] = np.nan, -np.inf
    logits[2, :, 50:] = -np.inf
    logits[3, 0, vocab // 2 :] = np.nan
    logits[5, 0, : vocab - 1] = -np.inf
    probs = softmax(np.nan_to_num(logits[:, :1], nan=0.0, neginf=-1e9)).astype(np.float32)
    probs[4, 0, 7] = 0  # a draft that q excludes is rejected, and p - q then leaves all but nothing
    drafts = jnp.array([[3], [3], [60], [3], [7], [2]], jnp.int32)
    out = check(jnp.asarray(logits), drafts, jnp.asarray(probs), settings([temperature] * 6), at(6))
    for row, emitted in zip(np.asarray(out.tokens), np.asarray(out.num_emitted), strict=True):
        assert ((row[:emitted] >= 0) & (row[:emitted] < vocab)).all()
    assert temperature == 0 or int(out.num_accepted[4]) == 0
    assert int(out.tokens[2, 0]) < 50 and int(out.tokens[5, 0]) == vocab - 1


def test_a_token_without_probability_is_never_kept() -> None:
    """u may be exactly 0: with this seed it is. ``p/q >= u`` would then keep a token that a filter has removed."""
    seed = 4923025
    assert float(uniform(np.uint32(seed), np.int32(POSITION), np.int32(Role.ACCEPT))) == 0
    logits = jnp.zeros((1, 2, 12)).at[:, :, 0].set(-jnp.inf)
    out = check(logits, jnp.zeros((1, 1), jnp.int32), None, settings([1.0], [seed]), at(1))
    assert int(out.num_accepted[0]) == 0 and int(out.tokens[0, 0]) > 0


def test_greedy_ties_go_to_the_first() -> None:
    logits = jnp.zeros((1, 3, 12)).at[0, 0, jnp.array([4, 6])].set(2.0).at[0, 1, jnp.array([3, 5])].set(2.0)
    out = check(logits, jnp.array([[4, 5]], jnp.int32), None, settings([0.0]), at(1))
    assert np.asarray(out.tokens).tolist() == [[4, 3, -1]]


def test_stop_ids_below_the_minimum_are_never_emitted() -> None:
    """The target wants id 0, the end, everywhere and the draft proposes it; it may come as token 8, not before."""
    batch = len(CASES)
    state, stops = settings(np.arange(batch) % 2), jnp.full((batch, 32), -1, jnp.int32).at[:, 0].set(0)
    end = jnp.zeros((batch, 4, 12)).at[:, :, 0].set(50.0)
    masked = mask(end, at(batch), at(batch, POSITION + 2), stops)
    tokens = np.asarray(check(masked, jnp.zeros((batch, 3), jnp.int32), None, state, at(batch)).tokens)
    assert (tokens[:, 0] > 0).all() and (tokens[:, 1:] == -1).all()
    masked = masked.at[:, 0, 3].set(90.0).at[:, 1, 2].set(90.0)  # the target says 3, 2, and then ends
    drafts = jnp.tile(jnp.array([[3, 2, 0]], jnp.int32), (batch, 1))
    assert (np.asarray(check(masked, drafts, None, state, at(batch)).tokens) == [3, 2, 0, 0]).all()


def test_width_must_fit() -> None:
    with pytest.raises(ValueError, match="target_logits has 3 columns; 3 drafts need 4"):
        verify(jnp.zeros((1, 3, 5)), jnp.zeros((1, 3), jnp.int32), None, settings([1.0]), at(1))


def test_fit_vocabulary_pads_and_cuts() -> None:
    probs = jnp.arange(6.0).reshape(1, 2, 3)
    assert np.asarray(fit_vocabulary(probs, 5)).tolist() == [[[0, 1, 2, 0, 0], [3, 4, 5, 0, 0]]]
    assert np.asarray(fit_vocabulary(probs, 2)).tolist() == [[[0, 1], [3, 4]]]
    assert np.asarray(fit_vocabulary(probs, 3)).tolist() == np.asarray(probs).tolist()


# ---- what a row yields depends on itself alone ----


def test_a_row_alone_and_in_any_batch_is_the_same() -> None:
    """Greedy, seeded and filtered rows together, in any order, equal their solo runs, from raw logits on."""
    rng = np.random.default_rng(3)
    batch, depth, vocab = 20, 3, 500
    logits = rng.normal(0, 2, (batch, depth + 1, vocab)).astype(np.float32)
    draft_logits = logits[:, :-1] + rng.normal(0, 1, (batch, depth, vocab)).astype(np.float32)
    filters = {"top_k": [0, 20], "top_p": [1.0, 0.9], "min_p": [0.0, 0.02]}
    filters = {name: rng.choice(values, batch) for name, values in filters.items()}
    state = settings([0.0, 1.0] * 10, rng.integers(0, 2**32, batch), **filters)
    position = jnp.asarray(rng.integers(0, 500, batch), jnp.int32)
    drafts = drafted(jnp.asarray(draft_logits), state.seed, position)
    probs = softmax(draft_logits).astype(np.float32)
    inputs = jax.tree.map(np.asarray, (logits, drafts, probs, state, position))

    def rows(index: np.ndarray) -> Verified:
        logits, drafts, probs, state, position = jax.tree.map(lambda a: jnp.asarray(a[index]), inputs)
        return jax.tree.map(np.asarray, check(warp(logits, state), drafts, probs, state, position))

    whole, order = rows(np.arange(batch)), rng.permutation(batch)
    for shuffled, original in zip(rows(order), whole, strict=True):
        np.testing.assert_array_equal(shuffled, original[order])
    for b in range(batch):
        for alone, original in zip(rows(np.array([b])), whole, strict=True):
            np.testing.assert_array_equal(alone[0], original[b])


def test_seeds_are_honoured() -> None:
    """The same seed twice gives the same block; eight requests with seeds of their own are not all equal."""
    logits, drafts = jnp.zeros((8, 6, 1000)), jnp.zeros((8, 5), jnp.int32)
    once, again = (np.asarray(check(logits, drafts, None, settings([1.0] * 8), at(8)).tokens) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert len({tuple(row) for row in once.tolist()}) == 8
    same = np.asarray(check(logits, drafts, None, settings([1.0] * 8, [5] * 8), at(8)).tokens)
    assert len({tuple(row) for row in same.tolist()}) == 1


def test_settings_compile_once() -> None:
    function = jax.jit(lambda *args: verify(*args))
    for temperature in ([0.0, 0.0], [0.0, 1.0], [0.3, 2.0]):
        function(jnp.zeros((2, 4, 12)), jnp.zeros((2, 3), jnp.int32), None, settings(temperature), at(2))
    assert function._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_nothing_is_sorted_and_greedy_pays_argmax_alone() -> None:
    for q in (None, jnp.full((2, 3, 64), 1 / 64)):
        args = (jnp.zeros((2, 4, 64)), jnp.zeros((2, 3), jnp.int32), q, settings([0.0, 1.0]), at(2))
        assert "random_bits" in primitives(verify, *args)
        assert not primitives(verify, *args) & SORTING
        assert not primitives(verify, *args, into_cond=False) & COSTLY
