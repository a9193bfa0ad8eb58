"""HF to Orbax and back: every bit of every parameter, every other file, and the errors."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert import hf_to_orbax, orbax_to_hf
from pard_jax.config import ModelConfig
from pard_jax.weights import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, load_params
from tests.helpers.models import hf_config
from tests.weights.files import assert_same_bits, bits, hf_state, tiny, transformers_model, write_hf, write_shards

COMPANIONS = {
    "generation_config.json": '{"eos_token_id": [2, 0]}',
    "tokenizer.json": '{"é": 1}',
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ x }}",
    "merges.txt": "a b\n",
    "tokenizer.model": "\x00\x01",
    "LICENSE": "do",
    "README.md": "# model",
}


def there_and_back(source, tmp_path):
    hf_to_orbax(source, tmp_path / "orbax", progress=False)
    orbax_to_hf(tmp_path / "orbax", tmp_path / "back", progress=False)
    return load_file(tmp_path / "back" / "model.safetensors")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [("qwen3", {}), ("qwen2", {"tie_word_embeddings": True}), ("llama", {"attention_bias": True, "mlp_bias": True})],
)
def test_every_bit_comes_back(tmp_path, family, overrides, dtype):
    directory, config, state = tiny(tmp_path, family, dtype, **overrides)
    specials = np.array([0x7FC1, 0xFF80, 0x0001, 0x8000], np.uint16)  # a NaN's payload, infinity, subnormal, -0
    if dtype != np.float32:
        state["model.norm.weight"][:4] = specials.view(dtype)
        write_hf(directory, config, state)
    tensors = there_and_back(directory, tmp_path)
    assert tensors.keys() == state.keys()
    for name, array in tensors.items():
        assert array.dtype == dtype
        np.testing.assert_array_equal(bits(array), bits(state[name]), err_msg=name)
    assert_same_bits(load_params(tmp_path / "orbax", ModelConfig.from_hf(config), dtype=None, progress=False), state)


def test_dtypes_may_be_mixed(tmp_path):
    config = hf_config("llama")
    state = hf_state(config, ml_dtypes.bfloat16)
    state = {name: x.astype(np.float32) if "norm" in name else x for name, x in state.items()}
    tensors = there_and_back(write_hf(tmp_path / "hf", config, state), tmp_path)
    assert {name: x.dtype for name, x in tensors.items()} == {name: x.dtype for name, x in state.items()}


def test_layers_of_different_dtypes_are_refused(tmp_path):
    directory, config, state = tiny(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    write_hf(directory, config, state | {name: state[name].astype(np.float16)})
    with pytest.raises(CheckpointError, match=r"layers\.up_proj is stored as float16, float32 in different layers"):
        hf_to_orbax(directory, tmp_path / "orbax", progress=False)
    assert not (tmp_path / "orbax").exists()


def test_the_other_files_come_along_and_the_index_does_not(tmp_path):
    config = hf_config("llama")
    state = hf_state(config)
    source = write_shards(tmp_path / "hf", config, state, index=True)
    for name, text in COMPANIONS.items():
        (source / name).write_text(text)
    (source / "original").mkdir()
    (source / "training.log").touch()
    tensors = there_and_back(source, tmp_path)
    assert tensors.keys() == state.keys()
    for target, weights in (("orbax", "params"), ("back", "model.safetensors")):
        assert {f.name for f in (tmp_path / target).iterdir()} == {*COMPANIONS, "config.json", weights}
        for name in (*COMPANIONS, "config.json"):
            assert (tmp_path / target / name).read_bytes() == (source / name).read_bytes()


def test_what_is_no_parameter_stays_behind(tmp_path):
    """The head of a tied model and rotary buffers; whatever reads the result never wanted them."""
    config = hf_config("llama", tie_word_embeddings=True)
    state = hf_state(config)
    extra = {
        "lm_head.weight": state["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    assert there_and_back(write_hf(tmp_path / "hf", config, state | extra), tmp_path).keys() == state.keys()


def test_transformers_reads_what_came_back(tmp_path):
    pytest.importorskip("torch")
    config = hf_config("qwen3", dtype="bfloat16")
    state = hf_state(config, ml_dtypes.bfloat16)
    there_and_back(write_hf(tmp_path / "hf", config, state), tmp_path)
    model = transformers_model(tmp_path / "back")
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.float().numpy(), state[name].astype(np.float32))


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_source_that_is_wrong_leaves_nothing(tmp_path, damage):
    directory, config, state = tiny(tmp_path)
    if damage == "truncated":
        file = directory / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4])
    else:
        write_hf(directory, config, {name: x for name, x in state.items() if "norm" not in name})
    with pytest.raises(CheckpointError if damage == "truncated" else CheckpointMismatchError):
        hf_to_orbax(directory, tmp_path / "orbax", progress=False)
    assert [f.name for f in tmp_path.iterdir()] == ["llama"]


def test_the_wrong_direction_is_said(tmp_path):
    directory, _, _ = tiny(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="has no params/; expected an Orbax directory"):
        orbax_to_hf(directory, tmp_path / "out", progress=False)
    hf_to_orbax(directory, tmp_path / "orbax", progress=False)
    with pytest.raises(CheckpointError, match="is an Orbax directory already"):
        hf_to_orbax(tmp_path / "orbax", tmp_path / "out", progress=False)


def test_no_config(tmp_path):
    directory, _, _ = tiny(tmp_path)
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        hf_to_orbax(directory, tmp_path / "out", progress=False)


def test_a_target_is_replaced_only_when_asked(tmp_path):
    directory, config, state = tiny(tmp_path)
    hf_to_orbax(directory, tmp_path / "orbax", progress=False)
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        hf_to_orbax(directory, tmp_path / "orbax", progress=False)
    state["model.norm.weight"] += 1
    write_hf(directory, config, state)
    hf_to_orbax(directory, tmp_path / "orbax", overwrite=True, progress=False)
    assert_same_bits(load_params(tmp_path / "orbax", ModelConfig.from_hf(config), dtype=None, progress=False), state)
    assert {f.name for f in tmp_path.iterdir()} == {"llama", "orbax"}
    for target in (directory, tmp_path):
        with pytest.raises(ValueError, match="holds the source"):
            hf_to_orbax(directory, target, overwrite=True, progress=False)


@pytest.mark.parametrize("moment", ["saving", "copying"])
def test_a_failure_leaves_nothing(tmp_path, monkeypatch, moment):
    directory, _, _ = tiny(tmp_path)
    (directory / "tokenizer.json").write_text("{}")

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    if moment == "saving":
        monkeypatch.setattr("pard_jax.weights.orbax.save", fail)
    else:
        monkeypatch.setattr(shutil, "copy", fail)
    with pytest.raises(OSError, match="No space left"):
        hf_to_orbax(directory, tmp_path / "orbax", progress=False)
    assert [f.name for f in tmp_path.iterdir()] == ["llama"]


def test_config_json_is_the_last_file(tmp_path, monkeypatch):
    """Until then nothing can load what is there; the directory is renamed right after."""
    directory, _, _ = tiny(tmp_path)
    for name, text in COMPANIONS.items():
        (directory / name).write_text(text)
    copied, copy = [], shutil.copy
    monkeypatch.setattr(shutil, "copy", lambda source, target: (copied.append(source.name), copy(source, target)))
    hf_to_orbax(directory, tmp_path / "orbax", progress=False)
    assert copied[-1] == "config.json" and len(copied) == len(COMPANIONS) + 1
    assert json.loads((tmp_path / "orbax" / "config.json").read_text())["model_type"] == "llama"
