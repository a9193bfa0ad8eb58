"""COD, the conditional drop of training rows (PARD, section 3.2): which rows of which subtask are trained, and what
each may see.

A training row ``(b, p)`` of block ``b`` stands at position ``p``, holds the real token (b = 0) or the mask token, and
predicts the token at ``p + 1`` from the real tokens up to its anchor ``p - b`` and the mask tokens of the same anchor:
what the row would see when drafting. Keeping all K * L rows costs K times a plain pass. COD keeps ever fewer of the
later blocks, and keeps (b, p) only with (b - 1, p - 1), so that every key a kept row needs is kept.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pard_jax.pytree import pytree


@dataclasses.dataclass(frozen=True)
class CodConfig:
    """How many rows are kept.

    Attributes:
        num_blocks: K, the subtasks; 1 is plain next-token training.
        retention: r; block b keeps a share of ``max(r**b, r_min)``. 1 keeps all rows.
        min_retention: r_min.
    """

    num_blocks: int = 8
    retention: float = 0.7
    min_retention: float = 0.2

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"the number of blocks K must be at least 1, got {self.num_blocks}")
        for name, value in (("retention r", self.retention), ("minimal retention r_min", self.min_retention)):
            if not 0 <= value <= 1:
                raise ValueError(f"the {name} must be in [0, 1], got {value}")

    def counts(self, length: int) -> tuple[int, ...]:
        """Rows kept of each block, of ``length``: ``int(L * max(r**b, r_min))``, and L of block 0."""
        kept = (int(length * max(self.retention**b, self.min_retention)) for b in range(1, self.num_blocks))
        return (length, *kept)


@pytree
class Rows:
    """The rows of one draw, the same for every sequence of a batch; padding rows have block -1."""

    block: Int[Array, "R"]
    position: Int[Array, "R"]


def draw(key: Array, config: CodConfig, length: int, *, multiple: int = 1) -> Rows:
    """Draw the kept rows: block 0 whole, then nested random subsets.

    The reference draws S_b from C_b and goes on with C_{b+1} = S_b + 1 (mod L), C_1 being all positions. Nested random
    subsets are the prefixes of one random permutation, shifted by one position a block: the same distribution.

    Args:
        key: a PRNG key.
        length: L.
        multiple: R is padded up to a multiple of it.
    """
    counts = config.counts(length)
    permutation = jax.random.permutation(key, length).astype(jnp.int32)
    positions = [jnp.arange(length, dtype=jnp.int32)]
    positions += [(permutation[:count] + b) % length for b, count in enumerate(counts[1:])]
    blocks = np.repeat(np.arange(config.num_blocks, dtype=np.int32), counts)
    padding = -len(blocks) % multiple
    return Rows(
        block=jnp.asarray(np.concatenate([blocks, np.full(padding, -1, np.int32)])),
        position=jnp.concatenate([*positions, jnp.zeros(padding, jnp.int32)]),
    )


def all_rows(num_blocks: int, length: int) -> Rows:
    """Every row of every block, in order: the reference's layout before dropping."""
    blocks, positions = np.divmod(np.arange(num_blocks * length, dtype=np.int32), np.int32(length))
    return Rows(block=jnp.asarray(blocks), position=jnp.asarray(positions))


def attention_mask(rows: Rows, segments: Int[Array, "B R"]) -> Bool[Array, "B R R"]:
    """Whether a row (second axis) sees another (third axis).

    Real tokens up to the anchor, and the masks between the anchor and the row itself; never across samples. Padding
    rows see themselves.

    Args:
        segments: the sample that each row's position belongs to.
    """
    anchor = rows.position - rows.block
    q_block, k_block = rows.block[:, None], rows.block[None, :]
    real = (k_block == 0) & (rows.position[None, :] <= anchor[:, None])
    chain = (anchor[None, :] == anchor[:, None]) & (k_block >= 1) & (k_block <= q_block)
    seen = (real | chain) & (q_block >= 0)
    seen = seen | jnp.eye(len(rows.block), dtype=bool)
    return seen[None, :, :] & (segments[:, :, None] == segments[:, None, :])


@pytree
class Inputs:
    """A batch laid out by rows."""

    tokens: Int[Array, "B R"]  # the real token, or the mask token
    positions: Int[Array, "B R"]  # within the sample
    mask: Bool[Array, "B R R"]
    targets: Int[Array, "B R"]  # the token after the row's position
    supervised: Bool[Array, "B R"]


def lay_out(
    rows: Rows,
    token_ids: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
    loss_mask: Bool[Array, "B L"],
    mask_token_id: int,
) -> Inputs:
    """The model's inputs and targets for the rows of a draw.

    A row is supervised if the token it predicts belongs to its sample and counts in the loss, and its anchor lies in
    the sample, or just before it (as the reference has it: such a row sees masks only).

    Args:
        token_ids: packed samples.
        segment_ids: 1, 2, ... along a row, a number a sample; 0 is padding.
        loss_mask: tokens that count as targets.
        mask_token_id: of the draft.
    """
    length = token_ids.shape[1]
    at = jnp.arange(length, dtype=jnp.int32)[None, :]
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    starts = jax.lax.cummax(jnp.where(segment_ids != previous, at, 0), axis=1)
    within = at - starts
    # Shifted before the gather: every row keeps its own target, wherever it comes to lie.
    targets = jnp.pad(token_ids[:, 1:], ((0, 0), (0, 1)))
    same = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1))) == segment_ids
    counts = jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1))) & same & (segment_ids > 0)

    position, block = rows.position, rows.block[None, :]
    tokens = jnp.where(block == 0, token_ids[:, position], mask_token_id)
    return Inputs(
        tokens=tokens,
        positions=within[:, position],
        mask=attention_mask(rows, segment_ids[:, position]),
        targets=targets[:, position],
        supervised=counts[:, position] & (within[:, position] + 1 >= block) & (block >= 0),
    )
