"""The decoder by the kernels, interpreted, against the decoder by XLA.

Both run in bfloat16 and round at other places, so neither is the other's oracle: that is the decoder in float32 on the
same weights, and the kernels may be no farther from it than XLA's bfloat16 is, up to a factor for chance.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.config import ModelConfig
from pard_jax.models import KVCache, bind
from pard_jax.models.fused import runs_fused
from tests.helpers.models import LLAMA3_SCALING, is_int8, model_config, quantized_params, random_params

SLOTS, ROWS, T = 128, 3, 5
SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3_SCALING, "mlp_bias": True,
                        "attention_bias": True}),
    "qwen3": ("qwen3", {"num_attention_heads": 6, "rms_norm_eps": 1e-3}),
    "qwen3-odd-vocabulary": ("qwen3", {"vocab_size": 131, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"head_dim": None, "hidden_size": 128}),
    # What the kernels take in part, or not at all.
    "attention-alone": ("qwen3", {"hidden_size": 96, "intermediate_size": 100, "attention_bias": True}),
    "head-alone": ("qwen3", {"head_dim": 24}),
    "nothing": ("llama", {"head_dim": 24, "hidden_size": 48}),
}  # fmt: skip
MODELS["llama-int8"] = MODELS["llama"]
ALL = {"linear", "linear_argmax", "decode_attention"}
KERNELS = {
    "llama": ALL, "qwen3-odd-vocabulary": ALL - {"linear_argmax"}, "attention-alone": {"decode_attention"},
    "head-alone": ALL - {"decode_attention"}, "nothing": set(), "llama-int8": ALL,
}  # fmt: skip


class Result(NamedTuple):
    logits: np.ndarray
    k: np.ndarray
    v: np.ndarray
    features: np.ndarray


@functools.cache
def model(name: str) -> tuple[ModelConfig, dict[str, Any]]:
    """A config and bfloat16 parameters, or matrices of int8."""
    family, overrides = MODELS[name]
    config = model_config(family, **SHAPE | overrides)
    params = random_params(config, len(name))
    if name.endswith("-int8"):
        params = quantized_params(config, params)
    return config, cast(params, jnp.bfloat16)


def cast(params: Any, dtype: Any) -> Any:
    """Whatever is not int8 in another dtype."""
    return jax.tree.map(lambda p: p if is_int8(p) else p.astype(dtype), params, is_leaf=is_int8)


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward(config, implementation, params, tokens, cache, starts, first_row=None):
    bound = bind(config, params, implementation)
    out = bound(
        tokens, cache, starts, window=SLOTS, capture=(1, 0), first_row=0 if first_row is None else first_row
    )  # fmt: skip
    return bound.logits(out.hidden), out.cache, out.features, bound.best(out.hidden), bound.best(out.hidden, 50)


def cache_of(config: ModelConfig, starts: Any, dtype: Any = jnp.bfloat16) -> KVCache:
    """Keys and values of the positions before ``starts``, which bfloat16 holds exactly, and large ones behind."""
    rng = np.random.default_rng(7)
    shape = (config.num_layers, ROWS, config.num_kv_heads, SLOTS, config.head_dim)
    k, v = (np.asarray(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16), np.float32) for _ in range(2))
    for row, start in enumerate(starts):
        k[:, row, :, start:], v[:, row, :, start:] = -8192, 8192
    return KVCache(jnp.asarray(k, dtype), jnp.asarray(v, dtype))


def run(name: str, implementation: str, tokens: np.ndarray, starts: np.ndarray, dtype: Any = jnp.bfloat16) -> Result:
    config, params = model(name)
    params = cast(params, dtype)
    cache = cache_of(config, starts, dtype)
    logits, cache, features, best, below = forward(config, implementation, params, tokens, cache, starts)
    assert (
        features is not None
        and cache.k.dtype == cache.v.dtype == features.dtype == dtype
        and logits.dtype == jnp.float32
    )
    scores = np.asarray(logits)
    np.testing.assert_array_equal(best, scores.argmax(axis=-1))
    np.testing.assert_array_equal(below, scores[..., :50].argmax(axis=-1))
    return Result(scores, *(np.asarray(a, np.float32) for a in (cache.k, cache.v, features)))


def calls(name: str, first_row: Any = None) -> set[str]:
    """The kernels in a pass."""
    config, params = model(name)
    starts = np.zeros(1, np.int32)
    traced = jax.make_jaxpr(forward, static_argnums=(0, 1))(
        config, "interpret", params, np.zeros((1, 1), np.int32), cache_of(config, starts), starts, first_row
    )
    return {kernel for kernel in ALL if re.search(rf"\bname={kernel}\n", str(traced))}


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2", "attention-alone", "head-alone", "llama-int8"])
def test_the_kernels_are_as_exact_as_xla(name: str):
    config, _ = model(name)
    ids = np.random.default_rng(len(name)).integers(0, config.vocab_size, (ROWS, T)).astype(np.int32)
    starts = np.asarray([0, 61, SLOTS - T], np.int32)
    exact, xla = run(name, "xla", ids, starts, jnp.float32), run(name, "xla", ids, starts)
    fused = run(name, "interpret", ids, starts)
    new = np.zeros((1, ROWS, 1, SLOTS, 1), bool)
    for row, start in enumerate(starts):
        new[:, row, :, start : start + T] = True
    before = cache_of(config, starts)
    for want, a, b, old in zip(exact[1:3], xla[1:3], fused[1:3], (before.k, before.v), strict=True):
        np.testing.assert_array_equal(np.where(new, 0, b), np.where(new, 0, np.asarray(old, np.float32)))
        assert np.abs(np.where(new, b - want, 0)).max() <= 2 * np.abs(np.where(new, a - want, 0)).max()
    for want, a, b in ((exact[i], xla[i], fused[i]) for i in (0, 3)):
        assert a.shape == b.shape
        difference, allowed = np.abs(b - want), np.abs(a - want)
        assert difference.max() <= 2 * allowed.max()
        assert np.sqrt((difference**2).mean()) <= 1.5 * np.sqrt((allowed**2).mean())
        assert allowed.max() < 0.1 * np.abs(want).max()  # the oracle is one


@pytest.mark.parametrize("name", KERNELS)
def test_what_runs_by_which_kernel(name: str):
    assert calls(name) == KERNELS[name]


def test_long_passes_and_odd_heads_are_xlas():
    def runs(config: ModelConfig, tokens: int, slots: int = 128, dtype: Any = jnp.bfloat16) -> bool:
        shape = (config.num_layers, 1, config.num_kv_heads, slots, config.head_dim)
        return runs_fused(config, tokens, KVCache.zeros(shape, dtype))

    config, _ = model("llama")  # two query heads a key/value head
    assert runs(config, 64) and not runs(config, 65)
    assert [runs(model_config(head_dim=h), 1) for h in (16, 24, 32, 48, 64, 128)] == [
        False, False, True, False, True, True
    ]  # fmt: skip
    assert not runs(config, 1, slots=100) and not runs(config, 1, dtype=jnp.float16)


def test_passes_of_listed_rows_are_xlas_and_the_kernels_go_on_from_them():
    """A prompt taken in by rows, then a step: by both, from caches that are then the same."""
    config, params = model("qwen3")
    rng = np.random.default_rng(0)
    prompt, ids = (rng.integers(0, config.vocab_size, (n, T)).astype(np.int32) for n in (2, ROWS))
    rows, ends = np.asarray([2, 0], np.int32), np.asarray([T, 0, T], np.int32)

    def both(implementation: str) -> tuple[KVCache, np.ndarray]:
        before = cache_of(config, np.zeros(ROWS, np.int32))
        cache = forward(config, implementation, params, prompt, before, np.zeros(2, np.int32), rows)[1]
        return cache, np.asarray(forward(config, implementation, params, ids, cache, ends)[0])

    (one, logits), (other, want) = both("interpret"), both("xla")
    np.testing.assert_array_equal(one.k, other.k)
    np.testing.assert_array_equal(one.v, other.v)
    for row in rows:
        # As far apart as the test above lets the two be together.
        np.testing.assert_allclose(logits[row], want[row], atol=0.1 * np.abs(want).max())
    assert calls("qwen3", np.zeros(1, np.int32)) == ALL - {"decode_attention"}  # the head is the kernels' still


def test_rows_from_a_number_on():
    """Python's own number names the first row as well as an array does."""
    first_row = 2
    config, params = model("qwen2")
    cache = cache_of(config, [17] * ROWS)
    ids, starts = jnp.asarray([[3, 4]], jnp.int32), jnp.asarray([17], jnp.int32)

    @jax.jit
    def go(params: Any, cache: KVCache) -> KVCache:
        return bind(config, params, "interpret")(ids, cache, starts, window=SLOTS, first_row=first_row).cache

    written = np.asarray(go(params, cache).k != cache.k).any(axis=(0, 2, 3, 4))
    np.testing.assert_array_equal(written, np.arange(ROWS) == first_row)


def test_one_program_whatever_the_tokens_and_starts():
    config, params = model("qwen3")
    jitted: Any = forward

    def go(seed: int, starts: list[int]) -> int:
        ids = np.full((ROWS, T), seed, np.int32)
        forward(config, "interpret", params, ids, cache_of(config, starts), np.asarray(starts, np.int32))
        return jitted._cache_size()

    assert len({go(1, [0, 0, 0]), go(2, [1, 64, 100]), go(3, [120, 2, 3])}) == 1


def test_layers_share_the_kernels_that_are_traced():
    """A layer's index is an operand: one kernel serves all layers, and matrices of equal shape share one, too."""
    config, params = model("llama")
    starts = np.zeros(1, np.int32)
    cache = cache_of(config, starts)
    text = forward.lower(config, "interpret", params, np.zeros((1, 1), np.int32), cache, starts).as_text()
    names = re.findall(r"func\.func private @(\w+)", text)
    assert sum(name.startswith("decode_attention") for name in names) == 1
    # Query, key and value, behind the embedding and behind a layer; output and down, of equal shape; the last down,
    # behind which no layer's norm is; gate and up; the head.
    assert sum(re.fullmatch(r"linear(_\d+)?", name) is not None for name in names) == 6
