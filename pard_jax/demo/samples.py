"""The messages of a file that :mod:`pard_jax.synthesize` or :mod:`pard_jax.demo.corpus` wrote, line by line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pard_jax.utf8 import not_utf8


def read_samples(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each sample stands, for messages about it, and the sample; with a progress bar on stderr.

    Every sample has ``messages``, one or more, each with a ``content`` of text; nothing else is sure. Blank lines do
    not count, and one line at a time is kept.

    Raises:
        ValueError: a line that is no such sample, or no line at all; the message names it.
        OSError: the file cannot be read.
    """
    from tqdm import tqdm

    found = False
    with path.open("rb") as file, tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc="reading") as bar:
        for number, line in enumerate(file, 1):
            bar.update(len(line))
            if line.strip():
                found = True
                where = f"{path}, line {number}"
                try:
                    sample = json.loads(line.decode("utf-8-sig"))
                except UnicodeDecodeError as e:
                    raise ValueError(f"{path}, {not_utf8(e, number)}") from None
                except ValueError as e:
                    raise ValueError(f"{where} is not valid JSON: {e}") from None
                _check(sample, where)
                yield where, sample
    if not found:
        raise ValueError(f"{path} holds no samples")


def _check(sample: Any, where: str) -> None:
    messages = sample.get("messages") if isinstance(sample, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: expected an object with a list of 'messages', got {sample!r:.80}")
    if not all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages):
        raise ValueError(f"{where}: every message must have a 'content' of text, got {messages!r:.80}")
