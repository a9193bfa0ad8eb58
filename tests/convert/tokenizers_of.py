"""Small byte-level tokenizers, split as the models' own ``tokenizer.json`` files split, trained on this very folder."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<think>", "</think>"]
VOCAB_SIZE = 600
TEXTS = [
    "",
    " ",
    "Hello, world! It's what they'd've DON'T expect: I'LL",
    "1234567890 3.14159 a1b22c333 ½ ² ٣ Ⅷ",
    "    5 spaces  7\t\t9\n\n1. one\n  2. two",
    "def f(x):\n\treturn x**2  # 12\r\n\r\n\n",
    "naïve café — “quotes” 日本語 한국어 العربية हिन्दी",
    "😀👩‍👩‍👧🇩🇪 e\u0301 \u1e9b\u0323 \u212b",
    "<|im_start|>user\n<think>hi</think><|im_end|>\n<|endoftext|>",
    "  leading and trailing   ",
    "\x00\x01\x7f\u200b\ufeff",
]


@functools.cache
def reference(pre: str) -> Tokenizer:
    """The tokenizer that a file with this ``tokenizer.ggml.pre`` was made from."""
    byte_level = functools.partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
    tokenizer = Tokenizer(BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = {
        "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()]),
        "gpt-2": byte_level,
        "qwen2": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(QWEN2), "isolated"), byte_level(use_regex=False)]
        ),
        "llama-bpe": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level(use_regex=False)]
        ),
    }[pre]()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(PLAIN),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*TEXTS, *(f.read_text() for f in sorted(Path(__file__).parent.glob("*.py")))]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in PLAIN])
    return tokenizer
