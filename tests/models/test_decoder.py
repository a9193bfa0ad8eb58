"""The decoder against transformers: every family and switch, and every way of feeding the same tokens."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pard_jax.config import ModelConfig
from pard_jax.models import Decoder, KVCache, abstract_params, bind, init_params
from pard_jax.models.attention import block_slots
from tests.helpers.models import LLAMA3_SCALING, hf_config, hf_model, model_config, params_of, random_params

T = 48  # tokens of the oracle's sequences
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-tied-one-kv-head": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-biases-kv-is-q": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4, "head_dim": 10}),
    "qwen3-odd-sizes": (
        "qwen3",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 27, "intermediate_size": 37,
         "vocab_size": 131, "rms_norm_eps": 1e-3, "rope_theta": None,
         "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    ),
    "qwen2-tied": ("qwen2", {"head_dim": None, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2-one-kv-head": (
        "qwen2",
        {"num_key_value_heads": 1, "head_dim": 6, "rope_theta": None,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "llama": ("llama", {"head_dim": None}),
    "llama-scaled": ("llama", {"rope_scaling": LLAMA3_SCALING, "tie_word_embeddings": True}),
    "llama-biases-scaled": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "rope_theta": None,
         "rope_parameters": LLAMA3_SCALING | {"rope_theta": 2e3, "low_freq_factor": 0.5}},
    ),
}  # fmt: skip


class Oracle(NamedTuple):
    config: ModelConfig
    params: dict[str, Any]
    tokens: np.ndarray  # [2, T]
    logits: np.ndarray  # [2, T, V]
    hidden_states: list[np.ndarray]  # embeddings, then [2, T, D] a layer, the last after the final norm


@functools.cache
def oracle(name: str) -> Oracle:
    family, overrides = MODELS[name]
    hf = hf_config(family, **overrides)
    config = ModelConfig.from_hf(hf)
    model = hf_model(hf, seed=len(name))
    tokens = np.random.default_rng(len(name)).integers(0, config.vocab_size, (2, T), dtype=np.int32)
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        out = model(torch.from_numpy(tokens).long(), output_hidden_states=True)
    return Oracle(config, params_of(model, config), tokens, out.logits.numpy(), [h.numpy() for h in out.hidden_states])


@functools.partial(jax.jit, static_argnums=0, static_argnames=("window", "capture"))
def forward(config, params, tokens, cache, starts, first_row=0, *, window, capture=()):
    model = bind(config, params)
    out = model(tokens, cache, starts, window=window, first_row=first_row, capture=capture)
    return model.logits(out.hidden), out


def cache_shape(config: ModelConfig, rows: int, slots: int) -> tuple[int, int, int, int, int]:
    return (config.num_layers, rows, config.num_kv_heads, slots, config.head_dim)


def garbage_cache(config: ModelConfig, rows: int, slots: int, seed: int = 0) -> KVCache:
    """A cache as a long-lived server's: full of somebody else's keys and values."""
    rng = np.random.default_rng(seed)
    k, v = (jnp.asarray(rng.normal(scale=1e4, size=cache_shape(config, rows, slots)), jnp.float32) for _ in range(2))
    return KVCache(k, v)


def starts_of(*starts: int):
    return jnp.asarray(starts, jnp.int32)


@functools.cache
def whole(name: str):
    """All tokens of an oracle in one pass, with the residual streams after layers 1 and 0."""
    o = oracle(name)
    cache = KVCache.zeros(cache_shape(o.config, 2, T), jnp.float32)
    return forward(o.config, o.params, jnp.asarray(o.tokens), cache, starts_of(0, 0), window=T, capture=(1, 0))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name):
    o, (logits, _) = oracle(name), whole(name)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, o.logits, atol=1e-4)
    # The oracle is worth comparing with: argmax varies and the scores are far apart.
    assert len(set(o.logits.argmax(-1).ravel().tolist())) > 20
    assert o.logits.std() > 0.5


@pytest.mark.parametrize("name", MODELS)
def test_features_equal_hidden_states(name):
    o, (_, out) = oracle(name), whole(name)
    np.testing.assert_allclose(out.features[1], o.hidden_states[1], atol=1e-4)
    np.testing.assert_allclose(out.hidden, o.hidden_states[2], atol=1e-4)
    # transformers' last hidden state has the final norm; the captured residual stream does not.
    last = np.asarray(out.features[0])
    normed = last / np.sqrt((last**2).mean(-1, keepdims=True) + o.config.rms_norm_eps) * np.asarray(o.params["norm"])
    np.testing.assert_allclose(normed, o.hidden_states[2], atol=1e-4)


def test_rope_scaling_matters_at_these_positions():
    o = oracle("llama-biases-scaled")
    family, overrides = MODELS["llama-biases-scaled"]
    config = model_config(family, **overrides | {"rope_parameters": {"rope_type": "default", "rope_theta": 2e3}})
    cache = KVCache.zeros(cache_shape(config, 2, T), jnp.float32)
    logits, out = forward(config, o.params, jnp.asarray(o.tokens), cache, starts_of(0, 0), window=T)
    assert np.abs(np.asarray(logits) - o.logits).max() > 0.1
    assert out.features is None


@pytest.mark.parametrize(
    ("name", "width"),
    [("qwen3", 1), ("qwen3", 4), ("qwen3", 6), ("qwen3", 13), ("qwen2-one-kv-head", 7), ("llama-biases-scaled", 5)],
)
def test_any_split_gives_the_same_logits(name, width):
    """Widths of a plain step, of K+1 and 2K (K = 3), and of prefill chunks that do not divide T."""
    o = oracle(name)
    cache = garbage_cache(o.config, 2, 96)
    padded = np.pad(o.tokens, ((0, 0), (0, width)), constant_values=5)
    pieces = []
    for start in range(0, T, width):
        chunk = jnp.asarray(padded[:, start : start + width])
        logits, out = forward(o.config, o.params, chunk, cache, starts_of(start, start), window=64)
        cache = out.cache
        pieces.append(np.asarray(logits))
    np.testing.assert_allclose(np.concatenate(pieces, axis=1)[:, :T], o.logits, atol=1e-4)


def test_rows_at_different_starts():
    """Rows prefilled one by one through ``first_row`` and then stepped together, each at its own position."""
    o = oracle("qwen3")
    cache = garbage_cache(o.config, 4, 64)
    untouched = np.asarray(cache.k[:, 2])
    tokens = np.stack([o.tokens[0], o.tokens[1], o.tokens[0], o.tokens[1]])
    lengths = {0: 7, 1: 32, 3: 16}  # row 2 is never prefilled
    for row, length in lengths.items():
        for start in range(0, length, 8):
            chunk = jnp.asarray(tokens[row : row + 1, start : start + 8])
            _, out = forward(o.config, o.params, chunk, cache, starts_of(start), jnp.int32(row), window=48)
            cache = out.cache
    np.testing.assert_array_equal(cache.k[:, 2], untouched)

    starts = [lengths.get(row, 0) for row in range(4)]
    step = np.stack([tokens[row, start : start + 5] for row, start in enumerate(starts)])
    logits, out = forward(o.config, o.params, jnp.asarray(step), cache, starts_of(*starts), window=48)
    expected = np.stack([o.logits[row % 2, start : start + 5] for row, start in enumerate(starts)])
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    # Rows 1 and 2 alone, through first_row: the same logits and the same cache.
    part, part_out = forward(
        o.config, o.params, jnp.asarray(step[1:3]), cache, starts_of(*starts[1:3]), jnp.int32(1), window=48
    )
    np.testing.assert_allclose(part, expected[1:3], atol=1e-4)
    np.testing.assert_allclose(part_out.cache.k[:, 1:3], out.cache.k[:, 1:3], atol=1e-5)
    np.testing.assert_array_equal(part_out.cache.k[:, 0::3], cache.k[:, 0::3])


@pytest.mark.parametrize("rows", [[1], [2, 0]])
def test_long_windows_are_read_in_blocks_and_give_what_whole_sequences_do(rows):
    """Chunks of prefill, one row or several by their ids, against a pass without a cache."""
    config = model_config("qwen3", max_position_embeddings=2048)
    params = random_params(config, 0)
    length, width, window = 1190, 170, 1300  # three blocks, of which the last overlaps the second
    assert block_slots(width, window) == 512
    tokens = np.random.default_rng(0).integers(0, 128, (len(rows), length), np.int32)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    mask = jnp.broadcast_to(positions[:, None, :] <= positions[:, :, None], (len(rows), length, length))
    expected = bind(config, params).encode(params["embed"][tokens], positions, mask)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params, cache, chunk, starts):
        first_row = jnp.int32(rows[0]) if len(rows) == 1 else jnp.asarray(rows, jnp.int32)
        out = bind(config, params)(chunk, cache, starts, window=window, first_row=first_row)
        return out.cache, out.hidden

    cache = KVCache.zeros((config.num_layers, 3, config.num_kv_heads, window, config.head_dim), jnp.float32)
    for start in range(0, length, width):
        chunk = tokens[:, start : start + width]
        cache, hidden = run(params, cache, chunk, np.full(len(rows), start, np.int32))
        np.testing.assert_allclose(hidden, expected[:, start : start + width], atol=5e-5)


def test_rejected_tokens_leave_no_trace():
    o = oracle("llama-biases-scaled")
    cache = garbage_cache(o.config, 2, 96)
    tokens, wrong = o.tokens, (o.tokens + 1) % o.config.vocab_size
    # Each pass takes the right tokens in from where the wrong ones of the pass before began.
    for start, kept in ((0, 5), (5, 2), (7, 1), (8, 5), (13, 5)):
        step = np.concatenate([tokens[:, start : start + kept], wrong[:, start + kept : start + 5]], axis=1)
        logits, out = forward(o.config, o.params, jnp.asarray(step), cache, starts_of(start, start), window=64)
        cache = out.cache
        np.testing.assert_allclose(logits[:, :kept], o.logits[:, start : start + kept], atol=1e-4)


def test_the_last_slots_of_the_cache():
    """A step that fills row 0 to the very end; its neighbour keeps all its keys."""
    o = oracle("qwen3")
    slots = 40
    cache = garbage_cache(o.config, 2, slots)
    _, out = forward(o.config, o.params, jnp.asarray(o.tokens[:, : slots - 4]), cache, starts_of(0, 0), window=slots)
    last = jnp.asarray(o.tokens[:1, slots - 4 : slots])
    logits, filled = forward(o.config, o.params, last, out.cache, starts_of(slots - 4), jnp.int32(0), window=slots)
    np.testing.assert_allclose(logits, o.logits[:1, slots - 4 : slots], atol=1e-4)
    np.testing.assert_array_equal(filled.cache.k[:, 1], out.cache.k[:, 1])
    np.testing.assert_array_equal(filled.cache.v[:, 0, :, : slots - 4], out.cache.v[:, 0, :, : slots - 4])


def test_bfloat16_stays_near_float32():
    o = oracle("llama-biases-scaled")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), o.params)
    cache = KVCache.zeros(cache_shape(o.config, 2, T), jnp.bfloat16)
    logits, out = forward(o.config, params, jnp.asarray(o.tokens), cache, starts_of(0, 0), window=T, capture=(0,))
    assert logits.dtype == jnp.float32
    assert out.cache.k.dtype == out.hidden.dtype == out.features.dtype == jnp.bfloat16
    error = np.abs(np.asarray(logits) - o.logits)
    assert 1e-4 < error.mean() < 0.05 * o.logits.std()


def test_the_donated_cache_is_written_in_place():
    config = model_config("qwen3")
    params = random_params(config, 0)
    cache = KVCache.zeros(cache_shape(config, 4, 4096), jnp.float32)
    size = cache.k.nbytes + cache.v.nbytes

    def step(params, tokens, cache, starts):
        out = bind(config, params)(tokens, cache, starts, window=64)
        return out.hidden, out.cache

    args = (params, jnp.zeros((4, 3), jnp.int32), cache, starts_of(0, 1, 2, 3))
    compiled = jax.jit(step, donate_argnums=2).lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 8  # no copy of even one of the two
    at = cache.k.unsafe_buffer_pointer(), cache.v.unsafe_buffer_pointer()
    _, new = compiled(*args)
    assert cache.k.is_deleted() and cache.v.is_deleted()
    assert (new.k.unsafe_buffer_pointer(), new.v.unsafe_buffer_pointer()) == at


@pytest.mark.parametrize("name", MODELS)
def test_hf_weights_fit_the_tree(name):
    o = oracle(name)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(o.config, jnp.float32))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), o.params) == shapes
    assert sum(x.size for x in jax.tree.leaves(o.params)) == o.config.num_parameters


def test_module_and_bound_parameters_are_the_same_model():
    config = model_config("llama", mlp_bias=True, num_hidden_layers=1)
    model = Decoder(config, rngs=nnx.Rngs(3))
    params = nnx.to_pure_dict(nnx.state(model))
    tokens = jnp.arange(6, dtype=jnp.int32)[None, :]
    cache = KVCache.zeros(cache_shape(config, 1, 8), jnp.float32)
    direct = nnx.jit(lambda m: m.logits(m(tokens, cache, starts_of(0), window=8).hidden))(model)
    bound, _ = forward(config, params, tokens, cache, starts_of(0), window=8)
    np.testing.assert_allclose(direct, bound, atol=1e-5)


def test_init_params_fit_the_tree_depend_on_the_seed_and_keep_their_scale():
    config = model_config("qwen3", attention_bias=True)
    a, b, again = (init_params(config, seed=seed) for seed in (0, 1, 0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), a) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_params(config, jnp.float32)
    )
    jax.tree.map(np.testing.assert_array_equal, a, again)
    assert np.abs(np.asarray(a["embed"] - b["embed"])).max() > 0.1
    np.testing.assert_array_equal(a["layers"]["q_norm"], 1.0)
    for name, fan_in in (("q_proj", 32), ("o_proj", 64), ("down_proj", 48)):
        assert float(jnp.std(a["layers"][name])) == pytest.approx(fan_in**-0.5, rel=0.1)
