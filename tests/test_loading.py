"""From directories to an engine: pairs that go together, pairs that are refused, and when."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pard_jax import loading
from pard_jax.config import EngineConfig, SpeculativeConfig
from pard_jax.decoding.drafters import NgramDrafter, NoDrafter, PardDrafter, SequentialDrafter
from pard_jax.engine.memory import NotEnoughMemoryError
from pard_jax.int8 import Int8Matrix
from pard_jax.loading import Loaded, load_engine
from pard_jax.tokenizer import load_tokenizer
from pard_jax.weights import load_params
from tests.helpers.engine import (
    DRAFT_LIMIT,
    DRAFT_VOCAB,
    MASK,
    TARGET_LIMIT,
    TARGET_VOCAB,
    Checkpoints,
    count_compiles,
    save_pair,
)
from tests.helpers.models import hf_config, hf_model, save_hf


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading any weights fails the test."""

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read before the refusal")

    monkeypatch.setattr(loading, "load_params", read)


def load(target: Path, speculative: dict[str, Any] | None = None, **engine: Any) -> Loaded:
    settings: dict[str, Any] = {"max_num_seqs": 2} | engine
    config = None if speculative is None else SpeculativeConfig.from_dict(speculative)
    return load_engine(target, EngineConfig(**settings), config, progress=False)


def pard(draft: Path, k: int = 4, **keys: Any) -> dict[str, Any]:
    return {"model": str(draft), "num_speculative_tokens": k, "parallel_drafting": True} | keys


def edited(directory: Path, to: Path, file: str = "config.json", **changes: Any) -> Path:
    """A copy of a checkpoint with some keys of a JSON file changed; None takes a key out."""
    shutil.copytree(directory, to)
    path = to / file
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (old | changes).items() if v is not None}))
    return to


# -- what is built ------------------------------------------------------------------------------------------------


def test_a_parallel_draft_of_another_padding(pair):
    """G1: 304 and 320 rows for one tokenizer of 300 tokens, and a draft that ends at 64 tokens."""
    loaded = load(pair.target, pard(pair.draft), prefill_chunk_size=32, steps_per_dispatch=3, smallest_window=128)
    drafter, settings = loaded.settings.drafter, loaded.settings
    assert isinstance(drafter, PardDrafter)
    assert (drafter.config.vocab_size, drafter.target_vocab_size) == (DRAFT_VOCAB, TARGET_VOCAB)
    assert (drafter.mask_token_id, drafter.num_speculative_tokens, drafter.sampled) == (MASK, 4, False)
    assert drafter.max_model_len == DRAFT_LIMIT
    assert settings.plan.max_model_len == TARGET_LIMIT and settings.plan.windows == (128, 256, 384)
    assert (settings.chunk_size, settings.steps_per_dispatch) == (32, 3)
    assert loaded.engine.chunk_size == 32 and loaded.engine.steps_per_dispatch == 3
    state = loaded.engine._state
    assert state.cache.k.shape == state.draft.cache.k.shape == (1, 2, 2, 384, 8)
    assert loaded.tokenizer is not None and len(loaded.tokenizer) == 300


def test_the_weights_are_each_models_own(pair):
    params = load(pair.target, pard(pair.draft)).engine._params
    assert set(params) == {"target", "draft"}
    head = pair.hf.state_dict()["lm_head.weight"].numpy()
    np.testing.assert_array_equal(params["target"]["lm_head"], head)
    assert params["draft"]["lm_head"].shape[0] == DRAFT_VOCAB
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}


def test_a_sequential_draft(pair):
    keys = pard(pair.draft, parallel_drafting=False, draft_sample_method="probabilistic", max_model_len=50)
    drafter = load(pair.target, keys).settings.drafter
    assert isinstance(drafter, SequentialDrafter)
    assert (drafter.num_speculative_tokens, drafter.sampled, drafter.max_model_len) == (4, True, 50)


def test_ngram_and_no_drafts(pair):
    loaded = load(pair.target, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
    assert loaded.settings.drafter == NgramDrafter(num_speculative_tokens=3, max_n=4, min_n=4)
    assert loaded.settings.method == "ngram" and set(loaded.engine._params) == {"target"}
    plain = load(pair.target).settings
    assert plain.drafter == NoDrafter() and plain.method == "none" and plain.draft_model is None


def test_a_draft_without_a_limit_of_its_own_drafts_to_the_end(pair):
    """The last positions are drafted for as well: K more than the target's limit are asked about, none is kept."""
    drafter = load(pair.target, pard(pair.draft), max_model_len=60).settings.drafter
    assert isinstance(drafter, PardDrafter) and drafter.max_model_len == 60 + 4


def test_a_target_that_drafts_for_itself_is_read_once(pair, monkeypatch):
    reads = []
    monkeypatch.setattr(loading, "load_params", lambda *a, **k: reads.append(a) or load_params(*a, **k))
    loaded = load(pair.target, pard(pair.target, mask_token_id=301))
    assert len(reads) == 1 and loaded.engine._params["draft"] is loaded.engine._params["target"]
    alone = load(pair.target).settings.plan
    assert loaded.settings.plan.weight_bytes == alone.weight_bytes
    assert loaded.settings.plan.cache_bytes > 1.9 * alone.cache_bytes


def held(params: dict[str, Any]) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(("drafts", "expected"), [({}, "int8"), ({"quantization": "none"}, None)])
def test_the_draft_is_quantized_as_the_target_is_unless_it_is_told_otherwise(pair, drafts, expected):
    """And the plan counts the bytes that are held."""
    loaded = load(pair.target, pard(pair.draft, **drafts), quantization="int8")
    settings, params = loaded.settings, loaded.engine._params
    assert (settings.quantization, settings.draft_quantization) == ("int8", expected)
    assert isinstance(params["target"]["lm_head"], Int8Matrix)
    assert isinstance(params["draft"]["lm_head"], Int8Matrix) is (expected == "int8")
    assert settings.plan.weight_bytes == held(params)
    plain = loaded.parts.without_speculation().settings
    assert plain.quantization == "int8" and plain.plan.weight_bytes == held(params["target"])
    again = loaded.parts.configured(SpeculativeConfig.from_dict(pard(pair.draft)), 2).settings
    assert again.plan.weight_bytes == held(params)


def test_a_target_drafts_for_itself_with_fewer_bytes(pair):
    """The same checkpoint, read twice, since the two are not the same weights."""
    loaded = load(pair.target, pard(pair.target, mask_token_id=301, quantization="int8"))
    params = loaded.engine._params
    assert not isinstance(params["target"]["lm_head"], Int8Matrix) and isinstance(
        params["draft"]["lm_head"], Int8Matrix
    )
    assert loaded.settings.plan.weight_bytes == held(params)
    same = load(pair.target, pard(pair.target, mask_token_id=301), quantization="int8").engine._params
    assert same["draft"] is same["target"] and isinstance(same["draft"]["lm_head"], Int8Matrix)


def test_synthetic_rates_reach_the_engine(pair):
    keys = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9, 0.5, 0.2, 0.2]}
    parts = load(pair.target, pard(pair.draft, **keys)).parts
    assert parts.synthetic_rates == pytest.approx((0.9, 0.5 / 0.9, 0.4, 1.0))
    assert parts.build()._programs._rates == parts.synthetic_rates


def test_engines_of_the_same_parts_share_the_weights(pair):
    loaded = load(pair.target, pard(pair.draft))
    plain = loaded.parts.without_speculation()
    assert plain.params["target"] is loaded.engine._params["target"] and set(plain.params) == {"target"}
    assert plain.settings.method == "none" and plain.settings.plan.max_model_len == TARGET_LIMIT
    assert plain.build()._state.cache.k is not loaded.engine._state.cache.k


def test_loading_compiles_no_program(pair):
    """Weights and empty caches alone: the first program is compiled by the first request, or by a warm-up."""
    load(pair.target, pard(pair.draft))  # the caches' zeros are filled by small programs of JAX's own
    with count_compiles() as compiled:
        load(pair.target, pard(pair.draft))
    assert not compiled


@pytest.mark.parametrize(("config", "generation", "expected"), [
    (2, None, (2,)),  # the tokenizer's own
    ([2, 0], None, (2, 0)),
    (7, None, (2, 7)),
    (7, {"eos_token_id": [0, 2, 5]}, (2, 0, 5)),  # the generation config stands for config.json's
    (7, {"eos_token_id": 5}, (2, 5)),
    (None, {}, (2,)),
])  # fmt: skip
def test_eos_ids_in_vllms_order(pair, tmp_path, config, generation, expected):
    directory = edited(pair.target, tmp_path / "model", eos_token_id=config)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert load(directory).parts.eos_token_ids == expected


def test_eos_ids_without_a_tokenizer(pair, tmp_path):
    directory = edited(pair.target, tmp_path / "model", eos_token_id=[9, 2])
    for path in directory.glob("tokenizer*"):
        path.unlink()
    assert load(directory).parts.eos_token_ids == (9, 2)


# -- what is refused, before weights are read ---------------------------------------------------------------------


@pytest.mark.usefixtures("no_weights")
def test_g2_another_vocabulary_of_the_same_size_is_named(pair, tmp_path):
    """Two tokens have changed places; the first of the two is named."""
    draft = shutil.copytree(pair.draft, tmp_path / "draft")
    path = draft / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = (next(t for t, i in vocab.items() if i == n) for n in (40, 77))
    vocab[first], vocab[second] = 77, 40
    path.write_text(json.dumps(tokenizer))
    assert len(load_tokenizer(draft) or ()) == 300  # it loads, and is as large
    with pytest.raises(ValueError, match=rf"token id 40 is {first!r} in the target and {second!r} in the draft"):
        load(pair.target, pard(draft))


@pytest.mark.usefixtures("no_weights")
def test_g1_sizes_must_agree_where_tokens_cannot_be_compared(pair, tmp_path):
    draft = shutil.copytree(pair.draft, tmp_path / "draft")
    for path in draft.glob("tokenizer*"):
        path.unlink()
    message = "Target model vocab_size=304. Draft model vocab_size=320.*the draft brings none"
    with pytest.raises(ValueError, match=message):
        load(pair.target, pard(draft))


@pytest.mark.usefixtures("no_weights")
def test_g5_a_draft_without_a_mask_token(pair, tmp_path):
    """All keys that could have named it are listed, in vLLM's words."""
    draft = edited(pair.draft, tmp_path / "draft", pard_token=None)
    keys = "`dflash_config.mask_token_id`, `mask_token_id`, `dspark_noise_token_id`, `pard_token`, or `ptd_token_id`"
    with pytest.raises(ValueError, match=f"For parallel drafting, the draft model config must have {keys} specified"):
        load(pair.target, pard(draft))
    with pytest.raises(ValueError, match="For parallel drafting"):
        load(pair.target, pard(pair.target))  # a normal model drafting for itself


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("where", ["config.json", "speculative_config"])
def test_g5_a_mask_token_beyond_the_drafts_vocabulary(pair, tmp_path, where):
    draft = edited(pair.draft, tmp_path / "draft", pard_token=320 if where == "config.json" else MASK)
    keys = {} if where == "config.json" else {"mask_token_id": 320}
    with pytest.raises(ValueError, match=r"mask token id 320 is not in the draft's vocabulary of 320 ids \(0 to 319\)"):
        load(pair.target, pard(draft, **keys))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("speculative", "engine", "error", "message"),
    [
        ({"max_model_len": 65}, {}, ValueError, "=65 cannot be larger than draft_max_model_len=64"),
        ({"draft_tensor_parallel_size": 2}, {}, ValueError, "must be the same. Got 2 and 1"),
        ({}, {"tensor_parallel_size": 4}, ValueError, "=4 does not divide the qwen3 model's num_kv_heads=2"),
        ({}, {"tensor_parallel_size": 9}, ValueError, "tensor_parallel_size=9, but there are 8 cpu"),
        ({}, {"max_model_len": 300}, ValueError, "=300 is larger than the model's max_position_embeddings=256"),
        ({}, {"gpu_memory_utilization": 1e-9}, NotEnoughMemoryError, "Not even the shortest sequence fits"),
        ({"model": "/no/such/draft"}, {}, FileNotFoundError, "/no/such/draft does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_early(pair, speculative, engine, error, message):
    with pytest.raises(error, match=message):
        load(pair.target, pard(pair.draft, **speculative), **engine)


def test_the_mask_token_may_be_named_by_the_user(pair, tmp_path):
    draft = edited(pair.draft, tmp_path / "draft", pard_token=None)
    drafter = load(pair.target, pard(draft, mask_token_id=305)).settings.drafter
    assert isinstance(drafter, PardDrafter) and drafter.mask_token_id == 305


def test_two_devices(pair):
    loaded = load(pair.target, pard(pair.draft), tensor_parallel_size=2)
    plan, alone = loaded.settings.plan, load(pair.target, pard(pair.draft)).settings.plan
    assert plan.weight_bytes == alone.weight_bytes // 2
    for leaf in jax.tree.leaves((loaded.engine._params, loaded.engine._state)):
        assert len(leaf.sharding.device_set) == 2


def test_a_device_that_does_not_tell_its_memory(pair, monkeypatch, caplog):
    """It runs at the length that was asked for, and says that nothing was checked."""
    monkeypatch.setattr(loading, "device_memory", lambda device: None)
    with pytest.raises(ValueError, match=r"does not tell how much memory it has.*pass max_model_len"):
        load(pair.target, pard(pair.draft))
    with caplog.at_level(logging.WARNING):
        loaded = load(pair.target, pard(pair.draft), max_model_len=128)
    assert loaded.settings.plan.max_model_len == 128 and loaded.settings.plan.budget_bytes is None
    assert "max_model_len=128 with max_num_seqs=2 is taken to fit" in caplog.text
    assert loaded.parts.without_speculation().settings.plan.max_model_len == 128


def test_other_families_make_a_pair(pair, tmp_path):
    """A Llama draft of another width for a Qwen3 target."""
    config = hf_config("llama", num_hidden_layers=1, hidden_size=24, num_key_value_heads=1, vocab_size=TARGET_VOCAB)
    draft = save_hf(hf_model(config), tmp_path / "draft", pard_token=301)
    for path in pair.target.glob("tokenizer*"):
        shutil.copy(path, draft)
    drafter = load(pair.target, pard(draft)).settings.drafter
    assert isinstance(drafter, PardDrafter) and drafter.config.family == "llama"
