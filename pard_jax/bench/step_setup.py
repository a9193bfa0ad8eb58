"""What a measurement of the step runs on: two shapes, a device, sizes; and what of it cannot work."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from pard_jax.bench.ours import speculative_config
from pard_jax.config import EngineConfig, ModelConfig
from pard_jax.decoding.drafters import Drafter
from pard_jax.engine.memory import MemoryPlan, NotEnoughMemoryError, Speculation, cache_bytes, plan_memory
from pard_jax.loading import make_drafter
from pard_jax.report import pass_bytes

NO_DRAFT = "none"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all measurements of a run have in common.

    Attributes:
        cache: tokens that a row may hold: the engine's ``max_model_len``.
        context: tokens that every row holds when a dispatch begins.
        num_steps: steps of a dispatch.
        quantization: of both models' weights: "int8" or None.
        specialize: compile for greedy requests alone, as the engine does off the CPU.
    """

    target: ModelConfig
    draft: ModelConfig | None
    mask_token_id: int | None
    dtype: Any
    implementation: str
    specialize: bool
    chunk_size: int
    num_steps: int
    cache: int
    context: int
    memory_bytes: int | None
    mesh: Mesh
    quantization: str | None = None

    def check(self, num_rows: int, k: int) -> None:
        """Refuse what does not fit.

        Raises:
            ValueError: the context and what a dispatch adds to it are longer than the cache; a mask id that the draft
                lacks; see also :class:`pard_jax.config.SpeculativeConfig` for K.
            NotEnoughMemoryError: the device has less memory than is needed.
        """
        grown = self.context + self.num_steps * (k + 1)
        if grown > self.cache:
            room = self.cache - self.num_steps * (k + 1)
            fits = f"--context {room}, " if room >= 2 else ""
            raise ValueError(
                f"--context {self.context} and the {self.num_steps} x {k + 1} tokens that a dispatch at K={k} can add "
                f"are {grown}, but --cache is {self.cache}; what fits: {fits}--cache {grown}"
                + ("" if self.num_steps == 1 else ", or fewer --steps-per-dispatch")
            )
        self.drafter(k)
        try:
            self.plan(num_rows, k)
        except NotEnoughMemoryError as e:
            raise NotEnoughMemoryError(f"{e} (max_model_len is --cache here, max_num_seqs is --batch)") from None

    def plan(self, num_rows: int, k: int) -> MemoryPlan:
        """The sizes that the engine would choose."""
        return plan_memory(
            self.target,
            EngineConfig(
                max_model_len=self.cache,
                max_num_seqs=num_rows,
                tensor_parallel_size=self.mesh.size,
                quantization=self.quantization,
            ),
            Speculation(k, k, self.draft, self.quantization) if k else Speculation(),
            dtype=self.dtype,
            chunk_size=self.chunk_size,
            memory_bytes=self.memory_bytes,
        )

    def drafter(self, k: int) -> Drafter:
        """PARD's, or at K = 0 the one that drafts nothing."""
        speculative = speculative_config("pard", k, Path("draft"), self.mask_token_id) if k else None
        return make_drafter(speculative, self.target, self.draft, self.cache, self.implementation)

    def step_bytes(self, num_rows: int, k: int) -> int:
        """Bytes that a step has to read: weights once (:func:`pard_jax.report.pass_bytes`), live keys and values."""
        models = [m for m in (self.target, self.draft if k else None) if m is not None]
        return sum(
            pass_bytes(m, self.dtype, self.quantization) + cache_bytes(m, num_rows, self.context, self.dtype)
            for m in models
        )


def check_draft_flags(args: argparse.Namespace) -> None:
    """Refuse flags of a draft where there is none.

    Raises:
        ValueError: they were given beside ``--draft none``.
    """
    if args.draft != NO_DRAFT:
        return
    for flag, value in (("-k", args.num_speculative_tokens), ("--mask-token-id", args.mask_token_id)):
        if value is not None:
            raise ValueError(f"{flag} belongs to a draft, and --draft {NO_DRAFT} was given; leave one of the two out")


def mask_token_id(given: int | None, target: ModelConfig, draft: ModelConfig | None) -> int | None:
    """Any id will do, as the weights are random; the target's last one shows whether the two vocabularies agree.

    Raises:
        ValueError: the draft has fewer ids.
    """
    if draft is None or given is not None:
        return given
    if draft.mask_token_id is not None:
        return draft.mask_token_id
    if draft.vocab_size < target.vocab_size:
        raise ValueError(
            f"the draft has {draft.vocab_size} ids and lacks mask id {target.vocab_size - 1}, the target's last; "
            "choose a draft with that vocabulary, or name an id of both with --mask-token-id"
        )
    return target.vocab_size - 1
