"""Losslessness by statistics: every emitted position follows the target, whatever the drafts are.

The black boxes of vLLM's tests/v1/spec_decode/test_rejection_sampler_utils.py, joint distributions beside them, and
faults put in on purpose, which the same statistic must see. Drafts come from the package's own sampler.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.decoding.sampling import Role, role_keys, sample, warp_logits
from pard_jax.decoding.verify import fit_vocabulary, verify
from tests.helpers.blocks import at, drafted, repeat, settings, softmax
from tests.helpers.statistics import assert_follows, chi_square

check = jax.jit(verify)
TRIALS, VOCAB = 200_000, 16  # most tests share these, and so one compiled program


class Outcome(NamedTuple):
    """``Verified`` on the host."""

    tokens: np.ndarray
    num_emitted: np.ndarray
    num_accepted: np.ndarray


def verified(*args: Any) -> Outcome:
    return Outcome(*map(np.asarray, check(*args)))


def block(
    target: np.ndarray,
    draft: np.ndarray,
    *,
    soft: bool,
    q: bool | None = None,
    role: Role = Role.DRAFT,
    trials: int = TRIALS,
) -> Outcome:
    """``trials`` blocks with seeds 0, 1, ... of one target [V] and one draft [K, V]: logits, temperature applied.

    ``soft``: drafts drawn from the draft's distribution, else its argmax. ``q``, when not ``soft``, and ``role`` put
    faults in.
    """
    state = settings([1.0] * trials)
    if soft:
        drafts = drafted(repeat(draft, trials), state.seed, at(trials), role)
    else:
        drafts = jnp.asarray(np.broadcast_to(draft.argmax(axis=-1), (trials, len(draft))), jnp.int32)
    probs = fit_vocabulary(repeat(softmax(draft), trials), target.size) if (soft if q is None else q) else None
    return verified(repeat([target] * (len(draft) + 1), trials), drafts, probs, state, at(trials))


def assert_marginals_follow(out: Outcome, p: np.ndarray) -> None:
    """Every position follows p among the rows that emitted it; beyond what was emitted there is -1."""
    for k in range(out.tokens.shape[1]):
        ids = out.tokens[out.num_emitted > k, k]
        assert ids.size > 500, f"position {k} was emitted {ids.size} times: nothing to judge"
        assert_follows(ids, p, f"position {k}")
        assert (out.tokens[out.num_emitted <= k, k] == -1).all()


KINDS = ("one-hot", "sampled", "sampled from bfloat16")
SMALL = [(VOCAB, depth, temperature, kind) for depth in (1, 3) for temperature in (0.6, 1.0) for kind in KINDS]
LARGE = [(1000, 3, 0.6, "sampled"), (1000, 1, 1.0, "one-hot")]


@pytest.mark.parametrize(("vocab", "depth", "temperature", "drafts"), SMALL + LARGE)
def test_every_position_follows_the_target(vocab: int, depth: int, temperature: float, drafts: str) -> None:
    """10 V trials at the large vocabulary, as vLLM has them."""
    rng = np.random.default_rng(vocab + depth)
    target = rng.normal(0, 1, vocab)
    target[5] += 4 if vocab == VOCAB else 7  # likely enough that one-hot drafts reach the bonus token
    draft = target[None] + rng.normal(0, 0.7, (depth, vocab))
    if drafts.endswith("bfloat16"):
        draft = np.asarray(jnp.asarray(draft, jnp.bfloat16), np.float32)
    trials = TRIALS if vocab == VOCAB else 10 * vocab
    out = block(target / temperature, draft / temperature, soft=drafts != "one-hot", trials=trials)
    assert_marginals_follow(out, softmax(target / temperature))


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """p = q to the last bit, and a draft that q excludes: the correction comes from p, and only where p > 0."""
    logits = np.random.default_rng(6).normal(0, 1, VOCAB)
    logits[[1, 3]] = -np.inf
    q = jax.jit(jax.nn.softmax)(repeat(logits[None], TRIALS))
    drafts = jnp.full((TRIALS, 1), 1, jnp.int32)
    out = verified(repeat([logits] * 2, TRIALS), drafts, q, settings([1.0] * TRIALS), at(TRIALS))
    assert (out.num_emitted == 1).all()
    assert_follows(out.tokens[:, 0], softmax(logits))


def test_a_placeholder_after_certain_drafts_ends_the_block() -> None:
    """Drafts 1, 15, none: the first two are certain, the third token is drawn from p, and no bonus comes after it."""
    certain = np.where(np.eye(VOCAB)[[1, 15, 0, 2]] > 0, 100.0, -100.0)
    certain[2] = np.random.default_rng(6).normal(0, 1, VOCAB)
    drafts = jnp.tile(jnp.array([[1, 15, -1]], jnp.int32), (TRIALS, 1))
    tokens = verified(repeat(certain, TRIALS), drafts, None, settings([1.0] * TRIALS), at(TRIALS)).tokens
    assert (tokens[:, :2] == [1, 15]).all() and (tokens[:, 3] == -1).all()
    assert_follows(tokens[:, 2], softmax(certain[2]))


@pytest.mark.parametrize("soft", [False, True])
def test_rows_without_proposals_are_plain_decoding(soft: bool) -> None:
    """A block of placeholders emits what decoding without drafts emits, token for token, and it follows p."""
    logits, state = np.random.default_rng(2).normal(0, 2, VOCAB), settings([0.8] * TRIALS)
    probs = repeat(np.full((3, VOCAB), 1 / VOCAB), TRIALS) if soft else None
    plain = verified(repeat(logits[None], TRIALS), jnp.zeros((TRIALS, 0), jnp.int32), None, state, at(TRIALS))
    empty = verified(repeat([logits] * 4, TRIALS), jnp.full((TRIALS, 3), -1, jnp.int32), probs, state, at(TRIALS))
    np.testing.assert_array_equal(plain.tokens[:, 0], empty.tokens[:, 0])
    assert (plain.num_emitted == 1).all() and (empty.num_emitted == 1).all()
    assert_follows(plain.tokens[:, 0], softmax(logits))


@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_against_the_opposite_target(depth: int) -> None:
    """Most drafts are rejected, so a residual that shared the draft's noise would show at once."""
    target = np.random.default_rng(7).normal(0, 1.6, VOCAB)
    out = block(target, np.stack([-target] * depth), soft=True)
    assert 0.6 < (out.num_accepted == 0).mean() < 0.8
    assert_marginals_follow(out, softmax(target))


@pytest.mark.parametrize("fault", ["shared noise", "q of a greedy draft", "none: a drawn draft taken as one-hot"])
def test_faults_are_seen(fault: str) -> None:
    """Draft and residual on one stream; a draft taken by argmax but verified with its softmax; and one that is right:
    a point mass describes any draft that was drawn apart from the target, only less of it is kept."""
    target = np.random.default_rng(7).normal(0, 1.6, VOCAB)
    draft = -target[None]
    if fault == "shared noise":
        out = block(target, draft, soft=True, role=Role.RESIDUAL)
    else:
        out = block(target, draft, soft=fault.startswith("none"), q=not fault.startswith("none"))
    statistic, threshold = chi_square(out.tokens[:, 0], softmax(target))
    assert (statistic < threshold) == fault.startswith("none")


@pytest.mark.parametrize("soft", [False, True])
def test_filters_apply_to_what_is_followed(soft: bool) -> None:
    """Temperature, top-k and top-p on the target; the draft has a temperature alone."""
    rng = np.random.default_rng(8)
    raw = rng.normal(0, 1.5, VOCAB)
    state = settings([0.7], top_k=8, top_p=0.9)
    warped = np.asarray(jax.jit(warp_logits)(repeat(raw[None], 1), state))[0, 0]
    assert 3 < np.isfinite(warped).sum() < 8
    assert_marginals_follow(block(warped, (raw + rng.normal(0, 0.5, (3, VOCAB))) / 0.7, soft=soft), softmax(warped))


@pytest.mark.parametrize("draft_vocab", [12, 20])
def test_draft_vocabularies_of_other_sizes(draft_vocab: int) -> None:
    """A smaller one never says the last ids; a larger one says ids that the target has not: both stay unbiased."""
    rng = np.random.default_rng(9)
    target, draft = rng.normal(0, 1, VOCAB), rng.normal(0, 1, (3, draft_vocab))
    out = block(target, draft, soft=True)
    assert out.tokens.max() == VOCAB - 1
    assert_marginals_follow(out, softmax(target))


@pytest.mark.parametrize("soft", [False, True])
def test_as_much_is_accepted_as_can_be(soft: bool) -> None:
    """sum min(p, q) of drawn drafts, p(d) of one-hot ones: rejecting more would be lossless, too, and slow."""
    rng = np.random.default_rng(10)
    target = rng.normal(0, 1, VOCAB)
    draft = target[None] + rng.normal(0, 0.7, (3, VOCAB))
    out, p = block(target, draft, soft=soft), softmax(target)
    for k in range(3):
        expected = np.minimum(p, softmax(draft[k])).sum() if soft else p[draft[k].argmax()]
        reached = (out.num_accepted >= k).sum()
        rate = (out.num_accepted > k).sum() / reached
        assert abs(rate - expected) < 5 * np.sqrt(expected * (1 - expected) / reached)


def test_requests_with_different_drafts_keep_their_own() -> None:
    """Two kinds of request interleaved, each with its own target and draft probabilities."""
    rng = np.random.default_rng(11)
    targets, drafts, kind = rng.normal(0, 1, (2, VOCAB)), rng.normal(0, 1, (2, 3, VOCAB)), np.arange(TRIALS) % 2
    state = settings([1.0] * TRIALS)
    tokens = drafted(jnp.asarray(drafts[kind], jnp.float32), state.seed, at(TRIALS))
    logits = jnp.asarray(np.repeat(targets[kind][:, None], 4, axis=1), jnp.float32)
    out = verified(logits, tokens, jnp.asarray(softmax(drafts)[kind], jnp.float32), state, at(TRIALS))
    for which in range(2):
        assert_marginals_follow(Outcome(*(field[kind == which] for field in out)), softmax(targets[which]))


def test_approaches_the_target_distribution() -> None:
    """With more samples the distance to the target shrinks over 20 times more than that to random distributions."""
    rng = np.random.default_rng(0)
    target, references = rng.normal(0, 1, VOCAB), softmax(rng.normal(0, 1, (100, VOCAB)))
    tokens = block(target, rng.normal(0, 1, (3, VOCAB)), soft=True).tokens[:, 0]
    to_target, to_references = [], []
    for count in (10, 100_000):
        pdf = np.bincount(tokens[:count], minlength=VOCAB) / count
        to_target.append(np.linalg.norm(pdf - softmax(target)))
        to_references.append(np.linalg.norm(pdf - references, axis=1).mean())
    assert to_target[0] / to_target[1] > 20 * to_references[0] / to_references[1]


@pytest.mark.parametrize("soft", [False, True])
def test_whole_sequences_over_many_steps_follow_the_chain(soft: bool) -> None:
    """Decoding to the end: 4 tokens of a Markov chain, all 4**4 sequences, with drafts redrawn at the same positions.

    The joint distribution, so it sees noise that is used twice, whether between roles, positions or steps.
    """
    rng = np.random.default_rng(12)
    trials, depth, goal = 100_000, 3, 4
    target, draft = (jnp.asarray(rng.normal(0, 1.2, (4, 4)), jnp.float32) for _ in range(2))
    state = settings([1.0] * trials)

    @jax.jit
    def step(tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        chain = [jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)]
        for k in range(depth):
            keys = role_keys(state.seed, (length + k)[:, None], Role.DRAFT)
            logits = draft[chain[-1]]
            chain.append(sample(logits, keys) if soft else logits.argmax(axis=-1).astype(jnp.int32))
        inputs = jnp.concatenate(chain, axis=1)
        probs = jax.nn.softmax(draft)[inputs[:, :-1]] if soft else None
        out = verify(target[inputs], inputs[:, 1:], probs, state, length)
        columns = length[:, None] + jnp.arange(depth + 1)[None, :]
        columns = jnp.where((out.tokens >= 0) & (length <= goal)[:, None], columns, tokens.shape[1])
        grown = tokens.at[jnp.arange(trials)[:, None], columns].set(out.tokens, mode="drop")
        return grown, jnp.where(length <= goal, length + out.num_emitted, length)

    tokens, length = jnp.zeros((trials, 1 + goal + depth + 1), jnp.int32), jnp.ones(trials, jnp.int32)
    while int(length.min()) <= goal:
        tokens, length = step(tokens, length)
    p = softmax(np.asarray(target))
    joint = np.einsum("a,ab,bc,cd->abcd", p[0], p, p, p).reshape(-1)
    assert_follows(np.asarray(tokens)[:, 1 : goal + 1] @ np.array([64, 16, 4, 1]), joint)


# ---- synthetic acceptance ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rates", [[0.9, 0.5, 0.2], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.7, 0.0, 0.0]], ids=str)
def test_synthetic_acceptance(rates: list[float], temperature: float) -> None:
    """The share of blocks whose first k drafts are kept, within a hundredth, whatever the drafts are."""
    trials, depth = 50_000, len(rates)
    conditional = [rate / before if before else 0.0 for rate, before in zip(rates, [1.0, *rates], strict=False)]
    rng = np.random.default_rng(13)
    logits, drafts = rng.normal(0, 1, (depth + 1, VOCAB)), rng.integers(0, VOCAB, (trials, depth))
    drafts[:100, 1] = np.arange(100) % 2 * (VOCAB + 1) - 1  # none, or one past the end: never kept at any rate
    state = settings([temperature] * trials)
    proposals = jnp.asarray(drafts, jnp.int32)
    tokens, _, accepted = verified(repeat(logits, trials), proposals, None, state, at(trials), jnp.array(conditional))
    assert accepted[:100].max() == (rates[0] > 0)
    for k, rate in enumerate(rates):
        assert abs((accepted[100:] > k).mean() - rate) < 0.01
    final = tokens[np.arange(trials), accepted]
    if temperature == 0:
        np.testing.assert_array_equal(final, logits.argmax(axis=-1)[accepted])
    else:
        rejected = accepted < depth
        assert (final[rejected] != drafts[rejected, accepted[rejected]]).all()
        assert ((final >= 0) & (final < VOCAB)).all()
