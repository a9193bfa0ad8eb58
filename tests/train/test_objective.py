"""The objective against transformers, against one forward pass a row, and against itself on several devices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pard_jax.models import bind
from pard_jax.train.cod import CodConfig, draw
from pard_jax.train.loss import Teacher, coefficients, cross_entropy
from pard_jax.train.objective import Objective, TrainState, make_update
from pard_jax.train.optimizer import OptimizerConfig, make_optimizer
from tests.helpers.models import full_forward, hf_config, hf_model, model_config, params_of, random_params

MASK = 127
LENGTH = 12


def make_batch(rng: np.random.Generator, passes: int = 1, size: int = 2, length: int = LENGTH) -> dict[str, jax.Array]:
    shape = (passes, size, length)
    segments = np.ones(shape, np.int32)
    segments[:, 1:, length // 2 :] = 2
    loss = rng.random(shape) < 0.7
    return {
        "token_ids": jnp.asarray(rng.integers(0, MASK, shape), jnp.int32),
        "segment_ids": jnp.asarray(segments),
        "loss_mask": jnp.asarray(loss),
    }


def close(a, b, tolerance: float = 1e-4) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_one_block_is_the_language_modelling_of_transformers(family, tied):
    torch = pytest.importorskip("torch")
    hf = hf_config(family, tie_word_embeddings=tied)
    model, config = hf_model(hf), model_config(family, tie_word_embeddings=tied)
    params = params_of(model, config)
    ids = np.random.default_rng(0).integers(0, 127, (2, LENGTH))
    loss = model(input_ids=torch.tensor(ids), labels=torch.tensor(ids)).loss
    loss.backward()
    with torch.no_grad():  # the gradients in the place of the weights, to be read by the same names
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    expected = params_of(model, config)

    ones = jnp.ones((1, 2, LENGTH), jnp.int32)
    batch = {"token_ids": jnp.asarray(ids, jnp.int32)[None], "segment_ids": ones, "loss_mask": ones > 0}
    objective = Objective(config, CodConfig(1), MASK)
    value, grads = jax.jit(objective.gradients)(params, None, jnp.int32(0), batch)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    close(grads, expected)


def row_losses(objective: Objective, params, batch, step: int) -> list[tuple[int, float]]:
    """(block, nll) of every supervised row of a draw, each by a forward pass of its own, as drafting would run it."""
    logits = full_forward(objective.config, params, LENGTH)
    rows = draw(jax.random.fold_in(jax.random.key(objective.seed), step), objective.cod, LENGTH)
    found = []
    for ids, segments, loss in zip(*(np.asarray(batch[k])[0] for k in batch), strict=True):
        for b, p in zip(rows.block.tolist(), rows.position.tolist(), strict=True):
            if p + 1 >= LENGTH or segments[p + 1] != segments[p] or not loss[p + 1]:
                continue
            start = int(np.argmax(segments == segments[p]))
            if p - b < start - 1:
                continue
            seen = [*ids[start : p - b + 1].tolist(), *[MASK] * b]
            row = logits(seen)[-1].astype(np.float64)
            found.append((b, float(np.log(np.exp(row - row.max()).sum()) + row.max() - row[ids[p + 1]])))
    return found


@pytest.mark.parametrize("per_subtask", [False, True])
def test_loss_is_that_of_drafting_row_by_row(per_subtask):
    config = model_config("qwen3", tie_word_embeddings=True)
    params = random_params(config, 0)
    batch = make_batch(np.random.default_rng(1))
    objective = Objective(config, CodConfig(4, 0.7, 0.2), MASK, per_subtask=per_subtask, seed=7)
    value, _ = jax.jit(objective.gradients)(params, None, jnp.int32(3), batch)
    rows = row_losses(objective, params, batch, 3)
    if per_subtask:
        expected = np.mean([np.mean([nll for c, nll in rows if c == b]) for b in range(4)])
    else:
        expected = np.mean([nll for _, nll in rows])
    assert len(rows) > LENGTH
    np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_dropped_rows_and_what_only_they_predict_get_no_gradient():
    """A token that no kept row sees or predicts moves nothing: its row of an embedding stays as it is."""
    config = model_config("llama", tie_word_embeddings=False)
    params = random_params(config, 0)
    batch = make_batch(np.random.default_rng(1))
    batch["token_ids"] = batch["token_ids"] % 64
    batch["token_ids"] = batch["token_ids"].at[:, 0, -1].set(100)  # a target only: never an input before its own target
    batch["loss_mask"] = batch["loss_mask"].at[:, 0, -1].set(False)
    objective = Objective(config, CodConfig(4, 0.5, 0.0), MASK)
    _, grads = jax.jit(objective.gradients)(params, None, jnp.int32(0), batch)
    moved = np.abs(np.asarray(grads["embed"])).max(axis=1)
    assert moved[100] == 0  # seen by nobody who counts
    assert moved[MASK] > 0
    assert (moved[64:100] == 0).all()
    assert (moved[:64] > 0).any()


def test_accumulation_changes_nothing():
    config = model_config("qwen3", tie_word_embeddings=True)
    params = random_params(config, 0)
    for per_subtask in (False, True):
        objective = Objective(config, CodConfig(3, 0.7, 0.2), MASK, per_subtask=per_subtask)
        batch = make_batch(np.random.default_rng(2), passes=1, size=4)
        split = {key: value.reshape(2, 2, LENGTH) for key, value in batch.items()}
        whole = jax.jit(objective.gradients)(params, None, jnp.int32(0), batch)
        parts = jax.jit(objective.gradients)(params, None, jnp.int32(0), split)
        close(whole, parts, 1e-5)


@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_devices_change_nothing(distill):
    config = model_config("qwen3", tie_word_embeddings=True)
    target = model_config("llama", tie_word_embeddings=False)
    params, target_params = random_params(config, 0), random_params(target, 1)
    objective = Objective(config, CodConfig(3, 0.7, 0.2), MASK, distill_weight=distill, target=target)
    batch = make_batch(np.random.default_rng(2), passes=2, size=4)
    optimizer = optax.sgd(0.5)  # Adam would make much of what the order of a sum leaves of a gradient near 0
    results = []
    for count in (1, 4):
        mesh = Mesh(np.array(jax.devices()[:count]), ("data",))
        everywhere = NamedSharding(mesh, PartitionSpec())
        state = TrainState(step=jnp.zeros((), jnp.int32), params=params, optimizer=optimizer.init(params))
        state = jax.tree.map(jnp.copy, state)
        update = make_update(objective, optimizer, mesh)
        losses = []
        for _ in range(3):
            state, logged = update(
                jax.device_put(state, everywhere),
                jax.device_put(target_params, everywhere),
                jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, "data"))),
            )
            losses.append(float(logged["loss"]))
        results.append((losses, jax.device_get(state.params)))
    assert results[0][0][0] > results[0][0][2]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    close(results[0][1], results[1][1])


def test_frozen_embeddings_move_in_the_mask_tokens_row_only():
    config = model_config("qwen3", tie_word_embeddings=True)
    params = random_params(config, 0)
    batch = make_batch(np.random.default_rng(2))
    free = Objective(config, CodConfig(3), MASK)
    frozen = dataclasses.replace(free, frozen_embeddings=True)
    a = jax.jit(free.gradients)(params, None, jnp.int32(0), batch)
    b = jax.jit(frozen.gradients)(params, None, jnp.int32(0), batch)
    np.testing.assert_allclose(a[0], b[0], rtol=1e-6)
    close({**a[1], "embed": 0}, {**b[1], "embed": 0}, 1e-6)
    np.testing.assert_allclose(a[1]["embed"][MASK], b[1]["embed"][MASK], rtol=1e-4, atol=1e-6)
    assert not np.asarray(b[1]["embed"])[:MASK].any()

    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.5), 10, params)
    updates, _ = optimizer.update(b[1], optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    assert (np.asarray(after["embed"])[:MASK] == np.asarray(params["embed"])[:MASK]).all()  # bit for bit
    assert (np.asarray(after["embed"])[MASK] != np.asarray(params["embed"])[MASK]).any()


@pytest.mark.parametrize("vocab", [40, 50, 30])
def test_distillation_has_the_gradient_of_the_divergence(vocab):
    """The target's vocabulary may be padded further than the draft's, or less."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    hidden, head, teacher = normal(2, 6, 8), normal(40, 8), Teacher(normal(2, 6, 5), normal(vocab, 5), 0.3)
    targets = jnp.asarray(rng.integers(0, 30, (2, 6)), jnp.int32)
    weights = jnp.asarray(rng.random((2, 6)), jnp.float32)

    def naive(hidden, head):
        log_q = jax.nn.log_softmax(jnp.einsum("brd,vd->brv", hidden, head))
        p = jax.nn.softmax(jnp.einsum("brd,vd->brv", teacher.hidden, teacher.head[:40]))
        p = jnp.pad(p, ((0, 0), (0, 0), (0, 40 - p.shape[-1])))
        divergence = jnp.sum(jax.scipy.special.rel_entr(p, jnp.exp(log_q)), axis=-1)
        ce = -jnp.take_along_axis(log_q, targets[:, :, None], axis=-1)[:, :, 0]
        return jnp.sum(weights * (0.3 * divergence + 0.7 * ce))

    ours = jax.grad(lambda h, w: cross_entropy(h, w, targets, weights, teacher), argnums=(0, 1))(hidden, head)
    close(ours, jax.grad(naive, argnums=(0, 1))(hidden, head), 1e-4)


def test_chunks_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 24, 8), (40, 8)))
    targets = jnp.asarray(rng.integers(0, 40, (2, 24)), jnp.int32)
    weights = jnp.asarray(rng.random((2, 24)), jnp.float32)
    run = lambda: jax.value_and_grad(  # noqa: E731
        lambda h, w: 3 * cross_entropy(h, w, targets, weights), argnums=(0, 1)
    )(hidden, head)
    whole = run()
    monkeypatch.setattr("pard_jax.train.loss.CHUNK_ROWS", 8)
    close(whole, run(), 1e-5)


def test_coefficients_of_an_absent_block():
    """A block without supervised rows takes no share."""
    supervised = jnp.asarray([[[True, True, False, True]]])
    block = jnp.asarray([0, 0, 1, 2], jnp.int32)
    got = coefficients(supervised, block, num_blocks=3, per_subtask=True)
    assert np.asarray(got)[0, 0].tolist() == [0.25, 0.25, 0.0, 0.5]
    assert not np.asarray(coefficients(supervised & False, block, num_blocks=3, per_subtask=False)).any()


def test_remat_changes_nothing():
    config = model_config("qwen3", tie_word_embeddings=True, num_hidden_layers=9)  # scanned, too
    params = random_params(config, 0)
    batch = make_batch(np.random.default_rng(2))
    objective = Objective(config, CodConfig(3), MASK)
    a = jax.jit(objective.gradients)(params, None, jnp.int32(0), batch)
    b = jax.jit(dataclasses.replace(objective, remat=True).gradients)(params, None, jnp.int32(0), batch)
    close(a, b, 1e-5)


def test_encode_equals_the_cached_pass():
    config = model_config("qwen2", num_hidden_layers=2)
    params = random_params(config, 0)
    ids = np.random.default_rng(0).integers(0, 100, LENGTH)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None]
    model = bind(config, params)
    tokens = jnp.asarray(ids, jnp.int32)[None]
    hidden = model.encode(params["embed"][tokens], jnp.arange(LENGTH, dtype=jnp.int32)[None], causal)
    np.testing.assert_allclose(model.logits(hidden)[0], full_forward(config, params, LENGTH)(ids), rtol=1e-4, atol=1e-4)
