"""The sizes by name: against the published numbers of parameters, and against the files that come with the package."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import pard_jax
from pard_jax.bench.shapes import SHAPES, model_shape
from pard_jax.config import ModelConfig, RopeConfig
from tests.helpers.models import hf_config

# As the model pages give them; a tied head counts once.
PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
}
PACKAGE = Path(pard_jax.__file__).parent
IN_PACKAGE = {
    "demo-target": PACKAGE / "demo" / "target",
    "demo-draft": PACKAGE / "demo" / "draft",
    "smollm2-draft": PACKAGE / "drafts" / "smollm2",
}


def stored_parameters(directory: Path) -> int:
    """What the header of a safetensors file says, of what a model of Hugging Face's is made of."""
    with (directory / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name.startswith("model."))


def test_all_names_are_counted() -> None:
    assert {*PUBLISHED, *IN_PACKAGE} == {*SHAPES}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_published_sizes(name: str, count: int) -> None:
    assert model_shape(name).num_parameters == count


def test_sizes_in_the_package() -> None:
    for name in ("demo-target", "demo-draft"):
        assert model_shape(name).num_parameters == stored_parameters(IN_PACKAGE[name])
    target, draft = model_shape("smollm2-135m"), model_shape("smollm2-draft")
    # The draft takes its embedding from the target; its own file lacks it.
    table = 49152 * 576
    assert draft.num_parameters == stored_parameters(IN_PACKAGE["smollm2-draft"]) + table
    assert (draft.num_layers, draft.hidden_size, draft.vocab_size) == (4, target.hidden_size, target.vocab_size)


def test_what_no_count_shows() -> None:
    assert model_shape("qwen3-8b").rope == RopeConfig(1e6) and model_shape("qwen3-8b").qk_norm
    for name, factor in (("llama-3.2-1b", 32.0), ("llama-3.2-3b", 32.0), ("llama-3.1-8b", 8.0)):
        assert model_shape(name).rope == RopeConfig(500000.0, factor, 1.0, 4.0, 8192)
    heads = {name: (c.num_heads, c.num_kv_heads, c.head_dim) for name in PUBLISHED if (c := model_shape(name))}
    assert heads == {
        "qwen3-0.6b": (16, 8, 128),
        "qwen3-1.7b": (16, 8, 128),
        "qwen3-4b": (32, 8, 128),
        "qwen3-8b": (32, 8, 128),
        "qwen3-14b": (40, 8, 128),
        "qwen3-32b": (64, 8, 128),
        "llama-3.2-1b": (32, 8, 64),
        "llama-3.2-3b": (24, 8, 128),
        "llama-3.1-8b": (32, 8, 128),
        "smollm2-135m": (9, 3, 64),
    }


def test_files_and_directories(tmp_path: Path) -> None:
    config = hf_config("llama")
    for name in ("config.json", "other.json"):
        (tmp_path / name).write_text(json.dumps(config))
    expected = ModelConfig.from_hf(config)
    for given in (tmp_path, tmp_path / "config.json", tmp_path / "other.json"):
        assert model_shape(str(given)) == expected
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match=r"other\.json holds a list; expected a JSON object"):
        model_shape(str(tmp_path / "other.json"))


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'qwen4' is neither .* known size: qwen3-0\.6b, .*llama-3\.1-8b.*demo-draft"):
        model_shape("qwen4")
