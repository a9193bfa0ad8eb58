"""A small real tokenizer, trained on the spot: byte-level BPE like Qwen's and Llama 3's, with a ChatML template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; the last is EOS
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog, being lazy, lets it.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
    "user assistant system: What is the capital of France? The capital of France is Paris.",
    "naïve café, straße, 你好世界, こんにちは, 😀 😁 🇩🇪 — “quotes” …",
    "One two three four five six seven eight nine ten; once upon a time there was a token.",
)


def make_tokenizer(
    directory: str | Path, vocab_size: int = 300, chat_template: bool = True, added_tokens: Sequence[str] = ()
) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` that AutoTokenizer loads.

    Args:
        directory: made when it is missing.
        vocab_size: tokens, the 3 special ones and 256 bytes included; the same size gives the same tokenizer.
        chat_template: write a ChatML template that knows ``enable_thinking``.
        added_tokens: special tokens with the ids from ``vocab_size`` on.

    Returns:
        The directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size={vocab_size} cannot be trained; got {tokenizer.get_vocab_size()} tokens")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added_tokens])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template:
        config["chat_template"] = CHAT_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
