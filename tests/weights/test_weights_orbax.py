"""Orbax directories: the same parameters, the same errors, the same bound on memory."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from pard_jax.config import ModelConfig
from pard_jax.models import abstract_params, make_mesh
from pard_jax.weights import CheckpointError, CheckpointMismatchError, load_params, orbax
from tests.helpers.models import hf_config
from tests.weights.files import assert_same_bits, hf_state, tiny, write_hf
from tests.weights.test_weights_load import assert_quantized, linux, measure_peak


def to_orbax(directory, config, target):
    """What the converter does, without the other files."""
    target.mkdir()
    orbax.save(load_params(directory, ModelConfig.from_hf(config), dtype=None, progress=False), target)
    shutil.copy(directory / "config.json", target)
    return target


@pytest.fixture
def stored(tmp_path):
    directory, config, state = tiny(tmp_path, "qwen3", ml_dtypes.bfloat16, attention_bias=True)
    return to_orbax(directory, config, tmp_path / "orbax"), ModelConfig.from_hf(config), state


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_every_tensor_arrives_bit_for_bit(stored, dtype):
    directory, config, state = stored
    assert_same_bits(load_params(directory, config, dtype=dtype, progress=False), state)


def test_each_array_keeps_its_dtype(tmp_path):
    config = hf_config("llama")
    state = hf_state(config, np.float16)
    state = {name: x.astype(np.float32) if "norm" in name else x for name, x in state.items()}
    target = to_orbax(write_hf(tmp_path / "hf", config, state), config, tmp_path / "orbax")
    assert_same_bits(load_params(target, ModelConfig.from_hf(config), dtype=None, progress=False), state)


@pytest.mark.parametrize(("kind", "target"), [(np.float32, ml_dtypes.bfloat16), (ml_dtypes.bfloat16, np.float32)])
def test_casts(tmp_path, kind, target):
    directory, config, state = tiny(tmp_path, dtype=kind)
    directory = to_orbax(directory, config, tmp_path / "orbax")
    params = load_params(directory, ModelConfig.from_hf(config), dtype=target, progress=False)
    assert_same_bits(params, {name: x.astype(target) for name, x in state.items()})


def test_every_device_is_given_its_own_part(stored):
    directory, config, state = stored
    mesh = make_mesh(2)
    params = load_params(directory, config, dtype="float32", mesh=mesh, progress=False)
    expected = abstract_params(config, "float32", mesh)
    jax.tree.map(lambda x, a: np.testing.assert_equal(x.sharding, a.sharding), params, expected)
    assert {s.data.shape for s in params["layers"]["down_proj"].addressable_shards} == {(2, 32, 24)}
    assert_same_bits(params, {name: x.astype(np.float32) for name, x in state.items()})


@pytest.mark.parametrize("devices", [0, 2])
def test_matrices_are_quantized_as_they_are_stored(stored, devices):
    directory, config, state = stored
    mesh = make_mesh(devices) if devices else None
    params = load_params(directory, config, dtype="float32", mesh=mesh, progress=False, quantization="int8")
    assert_quantized(params, state, np.float32)


def test_chunks_of_an_array(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax, "_CHUNK_BYTES", 1000)
    directory, config, state = tiny(tmp_path)
    target = to_orbax(directory, config, tmp_path / "orbax")
    for mesh in (None, make_mesh(2)):
        params = load_params(target, ModelConfig.from_hf(config), dtype=None, mesh=mesh, progress=False)
        assert_same_bits(params, state)


def test_orbax_itself_reads_it(stored):
    directory, config, state = stored
    abstract = abstract_params(config, jnp.bfloat16, make_mesh(1))
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same_bits(checkpointer.restore(directory / "params", abstract), state)


def test_what_orbax_writes_by_default_is_read(tmp_path):
    directory, config, state = tiny(tmp_path)
    params = load_params(directory, ModelConfig.from_hf(config), dtype=None, progress=False)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "other" / "params", params)
    assert_same_bits(load_params(tmp_path / "other", ModelConfig.from_hf(config), dtype=None, progress=False), state)


def test_one_error_lists_everything_that_is_wrong(stored):
    directory, _, _ = stored
    other = ModelConfig.from_hf(hf_config("llama", vocab_size=100, num_hidden_layers=3))
    with pytest.raises(CheckpointMismatchError) as error:
        load_params(directory, other, dtype="float32", progress=False)
    message = str(error.value)
    assert "unexpected layers.q_norm [2, 16]" in message and "unexpected layers.o_bias [2, 32]" in message
    assert "shape of embed is [128, 32], expected [100, 32]" in message
    assert "shape of layers.up_proj is [2, 48, 32], expected [3, 48, 32]" in message


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "params").mkdir()
    config = ModelConfig.from_hf(hf_config("llama"))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/params is not an Orbax checkpoint, or is damaged"):
        load_params(tmp_path, config, dtype="float32", progress=False)


def test_lost_data_are_named(stored):
    directory, config, _ = stored
    data = [f for f in (directory / "params").rglob("*") if f.is_file() and f.parent.name == "d"]
    largest = max(data, key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"params is damaged: .* cannot be read"):
        load_params(directory, config, dtype="float32", progress=False)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A model of 300 MB, and a tiny one."""
    root = tmp_path_factory.mktemp("big")
    shape = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 2048}
    config = hf_config("llama", vocab_size=32768, num_hidden_layers=16, tie_word_embeddings=True, **shape)
    large = to_orbax(write_hf(root / "hf", config, hf_state(config)), config, root / "large")
    directory, config, _ = tiny(root)
    return large, to_orbax(directory, config, root / "small")


@linux
@pytest.mark.parametrize("devices", [0, 2])
def test_peak_memory_is_the_parameters_and_the_largest_tensor(big, devices):
    growth, size = measure_peak(big[0], big[1], "float32", devices)
    largest = 32768 * 512 * 4  # the embedding, 64 MiB, as large as a stacked up_proj
    assert size > 4 * largest
    assert size * 0.95 < growth < size + 1.5 * largest  # half for what TensorStore itself takes, whatever the size
