"""The models that come with the package: complete, small, loadable by others, and worth what their cards say."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax import LLM, SamplingParams
from pard_jax.config import ModelConfig
from pard_jax.demo.prompts import generate_prompts
from pard_jax.models import bind
from pard_jax.presets import PRESETS
from pard_jax.prompts import read_prompts
from pard_jax.weights import load_params
from pard_jax.weights.borrow import assemble, is_stripped

DEMO, SMOLLM2 = PRESETS["demo"], PRESETS["smollm2"]
ROOT = Path(__file__).parent.parent


def size(*directories: Path | str) -> int:
    return sum(file.stat().st_size for directory in directories for file in Path(directory).rglob("*"))


def test_sizes():
    assert size(DEMO.target, DEMO.draft) <= 40e6
    assert size(SMOLLM2.draft) <= 64e6
    assert max(file.stat().st_size for file in Path(SMOLLM2.draft).iterdir()) <= 45e6
    target, draft = (ModelConfig.from_pretrained(directory) for directory in (DEMO.target, DEMO.draft))
    assert 10e6 <= target.num_parameters <= 20e6
    assert 1 / 7 <= draft.num_parameters / target.num_parameters <= 1 / 5
    assert target.vocab_size == draft.vocab_size <= 8192


def test_the_recipes_configs_are_those_of_the_pair():
    for name, directory in (("target", DEMO.target), ("draft", DEMO.draft)):
        recipe = json.loads((ROOT / "docs" / f"demo-{name}.json").read_text())
        shipped = json.loads((Path(directory) / "config.json").read_text())
        assert recipe.items() <= shipped.items()


@pytest.mark.parametrize("directory", [DEMO.target, DEMO.draft, SMOLLM2.draft])
def test_every_model_has_a_card_with_licence_and_provenance(directory):
    card = (Path(directory) / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "docs/training.md" in card
    assert "/tmp" not in card


def logits_agree(directory: Path | str) -> None:
    """transformers loads the directory unchanged, and gives our logits."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config = ModelConfig.from_pretrained(directory)
    ids = np.random.default_rng(0).integers(4, config.vocab_size, (1, 24))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    params = load_params(directory, config, dtype="float32", progress=False)
    causal = jnp.tril(jnp.ones((24, 24), bool))[None]
    ours = bind(config, params)
    hidden = ours.encode(params["embed"][ids], jnp.arange(24, dtype=jnp.int32)[None], causal)
    np.testing.assert_allclose(ours.logits(hidden), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("directory", [DEMO.target, DEMO.draft])
def test_transformers_loads_the_demo_pair(directory):
    logits_agree(directory)


@pytest.mark.smollm2
def test_transformers_loads_the_smollm2_draft_once_assembled(smollm2_dir, tmp_path):
    assert is_stripped(Path(SMOLLM2.draft))
    assemble(Path(SMOLLM2.draft), smollm2_dir, tmp_path / "draft")
    logits_agree(tmp_path / "draft")


def run(target: str, draft: str, prompts: list[list[dict[str, str]]], k: int) -> tuple[float, list[str]]:
    """Acceptance length, and what was said; greedy tokens must be those of the target alone."""
    llm = LLM(
        target,
        speculative_config={"model": draft, "num_speculative_tokens": k, "parallel_drafting": True},
        max_model_len=384,
        max_num_seqs=4,
    )
    params = SamplingParams(temperature=0.0, max_tokens=96)
    outputs = llm.chat(prompts, params, use_tqdm=False)
    length = llm.engine.acceptance.mean_acceptance_length
    llm.disable_speculation()
    plain = llm.chat(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    return length, [o.outputs[0].text for o in outputs]


def test_the_demo_pair_speaks_english_and_its_draft_is_right_now_and_then():
    prompts = [[{"role": "user", "content": p.text}] for p in generate_prompts(6, seed=11, held_out=True)]
    length, texts = run("demo", "demo", prompts, 8)
    assert length > 2.3, length
    words = [word.strip(".,!?\"'").lower() for text in texts for word in text.split()]
    assert len(words) > 100
    common = {"the", "a", "and", "to", "of", "in", "is", "it", "was", "that", "with", "they", "for", "are"}
    assert sum(word in common for word in words) > 0.25 * len(words)


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_smollm2_draft_on_everyday_prompts(smollm2_dir):
    prompts = read_prompts([], str(ROOT / "pard_jax" / "bench" / "prompts" / "chat.jsonl"), 10)
    messages = [[{"role": "user", "content": prompt.given}] for prompt in prompts]
    length, _ = run(str(smollm2_dir), str(SMOLLM2.draft), messages, 8)
    assert length > 2.0, length
