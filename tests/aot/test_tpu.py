"""The step compiled for a real TPU by libtpu, on a machine that has none. Byte counts are the compiler's."""

from __future__ import annotations

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pard_jax.config import ModelConfig
from pard_jax.decoding.drafters import PardDrafter
from pard_jax.decoding.state import init_state
from pard_jax.decoding.step import Programs
from pard_jax.models import abstract_params, param_bytes

pytestmark = [
    pytest.mark.aot_tpu,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
    pytest.mark.timeout(600),
]

MIB = 1 << 20
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TARGET = ModelConfig.from_hf(
    QWEN3 | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728}
)
DRAFT = ModelConfig.from_hf(
    QWEN3 | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072}
)
K = 12


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_WORKER_ID", "0")
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1))
    return Mesh(np.asarray(topology.devices), ("tensor",))


@functools.cache
def compiled_step(mesh: Mesh, num_rows: int, max_model_len: int, quantization: str | None = None):
    """The whole PARD step, Qwen3-4B with PARD-Qwen3-0.6B in bfloat16, and the bytes of its caches."""
    drafter = PardDrafter(
        num_speculative_tokens=K,
        config=DRAFT,
        target_vocab_size=TARGET.vocab_size,
        max_model_len=max_model_len,
        mask_token_id=151670,
    )
    num_slots = -(-(max_model_len + 2 * K) // 128) * 128
    everywhere = NamedSharding(mesh, P())

    def place(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)

    state = jax.eval_shape(lambda: init_state(TARGET, drafter, num_rows, num_slots, jnp.bfloat16))
    params = {
        name: abstract_params(config, jnp.bfloat16, quantization=quantization)
        for name, config in (("target", TARGET), ("draft", DRAFT))
    }
    programs = Programs(TARGET, drafter, chunk_size=256, max_steps=8)
    arguments = (params, state, jax.ShapeDtypeStruct((num_rows,), bool), jax.ShapeDtypeStruct((), jnp.int32))
    lowered = programs.decode.lower(*jax.tree.map(place, arguments), window=num_slots)
    caches = [state.cache, state.draft.cache]
    return lowered.compile(), sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches))


def test_pard_step_fits_and_copies_no_cache(mesh: Mesh) -> None:
    compiled, cache_bytes = compiled_step(mesh, 1, 4096)
    memory = compiled.memory_analysis()
    print(
        f"\nv5e:1x1, Qwen3-4B + 0.6B, bf16, K=12, 4k: arguments {memory.argument_size_in_bytes / MIB:.0f} MiB, "
        f"temporaries {memory.temp_size_in_bytes / MIB:.1f} MiB, alias {memory.alias_size_in_bytes / MIB:.0f} MiB, "
        f"caches {cache_bytes / MIB:.0f} MiB, peak {memory.peak_memory_in_bytes / MIB:.0f} MiB"
    )
    assert memory.temp_size_in_bytes < 64 * MIB
    # The caches and the small arrays of the state are given back in place.
    assert cache_bytes <= memory.alias_size_in_bytes < cache_bytes + MIB
    assert memory.peak_memory_in_bytes < 15.75 * 1024 * MIB


def test_int8_weights_are_read_as_they_are(mesh: Mesh) -> None:
    """Half the bytes, and no matrix in bfloat16 beside them: it is converted within the product."""
    eight = compiled_step(mesh, 1, 4096, "int8")[0].memory_analysis()
    plain = compiled_step(mesh, 1, 4096)[0].memory_analysis()
    weights = sum(param_bytes(config, jnp.bfloat16, "int8") for config in (TARGET, DRAFT))
    assert weights < 0.51 * sum(param_bytes(config, jnp.bfloat16) for config in (TARGET, DRAFT))
    assert eight.argument_size_in_bytes < plain.argument_size_in_bytes - 0.98 * weights
    assert eight.temp_size_in_bytes < 64 * MIB


def test_no_sort_over_the_vocabulary(mesh: Mesh) -> None:
    compiled, _ = compiled_step(mesh, 1, 4096)
    assert " sort(" not in compiled.as_text()
