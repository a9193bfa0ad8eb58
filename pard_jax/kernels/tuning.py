"""How the kernels divide their work: block sizes by shape, from measurements on an H200 (docs/performance.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class LinearBlocks:
    """What one program of a matrix product takes."""

    rows: int  # of x
    columns: int  # of the product
    step: int  # of the contracted axis, in one turn of the loop
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class AttentionBlocks:
    """What one program of attention takes."""

    queries: int  # new tokens times the query heads of a key/value head, rounded up
    new: int  # new tokens, rounded up
    slots: int  # of the cache, a turn of the loop
    splits: int  # programs that share the cached slots of one row and head
    warps: int
    stages: int


SLOTS = 64  # the most slots of the cache that attention takes in a turn: caches are whole numbers of these
_NUM_PROCESSORS = 132  # of an H100 or H200: fewer programs than this leave some idle


# By rows rounded up, D, the widths' sum (of a gate: its width) and bytes a weight: shapes of Qwen3-8B and 0.6B whose
# best blocks are not those of the rules below.
_MEASURED = {
    (128, 4096, 12288, 2): LinearBlocks(128, 128, 64, warps=8, stages=4),
    (128, 12288, 4096, 2): LinearBlocks(64, 64, 128, warps=8, stages=4),
    (128, 4096, 6144, 2): LinearBlocks(128, 64, 128, warps=4, stages=4),
    (128, 4096, 4096, 2): LinearBlocks(64, 64, 128, warps=4, stages=4),
    (128, 4096, 151936, 2): LinearBlocks(128, 128, 64, warps=4, stages=4),
    (128, 1024, 3072, 2): LinearBlocks(64, 64, 128, warps=4, stages=4),
    (128, 3072, 1024, 2): LinearBlocks(64, 16, 128, warps=4, stages=4),
    (128, 1024, 4096, 2): LinearBlocks(64, 64, 128, warps=4, stages=4),
    (128, 2048, 1024, 2): LinearBlocks(64, 16, 128, warps=4, stages=4),
    (32, 1024, 3072, 1): LinearBlocks(32, 16, 256, warps=2, stages=4),
    (32, 3072, 1024, 1): LinearBlocks(32, 32, 512, warps=4, stages=4),
    (32, 1024, 4096, 1): LinearBlocks(32, 16, 256, warps=4, stages=4),
    (32, 2048, 1024, 1): LinearBlocks(32, 16, 512, warps=4, stages=4),
}


def linear_blocks(rows: int, depth: int, widths: Sequence[int], *, gated: bool, itemsize: int = 2) -> LinearBlocks:
    """Blocks for products of ``rows`` rows with matrices of ``widths`` x ``depth``, of ``itemsize`` bytes a weight."""
    height = min(max(16, power_of_two(rows)), 128)
    step = next(s for s in (256, 128, 64) if depth % s == 0)
    total = widths[0] if gated else sum(widths)
    measured = _MEASURED.get((height, depth, total, itemsize))
    if measured is not None and all(width % measured.columns == 0 for width in widths):
        return measured
    if height > 32:
        # The tensor cores' time counts, and whole warp groups use them best.
        sizes = (c for c in (64, 32) if all(width % c == 0 for width in widths) and total // c >= _NUM_PROCESSORS // 2)
        columns = next(sizes, 16)
        return LinearBlocks(height, columns, 64, warps=4 if columns < 64 else 8, stages=4)
    if all(width % 64 == 0 for width in widths) and total >= 8 * 64 * _NUM_PROCESSORS:
        return LinearBlocks(height, 64, min(step, 256 // itemsize), warps=4 // itemsize, stages=4)
    if all(width % 32 == 0 for width in widths) and (gated or depth >= 1024) and total >= 24 * 32:
        warps = 2 if height == 32 or (depth < 4096 and not gated) else 4
        return LinearBlocks(height, 32, min(step, 256 // itemsize) if gated else step, warps, stages=4)
    # A small matrix is a matter of latency: enough programs to go round, as much as possible asked for at once.
    if height == 16 and depth % 512 == 0:
        return LinearBlocks(height, 16, 512, warps=2, stages=3)
    return LinearBlocks(height, 16, step, warps=2, stages=4)


def attention_blocks(rows: int, tokens: int, group: int, num_kv_heads: int, window: int) -> AttentionBlocks:
    """Blocks for ``tokens`` new tokens of ``rows`` rows, where ``group`` query heads share a key/value head."""
    queries, new = max(16, power_of_two(tokens * group)), max(16, power_of_two(tokens))
    if queries == 16 and rows * num_kv_heads >= 8 * _NUM_PROCESSORS:
        # Many small programs beside one another hide each other's latency.
        return AttentionBlocks(queries, new, slots=32, splits=1, warps=1, stages=3)
    programs, most = rows * num_kv_heads, window // SLOTS
    splits = min(most, 2 * _NUM_PROCESSORS // programs)
    if splits > 16:
        # Putting so many parts together takes longer than a second turn of the loop.
        splits = power_of_two(min(most, max(16, _NUM_PROCESSORS // programs)) + 1) // 2
    return AttentionBlocks(queries, new, SLOTS, max(1, splits), warps=4, stages=2)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n: blocks of kernels are such."""
    return 1 << max(0, n - 1).bit_length()
