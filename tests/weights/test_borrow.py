"""Drafts that borrow their target's embedding: stripped, put together, and what is refused on the way."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert import hf_to_orbax
from pard_jax.config import ModelConfig
from pard_jax.weights import CheckpointError, borrow, load_params
from pard_jax.weights.borrow import assemble, assembled, is_stripped, strip_embedding
from tests.helpers.models import hf_config
from tests.helpers.tokenizer import make_tokenizer
from tests.weights.files import assert_same_bits, bits, hf_state, transformers_model, write_hf

V, MASK = 128, 127
EMBED = "model.embed_tokens.weight"


def write_target(directory: Path, **overrides: Any) -> Path:
    config = hf_config("qwen3", **overrides)
    return write_hf(directory, config, hf_state(config, seed=1))


def write_draft(directory: Path, target: Path, *, own: tuple[int, ...] = (MASK,), **overrides: Any) -> Path:
    """A bfloat16 draft whose embedding is the float32 target's, rounded, but for the rows ``own``."""
    config = hf_config(
        "llama", num_hidden_layers=1, tie_word_embeddings=True, pard_token=MASK, dtype="bfloat16", **overrides
    )
    state = hf_state(config, ml_dtypes.bfloat16, seed=2)
    borrowed = load_file(target / "model.safetensors")[EMBED][: config["vocab_size"]]
    rows = [i for i in range(len(borrowed)) if i not in own]
    state[EMBED][rows] = borrowed[rows].astype(ml_dtypes.bfloat16)
    write_hf(directory, config, state)
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    return directory


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    target = write_target(tmp_path / "target")
    return target, write_draft(tmp_path / "draft", target)


def same_directories(a: Path, b: Path) -> None:
    assert {f.name for f in a.iterdir()} == {f.name for f in b.iterdir()}
    ours, theirs = (load_file(d / "model.safetensors") for d in (a, b))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(bits(ours[name]), bits(tensor), err_msg=name)
    for file in b.glob("*.json"):
        assert json.loads((a / file.name).read_text()) == json.loads(file.read_text()), file.name


def test_what_is_left(pair, tmp_path):
    target, draft = pair
    strip_embedding(draft, target, tmp_path / "out")
    full = load_file(draft / "model.safetensors")
    stripped = load_file(tmp_path / "out" / "model.safetensors")
    assert stripped.keys() == (full.keys() - {EMBED}) | {"embed_rows.weight", "embed_rows.ids"}
    assert stripped["embed_rows.ids"].tolist() == [MASK]
    np.testing.assert_array_equal(bits(stripped["embed_rows.weight"]), bits(full[EMBED][[MASK]]))
    assert {t.dtype.name for name, t in stripped.items() if name != "embed_rows.ids"} == {"bfloat16"}
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1  # as readable as any other file
    config = json.loads((draft / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {"pard_embedding": "target"}
    assert is_stripped(tmp_path / "out") and not is_stripped(draft) and not is_stripped(tmp_path / "absent")


@pytest.mark.parametrize("kind", ["hf", "orbax"])
def test_there_and_back(pair, tmp_path, kind):
    target, draft = pair
    lender = target
    if kind == "orbax":
        lender = tmp_path / "orbax"
        hf_to_orbax(target, lender, progress=False)
    strip_embedding(draft, lender, tmp_path / "stripped")
    assemble(tmp_path / "stripped", lender, tmp_path / "out")
    same_directories(tmp_path / "out", draft)
    config = ModelConfig.from_pretrained(tmp_path / "out")
    assert config.mask_token_id == MASK and config.dtype == "bfloat16"
    params = load_params(tmp_path / "out", config, dtype=None, progress=False)
    assert_same_bits(params, load_file(draft / "model.safetensors"))


def test_transformers_loads_it(pair, tmp_path):
    torch = pytest.importorskip("torch")
    target, draft = pair
    strip_embedding(draft, target, tmp_path / "stripped")
    assemble(tmp_path / "stripped", target, tmp_path / "out")
    ids = torch.tensor([[3, 1, 4, 1, 5, MASK]])
    with torch.no_grad():
        logits = [transformers_model(d)(ids).logits for d in (tmp_path / "out", draft)]
    assert torch.equal(*logits)


def test_a_vocabulary_beyond_the_targets(tmp_path):
    """Rows that the target lacks are the draft's own, whatever is asked for; a smaller draft takes the first rows."""
    target = write_target(tmp_path / "target", vocab_size=V - 8)
    draft = write_draft(tmp_path / "draft", target, own=(5, MASK))
    strip_embedding(draft, target, tmp_path / "stripped", rows=[5])
    ids = load_file(tmp_path / "stripped" / "model.safetensors")["embed_rows.ids"]
    assert ids.tolist() == [5, *range(V - 8, V)]
    assemble(tmp_path / "stripped", target, tmp_path / "out")
    same_directories(tmp_path / "out", draft)

    large = write_target(tmp_path / "large", vocab_size=V + 8)
    small = write_draft(tmp_path / "small", large)
    strip_embedding(small, large, tmp_path / "stripped_small")
    assemble(tmp_path / "stripped_small", large, tmp_path / "out_small")
    same_directories(tmp_path / "out_small", small)

    fewer = write_target(tmp_path / "fewer", vocab_size=V - 9)
    with pytest.raises(CheckpointError, match=rf"fewer has {V - 9} rows .* needs {V} and brings 9; row {V - 9} is in"):
        assemble(tmp_path / "stripped", fewer, tmp_path / "refused")


def test_an_embedding_that_was_trained(tmp_path):
    target = write_target(tmp_path / "target")
    draft = write_draft(tmp_path / "draft", target, own=(3, 9, MASK))
    with pytest.raises(
        CheckpointError, match=rf"2 of {V} rows of .* differ .* in bfloat16 \(ids 3, 9\), beside the 1 "
    ):
        strip_embedding(draft, target, tmp_path / "out")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["draft", "target"]
    strip_embedding(draft, target, tmp_path / "out", rows=[9, 3, MASK])
    assemble(tmp_path / "out", target, tmp_path / "full")
    same_directories(tmp_path / "full", draft)


def test_the_tokenizer_is_the_targets(pair, tmp_path):
    target, draft = pair
    make_tokenizer(target)
    make_tokenizer(draft)
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    strip_embedding(draft, target, tmp_path / "borrows")
    assert not tokenizer & {f.name for f in (tmp_path / "borrows").iterdir()}
    assemble(tmp_path / "borrows", target, tmp_path / "full")
    same_directories(tmp_path / "full", draft)

    make_tokenizer(draft, vocab_size=280)
    strip_embedding(draft, target, tmp_path / "keeps")
    assert tokenizer <= {f.name for f in (tmp_path / "keeps").iterdir()}
    assemble(tmp_path / "keeps", target, tmp_path / "own")
    same_directories(tmp_path / "own", draft)


def test_what_cannot_be_stripped(pair, tmp_path):
    target, draft = pair

    def refused(error: type[Exception], match: str, directory: Path = draft, **kwargs: Any) -> None:
        with pytest.raises(error, match=match):
            strip_embedding(directory, target, tmp_path / "out", **kwargs)
        assert not (tmp_path / "out").exists()

    refused(ValueError, "has a head of its own", directory=target)
    refused(ValueError, r"row 128 is not in the draft's vocabulary of 128 ids", rows=[128])
    refused(FileNotFoundError, "holds no config.json", directory=tmp_path)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"pard_token": None}))
    refused(ValueError, "names no mask token; name the rows")
    (draft / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    refused(CheckpointError, "missing model.layers.1")
    wide = write_target(tmp_path / "wide", hidden_size=40)
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"wide has an embedding of \[128, 40\], .*draft is 32 wide; .* name that"
    ):
        strip_embedding(draft, wide, tmp_path / "out")
    strip_embedding(draft, target, tmp_path / "stripped")
    refused(CheckpointError, "stripped is stripped already: .* give the whole draft", directory=tmp_path / "stripped")
    hf_to_orbax(draft, tmp_path / "orbax", progress=False)
    refused(CheckpointError, "orbax is an Orbax directory; .* orbax-to-hf", directory=tmp_path / "orbax")
    (draft / "model.safetensors").unlink()
    refused(FileNotFoundError, r"draft holds a config.json, but no \*.safetensors; expected")


def test_what_cannot_be_put_together(pair, tmp_path):
    target, draft = pair
    stripped = tmp_path / "stripped"
    strip_embedding(draft, target, stripped)

    def refused(match: str, *, target: Path = target, config: Any = None, drop: str = "", **tensors: Any) -> None:
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(stripped, broken)
        if config is not None:
            old = json.loads((broken / "config.json").read_text())
            (broken / "config.json").write_text(json.dumps(old | config))
        stored = load_file(broken / "model.safetensors") | {k.replace("__", "."): v for k, v in tensors.items()}
        save_file({k: v for k, v in stored.items() if k != drop}, broken / "model.safetensors")
        with pytest.raises(CheckpointError, match=match):
            assemble(broken, target, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused('says "pard_embedding": "teacher"; expected "target"', config={"pard_embedding": "teacher"})
    refused('says "pard_embedding": null; expected "target", .* strip the whole', config={"pard_embedding": None})
    refused("lacks embed_rows.ids, .* strip the whole draft again", drop="embed_rows.ids")
    refused(r"expected \[1, 32\], and ids from 0 to 127", embed_rows__ids=np.array([V]))
    refused(r"is \[1, 32\] for 2 ids", embed_rows__ids=np.array([1, 2]))
    refused(r"embed_rows.ids is F32 \[1\]; expected I64", embed_rows__ids=np.zeros(1, np.float32))
    refused("wide has an embedding of .*broken is 32 wide", target=write_target(tmp_path / "wide", hidden_size=40))
    unnamed = shutil.copytree(stripped, tmp_path / "unnamed")
    (unnamed / "config.json").write_text((draft / "config.json").read_text())
    with pytest.raises(CheckpointError, match='has no "pard_embedding"; expected "target"'):
        assemble(unnamed, target, tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"draft holds a whole draft, with its model.embed_tokens.weight, .* strip-d"
    ):
        assemble(draft, target, tmp_path / "out")
    (unnamed / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"unnamed holds a config.json, but no \*.safetensors"):
        assemble(unnamed, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (target / "model.safetensors").unlink()
    save_file({"other": np.zeros(1)}, target / "model.safetensors")
    refused("holds no model.embed_tokens.weight to take")


def test_made_once_a_pair(pair, tmp_path, monkeypatch):
    target, draft = pair
    monkeypatch.setenv("PARD_JAX_HOME", str(tmp_path / "home"))
    strip_embedding(draft, target, tmp_path / "stripped")
    made = assembled(tmp_path / "stripped", target)
    same_directories(made, draft)
    assert made.parent == tmp_path / "home"
    with monkeypatch.context() as patch:
        patch.setattr(borrow, "assemble", lambda *_: pytest.fail("made again"))
        assert assembled(tmp_path / "stripped", target) == made
    os.utime(target / "model.safetensors", (1, 1))  # as if it had been written again
    other = assembled(tmp_path / "stripped", target)
    assert other != made
    same_directories(other, made)
