"""What a configuration needs of a device's memory, decided before anything is compiled or loaded."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import psutil

from pard_jax.config import EngineConfig, ModelConfig
from pard_jax.models import param_bytes
from pard_jax.models.attention import block_slots

_GIB = 1 << 30
# Slots are a multiple of this: the widest tile of a TPU's registers, so that no cache is padded on the way.
_SLOT_MULTIPLE = 128
# The most rows of one wide prefill pass: by then it is bound by arithmetic.
_MAX_PREFILL_ROWS = 64


class NotEnoughMemoryError(ValueError):
    """A configuration does not fit the device."""


@dataclasses.dataclass(frozen=True)
class Speculation:
    """What memory planning must know of the speculative method."""

    num_speculative_tokens: int = 0  # K
    extra_slots: int = 0  # of the slot table (config/speculative.py)
    draft: ModelConfig | None = None
    draft_quantization: str | None = None
    shares_weights: bool = False  # the draft is the target itself, loaded once
    sampled: bool = False


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The sizes that everything static follows from, and the bytes they cost on one device."""

    max_model_len: int
    num_slots: int  # S of a row: the longest sequence, rounded up to whole chunks, and the speculative slots behind it
    windows: tuple[int, ...]  # the attention windows that steps are compiled for, ascending; the last is num_slots
    weight_bytes: int
    cache_bytes: int
    workspace_bytes: int
    budget_bytes: int | None  # None: the device does not tell what it has
    prefill_rows: int = 1  # rows of a wide prefill pass; 1: there is none

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes

    def window(self, slots: int) -> int:
        """The smallest compiled window of at least ``slots``."""
        return next(w for w in self.windows if w >= slots)


def device_memory(device: jax.Device) -> int | None:  # pyright: ignore[reportInvalidTypeForm]
    """Bytes that may be allocated on ``device``: its allocator's limit, or the host's free memory on a CPU.

    None where the device does not tell.
    """
    # Some TPU runtimes return None or raise; a CPU has no statistics.
    try:
        stats = device.memory_stats() or {}
    except Exception:
        stats = {}
    if limit := stats.get("bytes_limit"):
        return int(limit)
    return int(psutil.virtual_memory().available) if device.platform == "cpu" else None


def cache_bytes(config: ModelConfig, num_rows: int, num_slots: int, dtype: jnp.dtype) -> int:
    """Bytes of one model's keys and values, over all devices."""
    return 2 * config.num_layers * num_rows * config.num_kv_heads * num_slots * config.head_dim * dtype.itemsize


def plan_memory(
    target: ModelConfig,
    engine: EngineConfig,
    speculation: Speculation,
    *,
    dtype,
    chunk_size: int,
    memory_bytes: int | None,
) -> MemoryPlan:
    """Find out whether the configuration fits and, where no length was asked for, the longest one that does.

    Args:
        memory_bytes: of one device; None where it is not known: a length must be asked for, and is taken to fit.

    Raises:
        NotEnoughMemoryError: it does not fit; the message says what would.
        ValueError: ``max_model_len`` beyond the model's own limit, or missing where the memory is not known.
    """
    limit = target.max_position_embeddings
    if engine.max_model_len is not None and engine.max_model_len > limit:
        raise ValueError(
            f"max_model_len={engine.max_model_len} is larger than the model's max_position_embeddings={limit}; "
            f"choose at most {limit}"
        )
    dtype = jnp.dtype(dtype)
    if memory_bytes is None:
        if engine.max_model_len is None:
            raise ValueError(
                "the device does not tell how much memory it has, so the longest sequence that fits is not known; pass "
                "max_model_len (and max_num_seqs)"
            )
        return _plan(
            target, engine, speculation, engine.max_model_len, engine.max_num_seqs, dtype, chunk_size, budget=None
        )
    budget = int(memory_bytes * engine.gpu_memory_utilization)

    def plan(max_model_len: int, num_rows: int) -> MemoryPlan:
        return _plan(target, engine, speculation, max_model_len, num_rows, dtype, chunk_size, budget)

    def fits(max_model_len: int, num_rows: int) -> bool:
        return plan(max_model_len, num_rows).total_bytes <= budget

    wanted, rows = engine.max_model_len or limit, engine.max_num_seqs
    if fits(wanted, rows):
        return plan(wanted, rows)
    longest = _largest(limit, lambda n: fits(n, rows))
    if engine.max_model_len is None and longest >= min(limit, 2 * chunk_size):
        return plan(longest, rows)

    short = plan(wanted, rows)
    advice = []
    if longest >= 2:
        advice.append(f"max_model_len={longest}")
    if most := _largest(rows, lambda b: fits(wanted, b)):
        advice.append(f"max_num_seqs={most}")
    raise NotEnoughMemoryError(
        f"max_model_len={wanted} with max_num_seqs={rows} needs {short.total_bytes / _GIB:.2f} GiB (weights "
        f"{short.weight_bytes / _GIB:.2f}, KV cache {short.cache_bytes / _GIB:.2f}, workspace "
        f"{short.workspace_bytes / _GIB:.2f}), but {budget / _GIB:.2f} GiB may be used "
        f"(gpu_memory_utilization={engine.gpu_memory_utilization} of {memory_bytes / _GIB:.2f} GiB). "
        + (f"What fits: {' or '.join(advice)}." if advice else "Not even the shortest sequence fits: use a smaller "
           "model or dtype, or more devices (tensor_parallel_size).")
    )  # fmt: skip


def _plan(
    target: ModelConfig,
    engine: EngineConfig,
    speculation: Speculation,
    max_model_len: int,
    num_rows: int,
    dtype: jnp.dtype,
    chunk_size: int,
    budget: int | None,
) -> MemoryPlan:
    k = speculation.num_speculative_tokens
    num_slots = _round_up(_round_up(max_model_len, chunk_size) + k + speculation.extra_slots, _SLOT_MULTIPLE)
    windows = []
    window = engine.smallest_window
    while window < num_slots:
        windows.append(window)
        window *= 2
    models = [m for m in (target, speculation.draft) if m is not None]
    weights = param_bytes(target, dtype, engine.quantization)
    if speculation.draft is not None and not speculation.shares_weights:
        weights += param_bytes(speculation.draft, dtype, speculation.draft_quantization)
    caches = sum(cache_bytes(m, num_rows, num_slots, dtype) for m in models)
    # float32 scores over the vocabulary: the target's raw, warped, as probabilities, as noise, as a sum; the drafts'.
    scores = 4 * num_rows * target.vocab_size * (5 * (k + 1) + (2 * k if speculation.sampled else k))
    # A wide pass takes in at most four times the tokens of a plain decoding step, so that small batches have none.
    prefill_rows = min(_MAX_PREFILL_ROWS, max(1, 4 * num_rows // chunk_size), num_rows)
    passes = ((num_rows, max(2 * k, k + 1)), (prefill_rows, chunk_size))  # rows and tokens of each: decoding, prefill
    widest = max(models, key=lambda m: m.intermediate_size)
    rows = max(r * t for r, t in passes)
    activations = rows * (3 * widest.intermediate_size + 6 * target.hidden_size) * dtype.itemsize
    if engine.quantization or speculation.draft_quantization:
        # Where a product cannot read int8, one layer's matrix at a time is converted for it.
        activations += widest.intermediate_size * widest.hidden_size * dtype.itemsize
    # float32 scores over the slots that a pass holds them of, and their softmax.
    heads = max(m.num_heads for m in models)
    attention = max(2 * 4 * r * t * heads * block_slots(t, num_slots) for r, t in passes)
    return MemoryPlan(
        max_model_len=max_model_len,
        num_slots=num_slots,
        windows=(*windows, num_slots),
        weight_bytes=weights // engine.tensor_parallel_size,
        cache_bytes=caches // engine.tensor_parallel_size + 4 * num_rows * num_slots,
        workspace_bytes=(scores + activations + attention) // engine.tensor_parallel_size,
        budget_bytes=budget,
        prefill_rows=prefill_rows,
    )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _largest(upper: int, fits) -> int:
    """The largest n in [1, upper] for which ``fits`` holds, assuming that smaller ones do too; 0 if none."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
