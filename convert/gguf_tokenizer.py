"""The tokenizer inside a GGUF file, rebuilt as Hugging Face's ``tokenizer.json``.

GGUF holds the vocabulary, the merges and the kind of every token, but of the rest only a name: ``tokenizer.ggml.pre``
says which model's pre-tokenizer was meant. Each name known here stands for what that model's own ``tokenizer.json``
says; llama.cpp's equivalents are in ``llama_vocab::impl::load`` and ``llm_tokenizer_bpe``. A name that is not known is
refused: a tokenizer that is almost right gives a model that is subtly wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pard_jax.weights.save import write_json


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """What a name in ``tokenizer.ggml.pre`` stands for."""

    split: str | None = None  # regex whose matches are words; None for GPT-2's, which ByteLevel brings
    digits: bool = False  # every digit is a word of its own, split off before anything else
    nfc: bool = False  # text is normalized first
    ignore_merges: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    add_bos: bool = False  # where `tokenizer.ggml.add_bos_token` says nothing


_QWEN2 = PreTokenizer(
    split=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    nfc=True,
)
_LLAMA3 = PreTokenizer(
    split=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    ignore_merges=True,
    add_bos=True,
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "smollm": PreTokenizer(digits=True),
    "starcoder": PreTokenizer(digits=True),
    "gpt-2": PreTokenizer(),
    "gpt2": PreTokenizer(),
    "qwen2": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
# Matched whole wherever they appear in a text. The special ones are left out when text is decoded.
_ADDED = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(metadata: Mapping[str, Any], directory: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template) for transformers' AutoTokenizer.

    Args:
        metadata: the GGUF file's key-value pairs.
        directory: where to write.
        max_length: of a text, in tokens.

    Raises:
        ValueError: see :func:`build_tokenizer`.
    """
    build_tokenizer(metadata).save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        # The class that takes tokenizer.json as it is; the models' own classes bring a pre-tokenizer of their own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    tokens = metadata["tokenizer.ggml.tokens"]
    for role, key in _ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[role] = tokens[_in_vocabulary(token_id, tokens, role)]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    write_json(directory / "tokenizer_config.json", config)


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Raises:
        ValueError: a tokenizer model or pre-tokenizer that is not supported, or a vocabulary that is incomplete.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"tokenizer model {kind!r} is not supported; only byte-level BPE ('gpt2') is")
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"pre-tokenizer {name!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)} (files without one "
            "are too old; a guess would give other tokens than the model was trained on)"
        )
    pre = PRE_TOKENIZERS[name]
    tokens, types, merges = (_array(metadata, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    # Unused entries only fill the embedding up to its padded size; Hugging Face's vocabularies lack them.
    vocabulary: dict[str, int] = {}
    for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=True)):
        if token_type != TokenType.UNUSED and vocabulary.setdefault(token, token_id) != token_id:
            raise ValueError(f"token {token!r} is in the vocabulary twice: {vocabulary[token]} and {token_id}")

    pairs = [tuple(merge.split(" ")) for merge in merges]
    lost = [
        merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2 or "".join(pair) not in vocabulary
    ]
    if lost:
        raise ValueError(f"{len(lost)} merges give no token of the vocabulary, the first is {lost[0]!r}")
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, pre, tokens)
    added = [
        AddedToken(token, normalized=False, special=_ADDED[token_type])
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in _ADDED
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    return tokenizer


def _pre_tokenizer(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None)
    if pre.split is not None:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pre.split), "isolated"), byte_level])
    if pre.digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def _post_processor(metadata: Mapping[str, Any], pre: PreTokenizer, tokens: Sequence[str]) -> processors.PostProcessor:
    """BOS in front and EOS behind, where the file wants them."""

    def token(role: str) -> tuple[str, int]:
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is None:
            raise ValueError(f"the tokenizer adds {role.upper()} to every text, but the file names no {role}_token_id")
        return tokens[_in_vocabulary(token_id, tokens, role)], token_id

    front = [token("bos")] if metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos) else []
    back = [token("eos")] if metadata.get("tokenizer.ggml.add_eos_token", False) else []
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not front and not back:
        return byte_level

    def template(text: str) -> list[str]:
        return [*(name for name, _ in front), text, *(name for name, _ in back)]

    added = processors.TemplateProcessing(
        single=template("$A"), pair=template("$A") + template("$B"), special_tokens=[*front, *back]
    )
    return processors.Sequence([byte_level, added])


def _array(metadata: Mapping[str, Any], key: str) -> list[Any]:
    if not metadata.get(key):
        raise ValueError(f"the file holds no {key}; a tokenizer cannot be rebuilt without it")
    return metadata[key]


def _in_vocabulary(token_id: int, tokens: Sequence[str], role: str) -> int:
    if not 0 <= token_id < len(tokens):
        raise ValueError(f"{role} id {token_id} is outside of the vocabulary of {len(tokens)} tokens")
    return token_id
