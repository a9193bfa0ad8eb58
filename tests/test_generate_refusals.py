"""``python -m pard_jax.generate``: what it refuses, before anything is compiled; and how it ends when it ends early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import pard_jax.loading
from pard_jax.engine.ahead import Ahead
from pard_jax.engine.engine import Engine
from pard_jax.generate import main
from tests.helpers.checkpoints import VOCABULARY, Checkpoints, make_checkpoints


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


BAD: dict[str, tuple[list[Any], str]] = {
    "no such directory": (["--model", "./absent/model"], "./absent/model does not exist"),
    "hub id, offline": (["--model", "absent/model"], "HF_HUB_OFFLINE"),
    "no mask token": (
        ["--draft-model", "{no_mask}", "-k", "2"],
        "`dflash_config.mask_token_id`, `mask_token_id`, `dspark_noise_token_id`, `pard_token`, or `ptd_token_id`",
    ),
    "mask id of the draft": (["--draft-model", "{bad_mask}", "-k", "2"], f"mask token id {VOCABULARY} is not in"),
    "mask id as given": (
        ["--draft-model", "{no_mask}", "-k", "2", "--mask-token-id", "999"],
        "mask token id 999 is not in",
    ),
    "vocabularies": (["--draft-model", "{other_vocabulary}", "-k", "2"], "must share one vocabulary"),
    "K of 0": (["--draft-model", "{pard}", "-k", "0"], "num_speculative_tokens to be greater than zero (0)"),
    "K of 129": (["--draft-model", "{pard}", "-k", "129"], "num_speculative_tokens=129 is greater than the maximum"),
    "K missing": (["--draft-model", "{pard}"], "needs -k"),
    "K no number": (["-k", "many"], "expected a whole number or auto, got 'many'"),
    "draft missing": (["--method", "pard", "-k", "2"], "needs a draft"),
    "method none": (["--method", "none", "-k", "2"], "drafts nothing, so -k/--num-speculative-tokens cannot be used"),
    "ngram with a draft": (["--method", "ngram", "--draft-model", "{pard}", "-k", "2"], "drafts without a model"),
    "two styles": (
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}', "-k", "2"],
        "--speculative-config contradicts -k/--num-speculative-tokens",
    ),
    "malformed JSON": (["--speculative-config", "{'method': 'ngram'}"], "--speculative-config is not valid JSON"),
    "JSON no object": (["--speculative-config", "[]"], "must be a JSON object"),
    "unknown key": (["--speculative-config", '{"methd": "ngram"}'], "unknown key 'methd'"),
    "contradicting keys": (
        ["--speculative-config", '{"method": "ngram", "model": "{pard}", "num_speculative_tokens": 2}'],
        "drafts without a model",
    ),
    "unsupported key": (
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "kv_cache_dtype": "fp8"}'],
        "kv_cache_dtype='fp8' is not supported",
    ),
    "nothing to compare": (["--compare"], "nothing to compare"),
    "blocks and json": (["--show-blocks", "--json"], "contradicts"),
    "blocks of two": (["--show-blocks", "another one"], "--show-blocks shows one completion, not 2"),
    "blocks, steps": (["--show-blocks", "--steps-per-dispatch", "2"], "looks at every step"),
    "a preset's revision": (["--model", "smollm2", "--revision", "main"], "'smollm2' is a preset"),
    "json and stream": (["--json", "--stream"], "contradicts"),
    "temperature": (["--temperature", "2.5"], "temperature must be in [0, 2]"),
    "temperature nan": (["--temperature", "nan"], "finite"),
    "top_p": (["--top-p", "0"], "top_p must be in (0, 1]"),
    "top_k": (["--top-k", "-2"], "top_k must be"),
    "min_p": (["--min-p", "1.5"], "min_p must be in [0, 1]"),
    "max_tokens": (["--max-tokens", "0"], "max_tokens must be at least 1"),
    "min_tokens": (["--min-tokens", "200"], "min_tokens must be less than or equal to max_tokens"),
    "logprobs": (["--json", "--logprobs", "21"], "greater than max allowed: 20"),
    "n": (["--n", "0"], "n must be at least 1"),
    "n, greedy": (["--n", "2"], "n must be 1 when using greedy sampling"),
    "stop": (["--stop", ""], "stop cannot contain an empty string"),
    "stop, no text": (["--stop", "caf\udce9"], "the text is not valid Unicode"),
    "stop id": (["--stop-token-ids", VOCABULARY, "--"], "out of vocabulary"),
    "logprobs unseen": (["--logprobs", "2"], "--logprobs are part of the JSON only"),
    "prompt, no text": (["caf\udce9"], "the text is not valid Unicode"),
    "stop ids": (["--stop-token-ids", *range(33), "--"], "stop token ids"),
    "dtype": (["--dtype", "int3"], "dtype='int3' is not supported"),
    "devices": (["-tp", "3"], "tensor_parallel_size=3 does not divide"),
    "slots": (["--max-num-seqs", "0"], "max_num_seqs=0"),
    "memory share": (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization=1.5"),
    "length": (["--max-model-len", "100000"], "larger than the model's max_position_embeddings=512"),
    "prompt too long": (["--raw", "--max-model-len", "4", "much too long a prompt"], "maximum context length is 4"),
    "output directory": (["--output", "./absent/out.jsonl"], "there is no directory"),
    "output is one": (["--output", "."], "is a directory"),
    "prompts missing": (["--prompts", "./absent.jsonl"], "absent.jsonl: No such file or directory"),
    "prompts a directory": (["--prompts", "."], "Is a directory"),
    "unknown flag": (["--temprature", "1"], "unrecognized arguments: --temprature"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(
    case: str, models: Checkpoints, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "start_compiling", lambda *_: pytest.fail("compiles before it refuses"))
    argv, expected = BAD[case]
    for name, path in models._asdict().items():
        argv = [str(arg).replace(f"{{{name}}}", path) for arg in argv]
    argv += [] if "--prompts" in argv or argv[-1].endswith("prompt") else ["a prompt"]
    assert main([*([] if "--model" in argv else ["--model", models.target]), *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and captured.err.endswith("\n")
    assert expected in captured.err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"prompt": "fine"}\n{"prompt": 3}\n', "line 2: 'prompt' must be a string, got 3"),
        ('{"prompt": ""}\n', "line 1: 'prompt' is empty"),
        ('\n{"prompt": \n', "line 2 is not valid JSON"),
        ('{"text": "x"}\n', "line 1: expected an object with one of the keys 'prompt', 'data', 'messages'"),
        ('{"prompt_token_ids": [1, 304]}\n', "line 1: Token id 304 is out of vocabulary"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}\n', "line 1: the chat template refused the messages"),
    ],
)
def test_bad_lines(
    content: str, expected: str, models: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    assert main(["--model", models.target, "--prompts", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file}, {expected}") and error.count("\n") == 1


def test_too_little_memory(
    models: Checkpoints, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pard_jax.loading, "device_memory", lambda device: 100_000)
    monkeypatch.setattr(pard_jax.loading, "load_params", lambda *_, **__: pytest.fail("reads weights"))
    assert main(["--model", models.target, "--max-model-len", "512", "x"]) == 2
    assert "needs 0.00 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "status", "expected"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating"), 2, "error: out of memory"),
        (KeyboardInterrupt(), 130, "\ninterrupted"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_ends_early(
    raised: BaseException,
    status: int,
    expected: str,
    models: Checkpoints,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(Engine, "start_compiling", lambda *_: Ahead([]))
    monkeypatch.setattr(Engine, "warm_up", fail)
    output = tmp_path / "out.jsonl"
    output.write_text("of another run")
    assert main(["--model", models.target, "--output", str(output), "x"]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert expected in captured.err.split("\nloaded ")[1]
    assert output.read_text() == "of another run" and list(tmp_path.iterdir()) == [output]


def test_a_fault_keeps_its_traceback(models: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("INTERNAL: a fault")

    monkeypatch.setattr(Engine, "start_compiling", lambda *_: Ahead([]))
    monkeypatch.setattr(Engine, "warm_up", fail)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["--model", models.target, "x"])


def test_as_a_module(models: Checkpoints) -> None:
    command = [sys.executable, "-m", "pard_jax.generate", "--model", models.target, "--draft-model", models.no_mask]
    done = subprocess.run([*command, "-k", "3", "x"], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: For parallel drafting") and done.stderr.count("\n") == 1
