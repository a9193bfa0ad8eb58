"""The jitted programs: a speculative step, several of them a dispatch, a chunk of prefill, the admission of a request.

All take the decode state by donation and return it. Weights are arguments; the models' structure, the drafter, its K
and the attention window are static, and nothing else is: no prompt, length or sampling setting compiles anything again.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pard_jax.config.model import ModelConfig
from pard_jax.decoding.drafters import DraftContext, Drafter, NoDrafter
from pard_jax.decoding.logprobs import TokenLogprobs, token_logprobs
from pard_jax.decoding.sampling import mask_below_min_tokens, warp_logits
from pard_jax.decoding.state import DecodeState, Row, admit
from pard_jax.decoding.verify import fit_vocabulary, verify, verify_greedy
from pard_jax.models import bind
from pard_jax.program_store import ProgramStore
from pard_jax.pytree import pytree


@pytree
class StepOutput:
    """What one step gave, row by row; a dispatch of several steps stacks them along a leading axis.

    The numbers lie side by side in one array: a kernel writes it, and the host reads it, at once.
    """

    packed: Int[Array | np.ndarray, "*steps B K+4"]
    logprobs: TokenLogprobs | None  # None where the program was compiled for requests that ask for none

    @property
    def tokens(self) -> Int[Array | np.ndarray, "*steps B _"]:
        """The tokens kept, then -1."""
        return self.packed[..., :-3]

    @property
    def num_kept(self) -> Int[Array | np.ndarray, "*steps B"]:
        """0 for rows that were not active."""
        return self.packed[..., -3]

    @property
    def num_drafts(self) -> Int[Array | np.ndarray, "*steps B"]:
        """Drafts that the drafter really made."""
        return self.packed[..., -2]

    @property
    def num_accepted(self) -> Int[Array | np.ndarray, "*steps B"]:
        """Of these; a stop token may keep fewer."""
        return self.packed[..., -1]


def step(
    config: ModelConfig,
    drafter: Drafter,
    params: dict[str, Any],
    state: DecodeState,
    *,
    window: int,
    greedy: bool = False,
    implementation: str = "xla",
    synthetic_rates: Float[Array, "K"] | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Draft, verify and commit once for every active row.

    Args:
        params: ``{"target": ..., "draft": ...}``.
        state: the state before; rows that are not active keep theirs.
        window: cache slots to read; at least the longest active row plus 2K.
        greedy: compile for rows that are all greedy, ask for no log-probabilities and may stop at any length: the
            same tokens, by less work (static).
        implementation: of the target's pass; see :func:`pard_jax.models.bind`.
        synthetic_rates: conditional acceptance rates for measuring (vLLM's "synthetic"); the output is then not the
            target's.
    """
    k = drafter.num_speculative_tokens
    context = DraftContext(state.tokens, state.length, state.active, state.sampling)
    with jax.named_scope("draft"):
        proposal, draft = drafter.propose(params.get("draft"), state.draft, context, window=window)
    # A draft behind a void one is void too, so the row's drafts are a prefix.
    column = jnp.arange(k, dtype=jnp.int32)[None, :]
    num_drafts = jnp.where(proposal.tokens < 0, column, k).min(axis=1, initial=k)
    drafts = jnp.where(column < num_drafts[:, None], proposal.tokens, -1)

    with jax.named_scope("target"):
        model = bind(config, params["target"], implementation)
        last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1, mode="clip")
        inputs = jnp.concatenate([last, jnp.maximum(drafts, 0)], axis=1)
        out = model(inputs, state.cache, state.cached, window=window, capture=drafter.target_layers)
        if out.features is not None:
            draft = drafter.observe(draft, out.features, state.cached, 0)
        raw = None if greedy else model.logits(out.hidden)

    with jax.named_scope("verify"):
        if raw is None:
            verified = verify_greedy(model.best(out.hidden), drafts)
        else:
            logits = mask_below_min_tokens(raw, state.length, state.min_length, state.stop_ids)
            logits = warp_logits(logits, state.sampling)
            probs = None if proposal.probs is None else fit_vocabulary(proposal.probs, logits.shape[-1])
            verified = verify(logits, drafts, probs, state.sampling, state.length, conditional_rates=synthetic_rates)

    # Keep up to and including the first token that ends the row.
    offsets = jnp.arange(k + 1, dtype=jnp.int32)[None, :]
    count = state.length[:, None] + offsets + 1  # committed tokens once this one is
    stops = jnp.any(verified.tokens[:, :, None] == state.stop_ids[:, None, :], axis=2)
    stops = stops & (verified.tokens >= 0) & (count > state.min_length[:, None])
    ends = (stops | (count >= state.max_length[:, None])) & (offsets < verified.num_emitted[:, None])
    first_end = jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1).astype(jnp.int32), k + 1)
    kept = jnp.where(state.active, jnp.minimum(verified.num_emitted, first_end + 1), 0)
    finished = first_end < k + 1
    tokens = jnp.where(offsets < kept[:, None], verified.tokens, -1)

    length = state.length + kept
    new_state = dataclasses.replace(
        state,
        tokens=_append(state.tokens, state.length, jnp.maximum(verified.tokens, 0)),
        length=length,
        cached=jnp.where(state.active, length - 1, state.cached),
        active=state.active & ~finished,
        cache=out.cache,
        draft=draft,
    )
    counts = jnp.stack([kept, *(jnp.where(state.active, n, 0) for n in (num_drafts, verified.num_accepted))], axis=1)
    logprobs = None
    if raw is not None:
        asked = jnp.where(state.active, state.num_logprobs, -1)
        logprobs = token_logprobs(raw, jnp.maximum(verified.tokens, 0), asked)
    return new_state, StepOutput(jnp.concatenate([tokens, counts], axis=1), logprobs)


def _append(history: Array, length: Array, tokens: Array) -> Array:
    """Write a step's tokens behind every row's; those that were not kept lie behind the new length.

    An inactive row's length may be that of a prompt still being prefilled: what is written lies behind it, too.
    """
    rows = jnp.arange(history.shape[0], dtype=jnp.int32)[:, None]
    at = length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    return history.at[rows, at].set(tokens, mode="drop", unique_indices=True)


class Programs:
    """The compiled programs of one target and drafter. Calling one twice with equal ``window`` compiles once."""

    def __init__(
        self,
        config: ModelConfig,
        drafter: Drafter,
        *,
        chunk_size: int,
        max_steps: int,
        implementation: str = "xla",
        synthetic_rates: tuple[float, ...] | None = None,
        state_sharding: Any = None,
        store: ProgramStore | None = None,
    ) -> None:
        """
        Args:
            chunk_size: C, tokens of one prefill pass.
            max_steps: the most steps of one dispatch (static: the size of its output).
            implementation: of the target's passes; see :func:`pard_jax.models.bind`.
            synthetic_rates: conditional acceptance rates, K of them, or None for exact verification.
            state_sharding: shardings of the decode state, pinned on every output so that a program's result never
                compiles the next one again; None on a single device.
            store: where compiled programs are kept for other processes; None keeps none.
        """
        self.config, self.drafter = config, drafter
        self.chunk_size, self.max_steps = chunk_size, max_steps
        self.implementation = implementation
        self._rates = synthetic_rates
        pinned: dict[str, Any] = {} if state_sharding is None else {"out_shardings": state_sharding}
        decode_pinned: dict[str, Any] = {} if state_sharding is None else {"out_shardings": (state_sharding, None)}
        made_of = (config, drafter, chunk_size, max_steps, implementation, synthetic_rates)

        def program(function: Any, **options: Any) -> Any:
            jitted = jax.jit(function, **options)
            return jitted if store is None else store.keep(function.__name__.strip("_"), jitted, made_of)

        self.admit = program(self._admit, donate_argnums=0, **pinned)
        self.prefill = program(self._prefill, donate_argnums=1, static_argnames="window", **pinned)
        self.decode = program(
            self._decode, donate_argnums=1, static_argnames=("window", "greedy", "k"), **decode_pinned
        )
        self.catch_up = program(self._catch_up, donate_argnums=1, static_argnames=("width", "window"), **pinned)

    def _admit(self, state: DecodeState, index: Int[Array, "*R"], row: Row) -> DecodeState:
        return admit(self.drafter, state, index, row)

    def _prefill(
        self,
        params: dict[str, Any],
        state: DecodeState,
        index: Int[Array, "*R"],
        start: Int[Array, "*R"],
        count: Int[Array, "*R"],
        *,
        window: int,
    ) -> DecodeState:
        """Take in ``count`` tokens of row ``index``'s prompt from ``start`` on; the row decodes once one is left.

        A chunk is always ``chunk_size`` wide: what it holds beyond ``count`` is masked now and overwritten later.

        The last prompt token is left to the first step, which runs it as any step runs the last kept token: prefill
        computes no logits, and the first output token is already drafted for.

        With vectors, a chunk of each of R distinct rows in one pass; an ``index`` of B or more is padding.
        """
        model = bind(self.config, params["target"])
        capture = self.drafter.target_layers
        if index.ndim == 0:
            chunk = lax.dynamic_slice(state.tokens, (index, start), (1, self.chunk_size))
        else:
            at = start[:, None] + jnp.arange(self.chunk_size, dtype=jnp.int32)[None, :]
            chunk = state.tokens.at[index[:, None], at].get(mode="clip")
        starts = jnp.atleast_1d(start)
        out = model(chunk, state.cache, starts, window=window, first_row=index, capture=capture)
        draft = self.drafter.prefill(params.get("draft"), state.draft, chunk, index, start, count, window=window)
        if out.features is not None:
            draft = self.drafter.observe(draft, out.features, starts, index)
        end = start + count
        return dataclasses.replace(
            state,
            cached=state.cached.at[index].set(end, mode="drop"),
            active=state.active.at[index].set(end == state.length.at[index].get(mode="clip") - 1, mode="drop"),
            cache=out.cache,
            draft=draft,
        )

    def _catch_up(self, params: dict[str, Any], state: DecodeState, *, width: int, window: int) -> DecodeState:
        """Make the drafter's state what it is after steps of its own: to be called before a step of a smaller K than
        the one before, or the first behind plain steps. See :meth:`Drafter.catch_up`."""
        context = DraftContext(state.tokens, state.length, state.active, state.sampling)
        draft = self.drafter.catch_up(params.get("draft"), state.draft, context, width=width, window=window)
        return dataclasses.replace(state, draft=draft)

    def _decode(
        self,
        params: dict[str, Any],
        state: DecodeState,
        keep: Bool[Array, "B"],
        num_steps: Int[Array, ""],
        *,
        window: int,
        greedy: bool = False,
        k: int | None = None,
    ) -> tuple[DecodeState, tuple[Int[Array, ""], StepOutput]]:
        """Up to ``num_steps`` steps; fewer when no row is left active.

        ``greedy``: see :func:`step`.
        ``k``: K of these steps, at most the drafter's; None for the drafter's. 0 leaves the drafter's state as it is.
        ``keep`` is False for rows whose request the host has ended since (a stop string, an abort).

        Returns:
            The state, and (how many steps ran, their outputs stacked ``[max_steps, ...]``).
        """
        state = dataclasses.replace(state, active=state.active & keep)
        k = self.drafter.num_speculative_tokens if k is None else k
        drafter = dataclasses.replace(self.drafter, num_speculative_tokens=k) if k else NoDrafter()
        rates = None if self._rates is None else jnp.asarray(self._rates[:k], jnp.float32)

        @functools.partial(jax.jit, inline=True)  # traced once, for its shapes and for the loop
        def one(state: DecodeState) -> tuple[DecodeState, StepOutput]:
            return step(
                self.config,
                drafter,
                params,
                state,
                window=window,
                greedy=greedy,
                implementation=self.implementation,
                synthetic_rates=rates,
            )

        shapes = jax.eval_shape(one, state)[1]
        buffers = jax.tree.map(lambda s: jnp.zeros((self.max_steps, *s.shape), s.dtype), shapes)

        def unfinished(carry: tuple[Array, DecodeState, StepOutput]) -> Array:
            i, state, _ = carry
            return (i < num_steps) & jnp.any(state.active)

        def body(carry: tuple[Array, DecodeState, StepOutput]) -> tuple[Array, DecodeState, StepOutput]:
            i, state, buffers = carry
            state, output = one(state)
            buffers = jax.tree.map(lambda b, o: lax.dynamic_update_index_in_dim(b, o, i, 0), buffers, output)
            return i + 1, state, buffers

        steps, state, outputs = lax.while_loop(unfinished, body, (jnp.int32(0), state, buffers))
        return state, (steps, outputs)
