"""Tensor parallelism on virtual devices: the same numbers, each device with its share."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pard_jax.models import TENSOR_AXIS, KVCache, abstract_params, bind, init_params, make_mesh
from pard_jax.models.sharding import PARAM_SPECS, replicated
from tests.helpers.models import hf_config, hf_model, model_config, params_of, random_params

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48}
CONFIGS = {
    "qwen3-biases": ("qwen3", SHAPE | {"attention_bias": True}),
    "qwen2-tied": ("qwen2", SHAPE | {"tie_word_embeddings": True}),
    "llama-biases": ("llama", SHAPE | {"attention_bias": True, "mlp_bias": True}),
}
SLOTS, ROWS = 32, 3


def place(params, abstract):
    return jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), params, abstract)


@pytest.mark.parametrize(
    ("name", "devices"), [("qwen3-biases", 2), ("qwen3-biases", 4), ("qwen2-tied", 4), ("llama-biases", 2)]
)
def test_sharded_equals_single_device(name, devices):
    family, overrides = CONFIGS[name]
    config = model_config(family, **overrides)
    params = params_of(hf_model(hf_config(family, **overrides), seed=1), config)
    mesh = make_mesh(devices)
    abstract = abstract_params(config, jnp.float32, mesh)
    sharded = place(params, abstract)
    shape = (config.num_layers, ROWS, config.num_kv_heads, SLOTS, config.head_dim)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, 10)), jnp.int32)

    @jax.jit
    def run(params, cache):
        model = bind(config, params)
        out = model(tokens, cache, jnp.arange(ROWS, dtype=jnp.int32), window=SLOTS)
        return model.logits(out.hidden), out.cache

    expected, expected_cache = run(params, KVCache.zeros(shape, jnp.float32))
    cache = KVCache.zeros(shape, jnp.float32, mesh)
    logits, new_cache = run(sharded, cache)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    np.testing.assert_allclose(new_cache.v, expected_cache.v, atol=1e-5)
    for array in (cache.k, cache.v, new_cache.k, new_cache.v):
        assert len(array.addressable_shards) == devices
        assert all(shard.data.nbytes * devices == array.nbytes for shard in array.addressable_shards)


@pytest.mark.parametrize("devices", [2, 4])
def test_each_device_holds_its_share(devices):
    config = model_config("llama", **SHAPE, attention_bias=True, mlp_bias=True)
    mesh = make_mesh(devices)
    params = init_params(config, mesh=mesh)
    single = init_params(config)
    jax.tree.map(np.testing.assert_array_equal, params, single)
    whole = {"norm", "attn_norm", "mlp_norm", "o_bias", "down_bias"}
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        share = 1 if path[-1].key in whole else devices
        assert [s.data.size for s in array.addressable_shards] == [array.size // share] * devices, path


def test_every_parameter_has_a_spec_of_its_rank():
    for family in ("qwen3", "qwen2", "llama"):
        config = model_config(family, attention_bias=True, mlp_bias=True)
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(config, jnp.bfloat16, make_mesh(2))):
            assert leaf.sharding.spec == PARAM_SPECS[path[-1].key]
            assert len(leaf.sharding.spec) in (0, len(leaf.shape)), path
            assert leaf.dtype == jnp.bfloat16


def test_two_all_reduces_a_layer_and_no_gather_of_weights():
    config = model_config("qwen3", **SHAPE)
    mesh = make_mesh(4)
    cache = KVCache.zeros((config.num_layers, 2, config.num_kv_heads, SLOTS, config.head_dim), jnp.float32, mesh)

    def hidden(params, tokens, cache):
        out = bind(config, params)(tokens, cache, jnp.zeros((2,), jnp.int32), window=SLOTS)
        return out.hidden, out.cache

    params = place(random_params(config, 0), abstract_params(config, jnp.float32, mesh))
    text = jax.jit(hidden).lower(params, jnp.zeros((2, 3), jnp.int32), cache).compile().as_text() or ""
    # The layers' body stands once, in the scan: two there, and one for the embedding, whose rows are split.
    assert len(re.findall(r"= \S+ all-reduce(?:-start)?\(", text)) == 3
    assert "all-gather" not in text and "all-to-all" not in text


def test_make_mesh():
    mesh = make_mesh(4)
    assert mesh.axis_names == (TENSOR_AXIS,) and mesh.devices.tolist() == jax.devices()[:4]
    assert make_mesh().size == 1
    assert make_mesh(2, jax.devices()[6:]).devices.tolist() == jax.devices()[6:]
    assert replicated(mesh) == NamedSharding(mesh, P())
    for size in (0, 9):
        with pytest.raises(ValueError, match=rf"tensor_parallel_size={size}, but there are 8 cpu device.*from 1 to 8"):
            make_mesh(size)
