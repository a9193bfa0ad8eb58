"""Teacher-forced acceptance against the engine that really drafts, and against hand-made tables."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from pard_jax.config import ModelConfig
from pard_jax.decoding.drafters.pard import PardDrafter
from pard_jax.engine.engine import Engine
from pard_jax.engine.memory import Speculation
from pard_jax.train.cod import CodConfig
from pard_jax.train.evaluate import Evaluator, answer_ranges, play
from pard_jax.train.objective import Objective
from tests.helpers.engine import drain, params_of_request, plan_for, submit
from tests.helpers.models import full_forward, model_config, random_params

K, MASK, LENGTH = 4, 127, 48


def mesh(devices: int = 1) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


def rows_of(prompts: list[list[int]], outputs: list[list[int]]) -> dict[str, np.ndarray]:
    """Two samples a row, the second behind the first."""
    ids = np.zeros((len(prompts) // 2, 2 * LENGTH), np.int32)
    segments, loss = np.zeros_like(ids), np.zeros(ids.shape, bool)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        row, at = divmod(i, 2)
        at = int(np.count_nonzero(segments[row])) if at else 0
        end = at + len(prompt) + len(output)
        ids[row, at:end] = [*prompt, *output]
        segments[row, at:end] = 1 + i % 2
        loss[row, at + len(prompt) : end] = True
    return {"token_ids": ids, "segment_ids": segments, "loss_mask": loss}


def decode(config: ModelConfig, params, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], Engine]:
    """What an engine says greedily with the target as its own parallel draft."""
    drafter = PardDrafter(
        num_speculative_tokens=K, config=config, target_vocab_size=128, max_model_len=200, mask_token_id=MASK
    )
    speculation = Speculation(num_speculative_tokens=K, extra_slots=K - 1, draft=config)
    engine = Engine(
        config,
        drafter,
        {"target": params, "draft": params},
        plan_for(config, speculation, 64, len(prompts), chunk_size=8),
        num_rows=len(prompts),
        chunk_size=8,
        steps_per_dispatch=1,
        dtype=np.float32,
        speculative_slots=2 * K,
    )
    asked = params_of_request(max_tokens=max_tokens, ignore_eos=True)
    submit(engine, {str(i): (prompt, asked) for i, prompt in enumerate(prompts)})
    outputs = drain(engine)
    return [outputs[str(i)].outputs[0].token_ids for i in range(len(prompts))], engine


def test_acceptance_is_what_decoding_measures():
    config = model_config("qwen3", num_hidden_layers=1, tie_word_embeddings=True)
    params = random_params(config, 0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 100, n).tolist() for n in (3, 9, 5, 14, 7, 4)]
    outputs, engine = decode(config, params, prompts, 30)
    stats = engine.acceptance

    objective = Objective(config, CodConfig(K), MASK)
    evaluator = Evaluator(objective, rows_of(prompts, outputs), mesh(), num_drafts=K, batch_size=2)
    got = evaluator(params)
    assert got.num_tokens == sum(map(len, outputs))
    assert got.num_steps == stats.num_drafts
    # Decoding may accept drafts behind the last token asked for; in all other steps the two are the same.
    ends = len(prompts)
    for position, rate in enumerate(got.per_position):
        assert 0 <= stats.num_accepted_tokens_per_pos[position] - round(rate * got.num_steps) <= ends
    assert 0.5 < got.per_position[0] <= 1  # its own draft: the first token is always right
    assert got.acceptance_length > 1.5


def test_loss_is_that_of_a_pass_over_each_sample():
    config = model_config("llama", num_hidden_layers=1)
    params = random_params(config, 1)
    rng = np.random.default_rng(1)
    prompts, outputs = ([rng.integers(0, 100, n).tolist() for n in sizes] for sizes in ((4, 6), (9, 12)))
    logits = full_forward(config, params, LENGTH)
    nll = []
    for prompt, output in zip(prompts, outputs, strict=True):
        rows = logits([*prompt, *output])[len(prompt) - 1 : -1].astype(np.float64)
        nll += [np.log(np.exp(row).sum()) - row[token] for row, token in zip(rows, output, strict=True)]
    evaluator = Evaluator(
        Objective(config, CodConfig(1), MASK), rows_of(prompts, outputs), mesh(), num_drafts=3, batch_size=1
    )
    got = evaluator(params)
    np.testing.assert_allclose(got.loss, np.mean(nll), rtol=1e-5)
    assert got.block_loss[0] == got.loss
    assert len(got.block_loss) == 3


@pytest.mark.parametrize(("devices", "batch_size"), [(1, 1), (1, 5), (4, 2), (2, 3)])
def test_batches_and_devices_change_nothing(devices, batch_size):
    config = model_config("llama", num_hidden_layers=1)
    params = random_params(config, 1)
    rng = np.random.default_rng(2)
    prompts, outputs = ([rng.integers(0, 100, n).tolist() for n in rng.integers(3, 12, 10)] for _ in range(2))
    rows = rows_of(prompts, outputs)
    objective = Objective(config, CodConfig(3), MASK)
    one = Evaluator(objective, rows, mesh(), num_drafts=3, batch_size=5)(params)
    other = Evaluator(objective, rows, mesh(devices), num_drafts=3, batch_size=batch_size)(params)
    assert other.num_steps == one.num_steps
    assert other.per_position == one.per_position
    np.testing.assert_allclose(other.block_loss, one.block_loss, rtol=1e-5)


def test_play_by_hand():
    hits = np.zeros((3, 12), bool)
    hits[:, 1] = [True, True, False]  # from anchor 1: two accepted, the token at 4 is the target's
    hits[:, 4] = [False, True, True]  # what comes behind a wrong draft does not count
    hits[:, 5] = [True, True, True]  # three accepted
    hits[:, 9] = [True, True, True]  # only one token is left
    assert play(hits, 2, 11) == [2, 0, 3, 1]
    assert play(hits, 2, 2) == []


def test_answer_ranges():
    segments = np.array([1, 1, 1, 1, 2, 2, 2, 3, 3, 0])
    loss = np.array([0, 1, 1, 0, 0, 1, 1, 1, 1, 0], bool)
    assert answer_ranges(segments, loss) == [(1, 3), (5, 7), (7, 9)]
    assert answer_ranges(segments, ~loss & (segments > 0)) == [(0, 1), (3, 4), (4, 5)]
    assert answer_ranges(segments, loss & False) == []
