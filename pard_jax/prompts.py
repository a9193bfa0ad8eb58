"""Prompts as a command line takes them: from its arguments, a file or stdin, to the token ids that the model sees."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pard_jax.tokenizer import Tokenizer
from pard_jax.utf8 import not_utf8, read_text

# Of a line of a .jsonl file; `data` is the key of the PARD repository's files of prompts.
TEXT_KEYS = ("prompt", "data")
KEYS = (*TEXT_KEYS, "messages", "prompt_token_ids")
STDIN = "-"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt as it was given."""

    kind: Literal["text", "messages", "ids"]
    given: Any  # str, list of {"role": ..., "content": ...}, or list of int
    where: str  # it stood, for messages


def read_prompts(texts: Sequence[str], file: str | None = None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a command line.

    Args:
        texts: prompts themselves; "-" stands for all of stdin as one prompt. Without any, and without a file, stdin is
            read if it is not a terminal.
        file: a file of prompts, "-" for stdin: ``.jsonl``, one object a line with one of :data:`KEYS`, or text, one
            prompt a line. Blank lines do not count.
        limit: take so many prompts of the file.

    Raises:
        ValueError: no prompt, an empty one, or a line that is none; the message names it.
        OSError: the file cannot be read.
    """
    if file is None:
        if limit is not None:
            raise ValueError("--limit takes the first prompts of a file; give one with --prompts")
        read = [_stdin().removesuffix("\n") if text == STDIN else text for text in texts]
        if not texts and sys.stdin and not sys.stdin.isatty():
            read = [text] if (text := _stdin().removesuffix("\n")) else []
        if not read:
            raise ValueError('no prompt was given; pass one as an argument, with --prompts FILE, or on stdin as "-"')
        return [_text(text, f"prompt {i}") for i, text in enumerate(read, 1)]
    if texts:
        raise ValueError("prompts were given as arguments and with --prompts; choose one")
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1, got {limit}")
    prompts = list(_of_lines(file, limit))
    if not prompts:
        raise ValueError(f"{file} holds no prompts")
    return prompts


def _stdin() -> str:
    if sys.stdin is None:
        raise ValueError('there is no stdin to read "-" from')
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as e:
        raise ValueError(f"stdin, {not_utf8(e)}") from None


def _of_lines(file: str, limit: int | None) -> Iterable[Prompt]:
    content = _stdin() if file == STDIN else read_text(file)
    parse = _of_json if file.endswith(".jsonl") else _text
    count = 0
    # Not splitlines(): a prompt may hold U+2028 and its like.
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip() and (limit is None or count < limit):
            count += 1
            yield parse(line.removesuffix("\r"), f"{'stdin' if file == STDIN else file}, line {number}")


def _text(text: str, where: str) -> Prompt:
    if not text:
        raise ValueError(f"{where} is empty")
    return Prompt("text", text, where)


def _of_json(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"{where} is not valid JSON: {e}") from None
    found = [key for key in KEYS if key in entry] if isinstance(entry, dict) else []
    if len(found) != 1:
        got = ("the keys " + (", ".join(map(repr, entry)) or "none")) if isinstance(entry, dict) else f"{entry!r:.80}"
        raise ValueError(f"{where}: expected an object with one of the keys {', '.join(map(repr, KEYS))}; got {got}")
    value = entry[found[0]]
    if found[0] in TEXT_KEYS:
        if not isinstance(value, str):
            raise ValueError(f"{where}: {found[0]!r} must be a string, got {value!r:.80}")
        return _text(value, f"{where}: {found[0]!r}")
    if found[0] == "messages":
        if not isinstance(value, list) or not value or not all(_is_message(message) for message in value):
            raise ValueError(
                f"{where}: 'messages' must be a list of objects with a 'role' and a 'content' of text, "
                f"got {value!r:.80}"
            )
        return Prompt("messages", value, where)
    if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
        raise ValueError(f"{where}: 'prompt_token_ids' must be a list of integers, got {value!r:.80}")
    return Prompt("ids", value, where)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    *,
    chat: bool = True,
    system: str | None = None,
    enable_thinking: bool | None = None,
) -> list[int]:
    """The ids that the model sees.

    Args:
        tokenizer: None where the checkpoint brings none; then only token ids can be given.
        chat: put a text through the tokenizer's chat template, as the user's turn, if there is one. Without, and
            where there is none, the text is completed as it stands.
        system: the system's turn, put in front.
        enable_thinking: given to the chat template.

    Raises:
        ValueError: what cannot be done with this prompt or this tokenizer.
    """
    try:
        return _encode(prompt, tokenizer, chat, system, enable_thinking)
    except ValueError as e:
        raise ValueError(f"{prompt.where}: {e}") from None


def _encode(
    prompt: Prompt, tokenizer: Tokenizer | None, chat: bool, system: str | None, enable_thinking: bool | None
) -> list[int]:
    needs_template = prompt.kind == "messages" or system is not None or enable_thinking is not None
    if prompt.kind == "ids":
        if system is not None or enable_thinking is not None:
            raise ValueError("token ids reach the model as they are; --system and --no-thinking need text or messages")
        return prompt.given
    if tokenizer is None:
        raise ValueError("the checkpoint holds no tokenizer, so text cannot be encoded; give prompt_token_ids")
    if not chat and needs_template:
        raise ValueError("messages, --system and --no-thinking need the chat template, which --raw turns off")
    if not needs_template and not (chat and tokenizer.has_chat_template):
        ids = tokenizer.encode(prompt.given)
    else:
        messages = prompt.given if prompt.kind == "messages" else [{"role": "user", "content": prompt.given}]
        if system is not None:
            if messages[0]["role"] == "system":
                raise ValueError("the messages bring a system turn of their own, which --system contradicts")
            messages = [{"role": "system", "content": system}, *messages]
        ids = tokenizer.apply_chat_template(messages, enable_thinking=enable_thinking)
    if not ids:
        raise ValueError("the prompt has no tokens")
    return ids
