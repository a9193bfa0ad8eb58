"""COD against a construction of the reference's rule in plain NumPy, row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.train.cod import CodConfig, Rows, all_rows, draw, lay_out

CASES = [
    (16, 4, 0.7, 0.2),
    (33, 8, 0.7, 0.2),
    (20, 8, 0.5, 0.0),
    (64, 16, 0.7, 0.1),
    (24, 5, 1.0, 0.0),
    (12, 1, 0.7, 0.2),
]
MASK = 99


def visible(b: int, p: int) -> set[tuple[int, int]]:
    """What row (b, p) sees, as one reads it off the paper: the tokens that are known, and the masks after them."""
    known = {(0, q) for q in range(p - b + 1)}
    return known | {(c, p - b + c) for c in range(1, b + 1)}


def numpy_draw(rng: np.random.Generator, length: int, counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """The reference's sampling: S_b of C_b, C_{b+1} = S_b + 1 (mod L)."""
    kept, candidates = [(0, p) for p in range(length)], np.arange(length)
    for b, count in enumerate(counts[1:], 1):
        chosen = rng.choice(candidates, count, replace=False)
        kept += [(b, int(p)) for p in chosen]
        candidates = (chosen + 1) % length
    return kept


def batch(rng: np.random.Generator, segments: list[list[int]], length: int):
    """Rows of samples of the given lengths, padded."""
    ids = rng.integers(0, 90, (len(segments), length)).astype(np.int32)
    segment_ids = np.zeros((len(segments), length), np.int32)
    loss = rng.random((len(segments), length)) < 0.8
    for r, sizes in enumerate(segments):
        at = 0
        for s, size in enumerate(sizes, 1):
            segment_ids[r, at : at + size] = s
            loss[r, at] = False
            at += size
    return ids, segment_ids, loss & (segment_ids > 0)


@pytest.mark.parametrize(
    ("k", "r", "r_min", "length", "counts", "total"),
    [
        (8, 0.7, 0.2, 512, (512, 358, 250, 175, 122, 102, 102, 102), 1723),
        (16, 0.7, 0.1, 512, None, 2022),
        (8, 0.5, 0.0, 512, None, 1020),
        (1, 0.7, 0.2, 512, (512,), 512),
    ],
)
def test_counts(k, r, r_min, length, counts, total):
    got = CodConfig(k, r, r_min).counts(length)
    assert sum(got) == total
    assert counts is None or got == counts


@pytest.mark.parametrize(("length", "k", "r", "r_min"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_draw_keeps_a_chain_under_every_row(length, k, r, r_min, seed):
    config = CodConfig(k, r, r_min)
    rows = draw(jax.random.key(seed), config, length, multiple=8)
    pairs = [(b, p) for b, p in zip(rows.block.tolist(), rows.position.tolist(), strict=True) if b >= 0]
    assert len(rows.block) % 8 == 0
    assert len(pairs) == len(set(pairs)) == sum(config.counts(length))
    kept = set(pairs)
    for b, count in enumerate(config.counts(length)):
        assert sum(q == b for q, _ in pairs) == count
    for b, p in pairs:
        assert 0 <= p < length
        assert b <= 1 or (b - 1, (p - 1) % length) in kept


@pytest.mark.parametrize(("length", "k", "r", "r_min"), CASES)
def test_draw_has_the_distribution_of_the_reference(length, k, r, r_min):
    """How often each row is kept, and how often two neighbours are kept together."""
    config, n = CodConfig(k, r, r_min), 400
    ours, theirs = np.zeros((k, length)), np.zeros((k, length))
    ours_pairs, theirs_pairs = np.zeros(k), np.zeros(k)
    rng = np.random.default_rng(0)
    draws = jax.vmap(lambda key: draw(key, config, length).position)(jax.random.split(jax.random.key(3), n))
    blocks = np.repeat(np.arange(k), config.counts(length))
    for positions in np.asarray(draws):
        grid = np.zeros((k, length))
        grid[blocks, positions] = 1
        ours += grid
        ours_pairs += (grid * np.roll(grid, 1, axis=1)).sum(axis=1)
        grid = np.zeros((k, length))
        for b, p in numpy_draw(rng, length, config.counts(length)):
            grid[b, p] = 1
        theirs += grid
        theirs_pairs += (grid * np.roll(grid, 1, axis=1)).sum(axis=1)
    # Six standard errors of the difference of two shares.
    assert np.abs(ours / n - theirs / n).max() <= 6 * np.sqrt(0.5 / n)
    assert np.abs(ours_pairs - theirs_pairs).max() / (n * length) <= 6 * np.sqrt(0.5 / (n * length)) * 4


@pytest.mark.parametrize(("length", "k", "r", "r_min"), CASES)
def test_every_supervised_row_sees_what_the_reference_shows_it(length, k, r, r_min):
    rng = np.random.default_rng(1)
    segments = [[length], [length // 2, length - length // 2], [length // 3, length // 4]]
    ids, segment_ids, loss = batch(rng, segments, length)
    rows = draw(jax.random.key(5), CodConfig(k, r, r_min), length, multiple=4)
    out = jax.device_get(lay_out(rows, jnp.asarray(ids), jnp.asarray(segment_ids), jnp.asarray(loss), MASK))
    pairs = list(zip(rows.block.tolist(), rows.position.tolist(), strict=True))
    supervised = 0
    for r_ in range(len(segments)):
        for i, (b, p) in enumerate(pairs):
            assert out.mask[r_, i, i]  # no softmax over nothing
            if b < 0:
                assert not out.supervised[r_, i]
                continue
            assert out.tokens[r_, i] == (ids[r_, p] if b == 0 else MASK)
            segment = segment_ids[r_, p]
            start = int(np.argmax(segment_ids[r_] == segment))
            inside = segment > 0 and p + 1 < length and segment_ids[r_, p + 1] == segment
            expected = bool(inside and loss[r_, p + 1] and p - start + 1 >= b)
            assert out.supervised[r_, i] == expected, (r_, b, p)
            if not expected:
                continue
            supervised += 1
            assert out.targets[r_, i] == ids[r_, p + 1]
            assert out.positions[r_, i] == p - start
            seen = {pairs[j] for j in np.flatnonzero(out.mask[r_, i])}
            # Equal, not only contained: no key that the rule allows was dropped.
            assert seen == {(c, q) for c, q in visible(b, p) if q >= start}
    assert supervised > length


def test_all_rows_is_the_layout_before_dropping():
    rows = all_rows(3, 4)
    assert rows.block.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert rows.position.tolist() == [0, 1, 2, 3] * 3


def test_rows_are_drawn_anew_for_every_key_and_equally_for_one():
    config = CodConfig(4, 0.5, 0.0)
    a, b, c = (draw(jax.random.key(seed), config, 32).position.tolist() for seed in (0, 0, 1))
    assert a == b != c


@pytest.mark.parametrize("bad", [{"num_blocks": 0}, {"retention": 1.5}, {"min_retention": -0.1}])
def test_settings_out_of_range(bad):
    with pytest.raises(ValueError, match="must be"):
        CodConfig(**bad)


def test_padding_rows_have_no_block():
    rows = Rows(block=jnp.asarray([0, -1], jnp.int32), position=jnp.asarray([0, 0], jnp.int32))
    ones = jnp.ones((1, 1), jnp.int32)
    out = lay_out(rows, ones, ones, ones > 0, MASK)
    assert not np.asarray(out.supervised).any()
    assert np.asarray(out.mask[0]).tolist() == [[True, False], [False, True]]
