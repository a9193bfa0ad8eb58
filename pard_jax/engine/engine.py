"""The engine: a fixed number of slots that requests join and leave between dispatches. The only host loop there is.

One call of :meth:`Engine.step` hands the device new prompts and the next dispatch, then reads the dispatch *before*
it: the device never waits for the host. The host therefore knows lengths one dispatch late, and bounds them.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pard_jax.config import ModelConfig
from pard_jax.decoding.drafters import Drafter
from pard_jax.decoding.state import MAX_STOP_TOKEN_IDS, Row, all_active, init_state
from pard_jax.decoding.step import Programs, StepOutput
from pard_jax.engine.adaptive import Choice, Policy, Scheduled
from pard_jax.engine.ahead import Ahead, shapes
from pard_jax.engine.memory import MemoryPlan
from pard_jax.engine.metrics import AcceptanceStats
from pard_jax.engine.request import Request, RequestUpdate, StepLogprobs
from pard_jax.engine.rows import column, rows_of
from pard_jax.engine.stop import StopChecker
from pard_jax.program_store import ProgramStore
from pard_jax.sampling_params import SamplingParams
from pard_jax.tokenizer import Tokenizer

# Prefill passes between two dispatches while other rows are decoding, so that a long prompt does not stall them. More
# rows than this are admitted and prefilled together, where the plan has a wide pass for that.
_CHUNKS_PER_DISPATCH = 4


@dataclasses.dataclass
class _Slot:
    """A request in its row."""

    request: Request
    prefilled: int = 0  # prompt tokens given to the device
    pending_tokens: int = 0  # the most that dispatches whose outcome is not known yet can add

    @property
    def num_to_prefill(self) -> int:
        """The last prompt token is left to the first step."""
        return len(self.request.prompt_token_ids) - 1 - self.prefilled


@dataclasses.dataclass
class _Dispatch:
    """A dispatch under way, with the requests that were in its rows."""

    rows: dict[int, _Slot]
    num_steps: int
    choice: Choice
    alone: bool  # whether the device had nothing to do between the dispatch before, which it was busy with, and this
    steps: jax.Array
    output: StepOutput

    @property
    def most_tokens(self) -> int:
        """The most that it can add to a row."""
        return self.num_steps * (self.choice.k + 1)


class Engine:
    """Runs requests. ``add_request`` and ``abort`` may be called from any thread, ``step`` from one."""

    def __init__(
        self,
        config: ModelConfig,
        drafter: Drafter,
        params: dict[str, Any],
        plan: MemoryPlan,
        *,
        num_rows: int,
        chunk_size: int,
        steps_per_dispatch: int,
        dtype: Any,
        speculative_slots: int = 0,
        implementation: str = "xla",
        specialize: bool = False,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        seed: int | None = 0,
        synthetic_rates: tuple[float, ...] | None = None,
        policy: Policy | None = None,
        mesh: Mesh | None = None,
        store: ProgramStore | None = None,
    ) -> None:
        """
        Args:
            config, drafter, params: the target, the drafter, and ``{"target": ..., "draft": ...}``, or their shapes and
                shardings, until :meth:`take_params`.
            plan: sizes of the caches.
            num_rows: B, the slots.
            chunk_size: C, prompt tokens of one prefill pass.
            steps_per_dispatch: speculative steps between two looks of the host.
            speculative_slots: cache slots a pass may reach beyond the committed tokens (K plus the slot table's).
            implementation: of the target's passes; see :func:`pard_jax.models.bind`.
            specialize: compile a program of its own for batches of plain greedy requests: less work a step, twice the
                compilation.
            eos_token_ids: the primary one first.
            store: where compiled programs are kept for other processes; None keeps none.
            seed: base of the seeds of requests that bring none; None for a new one each time.
            policy: chooses K for each dispatch, at most the drafter's; None for the drafter's, always.
        """
        self.config, self.drafter, self.plan, self.tokenizer = config, drafter, plan, tokenizer
        self.steps_per_dispatch, self.chunk_size = steps_per_dispatch, chunk_size
        self.acceptance = AcceptanceStats(drafter.num_speculative_tokens)
        self.steps_by_k: collections.Counter[int] = collections.Counter()  # steps read back so far
        self._params = params
        self._specialize = specialize and synthetic_rates is None
        self._greedy = sorted({False, self._specialize})  # the kinds of decode programs
        self._speculative_slots = speculative_slots
        self._eos = tuple(eos_token_ids)
        self._seeds = np.random.SeedSequence(seed)
        self._state = init_state(config, drafter, num_rows, plan.num_slots, dtype, mesh)
        if mesh is None:
            # Committed to a device (nothing is copied), as loaded weights are and as all results then are: JAX would
            # compile a program once more for a state that is not.
            self._state = jax.device_put(self._state, jax.tree.leaves(params)[0].sharding)
        sharding = None if mesh is None else jax.tree.map(lambda x: x.sharding, self._state)
        self._programs = Programs(
            config,
            drafter,
            chunk_size=chunk_size,
            max_steps=steps_per_dispatch,
            implementation=implementation,
            synthetic_rates=synthetic_rates,
            state_sharding=sharding,
            store=store,
        )
        self._policy = policy or Scheduled([(1, 1, drafter.num_speculative_tokens)])
        self._k = drafter.num_speculative_tokens  # of the last dispatch
        # As wide as memory is planned for, and as there are slots behind the longest row.
        width = max(speculative_slots, chunk_size // num_rows)
        self._catch_up_width = min(width, plan.num_slots - plan.max_model_len)
        self._measured_up_to = 0  # tokens; what the policy knows the costs of
        self._collected = 0.0  # when the last dispatch was read
        self._slots: list[_Slot | None] = [None] * num_rows
        self._most_passes = _CHUNKS_PER_DISPATCH
        if plan.prefill_rows > 1:
            # Half of the rows in one go: many small requests come and go faster than a few passes take them in.
            self._most_passes = max(self._most_passes, num_rows // (2 * plan.prefill_rows))
        self._ahead: Ahead | None = None
        self._in_flight: collections.deque[_Dispatch] = collections.deque()
        # Shared with other threads, under the lock: requests not yet in a slot, ids to abort, ids that are known.
        self._lock = threading.Lock()
        self._waiting: collections.deque[Request] = collections.deque()
        self._aborted: set[str] = set()
        self._known: set[str] = set()

    @property
    def num_steps(self) -> int:
        """Steps read back so far."""
        return self.steps_by_k.total()

    # -- from any thread ------------------------------------------------------------------------------------------

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, *, prompt: str | None = None
    ) -> None:
        """Queue a request.

        Raises:
            ValueError: a prompt that is empty, too long or out of the vocabulary, an id in use, too many stop ids,
                stop strings without a tokenizer.
        """
        self.check_prompt(prompt_token_ids)
        limit = self.plan.max_model_len
        wanted = limit if params.max_tokens is None else len(prompt_token_ids) + params.max_tokens
        eos, *extra = self._eos or (None,)
        stop = StopChecker(
            params, eos_token_id=eos, extra_eos_token_ids=[i for i in extra if i is not None], max_model_len=limit
        )
        for token in params.stop_token_ids or []:
            if token >= self.config.vocab_size:
                raise ValueError(
                    f"stop token id {token} is out of vocabulary; expected 0 to {self.config.vocab_size - 1}"
                )
        if len(stop.token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"{len(stop.token_ids)} stop token ids (EOS ids included) were given; at most {MAX_STOP_TOKEN_IDS} "
                "are supported"
            )
        request = Request(
            request_id,
            prompt,
            list(prompt_token_ids),
            params,
            seed=self._seed_of(params),
            stop=stop,
            tokenizer=self.tokenizer,
            max_length=min(wanted, limit),
            num_speculative_tokens=self.drafter.num_speculative_tokens,
        )
        with self._lock:
            if request_id in self._known:
                raise ValueError(f"request id {request_id!r} is in use")
            self._known.add(request_id)
            self._waiting.append(request)

    def check_prompt(self, prompt_token_ids: list[int]) -> None:
        """Refuse a prompt that cannot run (messages as vLLM has them).

        Raises:
            ValueError: see :meth:`add_request`.
        """
        n, limit, vocab = len(prompt_token_ids), self.plan.max_model_len, self.config.vocab_size
        if n == 0:
            raise ValueError("The decoder prompt cannot be empty")
        if n > limit:
            raise ValueError(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains {n} input "
                "tokens, which exceeds this limit even without any output tokens. Shorten the prompt or raise "
                "max_model_len."
            )
        if n == limit:
            raise ValueError(
                f"The prompt ({n} input tokens) plus the number of requested output tokens (at least 1) is longer than "
                f"the maximum model length of {limit}. Shorten the prompt or raise max_model_len."
            )
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab:
            wrong = next(token for token in prompt_token_ids if not 0 <= token < vocab)
            raise ValueError(f"Token id {wrong} is out of vocabulary; expected 0 to {vocab - 1}")

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; ids that are unknown or finished already are ignored."""
        with self._lock:
            self._aborted.update(i for i in request_ids if i in self._known)

    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        with self._lock:
            return bool(self._known) or bool(self._in_flight)

    # -- from the engine's thread ---------------------------------------------------------------------------------

    def start_compiling(self, max_length: int | None = None) -> Ahead:
        """Have another thread compile, or read, what :meth:`warm_up` will wait for; it needs shapes, and no weights."""
        params, state = shapes(self._params), shapes(self._state)
        self._ahead = Ahead(
            (getattr(self._programs, name), ((state,) if name == "admit" else (params, state)) + args, static)
            for name, args, static in self._all_calls(max_length)
        )
        return self._ahead

    def stop_compiling(self) -> None:
        """Leave what :meth:`start_compiling` has not begun with."""
        if self._ahead is not None:
            self._ahead.stop()

    def take_params(self, params: dict[str, Any]) -> None:
        """Put weights in the place of the shapes that the engine was made with."""
        self._params = params

    def warm_up(self, max_length: int | None = None, *, progress: bool = False) -> int:
        """Compile every program for sequences up to ``max_length`` tokens (None: any); nothing compiles afterwards.

        Args:
            progress: show, on a terminal, how many programs of :meth:`start_compiling` are ready.

        Returns:
            The number of attention windows compiled for.
        """
        if self._ahead is not None:
            self._ahead.wait(progress)
            self._ahead = None
        for name, args, static in self._all_calls(max_length):
            self._call(name, *args, **static)
        windows = self._windows(max_length)
        for window in windows:
            for greedy in self._greedy:
                choices = self._choices(window, greedy)
                self._policy.measure(choices, self._time_step)
                if window == windows[0] and not self._policy.measures:
                    # What never ran is slow the first time, on a CPU by some ten steps: the first request would pay.
                    for choice in choices:
                        self._time_step(choice)
        jax.block_until_ready(self._state.length)
        self._measured_up_to = self._longest(max_length)
        return len(windows)

    def _longest(self, max_length: int | None) -> int:
        return min(max_length or self.plan.max_model_len, self.plan.max_model_len)

    def _windows(self, max_length: int | None) -> list[int]:
        """All that sequences up to this length need."""
        length = self._longest(max_length)
        prefilled = -(-length // self.chunk_size) * self.chunk_size  # a prompt is read in whole chunks
        longest = self.plan.window(max(self._reach(length, self.drafter.num_speculative_tokens), prefilled))
        return [w for w in self.plan.windows if w <= longest]

    def _all_calls(self, max_length: int | None) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        """A call of every program, as :meth:`_call` takes it, that does nothing to any row."""
        keep = np.zeros(len(self._slots), bool)
        widths = sorted({1, self.plan.prefill_rows})
        for width in widths:
            yield "admit", self._admission([], width), {}
        for window in self._windows(max_length):
            for width in widths:
                yield "prefill", self._chunks([], [], [], width), {"window": window}
            if len(self._policy.widths) > 1:
                yield "catch_up", (), {"width": self._catch_up_width, "window": window}
            for greedy in self._greedy:
                for choice in self._choices(window, greedy):
                    yield "decode", (keep, np.int32(1)), choice.static

    def _choices(self, window: int, greedy: bool) -> list[Choice]:
        return [Choice(k, window, greedy) for k in self._policy.widths]

    def _call(self, name: str, *args: Any, **static: Any) -> Any:
        """Run a program, which takes the state and gives it back, and return what else it gives."""
        program = getattr(self._programs, name)
        if name == "admit":
            self._state = program(self._state, *args)
            return None
        result = program(self._params, self._state, *args, **static)
        self._state, result = result if name == "decode" else (result, None)
        return result

    def _time_step(self, choice: Choice) -> float:
        """Seconds of a step of all rows, of which none holds a request."""
        length = choice.window // 2
        steps = (length - self._speculative_slots) // (choice.k + 1)  # so many stay within the window
        steps = max(1, min(steps, self.steps_per_dispatch))
        every = np.ones(len(self._slots), bool)
        self._state = all_active(self._state, length)
        if len(self._policy.widths) > 1:
            self._catch_up(choice.window)
        jax.block_until_ready(self._state.length)
        start = time.perf_counter()
        jax.block_until_ready(self._run(every, steps, choice))
        seconds = (time.perf_counter() - start) / steps
        self._run(~every, 1, choice)  # none is active any more
        return seconds

    def step(self) -> list[RequestUpdate]:
        """Admit, prefill, dispatch, and read the dispatch before; returns what is new, request by request."""
        updates = self._take_aborts()
        if self._policy.measures:
            self._measure()
        busy = bool(self._in_flight)
        prefilled = self._admit() + self._prefill()
        dispatched = self._dispatch(alone=busy and not prefilled)
        if len(self._in_flight) > 1 or (self._in_flight and not dispatched):
            updates += self._collect(self._in_flight.popleft())
        return updates

    def _take_aborts(self) -> list[RequestUpdate]:
        with self._lock:
            if not self._aborted:
                return []
            aborted, self._aborted = self._aborted, set()
            ended: list[tuple[Request, int | None]] = [(r, None) for r in self._waiting if r.request_id in aborted]
            self._waiting = collections.deque(r for r in self._waiting if r.request_id not in aborted)
        slots = enumerate(self._slots)
        ended += [(s.request, i) for i, s in slots if s is not None and s.request.request_id in aborted]
        updates = []
        for request, index in ended:
            request.finish("abort")
            updates.append(self._retire(request, index))
        return updates

    def _measure(self) -> None:
        """Warm up for the requests that wait, where nobody has done so and no other would be disturbed."""
        if any(self._slots):
            return
        with self._lock:
            longest = max((request.max_length for request in self._waiting), default=0)
        if longest > self._measured_up_to:
            self.warm_up(longest)

    def _admit(self) -> int:
        """Put requests that wait into free slots; returns how many."""
        free = [i for i, slot in enumerate(self._slots) if slot is None]
        with self._lock:
            admitted = [(i, self._waiting.popleft()) for i in free[: len(self._waiting)]]
        for index, request in admitted:
            self._slots[index] = _Slot(request)
        count = len(admitted)
        while admitted:
            width = self._width(len(admitted))
            self._call("admit", *self._admission(admitted[:width], width))
            admitted = admitted[width:]
        return count

    def _width(self, count: int) -> int:
        """Rows of the next call that admits or prefills, where ``count`` are to be."""
        return self.plan.prefill_rows if count > _CHUNKS_PER_DISPATCH else 1

    def _admission(self, admitted: list[tuple[int, Request]], width: int) -> tuple[Any, Row]:
        """Arguments to put up to ``width`` requests into their rows by one call of a program compiled for this many."""
        row = rows_of([request for _, request in admitted], width, self.plan.num_slots)
        return self._row_ids([i for i, _ in admitted], width), row

    def _prefill(self) -> int:
        """Run prefill passes; returns how many."""
        passes = 0
        pending = [(i, s) for i, s in enumerate(self._slots) if s is not None and s.num_to_prefill > 0]
        decoding = any(s is not None and s.num_to_prefill <= 0 for s in self._slots)
        budget = self._most_passes if decoding else None
        while pending and budget != 0:
            width = self._width(len(pending))
            rows = dict(pending[:width])
            starts = [slot.prefilled for slot in rows.values()]
            counts = [min(self.chunk_size, slot.num_to_prefill) for slot in rows.values()]
            window = self.plan.window(max(starts) + self.chunk_size)
            self._call("prefill", *self._chunks(list(rows), starts, counts, width), window=window)
            for slot, count in zip(rows.values(), counts, strict=True):
                slot.prefilled += count
            pending = [(i, s) for i, s in rows.items() if s.num_to_prefill > 0] + pending[width:]
            budget = None if budget is None else budget - 1
            passes += 1
        return passes

    def _chunks(self, rows: list[int], starts: list[int], counts: list[int], width: int) -> tuple[Any, Any, Any]:
        """Arguments to take in a chunk of each of up to ``width`` rows' prompts by a program compiled for this many."""
        starts_, counts_ = (column(values, width, np.int32) for values in (starts, counts))
        return self._row_ids(rows, width), starts_, counts_

    def _row_ids(self, rows: list[int], width: int) -> Any:
        """Row ids of a call ``width`` rows wide; what is missing is filled with ids, all different, of no row."""
        spare = len(self._slots)
        return column([*rows, *range(spare, spare + width - len(rows))], width, np.int32)

    def _dispatch(self, *, alone: bool) -> bool:
        rows = {i: s for i, s in enumerate(self._slots) if s is not None and s.num_to_prefill <= 0}
        if not rows:
            return False
        keep = np.zeros(len(self._slots), bool)
        keep[list(rows)] = True
        steps = self.steps_per_dispatch
        greedy = self._specialize and all(slot.request.plain_greedy for slot in rows.values())
        window = self._window(rows.values(), steps, self._policy.widths[-1])
        choice = self._policy.choose(len(rows), steps, window, greedy)
        choice = dataclasses.replace(choice, window=self._window(rows.values(), steps, choice.k))
        if choice.k and not 0 < self._k <= choice.k:
            self._catch_up(choice.window)
        self._k = choice.k
        ran, output = self._run(keep, steps, choice)
        dispatch = _Dispatch(rows, steps, choice, alone, ran, output)
        for slot in rows.values():
            slot.pending_tokens += dispatch.most_tokens
        self._in_flight.append(dispatch)
        return True

    def _window(self, slots: Iterable[_Slot], steps: int, k: int) -> int:
        """The window for ``steps`` steps of K = ``k`` behind those under way."""
        grown = ((s.request.num_tokens + s.pending_tokens + steps * (k + 1), s.request.max_length) for s in slots)
        return self.plan.window(self._reach(max(map(min, grown)), k))

    def _reach(self, length: int, k: int) -> int:
        """Cache slots that a step may touch in a row of ``length`` tokens."""
        return length + (self._speculative_slots if k else 0)

    def _catch_up(self, window: int) -> None:
        """Have the drafter take in what plain steps kept, or steps of a larger K."""
        self._call("catch_up", width=self._catch_up_width, window=window)

    def _run(self, keep: np.ndarray, steps: int, choice: Choice) -> tuple[jax.Array, StepOutput]:
        return self._call("decode", keep, np.int32(steps), **choice.static)

    def _collect(self, dispatch: _Dispatch) -> list[RequestUpdate]:
        live = {i: s for i, s in dispatch.rows.items() if not s.request.finished}
        steps, packed = jax.device_get((dispatch.steps, dispatch.output.packed))
        out = StepOutput(packed, dispatch.output.logprobs)
        tokens, kept, drafts, accepted = out.tokens, out.num_kept, out.num_drafts, out.num_accepted
        wants_logprobs = any(s.request.params.logprobs is not None for s in live.values())
        logprobs = jax.device_get(out.logprobs) if wants_logprobs else None
        steps, choice = int(steps), dispatch.choice
        self.steps_by_k[choice.k] += steps
        now = time.monotonic()
        # Where the pipeline was full, the time since the last look is what it took, the host's part included.
        seconds = now - self._collected if dispatch.alone and steps == dispatch.num_steps else None
        self._collected = now
        if self._policy.measures:
            ran = kept[:steps, list(live)] > 0
            self._policy.observe(choice, steps, seconds, accepted[:steps, list(live)][ran])
        # Without speculation a row's steps are one token each until it ends, and are taken in together: at a thousand
        # rows this loop is what bounds the engine.
        together = None
        if not choice.k and logprobs is None:
            together = (tokens[:steps, :, 0].T.tolist(), kept[:steps].sum(axis=0).tolist())
        updates = []
        for index, slot in live.items():
            request = slot.request
            slot.pending_tokens -= dispatch.most_tokens
            if together is not None:
                rows, totals = together
                if totals[index]:
                    request.extend(rows[index][: totals[index]], 0, 0, None, now)
            for i in range(0 if together is not None else steps):
                n = int(kept[i, index])
                if request.finished or n == 0:
                    break
                step_logprobs = None
                if logprobs is not None:
                    fields = (logprobs.chosen, logprobs.rank, logprobs.top_ids, logprobs.top_values)
                    step_logprobs = StepLogprobs(*(f[i, index] for f in fields))
                kept_ids = tokens[i, index, :n].tolist()
                request.extend(kept_ids, int(drafts[i, index]), int(accepted[i, index]), step_logprobs, now)
            updates.append(self._retire(request, index) if request.finished else request.update())
        return updates

    def _retire(self, request: Request, index: int | None) -> RequestUpdate:
        """Free a finished request's slot, if it has one; the device stops its row by the next dispatch's ``keep``."""
        self.acceptance.merge(request.acceptance)
        if index is not None:
            self._slots[index] = None
        with self._lock:
            self._known.discard(request.request_id)
            self._aborted.discard(request.request_id)
        return request.update()

    def _seed_of(self, params: SamplingParams) -> int:
        """32 bits: of the request's own seed, or a new one (so that equal prompts do not give equal samples)."""
        if params.seed is not None:
            return int(np.random.SeedSequence(params.seed % 2**64).generate_state(1)[0])
        with self._lock:
            return int(self._seeds.spawn(1)[0].generate_state(1)[0])
