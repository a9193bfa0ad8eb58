"""What every method is given: the same prompts, in groups, at one context length."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pard_jax.prompts import STDIN, Prompt, encode_prompt, read_prompts
from pard_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts as token ids, by the name of their group, all fitted to ``context`` tokens where it is not None."""

    context: int | None
    groups: dict[str, list[list[int]]]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(ids) for prompts in self.groups.values() for ids in prompts)

    def batches(self, size: int) -> Iterator[tuple[str, list[list[int]]]]:
        """Up to ``size`` prompts at once, of one group each, with the group's name."""
        for name, prompts in self.groups.items():
            for i in range(0, len(prompts), size):
                yield name, prompts[i : i + size]


def add_prompt_arguments(parser: argparse.ArgumentParser, *, files: str) -> Callable[..., Any]:
    """The flags that say what the prompts are, in a group of their own, whose ``add_argument`` is returned.

    ``files`` says what becomes of several files.
    """
    add = parser.add_argument_group("prompts").add_argument
    add("texts", nargs="*", metavar="PROMPT", help='prompts; "-" for stdin')
    add("--prompts", nargs="+", action="extend", metavar="FILE",
        help=f"text, a prompt a line, or .jsonl as pard_jax.generate takes it; {files}")  # fmt: skip
    add("--limit", type=int, metavar="N", help="the first N prompts of each file")
    add("--raw", action="store_true", help="complete the text as it stands, without the chat template")
    add("--chat-template", dest="raw", action="store_false", default=False,
        help="put text through the chat template, if there is one (the default)")  # fmt: skip
    add("--no-thinking", action="store_true", help="tell the chat template enable_thinking=False")
    return add


def read_groups(texts: Sequence[str], files: Sequence[str] | None, limit: int | None) -> dict[str, list[Prompt]]:
    """The prompts of a command line: one group a file, named by its stem, or one of all texts, named "prompts".

    Raises:
        ValueError, OSError: see :func:`pard_jax.prompts.read_prompts`; files whose stems are equal.
    """
    if not files:
        return {"prompts": read_prompts(texts, None, limit)}
    groups: dict[str, list[Prompt]] = {}
    for file in files:
        name = "stdin" if file == STDIN else Path(file).stem
        if name in groups:
            raise ValueError(f"two files of prompts are called {name!r}, by which they are told apart; rename one")
        groups[name] = read_prompts(texts, file, limit)
    if len(groups) > 1 and TOTAL in groups:
        raise ValueError(f"a file of prompts is called {TOTAL!r}, as all of them together are; rename it")
    return groups


TOTAL = "total"  # the name of all groups together


def encode_groups(
    groups: dict[str, list[Prompt]],
    tokenizer: Tokenizer | None,
    contexts: Sequence[int | None],
    args: argparse.Namespace,
) -> list[Workload]:
    """One workload for each context length; ``args`` says how text becomes tokens (``raw``, ``no_thinking``).

    Raises:
        ValueError: a prompt that cannot be encoded.
    """
    thinking = False if args.no_thinking else None
    encoded = {
        name: [encode_prompt(p, tokenizer, chat=not args.raw, enable_thinking=thinking) for p in prompts]
        for name, prompts in groups.items()
    }
    return [
        Workload(context, {name: [fit(ids, context) for ids in prompts] for name, prompts in encoded.items()})
        for context in contexts
    ]


def fit(ids: list[int], length: int | None) -> list[int]:
    """A prompt made ``length`` tokens long: repeated from its end backwards, or cut at its beginning; None leaves it.

    The end stays, because it is what the model answers to (the last of the text, or the template's opening of a turn).
    """
    if length is None:
        return ids
    return (ids * -(-length // len(ids)))[-length:]
