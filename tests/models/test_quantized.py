"""Decoders with int8 matrices: what the same decoder gives with the matrices that they stand for."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.bench.shapes import SHAPES
from pard_jax.config import ModelConfig
from pard_jax.int8 import quantize
from pard_jax.models import KVCache, abstract_params, bind, init_params, make_mesh, param_bytes, quantized
from pard_jax.models.quantized import int8_product
from pard_jax.weights import load_params
from tests.helpers.models import full_forward, is_int8, model_config, quantized_params, random_params, stands_for

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "intermediate_size": 64}
CONFIGS = {
    "qwen2-tied": model_config("qwen2", **SHAPE, tie_word_embeddings=True),
    "llama": model_config("llama", **SHAPE, attention_bias=True, mlp_bias=True),
}


@functools.cache
def model(name: str) -> dict[str, Any]:
    return quantized_params(CONFIGS[name], random_params(CONFIGS[name], len(name)))


@pytest.mark.parametrize(
    ("height", "block", "dtype"),
    [(50, 1 << 20, jnp.float16), (50, 33 * 8, jnp.float16), (48, 33 * 16, jnp.bfloat16), (7, 1, jnp.float32)],
)
def test_products_in_one_piece_and_in_blocks(monkeypatch: pytest.MonkeyPatch, height: int, block: int, dtype: Any):
    """Blocks that do not divide the matrix overlap; sums that float16 cannot hold are scaled first."""
    monkeypatch.setattr(quantized, "_BLOCK", block)
    rng = np.random.default_rng(height)
    x = jnp.asarray(300 * rng.standard_normal((2, 3, 33)), dtype)
    matrix = jax.tree.map(jnp.asarray, quantize(rng.standard_normal((height, 33)).astype(np.float32)))
    got = jax.jit(lambda x, m: int8_product(x, m))(x, matrix)  # a function of its own, traced with this block
    assert got.dtype == jnp.float32
    wide, values = np.asarray(x).astype(np.float64), np.asarray(matrix.values, np.float64)
    scale = np.asarray(matrix.scale, np.float64)
    assert np.abs(wide @ values.T).max() > 65504  # the largest float16
    bound = np.abs(wide) @ np.abs(values).T * scale * 33 * 2.0**-23
    assert (np.abs(got - wide @ values.T * scale) <= bound).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decoder_is_the_one_of_what_its_matrices_stand_for(name: str):
    config, params = CONFIGS[name], model(name)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 20).tolist()
    got, want = full_forward(config, params, 24)(tokens), full_forward(config, stands_for(params), 24)(tokens)
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.abs(want).max() > 1
    # A tied head and the embedding are one table; an embedding that is no head is left as it is.
    assert is_int8(params["embed"]) is config.tie_word_embeddings
    matrices = {key for key, leaf in params["layers"].items() if is_int8(leaf)}
    assert matrices == {f"{key}_proj" for key in ("q", "k", "v", "o", "gate", "up", "down")}


@pytest.mark.parametrize("name", CONFIGS)
def test_eight_devices_give_what_one_does(name: str):
    config, params = CONFIGS[name], model(name)
    mesh = make_mesh(8)
    like = abstract_params(config, jnp.float32, mesh, quantization="int8")
    sharded = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), params, like)
    shape = (config.num_layers, 2, config.num_kv_heads, 16, config.head_dim)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 5)), jnp.int32)

    def run(params, cache):
        model = bind(config, params)
        out = model(tokens, cache, jnp.arange(2, dtype=jnp.int32), window=16)
        return model.logits(out.hidden)

    compiled = jax.jit(run).lower(sharded, KVCache.zeros(shape, jnp.float32, mesh)).compile()
    got = compiled(sharded, KVCache.zeros(shape, jnp.float32, mesh))
    want = jax.jit(run)(params, KVCache.zeros(shape, jnp.float32))
    np.testing.assert_allclose(got, want, atol=1e-5)
    values = sharded["layers"]["down_proj"].values
    assert {s.data.size for s in values.addressable_shards} == {values.size // 8}
    # Integers stay where they are.
    text = compiled.as_text() or ""
    assert "s8[" in text and not re.search(r"= s8\[.*(all-gather|all-to-all|collective-permute)", text)


def test_no_matrix_is_converted_as_a_whole_ahead_of_a_loop():
    """XLA would: nothing of it changes from step to step."""
    config = model_config("qwen3", vocab_size=4096, hidden_size=1024, head_dim=128, tie_word_embeddings=True)
    like = abstract_params(config, jnp.float32, quantization="int8")
    shape = (config.num_layers, 1, config.num_kv_heads, 16, config.head_dim)

    def loop(params, cache, tokens, steps):
        def body(i, carry):
            cache, tokens = carry
            decoder = bind(config, params)
            out = decoder(tokens, cache, i[None], window=16)
            return out.cache, decoder.best(out.hidden)

        return jax.lax.fori_loop(0, steps, body, (cache, tokens))

    cache = jax.eval_shape(lambda: KVCache.zeros(shape, jnp.float32))
    token, steps = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    text = jax.jit(loop).lower(like, cache, token, steps).compile().as_text() or ""
    assert "s8[4096,1024]" in text and "f32[4096,1024]" not in text
    assert "s8[2,48,1024]" in text and "f32[2,48,1024]" not in text


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_and_random_weights(name: str):
    config = CONFIGS[name]
    like = abstract_params(config, jnp.bfloat16, quantization="int8")
    params = init_params(config, dtype=jnp.bfloat16, quantization="int8", mesh=make_mesh(2))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), like)
    held = sum(x.nbytes for x in jax.tree.leaves(params))
    assert held == param_bytes(config, jnp.bfloat16, "int8")
    assert param_bytes(config, jnp.bfloat16) == 2 * config.num_parameters
    # A byte a weight, 4 a row, and what stays as it is.
    matrices = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_int8) if is_int8(leaf)]
    weights, channels = sum(m.values.size for m in matrices), sum(m.scale.size for m in matrices)
    assert held == weights + 4 * channels + 2 * (config.num_parameters - weights)
    up = params["layers"]["up_proj"]
    assert np.std(np.asarray(up.values, np.float32) * np.asarray(up.scale)[..., None]) == pytest.approx(
        config.hidden_size**-0.5, rel=0.05
    )


def test_logits_of_a_trained_model_hardly_change():
    """The demo target: an error of 1 to 2 % of the logits' spread, and nearly always the same choice."""
    directory = SHAPES["demo-target"]
    assert not isinstance(directory, dict)
    config = ModelConfig.from_pretrained(directory)
    common: dict[str, Any] = {"dtype": jnp.float32, "progress": False}
    plain = load_params(directory, config, **common)
    eight = load_params(directory, config, **common, quantization="int8")
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, 8).tolist()
    forwards = [full_forward(config, params, 64) for params in (plain, eight)]
    while len(tokens) < 64:
        tokens.append(int(forwards[0](tokens)[-1].argmax()))
    before, after = (forward(tokens)[7:] for forward in forwards)
    change = np.sqrt(np.square(after - before).mean() / before.var(axis=-1).mean())
    assert 1e-3 < change < 0.03
    assert (before.argmax(axis=-1) == after.argmax(axis=-1)).mean() > 0.9
