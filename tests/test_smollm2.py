"""The real thing: SmolLM2-135M-Instruct as ``python -m convert`` makes it, through every method."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax import LLM, SamplingParams
from pard_jax.config import ModelConfig
from pard_jax.models import KVCache, bind
from pard_jax.weights import load_params

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(600)]

MASK_TOKEN_ID = 3  # <repo_name>, which the instruct model has no use for
CONVERSATIONS = [
    [{"role": "user", "content": "Count from one to ten in words."}],
    [{"role": "user", "content": "Write a Python function that reverses a string. 日本語 🙂"}],
]


def test_logits_equal_transformers(smollm2_dir: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config = ModelConfig.from_pretrained(smollm2_dir)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 48), dtype=np.int32)
    model = bind(config, load_params(smollm2_dir, config, dtype="float32", progress=False))
    shape = (config.num_layers, 1, config.num_kv_heads, 48, config.head_dim)
    out = model(jnp.asarray(tokens), KVCache.zeros(shape, jnp.float32), jnp.zeros(1, jnp.int32), window=48)
    ours = model.logits(out.hidden)

    oracle = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    with torch.inference_mode():
        theirs = oracle(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max(), rtol=1e-4)


def test_all_methods_give_the_same_tokens(smollm2_dir: Path) -> None:
    draft = {"model": str(smollm2_dir), "num_speculative_tokens": 4, "method": "draft_model"}
    methods = {
        "none": None,
        "pard": draft | {"parallel_drafting": True, "mask_token_id": MASK_TOKEN_ID},
        "draft_model": draft,
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    }
    params = SamplingParams(temperature=0.0, max_tokens=28)
    outputs, stats = {}, {}
    for name, speculative_config in methods.items():
        llm = LLM(str(smollm2_dir), speculative_config=speculative_config, max_model_len=192, max_num_seqs=2)
        outputs[name] = [o.outputs[0] for o in llm.chat(CONVERSATIONS, params)]
        stats[name] = llm.engine.acceptance
    for name in methods:
        assert [o.token_ids for o in outputs[name]] == [o.token_ids for o in outputs["none"]], name
    assert all(digit in outputs["none"][0].text for digit in "12345")
    assert "def " in outputs["none"][1].text
    # The target is its own draft: PARD's first token is always right, the sequential drafter's all are.
    assert stats["pard"].per_position_acceptance_rates[0] == 1.0
    full, cut = stats["draft_model"].acceptance_histogram[4], stats["draft_model"].num_drafts
    assert full >= cut - len(CONVERSATIONS)  # the last step of a request may be cut short
