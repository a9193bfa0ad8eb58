"""The flags that the command lines share."""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from pard_jax import SamplingParams, SpeculativeConfig, cli, generate
from pard_jax.bench import __main__ as bench
from pard_jax.config import EngineConfig
from pard_jax.synthesize import __main__ as synthesize
from pard_jax.train import __main__ as train


def parse(*argv: str) -> argparse.Namespace:
    parser = cli.Parser(prog="test")
    cli.add_model_arguments(parser)
    cli.add_speculation_arguments(parser)
    cli.add_sampling_arguments(parser)
    cli.add_engine_arguments(parser, max_model_len="-", max_num_seqs="-")
    return parser.parse_args(["--model", "m", *argv])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", None),
        ("--method none", None),
        ("-k 4", {"method": "ngram", "num_speculative_tokens": 4}),
        (
            "-k 4 --prompt-lookup-max 3 --prompt-lookup-min 2",
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2},
        ),
        (
            "--draft-model d -k 4",
            {"method": "draft_model", "model": "d", "num_speculative_tokens": 4, "parallel_drafting": True},
        ),
        (
            "--draft-model d --num-speculative-tokens 4 --method draft_model --draft-sample-method probabilistic",
            {"model": "d", "num_speculative_tokens": 4, "draft_sample_method": "probabilistic"},
        ),
        (
            "--draft-model d --draft-revision r -k 4 --method pard --mask-token-id 7",
            {"model": "d", "revision": "r", "num_speculative_tokens": 4, "parallel_drafting": True, "mask_token_id": 7},
        ),
        ('--speculative-config {"method":"ngram","num_speculative_tokens":4}',
         {"method": "ngram", "num_speculative_tokens": 4}),
    ],
)  # fmt: skip
def test_speculation(argv: str, expected: dict | None) -> None:
    config = cli.speculative_config(parse(*argv.split()))
    assert config == (None if expected is None else SpeculativeConfig.from_dict(expected))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--mask-token-id 3", "neither --draft-model nor --method was given, so --mask-token-id"),
        ("--prompt-lookup-max 3", "neither --draft-model nor --method was given, so --prompt-lookup-max"),
        ("--method ngram", "needs -k"),
        ("--method draft_model -k 2", "--method draft_model needs a draft"),
        ("-k 2 --mask-token-id 3", "mask_token_id=3 describes a draft model"),
        ("--draft-model d -k 2 --prompt-lookup-max 3", "belong to method 'ngram'"),
        ("--draft-model d -k 2 --method draft_model --mask-token-id 3", "a sequential draft has no use for it"),
        ("--method eagle", "invalid choice: 'eagle'"),
    ],
)
def test_speculation_refused(argv: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        cli.speculative_config(parse(*argv.split()))


def test_sampling() -> None:
    assert cli.sampling_params(parse()) == SamplingParams(temperature=0.0, max_tokens=128)
    argv = (
        "--temperature 0.7 --top-p 0.9 --top-k 20 --min-p 0.1 --seed 3 --n 2 --max-tokens 9 --min-tokens 2 "
        "--ignore-eos --stop a --stop b --stop-token-ids 5 6 --include-stop-str-in-output "
        "--no-skip-special-tokens --logprobs 4"
    )
    assert cli.sampling_params(parse(*argv.split())) == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, seed=3, n=2, max_tokens=9, min_tokens=2, ignore_eos=True,
        stop=["a", "b"], stop_token_ids=[5, 6], include_stop_str_in_output=True, skip_special_tokens=False, logprobs=4,
    )  # fmt: skip


def test_engine() -> None:
    assert cli.engine_config(parse()) == EngineConfig()
    argv = (
        "--dtype bf16 --quantization int8 -tp 2 --max-model-len 100 --max-num-seqs 3 --gpu-memory-utilization 0.5 "
        "--prefill-chunk-size 32 --steps-per-dispatch 4"
    )
    assert cli.engine_config(parse(*argv.split())) == EngineConfig(
        dtype="bfloat16", quantization="int8", tensor_parallel_size=2, max_model_len=100, max_num_seqs=3,
        gpu_memory_utilization=0.5, prefill_chunk_size=32, steps_per_dispatch=4,
    )  # fmt: skip


def test_quantization() -> None:
    assert cli.engine_config(parse("--quantization", "none")) == EngineConfig(quantization="none") == EngineConfig()
    with pytest.raises(ValueError, match="--quantization: invalid choice: 'fp8'"):
        parse("--quantization", "fp8")


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(ValueError, match=r"unrecognized arguments: --temp 1 \(see test --help\)"):
        parse("--temp", "1")


def test_exit_status(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: BaseException, **keywords: str) -> tuple[int, str]:
        def command() -> None:
            raise error

        status = cli.run_command(command, **keywords)
        return status, capsys.readouterr().err

    assert cli.run_command(lambda: None) == 0
    assert fail(ValueError("two\n  lines")) == (2, "error: two lines\n")
    assert fail(NotImplementedError("not yet")) == (2, "error: not yet\n")
    assert fail(PermissionError(13, "Permission denied", "some/file")) == (2, "error: some/file: Permission denied\n")
    assert fail(FileNotFoundError("no such model")) == (2, "error: no such model\n")
    assert fail(MemoryError()) == (2, "error: out of memory (MemoryError)\n")
    for error, told in ((MemoryError(), "MemoryError"), (RuntimeError("RESOURCE_EXHAUSTED: 9\nGB"), None)):
        message = f"error: out of memory ({told or 'RESOURCE_EXHAUSTED: 9 GB'}); use less\n"
        assert fail(error, if_out_of_memory="use less") == (2, message)
    with pytest.raises(RuntimeError):
        fail(RuntimeError("a fault"), if_out_of_memory="use less")
    assert fail(SystemExit(0)) == (0, "")
    assert fail(SystemExit(143)) == (143, "")
    assert fail(KeyboardInterrupt()) == (130, "\ninterrupted\n")
    assert fail(KeyboardInterrupt("in time")) == (130, "\ninterrupted: in time\n")
    assert fail(BrokenPipeError()) == (141, "")
    with pytest.raises(TypeError):
        fail(TypeError("a fault"))


def commands() -> dict[str, tuple[Any, str, str]]:
    """What runs a command, where it does its work, and its flags."""
    return {
        "generate": (generate.main, "pard_jax.generate._generate", "hello"),
        "synthesize": (synthesize.main, "pard_jax.synthesize.__main__._synthesize", "--output x --num-samples 1"),
        "train": (train.main, "pard_jax.train.run.run", "--data x --output x"),
        "bench cod": (bench.main, "pard_jax.train.run.run", "cod --model m --data x --output x"),
        "bench generate": (bench.main, "pard_jax.bench.generate.read_groups", "generate hello"),
    }


@pytest.mark.parametrize("name", commands())
def test_out_of_memory_names_flags_that_the_command_has(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main, work, argv = commands()[name]

    def fail(*_: Any) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(work, fail)
    assert main(argv.split()) == 2
    error = capsys.readouterr().err
    flags = set(re.findall(r"--[a-z-]+", error))
    assert len(flags) >= 3 and error.count("\n") == 1
    assert main([*argv.split()[: name.startswith("bench")], "--help"]) == 0
    assert flags <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


def test_open_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    device, line = cli.open_device()
    assert device == jax.devices()[0] and line.startswith("device       cpu")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(cli.report, "missed_accelerator", lambda: "a sign")
    cli.open_device()
    assert "WARNING: RUNNING ON THE CPU, although a TPU or GPU was expected (a sign)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "terminal", "file"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"NO_COLOR": "", "FORCE_COLOR": ""}, True, False),  # empty is as good as absent
    ],
)
def test_colours(environment: dict[str, str], terminal: bool, file: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (cli.in_colour(Terminal()), cli.in_colour(io.StringIO())) == (terminal, file)


def test_a_file_appears_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with cli.open_whole(path) as file:
        file.write("one\n")
        assert not path.exists()
    assert path.read_text() == "one\n"

    def fail() -> None:
        with cli.open_whole(path) as file:
            file.write("two\n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    cli.write_whole(tmp_path / "other", "é\n")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "out.jsonl"]
    assert path.read_text() == "one\n" and (tmp_path / "other").read_bytes() == "é\n".encode()
