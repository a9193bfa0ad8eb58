"""What a run says about itself."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pard_jax import report
from pard_jax.config import EngineConfig, ModelConfig
from pard_jax.decoding.drafters import Drafter, NgramDrafter, NoDrafter, PardDrafter, SequentialDrafter
from pard_jax.engine.memory import Speculation, plan_memory
from pard_jax.engine.metrics import AcceptanceStats
from pard_jax.loading import Settings
from pard_jax.models import abstract_params
from pard_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tests.helpers.models import model_config


def settings(method: str, drafter: Drafter, target: ModelConfig, dtype: str = "float32") -> Settings:
    plan = plan_memory(target, EngineConfig(), Speculation(), dtype=dtype, chunk_size=64, memory_bytes=1 << 30)
    return Settings(
        model=Path("target"), draft_model=Path("draft"), method=method,
        num_speculative_tokens=drafter.num_speculative_tokens, dtype=jnp.dtype(dtype), chunk_size=64,
        steps_per_dispatch=1, implementation="xla", plan=plan, config=target, drafter=drafter,
    )  # fmt: skip


def output(tokens: list[int], *, seconds: float = 2.0, acceptance: AcceptanceStats | None = None) -> RequestOutput:
    metrics = RequestMetrics(
        arrival_time=10.0,
        first_token_time=10.5,
        last_token_time=10.0 + seconds,
        num_generation_tokens=len(tokens),
        speculative_decoding=None if acceptance is None else acceptance.request_metrics(),
    )
    completion = CompletionOutput(0, "text", tokens, finish_reason="stop", stop_reason=9)
    return RequestOutput("0", None, [1, 2], [completion], True, metrics)


def run(outputs: list[RequestOutput], **changes: Any) -> report.Run:
    values: dict[str, Any] = {
        "outputs": outputs, "seconds": 4.0, "num_steps": 6, "decode_seconds": 2.0, "decode_steps": 5,
        "acceptance": AcceptanceStats(0),
    }  # fmt: skip
    return report.Run(**values | changes)


def read_bytes(config: ModelConfig, dtype: Any, quantization: str | None = None) -> int:
    params = dict(abstract_params(config, dtype, quantization=quantization))
    if not config.tie_word_embeddings:
        del params["embed"]  # looked up, not multiplied by
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("tied", [False, True])
def test_step_bytes(tied: bool) -> None:
    target = model_config("qwen3", tie_word_embeddings=tied)
    draft = model_config("llama", num_hidden_layers=1, pard_token=127)
    common: dict[str, Any] = {
        "num_speculative_tokens": 3, "config": draft, "target_vocab_size": 128, "max_model_len": 64,
    }  # fmt: skip
    ours, theirs = read_bytes(target, jnp.bfloat16), read_bytes(draft, jnp.bfloat16)
    for method, drafter, expected in [
        ("none", NoDrafter(), ours),
        ("ngram", NgramDrafter(num_speculative_tokens=3, max_n=3, min_n=1), ours),
        ("pard", PardDrafter(**common, mask_token_id=127), ours + theirs),
        ("draft_model", SequentialDrafter(**common), ours + 3 * theirs),
    ]:
        assert report.step_bytes(settings(method, drafter, target, "bfloat16")) == expected, method
    # Each model's weights are quantized, or not, by themselves.
    mixed = dataclasses.replace(settings("pard", PardDrafter(**common, mask_token_id=127), target), quantization="int8")
    ours = read_bytes(target, jnp.float32, "int8")
    assert report.step_bytes(mixed) == ours + read_bytes(draft, jnp.float32)
    mixed = dataclasses.replace(mixed, draft_quantization="int8")
    assert report.step_bytes(mixed) == ours + read_bytes(draft, jnp.float32, "int8")


def test_summary() -> None:
    target = model_config()
    stats = AcceptanceStats(2)
    for accepted in (0, 1, 2, 2):
        stats.observe(2, accepted)
    drafter = NgramDrafter(num_speculative_tokens=2, max_n=3, min_n=1)
    about = settings("ngram", drafter, target)
    lines = report.summarize(run([output([3] * 5), output([3] * 4)], acceptance=stats), about).splitlines()
    rate = read_bytes(target, jnp.float32) * 5 / 2.0 / 1e9
    assert lines[0].endswith("9 tokens in 6 steps, 4.00 s: 2.2 tokens/s; time to first token 0.500 s on average")
    assert f"{rate:.2f} GB/s" in lines[1] and "x 5 steps / 2.00 s" in lines[1]
    assert lines[2].endswith(
        "mean length 2.25 of 3 over the 4 steps that had drafts, drafts 62.5%, by position 0.75 0.50"
    )
    assert lines[3].endswith("accepted:steps 0:1 1:1 2:2")
    # One dispatch alone has no rate; n-grams may never match.
    short = report.summarize(run([output([3])], decode_steps=0, acceptance=AcceptanceStats(2)), about)
    assert "GB/s" not in short and "nothing was drafted" in short and "on average" not in short


def test_peak_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> None:
        raise RuntimeError("not implemented")

    def devices(*stats: Any) -> None:
        found = [types.SimpleNamespace(memory_stats=s if callable(s) else lambda s=s: s) for s in stats]
        monkeypatch.setattr(jax, "local_devices", lambda: found)

    devices(None, raises, {})
    assert report.peak_memory() is None
    devices({"peak_bytes_in_use": 5}, raises, {"peak_bytes_in_use": 7})
    assert report.peak_memory() == 7


def test_compare() -> None:
    same, other = output([1, 2]), output([1, 3])
    ours, plain = run([same, other]), run([same, same], seconds=8.0, num_steps=12)
    line = report.compare_runs(ours, plain, greedy=True, dtype="float32")
    assert "2.00x" in line and "(12 steps)" in line and line.endswith("tokens are equal in 1 of 2")
    assert "near-ties" in report.compare_runs(ours, plain, greedy=True, dtype="bfloat16")
    assert "near" not in report.compare_runs(ours, run([same, other]), greedy=True, dtype="bfloat16")
    assert "not compared" in report.compare_runs(ours, plain, greedy=False, dtype="float32")


def test_record() -> None:
    stats = AcceptanceStats(2)
    stats.observe(2, 1)
    about = settings("ngram", NgramDrafter(num_speculative_tokens=2, max_n=3, min_n=1), model_config())
    ours, plain = output([7, 8], acceptance=stats), output([7, 9], seconds=4.0)
    ours.outputs[0].logprobs = [{7: Logprob(-0.5, 1, "a")}, {8: Logprob(-1.5, 2, "b"), 9: Logprob(-0.1, 1, "c")}]
    record = report.completion_record("given", ours, about, index=3, plain=plain, greedy=True)
    assert json.loads(json.dumps(record)) == {
        "prompt": "given",
        "text": "text",
        "token_ids": [7, 8],
        "finish_reason": "stop",
        "stop_reason": 9,
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
        "metrics": {
            "tokens_per_second": 1.0,
            "time_to_first_token": 0.5,
            "mean_acceptance_length": 2.0,
            "draft_acceptance_rate": 0.5,
            "acceptance_histogram": [0, 1, 0],
            "per_position_acceptance_rates": [1.0, 0.0],
            "num_spec_steps": 1,
            "method": "ngram",
            "num_speculative_tokens": 2,
        },
        "index": 3,
        "logprobs": [
            {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}},
            {
                "8": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
                "9": {"logprob": -0.1, "rank": 1, "decoded_token": "c"},
            },
        ],
        "compare": {"tokens_per_second": 0.5, "speedup": 2.0, "equal": False},
    }
    sampled = report.completion_record("given", ours, about, plain=plain, greedy=False)
    assert sampled["compare"]["equal"] is None


@pytest.mark.parametrize(
    ("platforms", "backend", "installed", "expected"),
    [
        (None, "cpu", [], None),
        (None, "cpu", ["libtpu"], "libtpu is installed"),
        (None, "cpu", ["jax_cuda13_plugin"], "jax_cuda13_plugin is installed"),
        ("tpu,cpu", "cpu", [], "JAX_PLATFORMS=tpu,cpu"),
        ("cpu", "cpu", ["libtpu"], None),
        (None, "tpu", ["libtpu"], None),
        (None, "gpu", ["jax_cuda12_plugin"], None),
    ],
)
def test_missed_accelerator(
    platforms: str | None, backend: str, installed: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = types.SimpleNamespace(jax_platforms=platforms)
    monkeypatch.setattr(report, "jax", types.SimpleNamespace(config=config, default_backend=lambda: backend))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(report.shutil, "which", lambda name: None)
    monkeypatch.setattr(report, "_ACCELERATOR_DEVICES", ())
    assert report.missed_accelerator() == expected


def test_missed_accelerator_by_its_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    config = types.SimpleNamespace(jax_platforms=None)
    monkeypatch.setattr(report, "jax", types.SimpleNamespace(config=config, default_backend=lambda: "cpu"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(report.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(report, "_ACCELERATOR_DEVICES", ("nul[l]",))
    signs = report.missed_accelerator()
    assert signs == "/dev/null; nvidia-smi"
    assert "RUNNING ON THE CPU" in report.cpu_warning(signs) and signs in report.cpu_warning(signs)


def test_backend_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices() -> None:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    config = types.SimpleNamespace(jax_platforms="tpu")
    monkeypatch.setattr(report, "jax", types.SimpleNamespace(config=config, devices=devices))
    with pytest.raises(ValueError, match=r"JAX cannot start \(JAX_PLATFORMS=tpu\): Unable to initialize"):
        report.start_jax()


def test_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    device = jax.devices()[0]
    assert report.describe_device(device).startswith("device       cpu (cpu), 8 visible, ")
    monkeypatch.setattr(report, "device_memory", lambda device: None)
    assert report.describe_device(device).endswith("memory unknown")
    about = settings("none", NoDrafter(), model_config())
    lines = report.describe_settings(dataclasses.replace(about, draft_model=None), 1, 1).splitlines()
    assert lines[0].startswith("model        target (qwen3, 0.0 M parameters), float32, tensor_parallel_size=1")
    assert lines[1] == "speculation  none"
    assert "1 slot, max_model_len=512, KV cache 0.00 GiB" in lines[2]
