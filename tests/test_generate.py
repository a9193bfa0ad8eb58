"""``python -m pard_jax.generate`` from end to end, in this process, with tiny random checkpoints on disk."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from tests.helpers.checkpoints import MASK, Checkpoints, make_checkpoints
from tests.helpers.models import full_forward

LONG = 12  # tokens to generate
METRICS = {
    "tokens_per_second", "time_to_first_token", "mean_acceptance_length", "draft_acceptance_rate",
    "acceptance_histogram", "per_position_acceptance_rates", "num_spec_steps", "method", "num_speculative_tokens",
}  # fmt: skip
RECORD = {"prompt", "text", "token_ids", "finish_reason", "stop_reason", "usage", "metrics"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


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
