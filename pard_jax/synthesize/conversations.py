"""Conversations run on the engine: begun, written turn by turn, judged, and handed to the store in order of their ids.

Conversation i is the same whatever else runs beside it, before it or in which batch: all that is random about it comes
of the seed and i. So a run with other slots, or one that was killed and goes on, makes the same file.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pard_jax.engine.engine import Engine
from pard_jax.outputs import RequestOutput
from pard_jax.sampling_params import SamplingParams
from pard_jax.synthesize.filters import fault_of
from pard_jax.synthesize.store import DUPLICATE_PROMPT, Store
from pard_jax.synthesize.turns import Turns, special_ids
from pard_jax.tokenizer import Tokenizer

_FLUSH_SECONDS = 10.0
# So many conversations may all be dropped before the run is given up.
_MOST_IN_VAIN = 1000
_USER, _ASSISTANT, _CHOICES = range(3)  # what a seed is for


@dataclasses.dataclass
class Conversation:
    """One conversation under way.

    ``prompt_ids`` is what the model is given next. While the model writes the user's turn, ``user_ids`` is what that
    turn begins with.
    """

    id: int
    prompt_ids: list[int]
    messages: list[dict[str, str]] | None  # before the answer; None where the prompt was no conversation
    user_ids: list[int] | None = None
    greedy: bool = False  # how it is answered
    record: dict[str, Any] | None = None  # the sample, once written
    fault: str | None = None  # why there is none


class Source(Protocol):
    """Where conversations come from."""

    @property
    def writes_user(self) -> bool:
        """Whether the model writes the user's turns."""
        ...

    @property
    def total(self) -> int | None:
        """How many there are; None: without end."""
        ...

    def begin(self, index: int, choices: np.ndarray) -> Conversation:
        """Conversation ``index``; ``choices``: random numbers of its own, uint64."""
        ...

    def longest_prompt(self, user_max_tokens: int) -> int:
        """Tokens of the longest prompt that is to be answered."""
        ...

    def digest(self) -> str:
        """What conversations begin with, as a hash."""
        ...


@dataclasses.dataclass
class Prompts:
    """Given prompts, encoded, all of them ``repeats`` times."""

    prompts: Sequence[tuple[list[int], list[dict[str, str]] | None]]
    repeats: int = 1
    writes_user: bool = False

    @property
    def total(self) -> int:
        return len(self.prompts) * self.repeats

    def begin(self, index: int, choices: np.ndarray) -> Conversation:
        """Every prompt once, then every prompt again."""
        ids, messages = self.prompts[index % len(self.prompts)]
        return Conversation(index, ids, messages)

    def longest_prompt(self, user_max_tokens: int) -> int:
        return max(len(ids) for ids, _ in self.prompts)

    def digest(self) -> str:
        return _sha256([ids for ids, _ in self.prompts])


@dataclasses.dataclass
class Magpie:
    """User turns that the model makes up, a share of them from given openers on (Magpie, arXiv 2406.08464)."""

    turns: Turns
    system: str | None = None
    openers: Sequence[list[int]] = ()
    opener_share: float = 0.0
    writes_user: bool = True
    total: int | None = None

    def begin(self, index: int, choices: np.ndarray) -> Conversation:
        opened = self.openers and _fraction(choices[0]) < self.opener_share
        opener = list(self.openers[int(choices[1]) % len(self.openers)]) if opened else []
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        return Conversation(index, [*self.turns.opening, *opener], messages, user_ids=opener)

    def longest_prompt(self, user_max_tokens: int) -> int:
        opener = max(map(len, self.openers), default=0)
        return len(self.turns.opening) + opener + user_max_tokens + len(self.turns.closing)

    def digest(self) -> str:
        return _sha256([self.turns.opening, self.turns.closing, *self.openers])


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How turns are written; the seeds in it are replaced by every conversation's own."""

    seed: int
    user: SamplingParams
    greedy: SamplingParams
    sampled: SamplingParams
    greedy_share: float  # of the answers
    keep_cut_off: bool = False


class Synthesis:
    """Runs conversations until enough samples are kept, or the source ends.

    Attributes:
        num_tokens: tokens that the model wrote in this run, dropped ones included.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer | None, source: Source, sampling: Sampling, store: Store, *,
        num_rows: int, closing: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            num_rows: slots of the engine; a quarter more requests are kept waiting, so that no slot stands empty.
            closing: ids between a user's turn that the model wrote and its answer.
        """
        self._engine, self._tokenizer, self._source, self._store = engine, tokenizer, source, store
        self._sampling, self._closing = sampling, list(closing)
        self._special = frozenset() if tokenizer is None else special_ids(tokenizer)
        self._most_requests = num_rows + max(1, num_rows // 4)
        self._next_id = store.next_id
        self._running: dict[str, Conversation] = {}  # by request id
        self._open: collections.deque[Conversation] = collections.deque()  # begun and not yet in the store, by id
        self._candidates = 0  # of these, the ones that have no fault so far
        self.num_tokens = 0

    def run(self, num_samples: int, on_progress: Callable[[], None] = lambda: None) -> None:
        """Go on until the store holds ``num_samples``; ``on_progress`` is called after every dispatch.

        Raises:
            ValueError: a thousand conversations gave no sample at all.
        """
        # The collector would otherwise walk all of JAX's and transformers' objects again and again (a quarter of the
        # host's time), for nothing: none of them is ever freed.
        gc.collect()
        gc.freeze()
        flushed = time.monotonic()
        try:
            while self._fill(num_samples):
                for update in self._engine.step():
                    self.num_tokens += len(update.token_ids)
                    if update.output is not None:
                        self._take(self._running.pop(update.request_id), update.output)
                self._store_finished(num_samples)
                on_progress()
                if time.monotonic() - flushed > _FLUSH_SECONDS:
                    self._store.flush()
                    flushed = time.monotonic()
        finally:
            gc.unfreeze()
        # What was begun to fill the slots is not wanted any more.
        self._engine.abort(self._running)
        while self._engine.has_work():
            self._engine.step()

    def _fill(self, num_samples: int) -> bool:
        """Begin conversations as long as there is use and room for them; False once all is done."""
        store, total = self._store, self._source.total
        while (
            len(self._running) < self._most_requests
            and store.kept + self._candidates < num_samples
            and (total is None or self._next_id < total)
        ):
            choices = self._seeds(self._next_id, _CHOICES, 3)
            conversation = self._source.begin(self._next_id, choices)
            conversation.greedy = _fraction(choices[2]) < self._sampling.greedy_share
            self._next_id += 1
            self._candidates += 1
            self._open.append(conversation)
            if conversation.user_ids is None:
                self._ask_answer(conversation)
            else:
                self._ask(conversation, _USER, self._sampling.user)
            self._store_finished(num_samples)
        return store.kept < num_samples and bool(self._open)

    def _take(self, conversation: Conversation, output: RequestOutput) -> None:
        """A turn is written: judge it, and go on to the next or make a sample of it."""
        completion = output.outputs[0]
        written, ended = completion.token_ids, completion.finish_reason == "stop"
        text_ids = written[:-1] if ended else written
        if conversation.user_ids is not None:
            user_ids, conversation.user_ids = [*conversation.user_ids, *text_ids], None
            text = self._decode(user_ids) if text_ids else ""  # an opener alone is not worth an answer
            if fault := fault_of(user_ids, text, ended=ended, special=self._special):
                return self._give_up(conversation, f"user turn {fault}")
            assert conversation.messages is not None
            conversation.messages.append({"role": "user", "content": text})
            conversation.prompt_ids = [*conversation.prompt_ids, *text_ids, *self._closing]
            if self._store.is_duplicate(conversation.prompt_ids):
                return self._give_up(conversation, DUPLICATE_PROMPT)  # known before it is answered
            return self._ask_answer(conversation)
        text = self._decode(text_ids)
        complete = ended or self._sampling.keep_cut_off
        if fault := fault_of(text_ids, text, ended=complete, special=self._special):
            return self._give_up(conversation, f"answer {fault}")
        start = len(conversation.prompt_ids)
        record: dict[str, Any] = {
            "id": conversation.id,
            "token_ids": [*conversation.prompt_ids, *written],
            "loss_ranges": [[start, start + len(written)]],
        }
        if conversation.messages is not None:
            record["messages"] = [*conversation.messages, {"role": "assistant", "content": text}]
        conversation.record = record | {"finish_reason": completion.finish_reason, "greedy": conversation.greedy}

    def _ask_answer(self, conversation: Conversation) -> None:
        self._ask(conversation, _ASSISTANT, self._sampling.greedy if conversation.greedy else self._sampling.sampled)

    def _ask(self, conversation: Conversation, turn: int, params: SamplingParams) -> None:
        if len(conversation.prompt_ids) >= self._engine.plan.max_model_len:
            return self._give_up(conversation, "prompt too long")
        params = copy.copy(params)  # checked once; to construct it again would check it a million times
        params.seed = int(self._seeds(conversation.id, turn, 1)[0] >> np.uint64(1))
        request_id = f"{conversation.id}.{turn}"
        self._engine.add_request(request_id, conversation.prompt_ids, params)
        self._running[request_id] = conversation

    def _give_up(self, conversation: Conversation, reason: str) -> None:
        conversation.fault = reason
        self._candidates -= 1

    def _store_finished(self, num_samples: int) -> None:
        """Hand over what is done, up to the first conversation that is not: the file is in order of ids."""
        store = self._store
        while self._open and store.kept < num_samples:
            conversation = self._open[0]
            if conversation.fault is not None:
                # The reason must not hang on whether the prompt's first sample was stored before this was answered.
                again = self._source.writes_user and store.is_duplicate(conversation.prompt_ids)
                store.drop(DUPLICATE_PROMPT if again else conversation.fault)
            elif conversation.record is not None:
                store.add(conversation.record, unique_prompt=self._source.writes_user)
                self._candidates -= 1
            else:
                break
            self._open.popleft()
            if store.kept == 0 and store.next_id >= _MOST_IN_VAIN:
                reasons = ", ".join(f"{count} {reason}" for reason, count in store.dropped.most_common())
                raise ValueError(f"{store.next_id} conversations gave no sample: {reasons}")

    def _seeds(self, index: int, turn: int, count: int) -> np.ndarray:
        return np.random.SeedSequence((self._sampling.seed, index, turn)).generate_state(count, np.uint64)

    def _decode(self, token_ids: list[int]) -> str:
        # Without a tokenizer there is no text to judge: the ids themselves stand for it.
        if self._tokenizer is None:
            return " ".join(map(str, token_ids))
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _fraction(number: Any) -> float:
    """A uint64 as a number in [0, 1)."""
    return int(number) / 2**64


def _sha256(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()
