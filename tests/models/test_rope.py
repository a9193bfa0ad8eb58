"""Rotary embedding against transformers' own functions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoConfig

from pard_jax.config import ModelConfig, RopeConfig
from pard_jax.models.rope import apply_rope, inverse_frequencies, rope_tables
from tests.helpers.models import hf_config

torch = pytest.importorskip("torch")  # transformers' functions are torch's

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb  # noqa: E402

SCALINGS = [
    pytest.param(5e5, 64, (32.0, 1.0, 4.0, 8192), id="llama-3.2-1b"),
    pytest.param(5e5, 128, (8.0, 1.0, 4.0, 8192), id="llama-3.1-8b"),
    pytest.param(1e4, 16, (8.0, 1.0, 4.0, 64), id="tiny"),
    pytest.param(1e4, 32, (2.5, 0.5, 8.0, 100), id="wide-blend"),
]


def scaled_config(theta: float, head_dim: int, scaling: tuple[float, float, float, int]) -> dict:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rope = {"rope_type": "llama3", **dict(zip(names, scaling, strict=True))}
    return hf_config("llama", rope_theta=theta, head_dim=head_dim, rope_scaling=rope)


def oracle(config: dict) -> Any:
    return AutoConfig.for_model("llama", **{k: v for k, v in config.items() if k != "model_type"})


@pytest.mark.parametrize(("theta", "head_dim", "scaling"), SCALINGS)
def test_llama3_frequencies_equal_transformers(theta, head_dim, scaling):
    config = scaled_config(theta, head_dim, scaling)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](oracle(config), device="cpu")
    rope = ModelConfig.from_hf(config).rope
    np.testing.assert_allclose(inverse_frequencies(rope, head_dim), expected.numpy(), rtol=2e-6)
    assert attention_factor == 1.0
    # All three bands occur, or the comparison would say little.
    ratio = inverse_frequencies(RopeConfig(theta), head_dim) / inverse_frequencies(rope, head_dim)
    factor = scaling[0]
    kept, divided = np.isclose(ratio, 1, rtol=1e-5), np.isclose(ratio, factor, rtol=1e-5)
    assert kept.any() and divided.any() and (~kept & ~divided).any()


@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 16), (1e6, 128), (5e6, 128), (1e4, 10)])
def test_default_frequencies_equal_transformers(theta, head_dim):
    expected = LlamaRotaryEmbedding(oracle(hf_config("llama", rope_theta=theta, head_dim=head_dim))).inv_freq
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(theta), head_dim), expected.numpy(), rtol=2e-6)


@pytest.mark.parametrize(("theta", "head_dim", "scaling"), SCALINGS[1:3])
def test_rotation_equals_transformers(theta, head_dim, scaling):
    config = scaled_config(theta, head_dim, scaling)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, head_dim), dtype=np.float32)
    positions = np.asarray([[0, 1, 2, 3, 4], [57, 58, 63, 64, 500]], np.int32)
    cos, sin = LlamaRotaryEmbedding(oracle(config))(torch.zeros(2, 5, 1), torch.from_numpy(positions))
    q = torch.from_numpy(x).transpose(1, 2)
    expected = apply_rotary_pos_emb(q, q, cos, sin)[0].transpose(1, 2)
    tables = rope_tables(ModelConfig.from_hf(config).rope, head_dim, jnp.asarray(positions))
    np.testing.assert_allclose(apply_rope(jnp.asarray(x), tables), expected.numpy(), atol=1e-4)


def test_angles_stay_float32_for_bfloat16_heads():
    """bfloat16 has no 257: rotated by the angle of position 256, the keys of both positions would be equal."""
    positions = jnp.asarray([[256, 257, 4097]], jnp.int32)
    tables = rope_tables(RopeConfig(1e4), 8, positions)
    assert all(table.dtype == jnp.float32 for table in tables)
    x = np.random.default_rng(1).standard_normal((1, 1, 1, 8)).repeat(3, axis=1)
    exact = apply_rope(jnp.asarray(x, jnp.float32), tables)
    rounded = apply_rope(jnp.asarray(x, jnp.bfloat16), tables)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=0.03)
    assert np.abs(np.asarray(exact[0, 0] - exact[0, 1])).max() > 0.1


def test_scores_depend_on_the_distance_alone():
    rope = ModelConfig.from_hf(scaled_config(1e4, 16, (8.0, 1.0, 4.0, 64))).rope
    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(at_q: int, at_k: int) -> float:
        at = [rope_tables(rope, 16, jnp.asarray([[p]], jnp.int32)) for p in (at_q, at_k)]
        return float(jnp.sum(apply_rope(q, at[0]) * apply_rope(k, at[1])))

    assert score(9, 2) == pytest.approx(score(109, 102), abs=1e-4)
    assert score(9, 2) != pytest.approx(score(9, 3), abs=1e-2)
