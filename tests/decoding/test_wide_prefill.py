"""Prefill and admission of several rows in one call: what they do to the state, and that they copy none of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from pard_jax.decoding.drafters import Drafter, NoDrafter, PardDrafter, Proposal
from pard_jax.decoding.state import Row, init_state
from pard_jax.decoding.step import Programs
from tests.helpers.models import tiny_pair

PAIR = tiny_pair(vocab_size=32, num_layers=2)
CHUNK, SLOTS, ROWS = 4, 16, 5


def pard() -> PardDrafter:
    return PardDrafter(
        num_speculative_tokens=2, mask_token_id=31, config=PAIR.draft, target_vocab_size=32, max_model_len=SLOTS
    )


def rows_of(lengths: list[int], seed: int = 0) -> Row:
    """Requests of prompts of these lengths, all their settings different."""
    rng = np.random.default_rng(seed)
    n = len(lengths)
    tokens = rng.integers(1, 31, (n, SLOTS)).astype(np.int32)
    tokens[np.arange(SLOTS)[None, :] >= np.asarray(lengths)[:, None]] = 0
    return Row(
        tokens=tokens,
        length=np.asarray(lengths, np.int32),
        temperature=rng.random(n).astype(np.float32),
        top_k=rng.integers(0, 9, n).astype(np.int32),
        top_p=rng.random(n).astype(np.float32),
        min_p=rng.random(n).astype(np.float32),
        seed=rng.integers(0, 2**32, n).astype(np.uint32),
        stop_ids=rng.integers(-1, 31, (n, 32)).astype(np.int32),
        min_length=rng.integers(0, 9, n).astype(np.int32),
        max_length=rng.integers(9, SLOTS, n).astype(np.int32),
        num_logprobs=rng.integers(-1, 9, n).astype(np.int32),
    )


def garbage(drafter: Drafter, seed: int = 1) -> Any:
    """A state in which nothing is zero, so that every write shows."""
    rng = np.random.default_rng(seed)

    def draw(leaf: Array) -> Array:
        if leaf.dtype == jnp.bool_:
            return jnp.asarray(rng.random(leaf.shape) < 0.5)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(1, 9, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree.map(draw, init_state(PAIR.target, drafter, ROWS, SLOTS, jnp.float32))


def equal(one: Any, other: Any, atol: float = 0.0) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), one, other)


def test_admission_of_several_is_that_of_each():
    programs = Programs(PAIR.target, pard(), chunk_size=CHUNK, max_steps=1)
    rows = rows_of([1, 9, 5])
    one_by_one = garbage(programs.drafter)
    for i, index in enumerate((3, 0, 4)):
        one_by_one = programs.admit(one_by_one, np.int32(index), jax.tree.map(lambda x, i=i: x[i], rows))
    at_once = programs.admit(garbage(programs.drafter), np.asarray([3, 0, 4], np.int32), rows)
    equal(at_once, one_by_one)
    assert bool(at_once.active[3])  # a prompt of one token
    # Ids that are no row's leave the state as it was.
    nowhere = np.asarray([ROWS, ROWS + 1, ROWS + 2], np.int32)
    equal(programs.admit(garbage(programs.drafter), nowhere, rows), garbage(programs.drafter))


@pytest.mark.parametrize("kind", ["none", "pard"])
def test_a_chunk_of_several_rows_is_that_of_each(kind):
    """Rows in any order, each at a place of its own, with padding behind them; the other rows stay bit for bit."""
    drafter = NoDrafter() if kind == "none" else pard()
    programs = Programs(PAIR.target, drafter, chunk_size=CHUNK, max_steps=1)
    params = PAIR.params if kind == "pard" else {"target": PAIR.params["target"]}
    rows = rows_of([9, 5, 12])
    chunks = [(4, 0, 4), (0, 0, 4), (2, 8, 3)]  # row, start, count: more to come, the only one, the last one

    def admitted() -> Any:
        return programs.admit(garbage(drafter), np.asarray([4, 0, 2], np.int32), rows)

    expected, before = admitted(), admitted()
    for row, start, count in chunks:
        expected = programs.prefill(params, expected, *map(np.int32, (row, start, count)), window=SLOTS)
    wide = [*chunks, (ROWS, 0, 0), (ROWS + 1, 0, 0)]
    index, start, count = (np.asarray(column, np.int32) for column in zip(*wide, strict=True))
    state = programs.prefill(params, admitted(), index, start, count, window=SLOTS)
    equal(state, expected, atol=1e-5)
    assert state.active.tolist() == [True, bool(before.active[1]), True, bool(before.active[3]), False]
    others = jnp.asarray([1, 3])
    equal(state.cache.k[:, others], before.cache.k[:, others])
    equal(state.cache.v[:, others], before.cache.v[:, others])
    if kind == "pard":
        equal(state.draft.cache.k[:, others], before.draft.cache.k[:, others])
        assert state.draft.cached[jnp.asarray([4, 0, 2])].tolist() == [4, 4, 11]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watcher(Drafter):
    """Keeps the last token of what it is shown of every row."""

    def init(self, num_rows: int, num_slots: int, dtype: Any, mesh: Any = None) -> Array:
        return jnp.zeros((num_rows, PAIR.target.hidden_size), dtype)

    def propose(self, params: Any, state: Array, context: Any, *, window: int) -> tuple[Proposal, Array]:
        raise AssertionError

    def observe(self, state: Array, features: Array, starts: Array, first_row: Array) -> Array:
        return state.at[first_row].set(features[0, :, -1] if first_row.ndim else features[0, 0, -1], mode="drop")


def test_a_drafter_is_told_which_rows_the_features_are_of():
    drafter = Watcher(num_speculative_tokens=1, target_layers=(1,))
    programs = Programs(PAIR.target, drafter, chunk_size=CHUNK, max_steps=1)
    rows = rows_of([9, 9])
    states = []
    for wide in (True, False):
        state = programs.admit(garbage(drafter), np.asarray([3, 1], np.int32), rows)
        calls = [([3, 1, ROWS], [0, 0, 0], [4, 4, 0])] if wide else [(3, 0, 4), (1, 0, 4)]
        for call in calls:
            state = programs.prefill(PAIR.params, state, *(np.asarray(x, np.int32) for x in call), window=SLOTS)
        states.append(state.draft)
    equal(states[0], states[1], atol=1e-5)
    equal(states[0][2], garbage(drafter).draft[2])


def test_nothing_is_copied():
    """The state is donated, and neither call needs room for another cache."""
    programs = Programs(PAIR.target, pard(), chunk_size=CHUNK, max_steps=1)
    state = init_state(PAIR.target, programs.drafter, 64, 2048, jnp.float32)
    caches = [state.cache.k, state.cache.v, state.draft.cache.k, state.draft.cache.v, state.tokens]
    rows = jax.tree.map(lambda x: np.repeat(x[:1], 4, axis=0), rows_of([5]))
    rows = dataclasses.replace(rows, tokens=np.zeros((4, 2048), np.int32))
    zeros = np.zeros(4, np.int32)
    for program in (
        programs.admit.lower(state, zeros, rows).compile(),
        programs.prefill.lower(PAIR.params, state, zeros, zeros, zeros, window=64).compile(),
    ):
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes >= sum(cache.nbytes for cache in caches)
        assert memory.temp_size_in_bytes < min(cache.nbytes for cache in caches)
