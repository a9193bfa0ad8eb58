"""Writing HF directories: what is read back is what was written, and a directory is never half there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from pard_jax.config import ModelConfig
from pard_jax.models import make_mesh
from pard_jax.weights import CheckpointError, load_params, save_hf
from pard_jax.weights.save import new_directory, write_tensors
from tests.helpers.models import hf_config, hf_model, params_of
from tests.weights.files import assert_same_bits, bits, hf_state, tiny, transformers_model


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [("qwen3", {"attention_bias": True}), ("qwen2", {"tie_word_embeddings": True}), ("llama", {"mlp_bias": True})],
)
def test_what_was_read_is_written_bit_for_bit(tmp_path, family, overrides, dtype):
    directory, config, state = tiny(tmp_path, family, dtype, **overrides)
    params = load_params(directory, ModelConfig.from_hf(config), dtype=None, progress=False)
    save_hf(params, config, tmp_path / "out", progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: (x.shape, x.dtype) for name, x in written.items()} == {
        name: (x.shape, x.dtype) for name, x in state.items()
    }
    for name, array in written.items():
        np.testing.assert_array_equal(bits(array), bits(state[name]), err_msg=name)


def test_sharded_parameters_are_gathered(tmp_path):
    directory, config, state = tiny(tmp_path, "llama")
    params = load_params(directory, ModelConfig.from_hf(config), dtype="float32", mesh=make_mesh(2), progress=False)
    save_hf(params, config, tmp_path / "out", progress=False)
    for name, array in load_file(tmp_path / "out" / "model.safetensors").items():
        np.testing.assert_array_equal(array, state[name])


def test_shards_and_their_index(tmp_path):
    directory, config, state = tiny(tmp_path, "qwen3")
    params = load_params(directory, ModelConfig.from_hf(config), dtype=None, progress=False)
    save_hf(params, config, tmp_path / "out", max_shard_bytes=20_000, progress=False)
    files = sorted(f.name for f in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    assert all((tmp_path / "out" / f).stat().st_size < 22_000 for f in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in state.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "numpy") as f:
            assert name in f.keys()  # noqa: SIM118 -- a safe_open is no mapping
    again = load_params(tmp_path / "out", ModelConfig.from_hf(config), dtype=None, progress=False)
    assert_same_bits(again, state)


def test_transformers_reads_it(tmp_path):
    torch = pytest.importorskip("torch")
    config = hf_config("qwen3")
    model = hf_model(config)
    save_hf(params_of(model, ModelConfig.from_hf(config)), config, tmp_path / "out", progress=False)
    again = transformers_model(tmp_path / "out")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_data_begin_aligned(tmp_path):
    for length in range(1, 9):
        tensors = {"x" * length: (np.dtype(np.float32), (3,), lambda: np.ones(3, np.float32))}
        write_tensors(tensors, tmp_path, progress=False)
        raw = (tmp_path / "model.safetensors").read_bytes()
        assert int.from_bytes(raw[:8], "little") % 8 == 0
        np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["x" * length], np.ones(3))


def test_one_tensor_is_held_at_a_time(tmp_path):
    alive: list[weakref.ref] = []

    def make(i):
        assert sum(ref() is not None for ref in alive) <= 1  # the one before, until this one replaces it
        array = np.full(1000, i, np.float32)
        alive.append(weakref.ref(array))
        return array

    tensors = {str(i): (np.dtype(np.float32), (1000,), lambda i=i: make(i)) for i in range(50)}
    write_tensors(tensors, tmp_path, progress=False)
    assert len(alive) == 50
    for name, array in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(array, np.full(1000, int(name), np.float32))


def test_a_directory_that_is_not_empty_is_kept(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    params, config = {"norm": np.ones(32, np.float32)}, {}
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        save_hf(params, config, tmp_path / "out", progress=False)
    assert [f.name for f in tmp_path.rglob("*")] == ["out", "precious"]
    save_hf(params, config, tmp_path / "out", overwrite=True, progress=False)
    assert sorted(f.name for f in tmp_path.rglob("*")) == ["config.json", "model.safetensors", "out"]


def test_an_empty_directory_and_absent_parents_are_fine(tmp_path):
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        with new_directory(target) as partial:
            (partial / "x").touch()
        assert [f.name for f in target.iterdir()] == ["x"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_changes_nothing(tmp_path, exists):
    if exists:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "old").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RuntimeError), new_directory(tmp_path / "out", overwrite=True) as partial:
        (partial / "config.json").touch()
        raise RuntimeError
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("under", ["file/out", "file"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, under):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"{tmp_path / under}"), new_directory(tmp_path / under):
        pass


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="cannot write to"), new_directory(tmp_path / "out"):
            pass
    finally:
        tmp_path.chmod(0o700)


def test_rights_are_those_of_any_new_directory(tmp_path):
    with new_directory(tmp_path / "out"):
        pass
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


KILLED = """
import os, sys
import numpy as np
from pard_jax.weights import save
from pard_jax.config import ModelConfig
from pard_jax.models import abstract_params
from tests.helpers.models import hf_config
import jax

class File:  # dies after the given write, as kill -9 would have it
    def __init__(self, file):
        self.file, self.writes = file, 0
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.file.close()
    def write(self, data):
        self.file.write(data)
        self.writes += 1
        if self.writes == fatal:
            self.file.flush()
            os._exit(9)

opened = save.Path.open
save.Path.open = lambda self, mode="r", *args, **kwargs: (
    File(opened(self, mode, *args, **kwargs)) if mode == "wb" else opened(self, mode, *args, **kwargs))
config = hf_config("llama")
params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_params(ModelConfig.from_hf(config), np.float32))
for fatal in map(int, sys.argv[2:]):
    if os.fork() == 0:
        save.save_hf(params, config, f"{sys.argv[1]}/{fatal}/out", progress=False)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_nothing_that_loads_is_left_by_a_killed_run(tmp_path):
    tensors = len(hf_state(hf_config("llama")))
    fatal = [1, tensors // 2, tensors, tensors + 1, 0]  # the header is one more write; 0 is never
    command = [sys.executable, "-c", KILLED, str(tmp_path), *map(str, fatal)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == ["9", "9", "9", "9", "0"], done.stderr
    config = ModelConfig.from_pretrained(tmp_path / "0" / "out")
    load_params(tmp_path / "0" / "out", config, dtype="float32", progress=False)
    for write in fatal[:-1]:
        (left,) = (tmp_path / str(write)).iterdir()
        assert left.name.startswith(".out.partial-")
        with pytest.raises(FileNotFoundError):
            ModelConfig.from_pretrained(left)
        if write <= tensors:  # after the last write the weights are whole, and only the config is missing
            with pytest.raises(CheckpointError, match="truncated or corrupt"):
                load_params(left, config, dtype="float32", progress=False)
