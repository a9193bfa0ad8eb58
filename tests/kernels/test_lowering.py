"""The kernels lowered for an NVIDIA GPU at the shapes of real models: nothing is touched beyond an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pard_jax.kernels.linear as of_linear
from pard_jax.int8 import Int8Matrix, quantized_like
from pard_jax.kernels.attention import decode_attention
from pard_jax.kernels.linear import Normed, linear, linear_argmax
from tests.kernels.ttir import Access, Kernel, kernels_of

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

LAYER = jax.ShapeDtypeStruct((), jnp.int32)


class Model(NamedTuple):
    """A real model's sizes."""

    d: int
    n: int
    m: int
    h: int
    f: int
    v: int
    layers: int
    qk_norm: bool = True


SMOLLM2 = Model(d=576, n=9, m=3, h=64, f=1536, v=49152, layers=30, qk_norm=False)
QWEN3_8B = Model(d=4096, n=32, m=8, h=128, f=12288, v=151936, layers=36)
QWEN3_06B = Model(d=1024, n=16, m=8, h=128, f=3072, v=151936, layers=28)
PASSES = [
    *(pytest.param(SMOLLM2, t, id=f"smollm2-{t}") for t in (1, 5, 8)),
    *(pytest.param(QWEN3_8B, t, id=f"qwen3-8b-{t}") for t in (1, 13)),
    pytest.param(QWEN3_06B, 24, id="qwen3-0.6b-24"),
]


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def int8(*shape: int) -> Int8Matrix:
    return quantized_like(array(*shape))


PRODUCTS = [
    *(pytest.param(*case.values, array, id=case.id) for case in PASSES),
    pytest.param(SMOLLM2, 5, int8, id="smollm2-5-int8"),
    pytest.param(QWEN3_8B, 13, int8, id="qwen3-8b-13-int8"),
]


def only(kernels: list[Kernel]) -> Kernel:
    assert len(kernels) == 1
    return kernels[0]


def stored(found: Sequence[Access], argument: int) -> np.ndarray:
    """The elements of ``argument`` that are written, as often as they are."""
    return np.concatenate([a.offsets for a in found if a.store and a.argument == argument])


def check_linear(kernel: Kernel, layers: int, outputs: int = 1, *, has_norm: bool = False) -> None:
    """In bounds at the last layer; every element of an output is written once, by one program."""
    indices = [0, len(kernel.sizes) - outputs - 2] if has_norm else [0]  # that of the norm lies before the residual
    found = kernel.check_bounds({index: [layers - 1] for index in indices})
    assert {a.argument for a in found} == set(range(len(kernel.sizes)))
    assert {a.argument for a in found if a.store} == set(range(len(kernel.sizes))[-outputs:])
    for argument in range(len(kernel.sizes) - outputs, len(kernel.sizes)):
        written = stored(found, argument)
        assert len(np.unique(written)) == len(written)
        if len(kernel.programs()) == np.prod(kernel.grid):
            assert len(written) == kernel.sizes[argument]


@pytest.mark.parametrize(("model", "rows", "matrix"), PRODUCTS)
def test_products_stay_in_their_arrays(model: Model, rows: int, matrix: Any):
    """Scales are arrays of their own, which must be read within their bounds and are never left out."""
    d, n, m, h, f, _, layers, _ = model
    x, norm, squares = array(rows, d), array(layers, d), array(rows, d // 16, dtype=jnp.float32)

    def projections(x, squares, q, k, v, layer):
        return linear(Normed(x, squares), [q, k, v], layer, eps=1e-6)

    def residual(x, weight, stream, norm, layer):
        return linear(x, [weight], layer, residual=stream, next_norm=(norm, layer))

    def gated(x, squares, gate, up, layer):
        return linear(Normed(x, squares), [gate, up], layer, eps=1e-6, gated=True)

    kv, up = matrix(layers, m * h, d), matrix(layers, f, d)
    check_linear(only(kernels_of(projections, x, squares, matrix(layers, n * h, d), kv, kv, LAYER)), layers, 3)
    check_linear(only(kernels_of(gated, x, squares, up, up, LAYER)), layers)
    for depth in (n * h, f):
        down = matrix(layers, d, depth)
        check_linear(only(kernels_of(residual, array(rows, depth), down, x, norm, LAYER)), layers, 3, has_norm=True)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 128, 130])
def test_rows_that_do_not_fill_their_blocks(rows: int):
    def both(x, a, b, biases, layer):
        return linear(x, [a, b], layer, biases=[biases, biases])

    kernel = only(kernels_of(both, array(rows, 128), array(2, 48, 128), array(2, 48, 128), array(2, 48), LAYER))
    check_linear(kernel, 2, 2)


def test_offsets_of_stacks_beyond_4_gib():
    """Qwen3-32B's gates: 8.4e9 elements, whose offsets no 32 bits hold."""
    kernel = only(
        kernels_of(lambda x, w, i: linear(x, [w], i), array(3, 5120), array(64, 25600, 5120), LAYER)
    )  # fmt: skip
    found = kernel.check_bounds({0: [63]})
    last = max(int(a.offsets.max()) for a in found if a.argument == 2)
    assert last == 64 * 25600 * 5120 - 1


@pytest.mark.parametrize(("model", "rows", "matrix"), PRODUCTS)
def test_the_head_stays_in_its_arrays(model: Model, rows: int, matrix: Any):
    def scores(x, head):
        return linear(x, [head[None]], np.int32(0), out_dtype=jnp.float32)

    def best(x, head):
        return linear_argmax(x, head, limit=model.v - 3)

    x, head = array(rows, model.d), matrix(model.v, model.d)
    check_linear(only(kernels_of(scores, x, head)), 1)
    kernel = only(kernels_of(best, x, head))
    found = kernel.check_bounds({})
    outputs = range(len(kernel.sizes))[-2:]
    assert {a.argument for a in found if not a.store} >= set(range(outputs[0]))
    for argument in outputs:
        written = stored(found, argument)
        assert len(np.unique(written)) == len(written) == rows * len(kernel.programs())


@pytest.mark.parametrize(("rows", "window"), [(1, 512), (2, 512), (2, 128)])
@pytest.mark.parametrize(("model", "tokens"), PASSES)
def test_attention_stays_in_its_arrays(model: Model, tokens: int, rows: int, window: int):
    """Up to the last slot of the last row and layer; only the new slots of the rows are written."""
    n, m, h, qk_norm = model.n, model.m, model.h, model.qk_norm
    slots, batch, layers = 512, rows, 3

    def attention(q, k, v, rotations, k_cache, v_cache, layer, starts, *norms):
        return decode_attention(
            q, k, v, rotations, k_cache, v_cache, layer, starts, window=window, qk_norm=norms or None, eps=1e-6
        )

    kv, cache = array(rows, tokens, m, h), array(layers, batch, m, slots, h)
    arguments = [
        array(rows, tokens, n, h), kv, kv, array(rows, tokens, h, dtype=jnp.float32), cache, cache, LAYER,
        array(rows, dtype=jnp.int32), *([array(layers, h)] * 2 if qk_norm else []),
    ]  # fmt: skip
    kernel, *combining = kernels_of(attention, *arguments)
    assert bool(combining) == (kernel.grid[2] > 1)
    for second in combining:
        found = second.check_bounds({}, every=True)
        assert len(np.unique(stored(found, 3))) == second.sizes[3] == rows * tokens * n * h
    layer, at = layers - 1, [0, window - tokens][-rows:]
    found = kernel.check_bounds({0: [layer], 1: at}, every=True)
    wanted = np.zeros((layers, batch, m, slots, h), bool)
    for row, start in enumerate(at):
        wanted[layer, row, :, start : start + tokens] = True
    for argument in (-2, -1):
        written = np.zeros(wanted.size, bool)
        written[stored(found, len(kernel.sizes) + argument)] = True
        np.testing.assert_array_equal(written, wanted.ravel())
    # What is no cache is written whole.
    for argument in range(6 + 2 * qk_norm + 2, len(kernel.sizes) - 2):
        assert len(np.unique(stored(found, argument))) == kernel.sizes[argument]


def small_attention(slots: int) -> Kernel:
    """Of 2 tokens of 2 rows, over a cache of 3 layers."""

    def attention(q, kv, rotations, cache, layer, starts):
        return decode_attention(q, kv, kv, rotations, cache, cache, layer, starts, window=slots)

    rotations, starts = array(2, 2, 32, dtype=jnp.float32), array(2, dtype=jnp.int32)
    kv, cache = array(2, 2, 2, 32), array(3, 2, 2, slots, 32)
    return kernels_of(attention, array(2, 2, 4, 32), kv, rotations, cache, LAYER, starts)[0]


def test_what_lies_beyond_is_found():
    """The check itself: a row that starts one slot too late, a layer that is not there."""
    kernel = small_attention(64)
    kernel.check_bounds({0: [2], 1: [62, 62]})
    with pytest.raises(AssertionError, match="of argument 9, which has 24576 elements"):
        kernel.check_bounds({0: [2], 1: [62, 63]})
    with pytest.raises(AssertionError, match="of argument 6, which has 24576 elements"):
        kernel.check_bounds({0: [3], 1: [62, 62]})


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch):
    """Say whether the GPU knows how to start a kernel early; kernels traced before are forgotten."""

    def known(value: bool) -> None:
        jax.clear_caches()
        monkeypatch.setattr(of_linear, "can_start_early", lambda: value)

    yield known
    jax.clear_caches()


@pytest.mark.parametrize("known", [True, False])
def test_products_let_the_next_kernel_start_where_the_gpu_can(capability: Any, known: bool):
    """Those of bfloat16, each matrix's; not those with int8, which gain nothing."""
    capability(known)
    x, weight, layer = array(5, 576), array(3, 192, 576), np.int32(1)
    (one,) = kernels_of(lambda x, w: linear(x, [w], layer), x, weight)
    (gated,) = kernels_of(lambda x, w: linear(x, [w, w], layer, gated=True), x, weight)
    (quantized,) = kernels_of(lambda x, w: linear(x, [w], layer), x, int8(3, 192, 576))
    counts = [kernel.count("tt.elementwise_inline_asm") for kernel in (one, gated, quantized)]
    assert counts == ([1, 2, 0] if known else [0, 0, 0])
