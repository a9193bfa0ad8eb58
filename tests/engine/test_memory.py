"""What is planned fits, what does not fit is told what would, and no write can reach past a row's end."""

from __future__ import annotations

import itertools
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from pard_jax.config import EngineConfig, ModelConfig, extra_slots
from pard_jax.engine.memory import MemoryPlan, NotEnoughMemoryError, Speculation, device_memory, plan_memory
from tests.helpers.models import model_config, random_params

MIB = 1 << 20
TARGET = model_config(
    "qwen3", hidden_size=256, num_hidden_layers=4, intermediate_size=512, max_position_embeddings=4096, vocab_size=1000
)
DRAFT = model_config("llama", num_hidden_layers=2, hidden_size=64, intermediate_size=128, vocab_size=1000)
METHODS = {"ngram": ("ngram", False), "draft_model": ("draft_model", False), "pard": ("draft_model", True)}


def speculation_of(method: str, k: int, draft: ModelConfig | None = DRAFT, **keys: Any) -> Speculation:
    if method == "none":
        return Speculation()
    name, parallel = METHODS[method]
    draft = None if name == "ngram" else draft
    return Speculation(num_speculative_tokens=k, extra_slots=extra_slots(name, parallel, k), draft=draft, **keys)


def plan(
    memory_bytes: int | None, speculation: Speculation | None = None, *, target: ModelConfig = TARGET,
    chunk_size: int = 64, dtype: Any = jnp.float32, **engine: Any,
) -> MemoryPlan:  # fmt: skip
    return plan_memory(
        target,
        EngineConfig(**engine),
        speculation or speculation_of("pard", 12),
        dtype=dtype,
        chunk_size=chunk_size,
        memory_bytes=memory_bytes,
    )


# -- what fits ----------------------------------------------------------------------------------------------------


def test_the_models_own_limit_where_it_fits():
    got = plan(1 << 34)
    assert got.max_model_len == 4096
    assert got.budget_bytes == int((1 << 34) * 0.9) >= got.total_bytes


def test_the_default_length_shrinks_to_what_fits():
    """Neither more than fits, nor less: one token more would not."""
    memory = 60 * MIB
    got = plan(memory)
    assert 128 <= got.max_model_len < 4096
    assert got.total_bytes <= memory * 0.9
    with pytest.raises(NotEnoughMemoryError):
        plan(memory, max_model_len=got.max_model_len + 1)


@pytest.mark.parametrize("wanted", [None, 4096, 3000])
@pytest.mark.parametrize("memory", [m * MIB for m in (14, 16, 20, 30, 48, 64, 100)])
@pytest.mark.parametrize("method", ["none", "pard"])
def test_what_a_refusal_names_really_fits(memory, wanted, method):
    """The advice is taken at its word, and is the most that fits."""
    engine: dict[str, Any] = {"max_model_len": wanted, "max_num_seqs": 8}
    try:
        got = plan(memory, speculation_of(method, 12), **engine)
        assert got.total_bytes <= memory * 0.9 and (wanted is None or got.max_model_len == wanted)
        return
    except NotEnoughMemoryError as e:
        message = str(e)
    assert f"max_model_len={wanted or 4096} with max_num_seqs=8 needs" in message and "GiB" in message
    advice = re.findall(r"(max_model_len|max_num_seqs)=(\d+)", message.partition("What fits:")[2])
    if not advice:
        assert "Not even the shortest sequence fits: use a smaller model or dtype" in message
        advice = [("max_model_len", "1")]
    for name, value in advice:
        for more in (0, 1):
            changed: dict[str, Any] = engine | {name: int(value) + more}
            if name == "max_num_seqs":
                changed["max_model_len"] = wanted or 4096
            if more:
                with pytest.raises(NotEnoughMemoryError):
                    plan(memory, speculation_of(method, 12), **changed)
            elif int(value) > 1 or name == "max_num_seqs":
                plan(memory, speculation_of(method, 12), **changed)


def test_refusals_of_both_kinds_were_tried():
    """Else the test above says nothing."""
    with pytest.raises(NotEnoughMemoryError, match=r"What fits: max_model_len=\d+ or max_num_seqs=\d+\."):
        plan(48 * MIB, max_model_len=4096)
    with pytest.raises(NotEnoughMemoryError, match="more devices"):
        plan(4 * MIB, max_model_len=4096)


def test_beyond_the_models_limit_is_refused():
    with pytest.raises(ValueError, match="max_model_len=4097 is larger than the model's max_position_embeddings=4096"):
        plan(1 << 40, max_model_len=4097)


def test_more_devices_hold_more():
    one, two = plan(1 << 40), plan(1 << 40, tensor_parallel_size=2)
    assert two.weight_bytes == one.weight_bytes // 2
    assert two.total_bytes < 0.6 * one.total_bytes
    memory = int(one.total_bytes / 0.9 * 0.7)
    assert plan(memory).max_model_len < 4096
    assert plan(memory, tensor_parallel_size=2).max_model_len == 4096


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights_and_caches_are_counted_to_the_byte(dtype):
    size = jnp.dtype(dtype).itemsize
    count = sum(x.size for p in (TARGET, DRAFT) for x in _leaves(random_params(p, 0)))
    got = plan(1 << 40, dtype=dtype, max_model_len=1000, max_num_seqs=3)
    assert got.weight_bytes == count * size
    slots = got.num_slots
    keys = sum(c.num_layers * 3 * c.num_kv_heads * slots * c.head_dim for c in (TARGET, DRAFT))
    assert got.cache_bytes == 2 * keys * size + 3 * slots * 4  # the history of ids, too


def test_a_draft_that_is_the_target_is_held_once():
    alone = plan(1 << 40, Speculation())
    shared = plan(1 << 40, speculation_of("pard", 12, TARGET, shares_weights=True))
    twice = plan(1 << 40, speculation_of("pard", 12, TARGET))
    assert shared.weight_bytes == alone.weight_bytes == twice.weight_bytes // 2
    assert shared.cache_bytes == twice.cache_bytes > 1.9 * alone.cache_bytes


def test_sampled_drafts_need_room_for_their_distributions():
    greedy, sampled = (plan(1 << 40, speculation_of("pard", 12, sampled=s)) for s in (False, True))
    assert sampled.workspace_bytes > greedy.workspace_bytes


# -- what a device has --------------------------------------------------------------------------------------------


def device_of(platform: str, stats: Any) -> Any:
    device = mock.Mock(spec=jax.Device, platform=platform)
    device.memory_stats.configure_mock(**{"side_effect" if isinstance(stats, Exception) else "return_value": stats})
    return device


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 3}, NotImplementedError("no"), RuntimeError("no")])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_devices_that_do_not_tell(stats, platform):
    """Some TPU runtimes return None or raise: nothing fails, and a length must then be asked for."""
    got = device_memory(device_of(platform, stats))
    if platform == "cpu":
        assert got is not None and 0 < got <= psutil.virtual_memory().total
    else:
        assert got is None


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_allocators_limit_counts(platform):
    assert device_memory(device_of(platform, {"bytes_limit": 123, "bytes_in_use": 100})) == 123


def test_without_a_known_memory_a_length_must_be_asked_for():
    with pytest.raises(ValueError, match=r"does not tell how much memory it has.*pass max_model_len"):
        plan(None)
    got = plan(None, max_model_len=4096)
    known = plan(1 << 40, max_model_len=4096)
    assert got.budget_bytes is None
    assert (got.num_slots, got.windows, got.total_bytes) == (known.num_slots, known.windows, known.total_bytes)


# -- slots and windows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["none", *METHODS])
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64, 100, 256, 1000])
def test_every_reach_lies_within_a_rows_slots(method, chunk_size):
    """The longest sequence, what a step adds to it, and the last chunk of the longest prompt."""
    rng = np.random.default_rng(chunk_size)
    lengths = sorted({2, 3, 127, 128, 129, 1000, 4095, 4096, *rng.integers(2, 4097, 4).tolist()})
    for k, length in itertools.product((1, 2, 12, 128), lengths):
        speculation = speculation_of(method, k)
        got = plan(1 << 42, speculation, chunk_size=chunk_size, max_model_len=length)
        assert got.max_model_len == length
        # The target writes K+1 slots from length - 1 on; PARD 2K from at most length - 1, a sequential draft up to K+1.
        width = {"none": 1, "ngram": k + 1, "draft_model": k + 2, "pard": 2 * k}[method]
        assert got.num_slots >= length - 1 + width
        assert got.num_slots >= length + speculation.num_speculative_tokens + speculation.extra_slots
        last_chunk = (length - 2) // chunk_size * chunk_size  # where the longest prompt's last chunk may begin
        assert got.num_slots >= last_chunk + chunk_size
        assert got.num_slots % 128 == 0


@pytest.mark.parametrize("smallest", [1, 100, 256, 4096, 10_000])
@pytest.mark.parametrize("length", [2, 100, 1000, 4096])
def test_windows_ascend_to_the_whole_row(smallest, length):
    got = plan(1 << 42, smallest_window=smallest, max_model_len=length)
    windows = got.windows
    assert windows[-1] == got.num_slots and list(windows) == sorted(set(windows))
    # Each but the last is twice the one before, so that attention reads less than twice what it needs.
    assert all(b == 2 * a for a, b in itertools.pairwise(windows[:-1]))
    for slots in {1, smallest, length, length + 1, got.num_slots}:
        if slots <= got.num_slots:
            assert got.window(slots) == min(w for w in windows if w >= slots)


def _leaves(tree: Any) -> list[Any]:
    return [leaf for value in tree.values() for leaf in (_leaves(value) if isinstance(value, dict) else [value])]
