"""Log-probabilities against torch's log_softmax and topk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.decoding.logprobs import TokenLogprobs, token_logprobs
from tests.helpers.jaxprs import COSTLY, SORTING, primitives

compute = jax.jit(token_logprobs, static_argnames="max_logprobs")


def run(logits: np.ndarray, tokens: np.ndarray, asked: list[int], **options: int) -> TokenLogprobs:
    return compute(jnp.asarray(logits), jnp.asarray(tokens, jnp.int32), jnp.array(asked, jnp.int32), **options)


@pytest.mark.parametrize("vocab", [30, 5000])
def test_equals_torch(vocab: int) -> None:
    """Rows that ask for different numbers, and one that asks for nothing, in one batch."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(vocab)
    asked = [20, 0, -1, 5, 1]
    logits = rng.normal(0, 4, (5, 4, vocab)).astype(np.float32)
    tokens = rng.integers(0, vocab, (5, 4))
    out = run(logits, tokens, asked)
    reference = torch.log_softmax(torch.tensor(logits).double(), dim=-1)
    for b, count in enumerate(asked):
        if count < 0:
            continue
        chosen = reference[b].gather(1, torch.tensor(tokens[b])[:, None])
        np.testing.assert_allclose(np.asarray(out.chosen)[b], chosen[:, 0].numpy(), atol=1e-5)
        # vLLM's rank, `(logprobs >= token_logprob).sum`, which is the same where no two are equal.
        np.testing.assert_array_equal(np.asarray(out.rank)[b], (reference[b] >= chosen).sum(dim=-1).numpy())
        values, ids = reference[b].topk(count)
        np.testing.assert_allclose(np.asarray(out.top_values)[b, :, :count], values.numpy(), atol=1e-5)
        np.testing.assert_array_equal(np.asarray(out.top_ids)[b, :, :count], ids.numpy())
        assert (np.asarray(out.top_ids)[b, :, count:] == -1).all()
        assert np.isneginf(np.asarray(out.top_values)[b, :, count:]).all()


def test_a_row_that_asks_for_nothing_gets_nothing() -> None:
    """Alone and beside one that asks; -1 tokens get nothing either."""
    logits = np.random.default_rng(0).normal(0, 1, (2, 3, 30)).astype(np.float32)
    tokens = np.array([[1, 2, 3], [4, 5, -1]])
    beside, alone = run(logits, tokens, [-1, 4]), run(logits[:1], tokens[:1], [-1])
    for out in (beside, alone):
        assert np.isneginf(np.asarray(out.chosen)[0]).all() and (np.asarray(out.rank)[0] == 0).all()
        assert np.isneginf(np.asarray(out.top_values)[0]).all() and (np.asarray(out.top_ids)[0] == -1).all()
    assert np.isneginf(np.asarray(beside.chosen)[1, 2]) and int(beside.rank[1, 2]) == 0
    assert (np.asarray(beside.top_ids)[1, 2] == -1).all()
    assert np.isfinite(np.asarray(beside.chosen)[1, :2]).all()


def test_ties_are_ranked_together_and_listed_by_id() -> None:
    logits = np.array([[[0.0, 2.0, 1.0, 2.0, 1.0, 2.0]]], np.float32)
    out = run(np.repeat(logits, 3, axis=1), np.array([[5, 4, 0]]), [6])
    assert np.asarray(out.rank).tolist() == [[1, 4, 6]]
    assert np.asarray(out.top_ids)[0, 0, :7].tolist() == [1, 3, 5, 2, 4, 0, -1]
    assert np.exp(np.asarray(out.top_values)[0, 0, :6]).sum() == pytest.approx(1, abs=1e-6)


def test_only_tokens_that_exist_are_listed() -> None:
    """Fewer possible tokens than asked for; a chosen one that is impossible is -inf and ranks behind the others."""
    logits = np.array([[[0.5, -np.inf, 1.5, -np.inf]]], np.float32)
    out = run(logits, np.array([[1]]), [20])
    assert np.asarray(out.top_ids)[0, 0, :4].tolist() == [2, 0, -1, -1]
    assert float(out.chosen[0, 0]) == -np.inf and int(out.rank[0, 0]) == 3


def test_large_logits_keep_their_precision() -> None:
    logits = np.full((1, 1, 1000), -1000.0, np.float32)
    logits[0, 0, :2] = 5000.0
    out = run(logits, np.array([[1]]), [2])
    np.testing.assert_allclose(np.asarray(out.chosen), np.log(0.5), rtol=1e-3)
    np.testing.assert_allclose(np.asarray(out.top_values)[0, 0, :2], np.log(0.5), rtol=1e-3)


def test_the_largest_number_is_static() -> None:
    """Numbers compile nothing again; asking for more than the maximum gives the maximum."""
    logits, tokens = np.random.default_rng(1).normal(0, 1, (2, 2, 50)).astype(np.float32), np.zeros((2, 2))
    function = jax.jit(lambda logits, tokens, asked: token_logprobs(logits, tokens, asked, max_logprobs=3))
    for asked in ([-1, -1], [0, 1], [3, 9]):
        out = function(jnp.asarray(logits), jnp.asarray(tokens, jnp.int32), jnp.array(asked, jnp.int32))
        assert out.top_ids.shape == (2, 2, 3)
        assert ((np.asarray(out.top_ids) >= 0).sum(axis=-1) == np.clip(asked, 0, 3)[:, None]).all()
    assert function._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_nothing_is_sorted_and_nothing_is_paid_unasked() -> None:
    args = (jnp.zeros((2, 3, 64)), jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32))
    assert "exp" in primitives(token_logprobs, *args)
    assert not primitives(token_logprobs, *args) & SORTING
    assert not primitives(token_logprobs, *args, into_cond=False) & COSTLY
