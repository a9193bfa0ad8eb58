"""What is said of a run: the device and the settings in effect, the speed, the acceptance; for people and as JSON."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import jax

from pard_jax.config import ModelConfig
from pard_jax.decoding.drafters.model import ModelDrafter
from pard_jax.engine.memory import device_memory
from pard_jax.engine.metrics import AcceptanceStats
from pard_jax.loading import Settings
from pard_jax.models import param_bytes
from pard_jax.outputs import RequestOutput
from pard_jax.xla_flags import add_xla_flags

_ACCELERATOR_MODULES = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin")
_ACCELERATOR_DEVICES = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*")  # under /dev


@dataclasses.dataclass(frozen=True)
class Run:
    """One timed pass over all prompts, compilation not in it.

    Attributes:
        outputs: one a completion.
        seconds: from the first request to the last token.
        num_steps: verification steps, each over all slots.
        decode_seconds, decode_steps: the same from the first token on, which leaves the first prompts' prefill out.
        acceptance: over all requests.
    """

    outputs: list[RequestOutput]
    seconds: float
    num_steps: int
    decode_seconds: float
    decode_steps: int
    acceptance: AcceptanceStats

    @property
    def num_tokens(self) -> int:
        """Output tokens of all completions."""
        return sum(output.metrics.num_generation_tokens for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second, of all slots together."""
        return self.num_tokens / self.seconds


def start_jax() -> jax.Device:  # pyright: ignore[reportInvalidTypeForm]
    """The first device; starts JAX's backend, with our XLA flags.

    Raises:
        ValueError: the platform that was asked for cannot be had, or a switch is neither on nor off.
    """
    add_xla_flags()
    try:
        return jax.devices()[0]
    except (RuntimeError, AssertionError) as e:  # JAX asserts that there is one backend at least
        asked = f" (JAX_PLATFORMS={_asked_platforms()})" if _asked_platforms() else ""
        raise ValueError(f"JAX cannot start{asked}: {str(e) or 'no plugin for that platform is installed'}") from e


def missed_accelerator() -> str | None:
    """Why a TPU or GPU was to be expected although JAX runs on the CPU; None where all is as it should be."""
    platforms = _asked_platforms()
    if jax.default_backend() != "cpu" or platforms == "cpu":
        return None
    signs = [f"JAX_PLATFORMS={platforms}"] if platforms else []
    signs += [f"{name} is installed" for name in _ACCELERATOR_MODULES if importlib.util.find_spec(name)]
    signs += [str(path) for pattern in _ACCELERATOR_DEVICES for path in sorted(Path("/dev").glob(pattern))[:1]]
    signs += ["nvidia-smi"] if shutil.which("nvidia-smi") else []
    return "; ".join(signs) or None


def _asked_platforms() -> str | None:
    return jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]


def cpu_warning(signs: str) -> str:
    """A block that nobody overlooks."""
    bar = "!" * 100
    return (
        f"{bar}\n!!! WARNING: RUNNING ON THE CPU, although a TPU or GPU was expected ({signs}).\n"
        '!!! Install JAX for it: pip install "jax[cuda13]" or "jax[tpu]"; and see that no other process holds it.\n'
        f"!!! If the CPU is what you want, set JAX_PLATFORMS=cpu.\n{bar}"
    )


def describe_device(device: jax.Device) -> str:  # pyright: ignore[reportInvalidTypeForm]
    """Platform, kind, how many there are, and what memory one has."""
    memory = device_memory(device)
    size = "memory unknown" if memory is None else f"{_gib(memory)} {'free' if device.platform == 'cpu' else 'each'}"
    return f"device       {device.platform} ({device.device_kind}), {len(jax.devices())} visible, {size}"


def describe_settings(settings: Settings, num_slots: int, tensor_parallel_size: int) -> str:
    """What is in effect, in three lines."""
    config, plan = settings.config, settings.plan
    speculation = settings.method
    if settings.num_speculative_tokens:
        speculation += f", K={settings.num_speculative_tokens}"
    if isinstance(drafter := settings.drafter, ModelDrafter):
        kind = "sampled" if drafter.sampled else "greedy"
        speculation += (
            f", {kind} drafts of {settings.draft_model} ({drafter.config.family}, {_millions(drafter.config)}"
            f"{_weights(settings.draft_quantization)})"
        )
    return (
        f"model        {settings.model} ({config.family}, {_millions(config)}{_weights(settings.quantization)}), "
        f"{settings.dtype.name}, "
        f"tensor_parallel_size={tensor_parallel_size}\n"
        f"speculation  {speculation}\n"
        f"engine       {num_slots} slot{'s' * (num_slots > 1)}, max_model_len={plan.max_model_len}, "
        f"KV cache {_gib(plan.cache_bytes)}, weights {_gib(plan.weight_bytes)} a device, "
        f"prefill chunk {settings.chunk_size}, {settings.steps_per_dispatch} step(s) a dispatch, "
        f"{settings.implementation} decoding"
    )


def summarize(run: Run, settings: Settings) -> str:
    """Speed, bandwidth, acceptance and memory, as far as they are known."""
    waits = [w for output in run.outputs if (w := output.metrics.time_to_first_token) is not None]
    lines = [
        f"output       {run.num_tokens} tokens in {run.num_steps} steps, {run.seconds:.2f} s: "
        f"{run.tokens_per_second:.1f} tokens/s; "
        f"time to first token {sum(waits) / max(len(waits), 1):.3f} s{' on average' * (len(waits) > 1)}"
    ]
    size = step_bytes(settings)
    if run.decode_steps and run.decode_seconds > 0:
        rate = size * run.decode_steps / run.decode_seconds
        lines.append(
            f"bandwidth    {rate / 1e9:.2f} GB/s: {size / 1e9:.3g} GB of weights a step x {run.decode_steps} steps / "
            f"{run.decode_seconds:.2f} s, counted from the first token on, KV cache left out"
        )
    if run.acceptance.num_drafts:
        stats = run.acceptance
        histogram = " ".join(f"{count}:{steps}" for count, steps in enumerate(stats.acceptance_histogram))
        by_position = " ".join(f"{rate:.2f}" for rate in stats.per_position_acceptance_rates)
        lines += [
            f"acceptance   mean length {stats.mean_acceptance_length:.2f} of {stats.num_spec_tokens + 1} over the "
            f"{stats.num_drafts} steps that had drafts, drafts {stats.draft_acceptance_rate:.1%}, by position "
            f"{by_position}",
            f"histogram    accepted:steps {histogram}",
        ]
    elif settings.num_speculative_tokens:
        lines.append("acceptance   nothing was drafted")
    if (peak := peak_memory()) is not None:
        lines.append(f"memory       peak {_gib(peak)} a device")
    return "\n".join(lines)


def step_bytes(settings: Settings) -> int:
    """Bytes of weights that one step reads, over all devices: the target's once, the draft's once a pass."""
    drafter = settings.drafter
    passes = settings.num_speculative_tokens if settings.method == "draft_model" else 1
    draft = 0
    if isinstance(drafter, ModelDrafter):
        draft = pass_bytes(drafter.config, settings.dtype, settings.draft_quantization)
    return pass_bytes(settings.config, settings.dtype, settings.quantization) + passes * draft


def pass_bytes(config: ModelConfig, dtype: Any, quantization: str | None = None) -> int:
    """Bytes of weights that one pass reads, over all devices.

    Of an embedding table that is no head, a pass reads a few rows only; it is left out.
    """
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return param_bytes(config, dtype, quantization) - table * dtype.itemsize


def peak_memory() -> int | None:
    """The most bytes that were in use on any device; None where the runtime does not tell (a CPU's does not)."""
    peaks = []
    for device in jax.local_devices():
        # Some TPU runtimes return None or raise.
        try:
            stats = device.memory_stats() or {}
        except Exception:
            stats = {}
        peaks.append(stats.get("peak_bytes_in_use"))
    return max((int(peak) for peak in peaks if peak), default=None)


def compare_runs(run: Run, baseline: Run, *, greedy: bool, dtype: str) -> str:
    """What speculation gained over the same prompts without it and, where tokens can be equal, whether they are."""
    line = (
        f"compare      {run.tokens_per_second / baseline.tokens_per_second:.2f}x: {run.tokens_per_second:.1f} "
        f"tokens/s, {baseline.tokens_per_second:.1f} without speculation ({baseline.num_steps} steps)"
    )
    if not greedy:
        return f"{line}; samples are not compared token by token"
    pairs = zip(run.outputs, baseline.outputs, strict=True)
    equal = sum(ours.outputs[0].token_ids == plain.outputs[0].token_ids for ours, plain in pairs)
    line += f"; tokens are equal in {equal} of {len(run.outputs)}"
    if equal < len(run.outputs) and dtype != "float32":
        line += (
            f"\n             {dtype}: a pass over K+1 tokens and a pass over one can decide near-ties differently;"
            "\n             --dtype float32 shows whether that is all"
        )
    return line


def completion_record(
    given: Any,
    output: RequestOutput,
    settings: Settings,
    *,
    index: int | None = None,
    plain: RequestOutput | None = None,
    greedy: bool = False,
) -> dict[str, Any]:
    """One completion as JSON.

    Args:
        given: the prompt as it was given: text, messages or token ids.
        output: of one completion.
        index: which of a prompt's completions; None where there is one only.
        plain: the same without speculation, to compare with; None leaves ``compare`` out.
        greedy: whether the tokens of the two must be equal.

    Returns:
        What ``json.dumps`` takes. Where nothing is speculated, the acceptance's values are None.
    """
    completion, metrics = output.outputs[0], output.metrics
    num_prompt, num_output = len(output.prompt_token_ids), len(completion.token_ids)
    record: dict[str, Any] = {
        "prompt": given,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        },
        "metrics": {
            "tokens_per_second": metrics.tokens_per_second,
            "time_to_first_token": metrics.time_to_first_token,
            **_acceptance(output),
            "method": settings.method,
            "num_speculative_tokens": settings.num_speculative_tokens,
        },
    }
    if index is not None:
        record["index"] = index
    if completion.logprobs is not None:
        record["logprobs"] = [
            {str(token): dataclasses.asdict(logprob) for token, logprob in entry.items()}
            for entry in completion.logprobs
        ]
    if plain is not None:
        ours, base = metrics.tokens_per_second, plain.metrics.tokens_per_second
        record["compare"] = {
            "tokens_per_second": base,
            "speedup": ours / base if ours and base else None,
            "equal": completion.token_ids == plain.outputs[0].token_ids if greedy else None,
        }
    return record


def _acceptance(output: RequestOutput) -> dict[str, Any]:
    found = output.metrics.speculative_decoding
    names = ("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps")
    values = {name: None if found is None else getattr(found, name) for name in names}
    rates = None
    if found is not None:
        stats = AcceptanceStats(found.num_spec_tokens)
        stats.acceptance_histogram = found.acceptance_histogram
        rates = stats.per_position_acceptance_rates
    return values | {"per_position_acceptance_rates": rates}


def _millions(config: ModelConfig) -> str:
    return f"{config.num_parameters / 1e6:.1f} M parameters"


def _weights(quantization: str | None) -> str:
    return "" if quantization is None else f" in {quantization}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
