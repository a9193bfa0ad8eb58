"""What a draft is worth on held-out samples, by teacher forcing: its loss, and the acceptance that decoding would see.

One pass over all rows of all blocks tells, for every anchor, which of the K tokens drafted there equal the text's.
Where the text is what the target says greedily, that is what verification would accept, and the step loop can be played
on this table exactly: no generation is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from pard_jax.models import bind
from pard_jax.train.cod import all_rows, lay_out
from pard_jax.train.loss import num_chunks
from pard_jax.train.objective import DATA_AXIS, Objective, embed_rows

_CHUNK_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Means over the held-out samples.

    Attributes:
        loss: nats a token, of block 0.
        block_loss: of every block.
        acceptance_length: tokens a step of the target would yield, its own one included.
        per_position: share of the steps in which the draft's first, second, ... token would be accepted (with all
            before it), as vLLM counts it.
        num_tokens: text that was played.
        num_steps: steps it took.
    """

    loss: float
    block_loss: list[float]
    acceptance_length: float
    per_position: list[float]
    num_tokens: int
    num_steps: int


class Evaluator:
    """Evaluates parameters on the same held-out rows again and again."""

    def __init__(
        self, objective: Objective, rows: dict[str, np.ndarray], mesh: Mesh, *, num_drafts: int, batch_size: int
    ) -> None:
        """
        Args:
            rows: ``token_ids``, ``segment_ids``, ``loss_mask``, each ``[N, L]``.
            num_drafts: K, the tokens drafted a step.
            batch_size: rows at once, on all devices together; the last batch is filled up with padding.
        """
        devices = mesh.devices.size
        self._batch_size = -(-min(batch_size, len(rows["token_ids"])) // devices) * devices
        self._rows, self._num_drafts = rows, num_drafts
        self._sharding = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
        self._score = jax.jit(functools.partial(_score, objective, num_drafts))

    def __call__(self, params: Any) -> Evaluation:
        """Evaluate ``params``."""
        losses, counted = np.zeros(self._num_drafts), np.zeros(self._num_drafts)
        accepted: list[int] = []
        num_tokens = 0
        for batch in self._batches():
            placed = jax.device_put(batch, self._sharding)
            hits, block_losses, block_counts = jax.device_get(self._score(params, placed))
            losses += block_losses
            counted += block_counts
            for row in range(self._batch_size):
                for start, end in answer_ranges(batch["segment_ids"][row], batch["loss_mask"][row]):
                    accepted += play(hits[row], start, end)
                    num_tokens += end - start
        steps = max(len(accepted), 1)
        at_least = [sum(n > i for n in accepted) / steps for i in range(self._num_drafts)]
        block_loss = (losses / np.maximum(counted, 1)).tolist()
        return Evaluation(block_loss[0], block_loss, num_tokens / steps, at_least, num_tokens, len(accepted))

    def _batches(self) -> Iterator[dict[str, np.ndarray]]:
        total = len(self._rows["token_ids"])
        for start in range(0, total, self._batch_size):
            batch = {key: value[start : start + self._batch_size] for key, value in self._rows.items()}
            missing = self._batch_size - len(batch["token_ids"])
            yield {key: np.pad(value, ((0, missing), (0, 0))) for key, value in batch.items()}


def answer_ranges(segment_ids: np.ndarray, loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges of one row's labels ``[L]``, each within one sample."""
    marks = np.where(loss_mask, segment_ids, 0)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marks, [0]])))
    return [(int(s), int(e)) for s, e in itertools.pairwise(edges) if marks[s]]


def play(hits: np.ndarray, start: int, end: int) -> list[int]:
    """Drafts accepted in every step of decoding the tokens ``start..end``.

    Args:
        hits: ``[K, L]``: whether draft k at anchor a is the token at a + k + 1.
    """
    accepted, anchor = [], start - 1
    while anchor + 1 < end:
        left = min(len(hits), end - 1 - anchor)
        n = int(np.argmin(np.append(hits[:left, anchor], False)))
        accepted.append(n)
        anchor += n + 1
    return accepted


def _score(
    objective: Objective, num_drafts: int, params: Any, batch: dict[str, Array]
) -> tuple[Bool[Array, "B K L"], Float[Array, "K"], Float[Array, "K"]]:
    """Hits by draft and anchor; the summed loss and the number of supervised rows, by block."""
    size, length = batch["token_ids"].shape
    rows = all_rows(num_drafts, length)
    mask_id = objective.mask_token_id
    inputs = lay_out(rows, batch["token_ids"], batch["segment_ids"], batch["loss_mask"], mask_id)
    cast = jax.tree.map(lambda p: p.astype(objective.dtype), params)
    model = bind(objective.config, cast)
    embedded = embed_rows(cast["embed"], batch["token_ids"], rows, mask_id)
    hidden = model.encode(embedded, inputs.positions, inputs.mask, implementation=objective.attention)

    # Through the head in chunks of positions, so that the logits of all rows never lie beside one another.
    chunks = num_chunks(size * num_drafts, length, _CHUNK_ROWS)
    total = num_drafts * length

    def split(x: Array) -> Array:
        return x.reshape(size, chunks, total // chunks, *x.shape[2:]).swapaxes(0, 1)

    def chunk(xs: tuple[Array, Array]) -> tuple[Array, Array]:
        h, target = xs
        logits = model.logits(h)
        nll = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, target[:, :, None], axis=-1)[:, :, 0]
        return nll, jnp.argmax(logits, axis=-1) == target

    nll, right = jax.lax.map(chunk, (split(hidden), split(inputs.targets)))
    merge = lambda x: x.swapaxes(0, 1).reshape(size, num_drafts, length)  # noqa: E731
    nll, right, supervised = merge(nll), merge(right), inputs.supervised.reshape(size, num_drafts, length)
    # Row (b, p) drafts for anchor p - b: shifted so that the anchor is the index.
    hits = jnp.stack([jnp.roll(right[:, b] & supervised[:, b], -b, axis=1) for b in range(num_drafts)], axis=1)
    losses = jnp.sum(jnp.where(supervised, nll, 0), axis=(0, 2))
    return hits, losses, jnp.sum(supervised, axis=(0, 2)).astype(jnp.float32)
