"""Drives the compiled programs as an engine does, and records every step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pard_jax.config import extra_slots
from pard_jax.decoding.drafters import Drafter, PardDrafter, SequentialDrafter
from pard_jax.decoding.state import MAX_STOP_TOKEN_IDS, Row, init_state
from pard_jax.decoding.step import Programs, StepOutput
from tests.helpers.reference import Run


def slots_needed(drafter: Drafter, max_len: int, chunk_size: int) -> int:
    """Cache slots of a row of ``max_len`` tokens: whole chunks of them, and the speculative ones behind."""
    k = drafter.num_speculative_tokens
    parallel = isinstance(drafter, PardDrafter)
    method = "draft_model" if isinstance(drafter, PardDrafter | SequentialDrafter) else "ngram"
    return -(-max_len // chunk_size) * chunk_size + k + extra_slots(method, parallel, k)


class Request(NamedTuple):
    """What is asked of a row."""

    prompt: list[int]
    max_length: int
    stop_ids: tuple[int, ...] = ()
    min_length: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = -1


class Loop:
    """A batch on the device and what the host must remember of it: an engine without its conveniences.

    The state has not one slot more than rows of ``max_len`` tokens need, unless ``slots`` are given.
    """

    def __init__(
        self, programs: Programs, params: dict[str, Any], *, max_len: int, rows: int = 3, slots: int | None = None,
        windows: tuple[int, ...] = (), mesh: Any = None,
    ) -> None:  # fmt: skip
        self.programs, self.params = programs, params
        self.slots = slots or slots_needed(programs.drafter, max_len, programs.chunk_size)
        self.windows = (*windows, self.slots)
        self.state = init_state(programs.config, programs.drafter, rows, self.slots, jnp.float32, mesh)
        self.lengths = [1] * rows

    def admit(self, row: int, request: Request) -> None:
        tokens = np.zeros(self.slots, np.int32)
        tokens[: len(request.prompt)] = request.prompt
        stop_ids = np.full(MAX_STOP_TOKEN_IDS, -1, np.int32)
        stop_ids[: len(request.stop_ids)] = request.stop_ids
        row_state = Row(
            tokens=tokens,
            length=np.int32(len(request.prompt)),
            temperature=np.float32(request.temperature),
            top_k=np.int32(request.top_k),
            top_p=np.float32(request.top_p),
            min_p=np.float32(request.min_p),
            seed=np.uint32(request.seed),
            stop_ids=stop_ids,
            min_length=np.int32(request.min_length),
            max_length=np.int32(request.max_length),
            num_logprobs=np.int32(request.num_logprobs),
        )
        self.state = self.programs.admit(self.state, np.int32(row), row_state)
        self.lengths[row] = len(request.prompt)

    def window(self, slots: int) -> int:
        return next(w for w in self.windows if w >= min(slots, self.slots))

    def prefill(self, row: int, start: int, end: int) -> int:
        """One chunk of the prompt; returns where the next one starts."""
        count, window = min(self.programs.chunk_size, end - start), self.window(start + self.programs.chunk_size)
        at = map(np.int32, (row, start, count))
        self.state = self.programs.prefill(self.params, self.state, *at, window=window)
        return start + count

    def decode(self, keep: Any = None, steps: int = 1) -> tuple[int, StepOutput]:
        """A dispatch; returns how many steps ran, and their output on the host."""
        k = self.programs.drafter.num_speculative_tokens
        window = self.window(max(self.lengths) + (steps - 1) * (k + 1) + 2 * k)
        keep = np.ones(len(self.lengths), bool) if keep is None else np.asarray(keep)
        result = self.programs.decode(self.params, self.state, keep, np.int32(steps), window=window)
        self.state, (ran, output) = result
        ran, output = int(ran), jax.device_get(output)
        self.lengths = [int(n) for n in np.asarray(self.lengths) + output.num_kept[:ran].sum(axis=0)]
        return ran, output

    def serve(self, requests: list[Request], steps: int = 1) -> list[Run]:
        """Run all requests to their end, rows taking in the next one as they come free.

        Between two dispatches a row is fed one chunk of its prompt, so others decode while it is prefilled.
        """
        runs = [Run([], [], [], []) for _ in requests]
        waiting = list(range(len(requests)))
        held: dict[int, int] = {}  # row -> request
        filled: dict[int, int] = {}  # row -> prompt tokens taken in
        most = sum(r.max_length for r in requests)  # every dispatch gives a token or takes in a chunk
        for _ in range(most):
            if not waiting and not held:
                return runs
            for row in range(len(self.lengths)):
                if row not in held and waiting:
                    held[row], filled[row] = waiting.pop(0), 0
                    self.admit(row, requests[held[row]])
                if row in held and filled[row] < (end := len(requests[held[row]].prompt) - 1):
                    filled[row] = self.prefill(row, filled[row], end)
            ran, out = self.decode(steps=steps)
            for i, row in np.ndindex(ran, len(self.lengths)):
                kept = int(out.num_kept[i, row])
                assert (out.tokens[i, row, kept:] == -1).all()
                if kept == 0:
                    assert out.num_drafts[i, row] == out.num_accepted[i, row] == 0
                    continue
                run = runs[held[row]]
                run.tokens.extend(out.tokens[i, row, :kept].tolist())
                run.kept.append(kept)
                run.drafted.append(int(out.num_drafts[i, row]))
                run.accepted.append(int(out.num_accepted[i, row]))
            active = np.asarray(self.state.active)
            for row in [r for r in held if filled[r] >= len(requests[held[r]].prompt) - 1 and not active[r]]:
                assert runs[held.pop(row)].tokens
                self.lengths[row] = 1
        raise AssertionError(f"{len(held)} rows have not ended after {most} dispatches")
