"""The decode step on random weights, apart from any request: timed whole, in its parts, and beside a plain copy.

The programs, their arguments and their sizes are the engine's own (:class:`pard_jax.decoding.step.Programs`, a memory
plan's slots and windows), so a step here costs what it costs in the engine.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pard_jax.bench.spread import Spread, rate
from pard_jax.bench.step_setup import Setup
from pard_jax.decoding.drafters import DraftContext
from pard_jax.decoding.drafters.model import DraftState
from pard_jax.decoding.state import DecodeState, all_active, init_state
from pard_jax.decoding.step import Programs
from pard_jax.models import KVCache, bind

_COPIES = 8  # in a row, of which the host waits for the last only


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was timed of one batch and K, in seconds.

    Attributes:
        step: of one step, a dispatch's time by its steps.
        host: until the call of a dispatch returned.
        compilation: what the first dispatch took longer than the others do.
        target: of the target's pass alone, with the choice of the best tokens.
        draft: of the draft's pass alone; None without one.
        prefill_tokens_per_second: None where it was not asked for.
    """

    window: int
    num_slots: int
    step: Spread
    host: Spread
    compilation: float
    target: Spread
    draft: Spread | None
    prefill_tokens_per_second: Spread | None


class Bench:
    """One batch and K: the state and the programs."""

    def __init__(self, setup: Setup, params: dict[str, Any], num_rows: int, k: int) -> None:
        self.setup, self.params, self.num_rows, self.k = setup, params, num_rows, k
        self.plan, self.drafter = setup.plan(num_rows, k), setup.drafter(k)
        # The engine's bound on a row's length after a dispatch, and on the slots that a step may touch beyond it.
        self.window = self.plan.window(setup.context + setup.num_steps * (k + 1) + 2 * k)
        state = init_state(setup.target, self.drafter, num_rows, self.plan.num_slots, setup.dtype, setup.mesh)
        known = min(m.vocab_size for m in (setup.target, setup.draft) if m is not None)
        history = np.random.default_rng(0).integers(0, known, state.tokens.shape, np.int32)
        self.state = dataclasses.replace(state, tokens=jax.device_put(history, state.tokens.sharding))
        self._shardings = jax.tree.map(lambda x: x.sharding, self.state)
        self._programs = Programs(
            setup.target,
            self.drafter,
            chunk_size=setup.chunk_size,
            max_steps=setup.num_steps,
            implementation=setup.implementation,
            state_sharding=self._shardings,
        )

    def measure(self, repeats: int, *, prefill: bool) -> Measured:
        """Time everything; each program runs once before."""
        ((_, first),) = self._dispatch(0)
        dispatches = self._dispatch(repeats)
        prefilled = self._prefill(repeats) if prefill else None
        target, draft = self._target(repeats), self._draft(repeats) if self.k else None
        n = self.setup.num_steps
        return Measured(
            window=self.window,
            num_slots=self.plan.num_slots,
            step=_spread(total / n for _, total in dispatches),
            host=_spread(host for host, _ in dispatches),
            compilation=max(0.0, first - _spread(total for _, total in dispatches).median),
            target=target,
            draft=draft,
            prefill_tokens_per_second=prefilled,
        )

    def _dispatch(self, repeats: int) -> list[tuple[float, float]]:
        keep = np.ones(self.num_rows, bool)
        steps = np.int32(self.setup.num_steps)

        def dispatch() -> Any:
            self.state, (ran, _) = self._programs.decode(
                self.params, self.state, keep, steps, window=self.window, greedy=self.setup.specialize
            )
            return ran

        return self._timed(dispatch, repeats)

    def _prefill(self, repeats: int) -> Spread:
        """Prompts of ``context`` tokens but the last, as the engine reads them: in chunks, of as many rows at once."""
        width, chunk = self.plan.prefill_rows, self.setup.chunk_size
        length = self.setup.context - 1
        index = np.arange(width, dtype=np.int32)

        def rows(value: int) -> Any:
            return np.full(width, value, np.int32) if width > 1 else np.int32(value)

        def prefill() -> None:
            for start in range(0, length, chunk):
                self.state = self._programs.prefill(
                    self.params,
                    self.state,
                    index if width > 1 else index[0],
                    rows(start),
                    rows(min(chunk, length - start)),
                    window=self.plan.window(start + chunk),
                )

        self._timed(prefill, 0)
        return _spread(rate(width * length, total) for _, total in self._timed(prefill, repeats))

    def _target(self, repeats: int) -> Spread:
        """The target's pass over K+1 tokens, each fed with what the one before gave."""
        setup, window, width = self.setup, self.window, self.k + 1

        def loop(params: Any, cache: KVCache, tokens: Any, starts: Any, steps: Any) -> KVCache:
            def body(_: Any, carry: Any) -> Any:
                cache, tokens, starts = carry
                model = bind(setup.target, params, setup.implementation)
                out = model(tokens, cache, starts, window=window)
                return out.cache, model.best(out.hidden), starts + 1

            return lax.fori_loop(0, steps, body, (cache, tokens, starts))[0]

        compiled = jax.jit(loop, donate_argnums=1, out_shardings=self._shardings.cache)
        tokens = self.state.tokens[:, :width]

        def run() -> None:
            state = self.state
            cache = compiled(self.params["target"], state.cache, tokens, state.cached, np.int32(setup.num_steps))
            self.state = dataclasses.replace(state, cache=cache)

        self._timed(run, 0)
        return _spread(total / setup.num_steps for _, total in self._timed(run, repeats))

    def _draft(self, repeats: int) -> Spread:
        """The drafter's proposals, each appended to the text as one token for the next."""
        setup, window, drafter = self.setup, self.window, self.drafter

        def loop(params: Any, draft: Any, context: DraftContext, steps: Any) -> Any:
            rows = jnp.arange(context.length.shape[0])

            def body(_: Any, carry: Any) -> Any:
                draft, context = carry
                proposal, draft = drafter.propose(params, draft, context, window=window)
                token = jnp.maximum(proposal.tokens[:, 0], 0)
                tokens = context.tokens.at[rows, context.length].set(token, mode="drop")
                return draft, dataclasses.replace(context, tokens=tokens, length=context.length + 1)

            return lax.fori_loop(0, steps, body, (draft, context))[0]

        compiled = jax.jit(loop, donate_argnums=1, out_shardings=self._shardings.draft)

        def run() -> None:
            state = self.state
            context = DraftContext(state.tokens, state.length, state.active, state.sampling)
            draft = compiled(self.params["draft"], state.draft, context, np.int32(setup.num_steps))
            self.state = dataclasses.replace(state, draft=draft)

        self._timed(run, 0)
        return _spread(total / setup.num_steps for _, total in self._timed(run, repeats))

    def _timed(self, run: Callable[[], Any], repeats: int) -> list[tuple[float, float]]:
        """Seconds until ``run`` returned and until the device was done, from the same state each time.

        ``repeats`` of 0 runs it once all the same, to compile it.
        """
        times = []
        for _ in range(max(1, repeats)):
            self.state = jax.block_until_ready(self._rewound())
            begin = time.perf_counter()
            run()
            host = time.perf_counter() - begin
            jax.block_until_ready(self.state)
            times.append((host, time.perf_counter() - begin))
        return times

    def _rewound(self) -> DecodeState:
        """Every row active with the context's tokens; the caches keep what they hold."""
        state = all_active(self.state, self.setup.context)
        draft = state.draft
        if isinstance(draft, DraftState):
            cached = np.full(draft.cached.shape, self.setup.context - 1, np.int32)
            draft = dataclasses.replace(draft, cached=jax.device_put(cached, draft.cached.sharding))
        return dataclasses.replace(state, draft=draft)


def copy_rate(num_bytes: int, repeats: int) -> Spread:
    """Bytes a second, read and written, at which the device goes through an array of ``num_bytes`` in place."""
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.block_until_ready(add_one(jnp.zeros(num_bytes // 4, jnp.float32)))
    rates = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(_COPIES):
            x = add_one(x)
        jax.block_until_ready(x)
        rates.append(2 * num_bytes * _COPIES / (time.perf_counter() - begin))
    return _spread(rates)


def _spread(values: Any) -> Spread:
    spread = Spread.of(values)
    assert spread is not None
    return spread
