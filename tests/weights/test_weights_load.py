"""HF directories to parameters: bit for bit, in any number of files and any dtype, each device with its own part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pard_jax.config import ModelConfig
from pard_jax.models import abstract_params, make_mesh
from pard_jax.weights import CheckpointError, CheckpointMismatchError, load_params
from tests.helpers.models import hf_config, hf_model
from tests.weights.files import assert_same_bits, bits, hf_state, tiny, write_hf, write_shards

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FAMILIES = {
    "qwen3": {"attention_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
}


def load(directory, config, dtype=None, mesh=None):
    return load_params(directory, ModelConfig.from_hf(config), dtype=dtype, mesh=mesh, progress=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_arrives_bit_for_bit(tmp_path, family, dtype):
    directory, config, state = tiny(tmp_path, family, DTYPES[dtype], **FAMILIES[family])
    params = load(directory, config, dtype)
    assert_same_bits(params, state)
    expected = abstract_params(ModelConfig.from_hf(config), dtype)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)


@pytest.mark.parametrize("index", [True, False])
def test_several_files(tmp_path, index):
    config = hf_config("qwen3")
    state = hf_state(config)
    assert_same_bits(load(write_shards(tmp_path, config, state, index=index), config), state)


def test_none_keeps_each_arrays_dtype(tmp_path):
    config = hf_config("llama")
    state = hf_state(config, ml_dtypes.bfloat16)
    state = {name: x.astype(np.float32) if "norm" in name else x for name, x in state.items()}
    params = load(write_hf(tmp_path, config, state), config)
    assert params["norm"].dtype == jnp.float32 and params["embed"].dtype == jnp.bfloat16
    assert_same_bits(params, state)


def test_none_refuses_layers_of_different_dtypes(tmp_path):
    config = hf_config("llama")
    state = hf_state(config)
    name = "model.layers.1.mlp.up_proj.weight"
    state[name] = state[name].astype(np.float16)
    directory = write_hf(tmp_path, config, state)
    with pytest.raises(CheckpointError, match=r"layers\.up_proj is stored as float16, float32 in different layers"):
        load(directory, config)
    up = load(directory, config, jnp.float32)["layers"]["up_proj"]
    np.testing.assert_array_equal(up[1], state[name].astype(np.float32))


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_casts_round_as_torch_rounds(tmp_path, stored, target):
    torch = pytest.importorskip("torch")
    directory, config, state = tiny(tmp_path, dtype=DTYPES[stored])
    embed = state["model.embed_tokens.weight"]
    expected = torch.from_numpy(embed.astype(np.float32)).to(getattr(torch, target))
    loaded = load(directory, config, target)["embed"]
    assert loaded.dtype == DTYPES[target]
    same_size = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    np.testing.assert_array_equal(
        bits(loaded).astype(np.int64), expected.view(same_size).numpy().view(bits(loaded).dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves(tmp_path, family, dtype):
    torch = pytest.importorskip("torch")
    config = hf_config(family, **FAMILIES[family])
    model = hf_model(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    parsed = ModelConfig.from_pretrained(tmp_path)
    params = load_params(tmp_path, parsed, dtype=dtype, progress=False)
    stored = {k: v for k, v in model.state_dict().items() if not (parsed.tie_word_embeddings and k == "lm_head.weight")}
    state = {name: value.float().numpy().astype(DTYPES[dtype]) for name, value in stored.items()}
    assert_same_bits(params, state)


def test_a_tied_head_that_is_stored_all_the_same_is_ignored(tmp_path):
    config = hf_config("llama", tie_word_embeddings=True)
    state = hf_state(config)
    extra = {"lm_head.weight": np.zeros((128, 32), np.float32)}
    params = load(write_hf(tmp_path, config, state | extra), config)
    assert "lm_head" not in params
    assert_same_bits(params, state)


def test_rotary_buffers_are_ignored(tmp_path):
    config = hf_config("llama")
    state = hf_state(config)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32) for i in range(2)}
    assert_same_bits(load(write_hf(tmp_path, config, state | buffers), config), state)


def test_one_error_lists_everything_that_is_wrong(tmp_path):
    config = hf_config("llama")
    state = hf_state(config)
    del state["lm_head.weight"], state["model.layers.1.self_attn.q_proj.weight"]
    state["model.layers.0.self_attn.q_norm.weight"] = np.zeros(16, np.float32)
    state["model.layers.0.mlp.up_proj.weight"] = np.zeros((48, 31), np.float32)
    state["model.norm.weight"] = np.zeros(33, np.float32)
    state["model.layers.1.mlp.down_proj.weight"] = np.zeros((32, 48), np.int8)
    with pytest.raises(CheckpointMismatchError) as error:
        load(write_hf(tmp_path, config, state), config)
    assert str(error.value).splitlines() == [
        f"{tmp_path} does not hold the model that its config.json describes; 6 problem(s):",
        "  missing lm_head.weight [128, 32];",
        "  missing model.layers.1.self_attn.q_proj.weight [64, 32];",
        "  unexpected model.layers.0.self_attn.q_norm.weight [16];",
        "  shape of model.norm.weight is [33], expected [32];",
        "  shape of model.layers.0.mlp.up_proj.weight is [48, 31], expected [48, 32];",
        "  dtype of model.layers.1.mlp.down_proj.weight is I8, which is not supported "
        "(use bfloat16, float16 or float32)",
    ]


def test_a_float8_checkpoint_is_refused_by_name(tmp_path):
    config = hf_config("llama")
    state = hf_state(config)
    state["model.norm.weight"] = state["model.norm.weight"].astype(ml_dtypes.float8_e4m3fn)
    with pytest.raises(CheckpointMismatchError, match=r"dtype of model\.norm\.weight is F8_E4M3"):
        load(write_hf(tmp_path, config, state), config)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [2, 8])
def test_every_device_is_given_its_own_part(tmp_path, devices, stored):
    shape = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4, "hidden_size": 40}
    directory, config, state = tiny(tmp_path, "qwen3", DTYPES[stored], attention_bias=True, **shape)
    mesh = make_mesh(devices)
    expected = abstract_params(ModelConfig.from_hf(config), jnp.float32, mesh)
    params = load(directory, config, jnp.float32, mesh)
    jax.tree.map(lambda x, a: np.testing.assert_equal(x.sharding, a.sharding), params, expected)
    whole = {name: x.astype(np.float32) for name, x in state.items()}
    assert_same_bits(params, whole)
    shards = params["layers"]["down_proj"].addressable_shards  # split along its columns
    assert [s.data.shape for s in shards] == [(2, 40, 48 // devices)] * devices
    assert [s.device for s in shards] == jax.devices()[:devices]
    for part, shard in enumerate(shards):
        columns = slice(part * 48 // devices, (part + 1) * 48 // devices)
        np.testing.assert_array_equal(shard.data[1], whole["model.layers.1.mlp.down_proj.weight"][:, columns])
    per_device = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(params) if not x.is_fully_replicated)
    sharded = sum(x.size for x in jax.tree.leaves(params) if not x.is_fully_replicated)
    assert per_device * devices == sharded > 0.9 * sum(x.size for x in jax.tree.leaves(params))


def test_no_part_of_another_device_is_read(tmp_path, monkeypatch):
    from pard_jax.weights import load as module

    directory, config, _ = tiny(tmp_path, "llama", num_key_value_heads=4)
    read = []
    monkeypatch.setattr(module, "read_into", lambda out, tensor, index: read.append(out.size))
    params = load(directory, config, jnp.float32, make_mesh(4))
    once = sum(x.size for x in jax.tree.leaves(params))
    assert sum(read) == once


def test_blocks_of_rows_cover_a_tensor(tmp_path, monkeypatch):
    from pard_jax.weights import checkpoint

    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 1000)  # 7 rows of 128 bytes, and a rest
    directory, config, state = tiny(tmp_path)
    assert_same_bits(load(directory, config), state)


def test_default_device(tmp_path):
    directory, config, _ = tiny(tmp_path)
    with jax.default_device(jax.devices()[3]):
        params = load(directory, config)
    assert {d for x in jax.tree.leaves(params) for d in x.devices()} == {jax.devices()[3]}


def test_the_files_are_not_needed_afterwards(tmp_path):
    """On the CPU, parameters are the loader's own buffers: not views of the files, and safe to donate."""
    directory, config, state = tiny(tmp_path)
    params = load(directory, config)
    file = directory / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert_same_bits(params, state)
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)(params)
    np.testing.assert_array_equal(doubled["embed"], 2 * state["model.embed_tokens.weight"])


PEAK = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from pard_jax.config import ModelConfig
from pard_jax.models import make_mesh
from pard_jax.weights import load_params

def memory(key):  # of this process, in bytes; VmHWM is the peak of VmRSS
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

directory, warm, dtype, devices, quantization = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]
jax.config.update("jax_num_cpu_devices", 8)
mesh = make_mesh(devices) if devices else None
common = {"dtype": dtype, "mesh": mesh, "progress": False, "quantization": quantization or None}
load_params(warm, ModelConfig.from_pretrained(warm), **common)  # code is not data
before = memory("VmRSS")
assert memory("VmHWM") - before < 8 << 20, "the peak of start-up would hide that of loading"
params = load_params(directory, ModelConfig.from_pretrained(directory), **common)
jax.block_until_ready(params)
print(json.dumps({"growth": memory("VmHWM") - before, "size": sum(x.nbytes for x in jax.tree.leaves(params))}))
"""


def measure_peak(directory: Path, warm: Path, dtype: str, devices: int, quantization: str = "") -> tuple[int, int]:
    """(growth of this process's peak memory over loading, size of the parameters), of a fresh process, in bytes."""
    command = [sys.executable, "-c", PEAK, str(directory), str(warm), dtype, str(devices), quantization]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    return result["growth"], result["size"]


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> tuple[Path, Path]:
    """A model of 150 MB in float32, whose stacked arrays are larger than any stored tensor; and a tiny one."""
    root = tmp_path_factory.mktemp("big")
    shape = {"hidden_size": 256, "head_dim": 32, "num_attention_heads": 8, "intermediate_size": 1024}
    config = hf_config("llama", vocab_size=8192, num_hidden_layers=32, **shape)
    small = hf_config("llama", num_attention_heads=8, num_key_value_heads=2)
    return write_hf(root / "big", config, hf_state(config)), write_hf(root / "small", small, hf_state(small))


@linux
@pytest.mark.parametrize(("dtype", "devices"), [("float32", 0), ("bfloat16", 0), ("float32", 2)])
def test_peak_memory_is_the_parameters_and_the_largest_tensor(big, dtype, devices):
    growth, size = measure_peak(big[0], big[1], dtype, devices)
    largest = 8192 * 256 * 4  # the embedding as stored; a stacked up_proj is four times that
    assert size > 8 * largest * jnp.dtype(dtype).itemsize / 4
    assert size * 0.95 < growth < size + largest


@linux
def test_peak_memory_of_quantizing_is_the_integers_and_a_block_of_weights(big):
    growth, size = measure_peak(big[0], big[1], "float32", 0, "int8")
    assert 34 << 20 < size < 46 << 20  # of 34 MiB of matrices, and an embedding of 8 MiB that is no head
    threads = min(8, os.cpu_count() or 1)
    assert size * 0.95 < growth < size + (threads * 16 << 20)  # each reads 8 MiB at once; malloc keeps some


def by_definition(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The integers nearest to a matrix's weights, and its rows' scales."""
    weight = weight.astype(np.float32)
    scale = np.max(np.abs(weight), axis=1) / np.float32(127)
    return np.rint(weight / scale[:, None]).astype(np.int8), scale


def assert_quantized(params, state, dtype):
    """Every matrix that multiplies is the stored one's integers, every other array the stored one."""
    names = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn"}
    for name in "q", "k", "v", "o", "gate", "up", "down":
        matrix = params["layers"][f"{name}_proj"]
        for layer in range(matrix.shape[0]):
            values, scale = by_definition(state[f"model.layers.{layer}.{names.get(name, 'mlp')}.{name}_proj.weight"])
            np.testing.assert_array_equal(matrix.values[layer], values)
            np.testing.assert_array_equal(matrix.scale[layer], scale)
    head = params.get("lm_head", params["embed"])
    for ours, want in zip(
        (head.values, head.scale),
        by_definition(state.get("lm_head.weight", state["model.embed_tokens.weight"])),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, want)
    norm = state["model.norm.weight"].astype(dtype)
    np.testing.assert_array_equal(bits(params["norm"]), bits(norm))
    if "lm_head" in params:
        np.testing.assert_array_equal(bits(params["embed"]), bits(state["model.embed_tokens.weight"].astype(dtype)))


@pytest.mark.parametrize("devices", [0, 8])
@pytest.mark.parametrize(("tied", "stored", "dtype"), [(True, "bfloat16", "float32"), (False, "float32", "bfloat16")])
def test_matrices_are_quantized_as_they_are_stored(tmp_path, monkeypatch, tied, stored, dtype, devices):
    """Block by block of a few rows, the last ones smaller; the same on 8 devices, of which each has its part."""
    from pard_jax.weights import load as module

    monkeypatch.setattr(module, "_READ_WEIGHTS", 7 * 40)
    monkeypatch.setattr(module, "_QUANTIZED_WEIGHTS", 3 * 40)
    shape = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4, "hidden_size": 40}
    directory, config, state = tiny(tmp_path, "qwen3", DTYPES[stored], tie_word_embeddings=tied, **shape)
    parsed, mesh = ModelConfig.from_hf(config), make_mesh(devices) if devices else None
    params = load_params(directory, parsed, dtype=dtype, mesh=mesh, progress=False, quantization="int8")
    assert_quantized(params, state, DTYPES[dtype])
    expected = abstract_params(parsed, dtype, mesh, quantization="int8")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    if mesh is not None:
        jax.tree.map(lambda x, a: np.testing.assert_equal(x.sharding, a.sharding), params, expected)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_quantized(tmp_path, value):
    config = hf_config("llama")
    state = hf_state(config)
    state["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    directory = write_hf(tmp_path, config, state)
    with pytest.raises(CheckpointError, match=r"layers\.up_proj holds infinities or NaN, which cannot be quantized"):
        load_params(directory, ModelConfig.from_hf(config), dtype="float32", progress=False, quantization="int8")
