"""Block sizes: what the kernels rely on, for the shapes of real models."""

from __future__ import annotations

import itertools

import pytest

from pard_jax.kernels.linear import MAX_ROWS, fits_linear
from pard_jax.kernels.tuning import attention_blocks, linear_blocks

# D, N, M, H, F, V
MODELS = {
    "SmolLM2-135M": (576, 9, 3, 64, 1536, 49152),
    "Qwen2.5-0.5B": (896, 14, 2, 64, 4864, 151936),
    "Qwen3-0.6B": (1024, 16, 8, 128, 3072, 151936),
    "Llama-3.2-1B": (2048, 32, 8, 64, 8192, 128256),
    "Qwen3-4B": (2560, 32, 8, 128, 9728, 151936),
    "Qwen3-8B": (4096, 32, 8, 128, 12288, 151936),
    "Qwen2.5-7B": (3584, 28, 4, 128, 18944, 152064),
    "Qwen3-32B": (5120, 64, 8, 128, 25600, 151936),
}
ROWS = (1, 2, 5, 8, 13, 16, 17, 24, 32, 40, 64, 65, 104, MAX_ROWS)


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_blocks_of_products_divide_the_matrices(model: str, itemsize: int):
    d, n, m, h, f, v = MODELS[model]
    products = [
        (d, [n * h, m * h, m * h], False), (n * h, [d], False), (d, [f, f], True), (f, [d], False), (d, [v], False),
    ]  # fmt: skip
    for (depth, widths, gated), rows in itertools.product(products, ROWS):
        assert all(fits_linear(rows, depth, width) for width in widths)
        blocks = linear_blocks(rows, depth, widths, gated=gated, itemsize=itemsize)
        # No column and no step overhangs: only rows are masked.
        assert all(width % blocks.columns == 0 for width in widths)
        assert depth % blocks.step == 0
        # What the tensor cores take: 16 at least on each side, and Triton's tensors are powers of two.
        for size in (blocks.rows, blocks.columns, blocks.step):
            assert is_power_of_two(size) and size >= 16
        assert is_power_of_two(blocks.warps)
        assert -(-rows // blocks.rows) * blocks.rows < max(2 * rows, 17)  # less than half of the blocks is empty
        matrices = 2 if gated else 1
        # A stage of the pipeline holds a step of x and of the matrices; an H100 has 227 KiB of shared memory.
        stage = blocks.step * (2 * blocks.rows + itemsize * matrices * blocks.columns)
        assert stage * blocks.stages <= 227 * 1024


def test_many_rows_are_several_blocks():
    assert linear_blocks(1000, 64, [64], gated=False).rows == 128


@pytest.mark.parametrize("model", MODELS)
def test_blocks_of_attention(model: str):
    _, n, m, _, _, _ = MODELS[model]
    windows = (128, 256, 512, 1024, 4096, 32768)
    for rows, tokens, window in itertools.product((1, 2, 8, 64, 256), (1, 2, 5, 8, 13, 24), windows):
        blocks = attention_blocks(rows, tokens, n // m, m, window)
        for size in (blocks.queries, blocks.new, blocks.slots):
            assert is_power_of_two(size) and size >= 16
        assert tokens * (n // m) <= blocks.queries and tokens <= blocks.new
        assert is_power_of_two(blocks.warps)
        assert blocks.splits <= 16 or is_power_of_two(blocks.splits)
        # A split has a block of slots at least, and no more are made than two for each processor.
        assert blocks.splits == 1 or blocks.splits * blocks.slots <= window
        assert blocks.splits == 1 or rows * m * blocks.splits <= 2 * 132


def test_a_small_batch_shares_a_long_window():
    assert attention_blocks(1, 5, 3, 3, 64).splits == 1
    assert attention_blocks(1, 5, 3, 3, 256).splits == 4
    assert attention_blocks(1, 5, 3, 3, 32768).splits == 32
    assert attention_blocks(64, 5, 3, 3, 32768).splits == 1
