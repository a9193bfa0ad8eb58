"""What a drafter is: the one thing that differs between speculative methods.

A drafter proposes K tokens a row from the committed tokens. It owns a pytree of state (its cache, say) that travels
inside the decode state, and it is itself static: a frozen dataclass closed over by the jitted step. The state's shapes
do not hang on K, so that a copy with another K goes on from it.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from pard_jax.decoding.sampling import SamplingState
from pard_jax.pytree import pytree


@pytree
class DraftContext:
    """What a drafter may look at when it proposes."""

    tokens: Int[Array, "B C"]  # committed ids, garbage at and beyond `length`
    length: Int[Array, "B"]  # committed tokens; the first draft stands at this position
    active: Bool[Array, "B"]  # rows that decode; the others' proposals are thrown away
    sampling: SamplingState


class Proposal(NamedTuple):
    """K drafts a row; -1 where a row has none (every draft behind a -1 is void)."""

    tokens: Int[Array, "B K"]
    probs: Float[Array, "B K Q"] | None  # what each was drawn from, over the draft's vocabulary; None: a point mass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafter(abc.ABC):
    """Proposes drafts. All methods are pure and traced inside the engine's jitted programs.

    A drafter without state of its own defines ``propose`` alone. Drafters that read the target's hidden states
    (EAGLE-3, DFlash, MTP, PARD-2) name the layers in ``target_layers`` and keep what they need in ``observe``; for
    the others the target computes no features.
    """

    num_speculative_tokens: int  # K
    target_layers: tuple[int, ...] = ()  # layers of the target whose residual stream `observe` receives

    def init(self, num_rows: int, num_slots: int, dtype: Any, mesh: Mesh | None = None) -> Any:
        """State for ``num_rows`` rows of ``num_slots`` cache slots."""
        return ()

    def admit(self, state: Any, row: Int[Array, "*R"]) -> Any:
        """Forget what a row held, or each of several: a new request starts there. An id of B or more names no row."""
        return state

    def prefill(
        self, params: Any, state: Any, tokens: Int[Array, "R C"], row: Int[Array, "*R"], start: Int[Array, "*R"],
        count: Int[Array, "*R"], *, window: int,
    ) -> Any:  # fmt: skip
        """Take in a chunk of a prompt: ``count`` valid tokens, the first at position ``start``.

        Of one row (R = 1, the others scalars) or of several; a row id of B or more is padding, and leaves no trace.
        """
        return state

    def catch_up(self, params: Any, state: Any, context: DraftContext, *, width: int, window: int) -> Any:
        """Take in what steps of another K kept and this drafter did not see, or has no room for in one pass.

        Called before K shrinks, and before the first drafts behind plain steps. ``width``: tokens of a pass (static).
        """
        return state

    @abc.abstractmethod
    def propose(self, params: Any, state: Any, context: DraftContext, *, window: int) -> tuple[Proposal, Any]:
        """Draft K tokens a row; ``window`` is the number of cache slots worth reading (static)."""

    def observe(
        self, state: Any, features: Float[Array, "G R T D"], starts: Int[Array, "R"],
        first_row: Int[Array, ""] | Int[Array, "R"] | int,
    ) -> Any:  # fmt: skip
        """See the target's ``features`` of tokens at positions ``starts..starts+T`` of rows from ``first_row`` on, or
        of the rows that ``first_row`` lists (an id of B or more: padding).

        Called after every prefill chunk and every verification, if ``target_layers`` is not empty. Tokens behind a
        row's length were rejected or padding.
        """
        return state
