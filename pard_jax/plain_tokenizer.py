"""Tokenizers that are a ``tokenizer.json`` and little else, by the tokenizers library alone.

Importing transformers is a fifth of a start that compiles nothing. It is done without where a checkpoint leaves nothing
for transformers to add, which the pairs that come with the package do; and done after all where more is asked for.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pard_jax.tokenizer import Tokenizer, check_unicode

_SPECIAL = {f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_KNOWN = {"tokenizer_class", "clean_up_tokenization_spaces", "model_max_length", "chat_template"} | _SPECIAL
# Files that transformers would take more from.
_MORE = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "chat_templates")
# What a chat template may consist of: nothing that calls anything, so that rendering needs no more of a sandbox than
# jinja2's, nor any function of transformers'.
_SIMPLE = (nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Name, nodes.Const,
           nodes.Getattr, nodes.Getitem, nodes.Compare, nodes.Operand, nodes.Not, nodes.And, nodes.Or,
           nodes.Add, nodes.Concat)  # fmt: skip


class PlainTokenizer(Tokenizer):
    """Gives what the transformers tokenizer of the same directory gives."""

    def __init__(self, directory: Path, library: tokenizers.Tokenizer, special: dict[str, str], template: Any) -> None:
        """
        Args:
            directory: for transformers, where more is asked for.
            library: has the tokens.
            special: the tokens of ``tokenizer_config.json``, by their roles (``"eos_token"``).
            template: compiled; None where there is no chat template.
        """
        self._directory, self._library, self._special, self._template = directory, library, special, template

    @functools.cached_property
    def hf(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(self._directory), local_files_only=True)

    def __len__(self) -> int:
        return self._library.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    def _id_of(self, role: str) -> int | None:
        return self._library.token_to_id(self._special[role]) if role in self._special else None

    @property
    def vocab(self) -> dict[str, int]:
        return self._library.get_vocab(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_unicode(text)
        return self._library.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._library.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        return [self._library.id_to_token(i) for i in token_ids]

    def _render(self, conversation: list[dict[str, Any]], add_generation_prompt: bool, **more: Any) -> list[int]:
        simple = all(set(message) == {"role", "content"} for message in conversation)
        asked = "hf" in vars(self)  # somebody has it, and may have changed it
        if asked or self._template is None or not simple or not set(more) <= {"enable_thinking"}:
            return super()._render(conversation, add_generation_prompt, **more)
        given = self._special | {"tools": None, "documents": None} | more
        text = self._template.render(messages=conversation, add_generation_prompt=add_generation_prompt, **given)
        return self.encode(text, add_special_tokens=False)


def load_plain(directory: Path) -> PlainTokenizer | None:
    """The tokenizer of a directory, of which AutoTokenizer would choose the generic class; None where it takes more.

    Raises:
        Exception: of any kind, from the library, for a broken ``tokenizer.json``.
    """
    config: Mapping[str, Any] = json.loads((directory / "tokenizer_config.json").read_bytes())
    if not set(config) <= _KNOWN or any((directory / name).exists() for name in _MORE):
        return None
    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    adds = library.post_processor
    if library.truncation or library.padding or not (adds is None or isinstance(adds, tokenizers.processors.ByteLevel)):
        return None
    special = {role: token for role, token in config.items() if role in _SPECIAL and token is not None}
    known = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    if not all(isinstance(token, str) and token in known for token in special.values()):
        return None
    source, template = config.get("chat_template"), None
    if source is not None and (template := _compile(source)) is None:
        return None
    return PlainTokenizer(directory, library, special, template)


def _compile(source: Any) -> Any:
    """A chat template of simple parts; None of others, or where it is none that jinja2 can read."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        parts = environment.parse(source).find_all(nodes.Node) if isinstance(source, str) else [None]
    except TemplateError:
        return None
    return environment.from_string(source) if all(isinstance(part, _SIMPLE) for part in parts) else None
