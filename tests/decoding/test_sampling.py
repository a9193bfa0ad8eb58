"""Warping against HF's warpers and plain NumPy; the streams and the draw by their statistics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.decoding import sampling
from pard_jax.decoding.sampling import Role, SamplingState, mask_below_min_tokens, role_keys, sample, warp_logits
from tests.helpers.blocks import settings
from tests.helpers.jaxprs import COSTLY, SORTING, primitives
from tests.helpers.statistics import assert_follows, chi_square

warp = jax.jit(warp_logits)
draw = jax.jit(sample)

# temperature, top_k, top_p, min_p: each alone, in pairs, all at once, and none.
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (1.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (0.6, 99, 1.0, 0.0),
    (1.0, 10**6, 1.0, 0.0),
    (1.0, 0, 0.5, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.4, 0, 0.99, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.7, 0, 1.0, 0.5),
    (1.0, 0, 1.0, 1.0),
    (0.6, 20, 0.95, 0.0),
    (1.5, 50, 0.8, 0.1),
    (2.0, 7, 1.0, 0.3),
    (0.8, 0, 0.95, 0.02),
]


def of(rows: list[tuple[float, int, float, float]]) -> SamplingState:
    temperature, top_k, top_p, min_p = map(np.array, zip(*rows, strict=True))
    return settings(temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def hf_warped(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """``GenerationMixin``'s warpers in its order, each only where its setting asks for it."""
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers: list[Any] = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    scores = torch.tensor(logits)
    for warper in warpers:
        scores = warper(None, scores)
    return scores.numpy()


@pytest.mark.parametrize("vocab", [7, 1000, 8193])
@pytest.mark.parametrize("masked", [False, True])
def test_warp_equals_hf_in_one_batch_of_all_settings(vocab: int, masked: bool) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (len(SETTINGS), 3, vocab)).astype(np.float32)
    if masked:
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[:, :, 3] = 1.0  # no row is masked whole
    ours = np.asarray(warp(jnp.asarray(logits), of(SETTINGS)))
    for row, setting in enumerate(SETTINGS):
        theirs = hf_warped(logits[row], *setting)
        np.testing.assert_array_equal(np.isfinite(ours[row]), np.isfinite(theirs), err_msg=str(setting))
        np.testing.assert_allclose(ours[row], theirs, rtol=1e-6, err_msg=str(setting))


def test_order_matters_for_top_p() -> None:
    """Temperature comes first: the nucleus of the flattened distribution is larger."""
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))[None, None]
    kept = np.isfinite(np.asarray(warp(jnp.asarray(logits), of([(4.0, 0, 0.59, 0.0)]))))
    assert kept.tolist() == [[[True, True, False]]]


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_ties_are_kept_together(levels: int) -> None:
    """Among few distinct logits, against the definitions themselves in float64."""
    rng = np.random.default_rng(levels)
    logits = rng.integers(-1, levels - 1, (1, 1, 60)).astype(np.float32)
    values = logits[0, 0].astype(np.float64)
    for top_k, top_p in [(1, 1.0), (7, 1.0), (59, 1.0), (60, 1.0), (0, 0.03), (0, 0.4), (0, 0.97), (20, 0.7)]:
        kept = np.ones(60, bool)
        if top_k:
            kept &= np.array([(values > v).sum() < top_k for v in values])
        p = np.where(kept, np.exp(values), 0)
        p /= p.sum()
        if top_p < 1:
            kept &= np.array([p[values > v].sum() < top_p for v in values])
        ours = np.asarray(warp(jnp.asarray(logits), of([(1.0, top_k, top_p, 0.0)])))[0, 0]
        np.testing.assert_array_equal(np.isfinite(ours), kept, err_msg=f"{top_k=} {top_p=}")


def test_the_kth_largest_is_exact_over_the_whole_float_range() -> None:
    """Any finite float32, zeros of both signs and subnormal numbers aside: the bisection misses none."""
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 2**32, (1, 8, 500), np.uint64).astype(np.uint32).view(np.float32)
    logits = np.where(np.abs(np.nan_to_num(logits, nan=1.0, posinf=2.0, neginf=-2.0)) < 1e-37, 0.5, logits)
    logits = np.where(np.isfinite(logits), logits, np.float32(-0.0))
    for k in (1, 2, 100, 499):
        ours = np.asarray(warp(jnp.asarray(logits), of([(1.0, k, 1.0, 0.0)])))
        kth = np.sort(logits, axis=-1)[:, :, -k, None]
        np.testing.assert_array_equal(ours, np.where(logits >= kth, logits, -np.inf))


def test_zeros_of_both_signs_tie() -> None:
    logits = jnp.array([[[0.0, -0.0, -1.0, 0.0]]], jnp.float32)
    assert np.isfinite(np.asarray(warp(logits, of([(1.0, 1, 1.0, 0.0)])))).tolist() == [[[True, True, False, True]]]


def test_rows_that_do_not_ask_are_left_exactly_as_they_are() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (4, 2, 50)).astype(np.float32)
    logits[0, 0, :3] = -np.inf
    rows = [(1.0, 0, 1.0, 0.0), (0.0, 3, 0.1, 0.9), (1e-6, 0, 0.5, 0.0), (0.7, 5, 0.9, 0.1)]
    ours = np.asarray(warp(jnp.asarray(logits), of(rows)))
    np.testing.assert_array_equal(ours[:3], logits[:3])  # no filter at temperature 1; greedy rows whatever they say
    assert np.isfinite(ours[3]).sum(axis=-1).max() <= 5


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_a_row_without_any_token_stays_one(value: float) -> None:
    logits = jnp.full((len(SETTINGS), 1, 9), value, jnp.float32)
    np.testing.assert_array_equal(np.asarray(warp(logits, of(SETTINGS))), np.asarray(logits))


def test_warping_a_row_alone_and_in_a_batch_is_the_same() -> None:
    logits = np.random.default_rng(2).normal(0, 4, (len(SETTINGS), 2, 300)).astype(np.float32)
    whole = np.asarray(warp(jnp.asarray(logits), of(SETTINGS)))
    for row, setting in enumerate(SETTINGS):
        np.testing.assert_array_equal(
            np.asarray(warp(jnp.asarray(logits[row : row + 1]), of([setting])))[0], whole[row]
        )


def test_nothing_is_sorted_and_nothing_is_paid_unasked() -> None:
    logits, state = jnp.zeros((2, 3, 64)), of(SETTINGS[:2])
    assert not primitives(warp_logits, logits, state) & SORTING
    assert "scan" in primitives(warp_logits, logits, state)  # the bisection
    assert not primitives(warp_logits, logits, state, into_cond=False) & COSTLY
    rows = jnp.zeros(2, jnp.int32)
    assert (
        not primitives(mask_below_min_tokens, logits, rows, rows, jnp.zeros((2, 4), jnp.int32), into_cond=False)
        & COSTLY
    )


def test_settings_compile_once() -> None:
    function = jax.jit(lambda logits, state: warp_logits(logits, state))
    for setting in SETTINGS:
        function(jnp.ones((1, 2, 32)), of([setting]))
    assert function._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_role_keys_are_the_stated_folds() -> None:
    seeds, positions = jnp.array([3, 2**32 - 1], jnp.uint32), jnp.array([[0, 7], [5, 100_000]], jnp.int32)
    for role in Role:
        keys = role_keys(seeds, positions, role)
        assert keys.shape == (2, 2)
        for b in range(2):
            for k in range(2):
                stream = jax.random.key(int(seeds[b]), impl="threefry2x32")
                expected = jax.random.fold_in(jax.random.fold_in(stream, positions[b, k]), int(role))
                assert (jax.random.key_data(keys[b, k]) == jax.random.key_data(expected)).all()
        one_column = role_keys(seeds, positions[:, 1], role)
        assert (jax.random.key_data(one_column) == jax.random.key_data(keys[:, 1])).all()


def test_streams_are_distinct() -> None:
    """1,200 keys of 3 seeds, 100 positions and 4 roles, none twice; a role per row equals the role alone."""
    position = jnp.tile(jnp.arange(100, dtype=jnp.int32)[None], (3, 1))
    seed = jnp.array([0, 1, 2**31], jnp.uint32)
    data = [np.asarray(jax.random.key_data(role_keys(seed, position, role))).reshape(-1, 2) for role in Role]
    assert len({tuple(key) for key in np.concatenate(data).tolist()}) == 1200
    mixed = role_keys(seed, position[:, 9], jnp.array([2, 3, 0], jnp.int32))
    expected = [data[role].reshape(3, 100, 2)[row, 9] for row, role in enumerate([2, 3, 0])]
    np.testing.assert_array_equal(np.asarray(jax.random.key_data(mixed)), np.stack(expected))


def test_the_generator_is_pinned() -> None:
    """A user's default generator changes nothing (rbg draws other numbers in a batch than alone)."""
    seed, position = jnp.arange(3, dtype=jnp.uint32), jnp.arange(3, dtype=jnp.int32)
    before = sample(jnp.zeros((3, 100)), role_keys(seed, position, Role.BONUS))
    with jax.default_prng_impl("rbg"):
        after = sample(jnp.zeros((3, 100)), role_keys(seed, position, Role.BONUS))
    np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


def keys_of(count: int, role: Role = Role.BONUS) -> jax.Array:
    return role_keys(jnp.arange(count, dtype=jnp.uint32), jnp.full(count, 11, jnp.int32), role)


@pytest.mark.parametrize(("vocab", "trials"), [(2, 50_000), (16, 200_000), (1000, 20_000)])
def test_draws_follow_the_distribution(vocab: int, trials: int) -> None:
    logits = np.random.default_rng(vocab).normal(0, 2, vocab).astype(np.float32)
    logits[0] = -np.inf if vocab > 2 else logits[0]
    ids = np.asarray(draw(jnp.tile(jnp.asarray(logits)[None], (trials, 1)), keys_of(trials)))
    p = np.exp(logits.astype(np.float64))
    assert_follows(ids, p / p.sum())


def test_successive_positions_of_one_seed_are_independent() -> None:
    """Pairs of neighbouring draws of one request fill the square evenly."""
    keys = role_keys(jnp.array([5], jnp.uint32), jnp.arange(60_000, dtype=jnp.int32)[None], Role.BONUS)
    ids = np.asarray(draw(jnp.zeros((1, 60_000, 16)), keys))[0].reshape(-1, 2)
    assert_follows(ids[:, 0] * 16 + ids[:, 1], np.full(256, 1 / 256))


def test_a_flat_large_vocabulary_is_drawn_evenly() -> None:
    ids = np.asarray(draw(jnp.zeros((400, 151_936)), keys_of(400)))
    assert_follows(ids * 8 // 151_936, np.full(8, 1 / 8))


def test_ties_of_the_winner_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise made of 23 random bits ties 1 draw in 8 at V = 2**20, always in favour of the lower id."""
    monkeypatch.setattr(sampling, "first_argmax", lambda s: (s == s.max(axis=-1, keepdims=True)).sum(axis=-1))
    winners = np.asarray(jax.jit(lambda logits, keys: sample(logits, keys))(jnp.zeros((48, 2**20)), keys_of(48)))
    assert winners.tolist() == [1] * 48


def test_a_lone_token_always_wins() -> None:
    logits = jnp.full((5000, 40), -jnp.inf).at[:, 17].set(-80.0)
    assert (np.asarray(draw(logits, keys_of(5000))) == 17).all()


@pytest.mark.parametrize("extreme", [0, 2**32 - 1])
def test_the_noise_is_finite(extreme: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the rarest random bits leave a lone token ahead of the -inf of the others, and an even choice finite."""
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.full(shape, extreme, dtype))
    lone = jnp.full((1, 40), -jnp.inf).at[:, 17].set(-80.0)
    assert sample(lone, keys_of(1)).tolist() == [17]
    assert sample(jnp.zeros((1, 40)).at[:, 9].set(1e-3), keys_of(1)).tolist() == [9]


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_no_token_at_all_still_gives_an_id(value: float) -> None:
    ids = np.asarray(draw(jnp.full((50, 13), value), keys_of(50)))
    assert ((ids >= 0) & (ids < 13)).all()


def test_seeds_decide_and_nothing_else() -> None:
    """Same seed, same draw, whatever row or batch; other seeds, other draws (never 8 equal samples of one prompt)."""
    logits = jnp.asarray(np.random.default_rng(3).normal(0, 1, (1, 5000)), jnp.float32)
    seeds = [9, 8, 7, 9, 1, 2, 3, 2**32 - 2]
    keys = role_keys(jnp.array(seeds, jnp.uint32), jnp.full(8, 4, jnp.int32), Role.BONUS)
    ids = np.asarray(draw(jnp.tile(logits, (8, 1)), keys))
    assert ids[0] == ids[3] and len(set(ids.tolist())) > 4
    for row in range(8):
        assert np.asarray(draw(logits, keys[row : row + 1]))[0] == ids[row]


def test_first_argmax_is_the_first() -> None:
    scores = np.random.default_rng(4).integers(0, 3, (50, 4, 9)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(sampling.first_argmax(jnp.asarray(scores))), scores.argmax(axis=-1))


def test_stop_ids_wait_for_the_minimum_length() -> None:
    """Absolute indices, so that a block may cross the minimum: A10 of the usual faults is an off-by-one here."""
    logits = np.random.default_rng(5).normal(0, 1, (4, 3, 10)).astype(np.float32)
    position, min_length = np.array([5, 7, 9, 20]), np.array([7, 12, 9, 0])
    stops = np.array([[2, 9, -1, -1], [4, -1, -1, 0], [1, 2, 3, 4], [5, 12, -1, -1]])
    expected = logits.copy()
    for b in range(4):
        for t in range(3):
            if position[b] + t < min_length[b]:
                expected[b, t, [s for s in stops[b] if 0 <= s < 10]] = -np.inf
    assert np.isneginf(expected).sum() == 2 * 2 + 3 * 2
    arrays = (jnp.asarray(a, jnp.int32) for a in (position, min_length, stops))
    np.testing.assert_array_equal(np.asarray(jax.jit(mask_below_min_tokens)(jnp.asarray(logits), *arrays)), expected)


def test_the_chi_square_sees_a_bias_of_two_per_cent() -> None:
    """The yardstick itself: an even sample passes, one that prefers the lower half does not."""
    rng, even = np.random.default_rng(6), np.full(16, 1 / 16)
    skewed = np.where(np.arange(16) < 8, 1.02, 0.98) / 16
    statistic, threshold = chi_square(rng.choice(16, 500_000, p=even), even)
    assert statistic < threshold
    statistic, threshold = chi_square(rng.choice(16, 500_000, p=skewed), even)
    assert statistic > threshold
