"""Samples from JSONL, packed into rows of one length, and the batches of every step. It knows no model and no loss.

A line of a file is an object in one of four forms:

    {"token_ids": [...], "loss_ranges": [[s, e], ...]}    half-open ranges of what the target wrote; other keys too
    {"messages": [{"role": ..., "content": ...}, ...]}    the tokenizer's chat template makes the tokens
    {"conversation": [{"human": ..., "assistant": ...}]}  the same in the PARD repository's spelling
    {"text": "..."}                                       plain text, all of it in the loss

A loss mask marks tokens as labels: token i is predicted from the tokens before it. The first token of a sample has none
before it and is never marked, so the number of marks is the number of labels.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32
from tqdm.auto import tqdm

from pard_jax.tokenizer import Tokenizer
from pard_jax.utf8 import not_utf8

TEXT_FORMS = ("messages", "conversation", "text")
PREFETCH_DEPTH = 2


@dataclasses.dataclass(frozen=True)
class Sample:
    """One text as the model sees it, and which of its tokens are labels that count."""

    token_ids: Int32[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]


def read_samples(
    paths: Sequence[Path],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    include_prompt: bool,
    retokenize: bool = False,
    max_samples: int | None = None,
    progress: bool = True,
) -> list[Sample]:
    """The samples of JSONL files, in their order. Blank lines do not count.

    Args:
        paths: files of lines in the forms that the module describes.
        tokenizer: makes tokens of the forms that hold text; None where all lines hold token ids.
        vocab_size: every id must lie below it.
        include_prompt: put every token in the loss, as PARD's own training does; otherwise ``loss_ranges``, or the
            assistant's turns with their end-of-turn tokens.
        retokenize: make tokens of the text where a line holds both, as another model's tokenizer has made the ids.
        max_samples: stop after so many.
        progress: show a bar, on a terminal.

    Raises:
        ValueError: a file or line that is no such thing, naming file and line, what was found and what is expected.
        OSError: a file cannot be read.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples must be at least 1, got {max_samples}")
    if not paths:
        raise ValueError("no file of samples was given; expected at least one JSONL file")
    samples: list[Sample] = []
    total = sum(Path(path).stat().st_size for path in paths)
    with tqdm(
        total=total, desc="Reading samples", unit="B", unit_scale=True, disable=None if progress else True
    ) as bar:
        for path in map(Path, paths):
            before = len(samples)
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    bar.update(len(line))
                    if line.isspace():
                        continue
                    try:
                        samples.append(_sample(_parse(line), tokenizer, vocab_size, include_prompt, retokenize))
                    except UnicodeDecodeError as e:
                        raise ValueError(f"{path}, {not_utf8(e, number)}") from None
                    except ValueError as e:
                        raise ValueError(f"{path}, line {number}: {e}") from None
                    if len(samples) == max_samples:
                        return samples
            if len(samples) == before:
                what = "holds blank lines only" if path.stat().st_size else "is empty"
                raise ValueError(f"{path} {what}; expected one JSON object a line, each a sample")
    return samples


def _parse(line: bytes) -> dict[str, Any]:
    try:
        # Left to itself, json takes what looks like UTF-16 for it; the first line may begin with UTF-8's own mark.
        entry = json.loads(line.decode("utf-8-sig"))
    except ValueError as e:  # json.JSONDecodeError, UnicodeDecodeError
        if isinstance(e, UnicodeDecodeError) and e.reason != "unexpected end of data":
            raise
        if not line.endswith(b"\n"):
            raise ValueError(
                f"the last line ends in the middle ({e}); the file was cut off while it was written or copied: "
                "remove that line, or make the file again"
            ) from None
        raise ValueError(f"not valid JSON: {e}; expected one JSON object a line") from None
    if not isinstance(entry, dict):
        raise ValueError(f"expected a JSON object, got {entry!r:.80}")
    return entry


def _sample(
    entry: dict[str, Any], tokenizer: Tokenizer | None, vocab_size: int, include_prompt: bool, retokenize: bool
) -> Sample:
    if "token_ids" in entry and not retokenize:
        ids = entry["token_ids"]
        # map and set run in C: a loop over 50 million ids would take longer than all else.
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise ValueError(f"'token_ids' must be a list of integers, got {ids!r:.80}")
        if "loss_ranges" in entry:
            ranges = _checked_ranges(entry["loss_ranges"], len(ids))
        elif include_prompt:
            ranges = []
        else:
            raise ValueError(
                "'token_ids' without 'loss_ranges'; expected the half-open ranges of what the target wrote, or put "
                "every token in the loss (include_prompt)"
            )
    else:
        ids, ranges = _encode(entry, tokenizer, include_prompt)
    if len(ids) < 2:
        raise ValueError(
            f"the sample has {len(ids)} tokens; expected at least 2, one to predict from and one to predict"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise ValueError(
            f"token id {wrong} is outside the vocabulary; expected 0 to {vocab_size - 1}: the samples must be made "
            "with the tokenizer of the model that is trained"
        )
    mask = np.full(len(ids), include_prompt)
    for start, end in ranges:
        mask[start:end] = True
    mask[0] = False
    if not mask.any():
        raise ValueError(
            f"no token is in the loss (loss ranges {ranges!r:.80}); expected an assistant's turn, or put every token "
            "in the loss (include_prompt)"
        )
    return Sample(np.asarray(ids, np.int32), mask)


def _checked_ranges(ranges: Any, length: int) -> list[list[int]]:
    if not isinstance(ranges, list):
        raise ValueError(f"'loss_ranges' must be a list of [start, end), got {ranges!r:.80}")
    for r in ranges:
        if not isinstance(r, list) or len(r) != 2 or not set(map(type, r)) <= {int} or not 0 <= r[0] < r[1] <= length:
            raise ValueError(
                f"the loss range {r!r:.80} is none of the sample's {length} tokens; expected [start, end) with "
                f"0 <= start < end <= {length}"
            )
    return ranges


def _encode(
    entry: dict[str, Any], tokenizer: Tokenizer | None, include_prompt: bool
) -> tuple[list[int], list[list[int]]]:
    """Tokens and loss ranges of a line that holds text; no ranges where they do not matter."""
    found = [form for form in TEXT_FORMS if form in entry]
    if len(found) != 1:
        got = ", ".join(map(repr, entry)) or "none"
        raise ValueError(
            f"expected the key 'token_ids' or one of {', '.join(map(repr, TEXT_FORMS))}; got the keys {got}"
        )
    if tokenizer is None:
        raise ValueError(
            f"{found[0]!r} needs a tokenizer, and the checkpoint holds none; give 'token_ids' and 'loss_ranges'"
        )
    value = entry[found[0]]
    if found[0] == "text":
        if not isinstance(value, str):
            raise ValueError(f"'text' must be a string, got {value!r:.80}")
        ids = tokenizer.encode(value)
        return ids, [[0, len(ids)]]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{found[0]!r} must be a list with a turn or more, got {value!r:.80}")
    messages = _messages_of(value) if found[0] == "conversation" else value
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    return ids, [] if include_prompt else _assistant_ranges(messages, ids, tokenizer)


def _messages_of(conversation: list[Any]) -> list[dict[str, str]]:
    messages = []
    for turn in conversation:
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("human", "assistant")):
            raise ValueError(f"a turn of 'conversation' must have a 'human' and an 'assistant' text, got {turn!r:.80}")
        messages.append({"role": "user", "content": turn["human"]})
        messages.append({"role": "assistant", "content": turn["assistant"]})
    return messages


def _assistant_ranges(messages: Sequence[Mapping[str, Any]], ids: list[int], tokenizer: Tokenizer) -> list[list[int]]:
    """Where the assistant's turns lie in ``ids``, each from behind the generation prompt to its end-of-turn token.

    Templates put more than the content into a turn (thoughts), treat the last one differently, and write a newline
    after the end-of-turn token, which no model does. So a turn starts where the generation prompt of the messages
    before it ends, and ends where generation would: with the first end-of-turn token.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [len(_opened(messages[:i], ids, tokenizer)) for i in turns]
    if not turns:
        return []
    last = tokenizer.apply_chat_template(messages[: turns[-1] + 1], add_generation_prompt=False)
    special = {i for i, token in tokenizer.hf.added_tokens_decoder.items() if token.special}
    end_of_turn = next((i for i in reversed(last[starts[-1] :]) if i in special), None)
    if end_of_turn is None:
        raise ValueError(
            "the chat template ends the assistant's turn without a special token, so where it ends cannot be told; "
            "give 'token_ids' and 'loss_ranges'"
        )
    return [[start, ids.index(end_of_turn, start) + 1] for start in starts]


def _opened(messages: Sequence[Mapping[str, Any]], ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The tokens in front of an assistant's turn, generation prompt included."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True) if messages else []
    if not messages or ids[: len(prompt)] != prompt:
        raise ValueError(
            f"the assistant's turn after {len(messages)} messages does not continue the chat template's generation "
            "prompt, so where it starts cannot be told; give 'token_ids' and 'loss_ranges'"
        )
    return prompt


def split(samples: Sequence[Sample], *, held_out: int, seed: int) -> tuple[list[Sample], list[Sample]]:
    """(train, held out): ``held_out`` samples drawn by ``seed``, both in the order of ``samples``.

    Raises:
        ValueError: nothing would be left to train on.
    """
    if not 0 <= held_out < len(samples):
        raise ValueError(f"held_out={held_out} of {len(samples)} samples; expected 0 to {len(samples) - 1}")
    chosen = set(np.random.default_rng(seed).choice(len(samples), held_out, replace=False).tolist())
    return [s for i, s in enumerate(samples) if i not in chosen], [samples[i] for i in sorted(chosen)]


def with_prompts(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with every token in the loss, as :func:`read_samples` gives them with ``include_prompt``."""
    whole = []
    for sample in samples:
        mask = np.ones_like(sample.loss_mask)
        mask[0] = False
        whole.append(Sample(sample.token_ids, mask))
    return whole


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of several samples each."""

    token_ids: Int32[np.ndarray, "rows T"]  # 0 where there is padding
    segment_ids: Int32[np.ndarray, "rows T"]  # 1, 2, ... for the samples of a row; 0 is padding
    loss_mask: Bool[np.ndarray, "rows T"]  # labels that count
    num_cut: int  # samples that were longer than a row

    @property
    def padding_share(self) -> float:
        """Share of the slots that hold nothing."""
        return float(np.mean(self.segment_ids == 0))


def pack(samples: Sequence[Sample], *, length: int, seed: int) -> Packed:
    """Put samples into rows of ``length`` tokens, by best fit, the longest first: O(n log length).

    A sample longer than a row is cut into pieces. A piece starts with the last token of the one before, so that no
    label is lost; a piece without a label (of a long prompt) is left out.

    Args:
        samples: at least one.
        length: T, at least 2.
        seed: which samples of a length meet in a row.

    Raises:
        ValueError: nothing to pack, or rows too short.
    """
    if length < 2:
        raise ValueError(f"rows of {length} tokens hold no label; expected a length of at least 2")
    pieces: list[tuple[Int32[np.ndarray, "T"], Bool[np.ndarray, "T"]]] = []
    for sample in samples:
        for start in range(0, len(sample.token_ids) - 1, length - 1):
            mask = sample.loss_mask[start : start + length]
            if mask[1:].any():
                pieces.append((sample.token_ids[start : start + length], mask))
    if not pieces:
        raise ValueError(f"there is nothing to pack: {len(samples)} samples, and no token of them is in the loss")
    sizes = np.array([len(ids) for ids, _ in pieces])
    shuffled = np.random.default_rng(seed).permutation(len(pieces))
    rows = _best_fit(shuffled[np.argsort(-sizes[shuffled], kind="stable")].tolist(), sizes.tolist(), length)

    token_ids = np.zeros((len(rows), length), np.int32)
    segment_ids = np.zeros((len(rows), length), np.int32)
    loss_mask = np.zeros((len(rows), length), np.bool_)
    for r, row in enumerate(rows):
        at = 0
        for segment, (ids, mask) in enumerate((pieces[i] for i in row), 1):
            end = at + len(ids)
            token_ids[r, at:end] = ids
            segment_ids[r, at:end] = segment
            loss_mask[r, at + 1 : end] = mask[1:]
            at = end
    return Packed(token_ids, segment_ids, loss_mask, sum(len(sample.token_ids) > length for sample in samples))


def _best_fit(order: Sequence[int], sizes: Sequence[int], length: int) -> list[list[int]]:
    """The pieces of every row: each piece goes to the fullest row that has room for it."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free slots -> rows with so many
    rooms: list[int] = []  # the keys of with_room, sorted
    for piece in order:
        at = bisect.bisect_left(rooms, sizes[piece])
        if at < len(rooms):
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        if left := room - sizes[piece]:
            if left not in with_room:
                with_room[left] = []
                bisect.insort(rooms, left)
            with_room[left].append(row)
    return rows


class Batches:
    """The batch of every step, from the step's number alone: a run that resumes sees what an unbroken one does.

    Every epoch is a permutation of the rows by (seed, epoch); rows that do not fill a last batch wait for the next.

    Args:
        packed: the rows.
        batch_size: B, rows a batch.
        seed: of the permutations.

    Raises:
        ValueError: fewer rows than one batch.
    """

    def __init__(self, packed: Packed, *, batch_size: int, seed: int) -> None:
        rows, length = packed.token_ids.shape
        if not 1 <= batch_size <= rows:
            raise ValueError(
                f"a batch of {batch_size} rows cannot be made of {rows} rows of {length} tokens; expected 1 to {rows}: "
                "lower the batch size or the length, or give more samples"
            )
        self.packed = packed
        self.batch_size = batch_size
        self.seed = seed
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))  # the last epoch asked for, and its rows

    def __len__(self) -> int:
        """Batches an epoch."""
        return len(self.packed.token_ids) // self.batch_size

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """``token_ids`` and ``segment_ids``, int32 [B, T], and ``loss_mask``, bool [B, T], of step 0, 1, ..."""
        epoch, index = divmod(step, len(self))
        cached, order = self._order
        if cached != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.packed.token_ids))
            self._order = (epoch, order)
        rows = order[index * self.batch_size : (index + 1) * self.batch_size]
        return {name: getattr(self.packed, name)[rows] for name in ("token_ids", "segment_ids", "loss_mask")}

    def prefetch(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """(step, batch) of the steps from ``start`` to before ``stop``, made in a thread, two ahead.

        What fails in the thread is raised here, at its step.
        """
        with ThreadPoolExecutor(1, "batches") as thread:
            ahead = collections.deque(
                thread.submit(self.batch, step) for step in range(start, min(start + PREFETCH_DEPTH, stop))
            )
            for step in range(start, stop):
                batch = ahead.popleft().result()
                if step + PREFETCH_DEPTH < stop:
                    ahead.append(thread.submit(self.batch, step + PREFETCH_DEPTH))
                yield step, batch
