"""How the kernels divide their work: block sizes by shape.

Attention's for large batches were measured on an H200; the others are a first choice for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class LinearBlocks:
    """What one program of a matrix product takes."""

    rows: int  # of x
    columns: int  # of the product
    step: int  # of the contracted axis, in one product
    ahead: int  # steps a turn of the loop, loaded together
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class AttentionBlocks:
    """What one program of attention takes."""

    queries: int  # new tokens times the query heads of a key/value head, rounded up
    new: int  # new tokens, rounded up
    slots: int  # of the cache, a turn of the loop
    splits: int  # programs that share the slots of one row and head
    warps: int
    stages: int


SLOTS = 64  # the most slots of the cache that attention takes in a turn: caches are whole numbers of these
_NUM_PROCESSORS = 132  # of an H100 or H200: fewer programs than this leave some idle


def linear_blocks(rows: int, depth: int, widths: Sequence[int], *, gated: bool, itemsize: int = 2) -> LinearBlocks:
    """Blocks for products of ``rows`` rows with matrices of ``widths`` x ``depth``, of ``itemsize`` bytes a weight.

    Steps over int8 are twice as long: what hides the latency of memory are the bytes under way.
    """
    height = min(max(16, power_of_two(rows)), 128)
    total = widths[0] if gated else sum(widths)

    def shares(columns: int) -> bool:
        return all(width % columns == 0 for width in widths) and total // columns >= _NUM_PROCESSORS

    columns = 64 if shares(64) and total // 64 >= 8 * _NUM_PROCESSORS else 32 if shares(32) else 16
    if columns == 16:
        # A small matrix is a matter of latency: as much of it as possible is asked for at once.
        step = next(s for s in (512 // itemsize, 256, 128, 64) if depth % s == 0)
        return LinearBlocks(height, columns, step if height == 16 else min(step, 128), 1, warps=4, stages=4)
    step = next(s for s in (256 // itemsize, 128, 64) if depth % s == 0)
    return LinearBlocks(height, columns, step, 1, warps=2, stages=4)


def attention_blocks(rows: int, tokens: int, group: int, num_kv_heads: int, window: int) -> AttentionBlocks:
    """Blocks for ``tokens`` new tokens of ``rows`` rows, where ``group`` query heads share a key/value head."""
    queries, new = max(16, power_of_two(tokens * group)), max(16, power_of_two(tokens))
    if queries == 16 and rows * num_kv_heads >= 8 * _NUM_PROCESSORS:
        # Many small programs beside one another hide each other's latency.
        return AttentionBlocks(queries, new, slots=32, splits=1, warps=1, stages=3)
    slots, splits = SLOTS, 1
    while rows * num_kv_heads * splits < _NUM_PROCESSORS and window // (2 * splits) >= 2 * slots:
        splits *= 2
    return AttentionBlocks(queries, new, slots, splits, warps=4, stages=2)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n: blocks of kernels are such."""
    return 1 << max(0, n - 1).bit_length()
