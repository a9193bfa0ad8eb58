"""The file of samples: JSON lines in the order of the conversations' ids, which a killed run goes on with.

Beside ``FILE`` stands ``FILE.meta.json``: the settings that made it, and how far it is complete. Samples are written
first and their count after them, so whatever a kill leaves behind the count is cut off and made again.
"""

from __future__ import annotations

import array
import collections
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pard_jax.cli import write_whole

DUPLICATE_PROMPT, DUPLICATE_ANSWER = "duplicate prompt", "duplicate answer"


class Store:
    """Takes the outcome of every conversation, in order of ids from :attr:`next_id` on.

    Attributes:
        next_id: the first conversation whose outcome is not known.
        kept: samples in the file.
        num_tokens: tokens of these samples that the target wrote as the assistant.
        dropped: conversations that gave none, by reason.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Begin a file, or go on with one that these settings made.

        Raises:
            ValueError: the file was made with other settings, or by something else, or is damaged.
            OSError: it cannot be written.
        """
        self._path, self._meta_path = path, path.with_name(path.name + ".meta.json")
        self._settings = json.loads(json.dumps(settings))  # as they will be read back: lists for tuples
        self.next_id = self.kept = self.num_tokens = self._size = 0
        self.dropped: collections.Counter[str] = collections.Counter()
        self._prompts: set[bytes] = set()
        self._answers: set[bytes] = set()
        if self._meta_path.exists():
            self._resume()
        elif path.exists() and path.stat().st_size:
            raise ValueError(f"{path} exists, and no {self._meta_path.name} says how it was made; name another file")
        self._file = path.open("ab")
        self._save()

    def is_duplicate(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a sample of the file has this prompt."""
        return _digest(prompt_ids) in self._prompts

    def add(self, record: dict[str, Any], *, unique_prompt: bool) -> None:
        """Take conversation :attr:`next_id`'s sample, unless the file has its answer or prompt already.

        Args:
            record: with ``token_ids`` and ``loss_ranges``, of which the last is the answer.
            unique_prompt: drop what only repeats a prompt, too.
        """
        prompt, answer = _parts(record)
        if unique_prompt and prompt in self._prompts:
            return self.drop(DUPLICATE_PROMPT)
        if answer in self._answers:
            return self.drop(DUPLICATE_ANSWER)
        self._count(record)
        self._size += self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self.next_id += 1

    def drop(self, reason: str) -> None:
        """Conversation :attr:`next_id` gave no sample."""
        self.dropped[reason] += 1
        self.next_id += 1

    def flush(self) -> None:
        """Make all that was taken outlast a kill."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._save()

    def close(self) -> None:
        """Flush, and close the file."""
        self.flush()
        self._file.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self, record: dict[str, Any]) -> None:
        prompt, answer = _parts(record)
        self._prompts.add(prompt)
        self._answers.add(answer)
        self.num_tokens += sum(end - start for start, end in record["loss_ranges"])
        self.kept += 1

    def _save(self) -> None:
        progress = {"next_id": self.next_id, "kept": self.kept, "dropped": dict(self.dropped), "bytes": self._size}
        meta = {"settings": self._settings, "progress": progress}
        write_whole(self._meta_path, json.dumps(meta, indent=2, ensure_ascii=False) + "\n")

    def _resume(self) -> None:
        try:
            meta = json.loads(self._meta_path.read_text(encoding="utf-8"))
            settings, progress = meta["settings"], meta["progress"]
            self.next_id, kept, self._size = progress["next_id"], progress["kept"], progress["bytes"]
            self.dropped.update(progress["dropped"])
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(
                f"{self._meta_path} is damaged ({e!r}); remove it and {self._path}, or name another"
            ) from None
        names = [k for k in {**settings, **self._settings} if settings.get(k) != self._settings.get(k)]
        if names:
            changes = ", ".join(f"{k}: {settings.get(k)!r:.60} then, {self._settings.get(k)!r:.60} now" for k in names)
            raise ValueError(f"{self._path} was made with other settings ({changes}); name another file")
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._size:
            raise ValueError(
                f"{self._path} holds {size} bytes of the {self._size} that {self._meta_path.name} counts; remove both"
            )
        if size:
            os.truncate(self._path, self._size)
            with self._path.open("rb") as file:
                for line in file:
                    self._count(json.loads(line))
        if self.kept != kept:
            raise ValueError(f"{self._path} holds {self.kept} samples where {kept} were written; remove both files")


def _parts(record: dict[str, Any]) -> tuple[bytes, bytes]:
    """Digests of a sample's prompt and answer."""
    start, end = record["loss_ranges"][-1]
    return _digest(record["token_ids"][:start]), _digest(record["token_ids"][start:end])


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array.array("i", token_ids).tobytes(), digest_size=12).digest()
