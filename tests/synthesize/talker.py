"""A small model that talks: which token comes next hangs on the last one alone, by a table that NumPy can follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pard_jax.config import ModelConfig
from pard_jax.tokenizer import load_tokenizer
from pard_jax.weights import save_hf
from tests.helpers.engine import table_params
from tests.helpers.tokenizer import make_tokenizer

VOCABULARY, NUM_TOKENS = 304, 300  # the tokenizer's, and some padding
END = 2  # <|im_end|>


def talker_table(tokenizer_dir: Path, seed: int = 0) -> np.ndarray:
    """``[V, V]`` logits after each token: plain characters, and now and then the end of the turn."""
    tokenizer = load_tokenizer(tokenizer_dir)
    assert tokenizer is not None
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2.5, (VOCABULARY, VOCABULARY))
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(NUM_TOKENS)]
    plain = [i for i, text in enumerate(texts) if i > END and text.isascii() and text.isprintable()]
    said = np.zeros(VOCABULARY, bool)
    said[[END, *plain]] = True
    logits[:, ~said] = -1e4
    logits[:, END] = rng.normal(5.0, 1.5, VOCABULARY)
    return logits


def make_talker(directory: Path, tokenizer_dir: Path) -> Path:
    """Write the model, and a tokenizer like the one in ``tokenizer_dir``."""
    hf: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": VOCABULARY,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "intermediate_size": 1,
        "max_position_embeddings": 512,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    params = table_params(ModelConfig.from_hf(hf), talker_table(tokenizer_dir))
    save_hf(params, hf, directory, progress=False)
    make_tokenizer(directory)
    return directory
