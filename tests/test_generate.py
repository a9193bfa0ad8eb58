"""``python -m pard_jax.generate`` from end to end, in this process, with tiny random checkpoints on disk."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import pard_jax.loading
from pard_jax import LLM, __version__
from pard_jax.config import ModelConfig
from pard_jax.engine.engine import Engine
from pard_jax.engine.request import RequestUpdate
from pard_jax.generate import TextPrinter, main
from pard_jax.outputs import RequestMetrics, RequestOutput
from pard_jax.presets import PRESETS, Preset
from pard_jax.tokenizer import load_tokenizer
from pard_jax.weights import save_hf
from tests.helpers.models import full_forward, hf_config, random_params
from tests.helpers.tokenizer import make_tokenizer

VOCABULARY = 304  # the tokenizer's 300 and some padding; the mask id is one of the padding
MASK = 303
LONG = 12  # tokens to generate
METRICS = {
    "tokens_per_second", "time_to_first_token", "mean_acceptance_length", "draft_acceptance_rate",
    "acceptance_histogram", "per_position_acceptance_rates", "num_spec_steps", "method", "num_speculative_tokens",
}  # fmt: skip
RECORD = {"prompt", "text", "token_ids", "finish_reason", "stop_reason", "usage", "metrics"}


class Checkpoints(NamedTuple):
    target: str
    pard: str  # the target's own weights, so that the first draft is always right, and a mask id
    no_mask: str  # an ordinary draft
    bad_mask: str
    other_vocabulary: str
    ids_only: str  # the target without tokenizer files

    def params(self) -> dict[str, Any]:
        return random_params(ModelConfig.from_pretrained(self.target), 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    root = tmp_path_factory.mktemp("checkpoints")

    def make(name: str, *, seed: int = 0, tokenizer: bool = True, **config: Any) -> str:
        hf = hf_config("qwen3", vocab_size=VOCABULARY, head_dim=8, num_hidden_layers=1, **config)
        save_hf(random_params(ModelConfig.from_hf(hf), seed), hf, root / name, progress=False)
        if tokenizer:
            make_tokenizer(root / name)
        return str(root / name)

    other = make("other_vocabulary", tokenizer=False, pard_token=MASK)
    make_tokenizer(other, vocab_size=280)
    return Checkpoints(
        target=make("target"),
        pard=make("pard", pard_token=MASK),
        no_mask=make("no_mask", seed=1),
        bad_mask=make("bad_mask", pard_token=VOCABULARY),
        other_vocabulary=other,
        ids_only=make("ids_only", tokenizer=False),
    )


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Equal programs of different runs compile once: JAX keeps them on disk."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def run(models: Checkpoints, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the command with --json on the target model: the objects of stdout."""

    def run(*argv: Any) -> list[dict[str, Any]]:
        common = ("--model", models.target, "--json", "--max-tokens", LONG, "--max-num-seqs", 2)
        status = main([str(arg) for arg in (*common, *argv)])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        assert captured.out.endswith("\n")
        run.err = captured.err
        return [json.loads(line) for line in captured.out.splitlines()]

    return run


def greedy(models: Checkpoints, prompt: list[int], count: int) -> list[int]:
    """The oracle: the whole sequence through the model for every token."""
    logits = full_forward(ModelConfig.from_pretrained(models.target), models.params(), 128)
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits(tokens)[-1])))
    return tokens[len(prompt) :]


def test_compare(
    models: Checkpoints, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "out.jsonl"
    loads, engines, compiled = [], [], []
    load_params, generate = pard_jax.loading.load_params, LLM.generate

    def counted_load(directory: Path, *args: Any, **kwargs: Any) -> Any:
        loads.append(directory.name)
        return load_params(directory, *args, **kwargs)

    class Watched(Engine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            assert all(engine() is None for engine in engines), "two engines' caches in memory at once"
            engines.append(weakref.ref(self))
            super().__init__(*args, **kwargs)

    def watched_generate(self: LLM, *args: Any, **kwargs: Any) -> Any:
        with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
            caplog.clear()
            outputs = generate(self, *args, **kwargs)
            compiled.append([r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")])
        return outputs

    monkeypatch.setattr(pard_jax.loading, "load_params", counted_load)
    monkeypatch.setattr(pard_jax.loading, "Engine", Watched)
    monkeypatch.setattr(LLM, "generate", watched_generate)
    texts = ("What is the capital of France?", "one two three")
    records = run(
        "--draft-model", models.pard, "-k", 3, "--compare", "--logprobs", 2, "--output", output, "--ignore-eos", *texts
    )

    assert sorted(loads) == ["pard", "target"]  # the target once, for both runs
    assert len(engines) == 2
    assert compiled == [[], []]  # all of it beforehand, so the times are a steady state's
    assert [json.loads(line) for line in output.read_text().splitlines()] == records
    assert list(tmp_path.iterdir()) == [output]
    tokenizer = load_tokenizer(models.target)
    assert tokenizer is not None
    for text, record in zip(texts, records, strict=True):
        assert set(record) == RECORD | {"logprobs", "compare"}
        assert set(record["metrics"]) == METRICS
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        assert record["prompt"] == text
        assert record["token_ids"] == greedy(models, prompt, LONG)
        assert record["text"] == tokenizer.decode(record["token_ids"])
        assert (record["finish_reason"], record["stop_reason"]) == ("length", None)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": LONG, "total_tokens": len(prompt) + LONG}
        assert record["usage"] == usage

        metrics = record["metrics"]
        assert (metrics["method"], metrics["num_speculative_tokens"]) == ("pard", 3)
        histogram = metrics["acceptance_histogram"]
        steps, accepted = sum(histogram), sum(j * n for j, n in enumerate(histogram))
        assert len(histogram) == 4 and metrics["num_spec_steps"] == steps
        assert accepted >= LONG // 2 - 1  # the first draft of every step is the target's own token
        assert metrics["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
        assert metrics["draft_acceptance_rate"] == pytest.approx(accepted / (3 * steps))
        rates = [sum(histogram[i:]) / steps for i in (1, 2, 3)]
        assert metrics["per_position_acceptance_rates"] == pytest.approx(rates)
        assert metrics["tokens_per_second"] > 0 and metrics["time_to_first_token"] > 0

        assert set(record["compare"]) == {"tokens_per_second", "speedup", "equal"}
        assert record["compare"]["equal"] is True
        ratio = metrics["tokens_per_second"] / record["compare"]["tokens_per_second"]
        assert record["compare"]["speedup"] == pytest.approx(ratio)
        for token, entry in zip(record["token_ids"], record["logprobs"], strict=True):
            best = min(entry.values(), key=lambda logprob: logprob["rank"])
            assert entry[str(token)] == best and best["rank"] == 1 and best["logprob"] <= 0
            assert best["decoded_token"] == tokenizer.decode([token], skip_special_tokens=False)
            assert len(entry) == 2

    for expected in ("device       cpu", "float32", "pard, K=3, greedy drafts of", "2 slots", "max_model_len=",
                     "KV cache", "loaded       in", "compiled", "tokens/s", "time to first token", "GB/s",
                     "acceptance   mean length", "accepted:steps 0:", "tokens are equal in 2 of 2"):  # fmt: skip
        assert expected in run.err


def test_sampling(models: Checkpoints, run: Any) -> None:
    argv = ("--draft-model", models.pard, "-k", 3, "--temperature", 1, "--ignore-eos", "--n", 2, "One two three")
    records = run("--seed", 5, "--compare", *argv)
    assert [record["index"] for record in records] == [0, 1]
    assert [set(record) for record in records] == [RECORD | {"index", "compare"}] * 2
    assert [record["compare"]["equal"] for record in records] == [None, None]
    assert "not compared token by token" in run.err
    assert records[0]["token_ids"] != records[1]["token_ids"]
    other = run("--seed", 6, *argv)  # whose first completion has the seed of the second one above
    assert other[0]["token_ids"] == records[1]["token_ids"] != other[1]["token_ids"]


def test_methods_agree(models: Checkpoints, run: Any) -> None:
    ids = [5, 9, 5, 9, 5, 9, 5]
    file = Path(models.target).parent / "ids.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": ids}) + "\n")
    argv = ("--prompts", file, "--ignore-eos")
    plain = run(*argv)
    assert plain[0]["token_ids"] == greedy(models, ids, LONG)
    assert plain[0]["prompt"] == ids
    metrics = plain[0]["metrics"]
    assert metrics["method"] == "none" and metrics["num_speculative_tokens"] == 0
    acceptance = METRICS - {"method", "num_speculative_tokens", "tokens_per_second", "time_to_first_token"}
    assert all(metrics[name] is None for name in acceptance)
    keys = {"method": "draft_model", "model": models.target, "num_speculative_tokens": 2, "max_model_len": 256}
    methods = {
        "ngram": ("-k", 2, "--prompt-lookup-max", 3, "--prompt-lookup-min", 1),
        "draft_model": ("--speculative-config", json.dumps(keys)),
        "pard": ("--draft-model", models.no_mask, "--mask-token-id", MASK, "-k", 3),
    }
    for method, flags in methods.items():
        record = run(*argv, *flags)[0]
        assert record["token_ids"] == plain[0]["token_ids"], method
        assert record["metrics"]["method"] == method
        if method == "draft_model":  # the target drafts for itself
            assert record["metrics"]["draft_acceptance_rate"] > 0.8


def test_a_pair_by_its_name(
    models: Checkpoints, run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Preset(Path(models.target), Path(models.pard), 3, "")
    monkeypatch.setitem(PRESETS, "demo", pair)
    monkeypatch.setitem(PRESETS, "tiny", pair)

    def settings(*argv: str) -> tuple[str, int]:
        status = main([*argv, "--json", "--max-tokens", str(LONG), "--max-num-seqs", "2", "--ignore-eos", "one two"])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        record = json.loads(captured.out)
        tokens.append(record["token_ids"])
        return record["metrics"]["method"], record["metrics"]["num_speculative_tokens"]

    tokens: list[list[int]] = []
    assert settings() == ("pard", 3)
    assert settings("--model", "tiny", "--method", "none") == ("none", 0)
    assert settings("--model", "tiny", "-k", "2", "--draft-model", models.pard) == ("pard", 2)
    assert settings("--model", models.target, "--speculative-config", '{"model": "tiny"}') == ("pard", 3)
    assert tokens == [run("--ignore-eos", "one two")[0]["token_ids"]] * 4


def test_blocks(
    models: Checkpoints, run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = ("--draft-model", models.pard, "-k", "3", "--ignore-eos")
    record = run(*draft, "one two")[0]
    argv = ["--model", models.target, "--max-tokens", str(LONG), "--max-num-seqs", "2", "--show-blocks", *draft]
    steps = record["metrics"]["num_spec_steps"]
    for stop in ([], ["--stop", record["text"][5:8]]):
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert main([*argv, *stop, "one two"]) == 0
        captured = capsys.readouterr()
        text = record["text"] if not stop else record["text"][: record["text"].index(stop[1])]
        assert re.sub(r"\x1b\[[\d;]*m", "", captured.out) == text + "\n"
        assert "1 step(s) a dispatch" in captured.err and "draft accepted" in captured.err
        if not stop:
            assert f"{LONG} tokens in {steps} steps, {LONG / steps:.2f} a step" in captured.err
            # Accepted drafts and own tokens, in two colours each, and the code that ends them.
            assert len(set(re.findall(r"\x1b\[[\d;]*m", captured.out))) >= 4
    monkeypatch.delenv("FORCE_COLOR")
    assert main([*argv, "one two"]) == 0  # neither stream is a terminal here
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err and "[draft accepted|" in captured.err
    # A bracket a step, and a bar in each; what the text itself has of them counts on top.
    assert all(captured.out.count(mark) == record["text"].count(mark) + steps for mark in "[|]")
    assert re.sub(r"[\[|\]]", "", captured.out) == re.sub(r"[\[|\]]", "", record["text"]) + "\n"


def test_text(
    models: Checkpoints, run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--model", models.target, "--max-tokens", str(LONG), "--max-num-seqs", "2", "--raw", "--ignore-eos"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\n"))
    assert main(argv) == 0
    text = capsys.readouterr().out
    records = run("--raw", "--ignore-eos", "from stdin", "two", "three")
    assert text == records[0]["text"] + "\n"
    assert records[0]["usage"]["prompt_tokens"] < 11  # the text alone
    # More prompts than slots, so that they end in another order than they are shown in.
    assert main([*argv, "--stream", "from stdin", "two", "--", "three"]) == 0
    titles = ("=== 1: from stdin", "=== 2: two", "=== 3: three")
    shown = "".join(f"{title}\n{record['text']}\n" for title, record in zip(titles, records, strict=True))
    assert capsys.readouterr().out == shown


def test_flags_reach_the_sampler(run: Any) -> None:
    plain = run("--raw", "--ignore-eos", "hello")[0]
    third, text = plain["token_ids"][2], plain["text"]
    stopped = run("--raw", "--ignore-eos", "--stop-token-ids", third, "--min-tokens", 2, "--", "hello")[0]
    assert stopped["token_ids"] == plain["token_ids"][:3]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", third)
    stop = text[3:5]
    cut = run("--raw", "--ignore-eos", "--stop", stop, "hello")[0]
    assert cut["text"] == text[: text.index(stop)] and cut["stop_reason"] == stop
    kept = run("--raw", "--ignore-eos", "--stop", stop, "--include-stop-str-in-output", "hello")[0]
    assert kept["text"] == text[: text.index(stop) + len(stop)]


def test_without_a_tokenizer(models: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text('{"prompt_token_ids": [5, 9]}\n')
    argv = ["--model", models.ids_only, "--max-tokens", "4", "--max-num-seqs", "2", "--ignore-eos"]
    assert main([*argv, "--prompts", str(file)]) == 0
    shown = capsys.readouterr().out
    assert [int(i) for i in shown.split()] == greedy(models, [5, 9], 4)
    assert main([*argv, "--prompts", str(file), "--stop", "x"]) == 2
    assert "stop strings need a tokenizer" in capsys.readouterr().err
    assert main([*argv, "text"]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err


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
    "K no number": (["-k", "many"], "invalid int value: 'many'"),
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
    monkeypatch.setattr(Engine, "warm_up", lambda *_: pytest.fail("compiles before it refuses"))
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
    def fail(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(Engine, "warm_up", fail)
    output = tmp_path / "out.jsonl"
    output.write_text("of another run")
    assert main(["--model", models.target, "--output", str(output), "x"]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert expected in captured.err.split(" decoding ...\n")[1]
    assert output.read_text() == "of another run" and list(tmp_path.iterdir()) == [output]


def test_a_fault_keeps_its_traceback(models: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("INTERNAL: a fault")

    monkeypatch.setattr(Engine, "warm_up", fail)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["--model", models.target, "x"])


def test_printer_keeps_the_order(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TextPrinter(["one", "two", "three"], stream=True)

    end = RequestOutput("", None, [1], [], finished=True, metrics=RequestMetrics(0.0))

    def update(prompt: int, text: str, finished: bool = False) -> str:
        output = end if finished else None
        printer(prompt, 0, RequestUpdate(str(prompt), text, [7], None, output))
        return capsys.readouterr().out

    assert update(1, "b") == "one\n"
    assert update(0, "a") == "a"
    assert update(2, "c", finished=True) == ""
    assert update(1, "B") == ""
    assert update(0, "A", finished=True) == "A\ntwo\nbB"
    assert update(1, "!", finished=True) == "!\nthree\nc\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for heading in ("prompts:", "output:", "model:", "speculation:", "sampling:", "engine:", "examples:"):
        assert f"\n{heading}\n" in shown
    assert main(["--list-presets"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in PRESETS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pard-jax {__version__}\n"


def test_as_a_module(models: Checkpoints) -> None:
    command = [sys.executable, "-m", "pard_jax.generate", "--model", models.target, "--draft-model", models.no_mask]
    done = subprocess.run([*command, "-k", "3", "x"], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: For parallel drafting") and done.stderr.count("\n") == 1
