"""Files that are damaged, absent or contradict each other: each is named, with what is wrong, before memory is used."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from pard_jax.weights import CheckpointError, CheckpointNotFoundError
from pard_jax.weights.checkpoint import StoredTensor, read_headers, read_into
from tests.helpers.models import hf_config
from tests.weights.files import hf_state, tiny, write_shards


def test_headers_say_where_the_data_are(tmp_path):
    directory, _, state = tiny(tmp_path)
    headers = read_headers(directory)
    assert headers.keys() == state.keys()
    for name, stored in headers.items():
        assert (stored.dtype, stored.shape) == ("F32", state[name].shape)
        raw = stored.file.read_bytes()[stored.offset : stored.offset + state[name].nbytes]
        assert raw == state[name].tobytes()


@pytest.mark.parametrize(
    "damage",
    {
        "empty": lambda data: b"",
        "no header": lambda data: data[:5],
        "half a header": lambda data: data[:200],
        "header only": lambda data: data[: 8 + int.from_bytes(data[:8], "little")],
        "last byte lost": lambda data: data[:-1],
        "a byte too many": lambda data: data + b"\0",
        "header length absurd": lambda data: b"\xff" * 8 + data[8:],
        "header no JSON": lambda data: data[:8] + b"x" + data[9:],
        "a web page": lambda data: b"<!DOCTYPE html><html>404</html>" * 20,
        "git LFS pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "shape larger than the data": lambda data: data.replace(b'"shape":[128,32]', b'"shape":[129,32]', 1),
        "offsets beyond the data": lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1),
        "unknown dtype": lambda data: data.replace(b'"F32"', b'"Q32"', 1),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_damaged_file_is_named(tmp_path, damage):
    directory, _, _ = tiny(tmp_path)
    file = directory / "model.safetensors"
    data = file.read_bytes()
    assert damage[1](data) != data
    file.write_bytes(damage[1](data))
    with pytest.raises(CheckpointError) as error:
        read_headers(directory)
    assert f"{file} is truncated or corrupt ({file.stat().st_size} bytes): " in str(error.value)


@pytest.mark.parametrize("keep", np.linspace(0, 1, 23, endpoint=False))
def test_wherever_it_was_cut(tmp_path, keep):
    directory, _, _ = tiny(tmp_path)
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or corrupt"):
        read_headers(directory)


def test_a_damaged_shard_is_named(tmp_path):
    config = hf_config("llama")
    write_shards(tmp_path, config, hf_state(config), index=True)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is truncated"):
        read_headers(tmp_path)


def test_absent_shards_are_named(tmp_path):
    config = hf_config("llama")
    write_shards(tmp_path, config, hf_state(config), index=True)
    for i in (1, 3):
        (tmp_path / f"model-0000{i}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError) as error:
        read_headers(tmp_path)
    message = str(error.value)
    assert "index.json names" in message and "download may be incomplete" in message
    assert "model-00001-of-00003" in message and "model-00003-of-00003" in message and "model-00002" not in message


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}', "\0"])
def test_an_index_that_is_none_is_named(tmp_path, text):
    config = hf_config("llama")
    write_shards(tmp_path, config, hf_state(config), index=True)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is not an index of safetensors shards"):
        read_headers(tmp_path)


def test_an_index_that_contradicts_its_shards(tmp_path):
    config = hf_config("llama")
    write_shards(tmp_path, config, hf_state(config), index=True)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = next(name for name, file in index["weight_map"].items() if "00001" in file)
    index["weight_map"][moved] = "model-00002-of-00003.safetensors"
    index["weight_map"]["phantom"] = "model-00003-of-00003.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        read_headers(tmp_path)
    assert f"{moved} (named in model-00002-of-00003.safetensors)" in str(error.value)
    assert "phantom (named in model-00003-of-00003.safetensors)" in str(error.value)


def test_a_tensor_stored_twice(tmp_path):
    for name in ("a", "b"):
        save_file({"x": np.zeros(3, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"x is stored twice: in .*a\.safetensors and in .*b\.safetensors"):
        read_headers(tmp_path)


def test_the_index_decides_which_files_are_read(tmp_path):
    config = hf_config("llama")
    state = hf_state(config)
    write_shards(tmp_path, config, state, index=True)
    shutil.copy(tmp_path / "model-00001-of-00003.safetensors", tmp_path / "consolidated.safetensors")
    assert read_headers(tmp_path).keys() == state.keys()


def test_no_weights(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"holds no \*\.safetensors and no params/"):
        read_headers(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointNotFoundError, match=r"found pytorch_model\.bin; only safetensors are read"):
        read_headers(tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    directory, _, _ = tiny(tmp_path)
    stored = read_headers(directory)["model.norm.weight"]
    stored.file.write_bytes(stored.file.read_bytes()[: stored.offset + 3])
    with pytest.raises(CheckpointError, match="was truncated while it was read"):
        read_into(np.empty(32, np.float32), stored, (slice(0, 32),))


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_slice_of_rows_and_columns(tmp_path, offset):
    """Also from data that are not aligned, as a header of odd length makes them."""
    x = np.random.default_rng(0).standard_normal((50, 30)).astype(np.float32)
    (tmp_path / "data").write_bytes(bytes(offset) + x.tobytes())
    out = np.empty((7, 5), np.float32)
    read_into(out, StoredTensor(tmp_path / "data", offset, "F32", x.shape), (slice(40, 47), slice(25, 30)))
    np.testing.assert_array_equal(out, x[40:47, 25:30])
