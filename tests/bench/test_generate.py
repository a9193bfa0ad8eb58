"""``python -m pard_jax.bench generate`` on tiny models: its table, report, figure and refusals, and what it counts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from pard_jax.bench import ours, peers
from pard_jax.bench.__main__ import main
from pard_jax.bench.result import Measurement
from pard_jax.bench.workload import Workload
from pard_jax.config import EngineConfig, ModelConfig
from pard_jax.weights import save_hf
from tests.helpers.engine import count_compiles
from tests.helpers.models import hf_config, random_params
from tests.helpers.tokenizer import make_tokenizer

MASK = 310


class Directories(NamedTuple):
    target: str
    draft: str


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """A target, and a draft that is the target with some noise."""
    directory = tmp_path_factory.mktemp("bench")
    config = hf_config("qwen3", vocab_size=320, num_hidden_layers=1)
    params = random_params(ModelConfig.from_hf(config), 0)
    rng = np.random.default_rng(1)
    noisy = jax.tree.map(lambda x: x + 0.02 * rng.standard_normal(x.shape).astype(x.dtype), params)
    for name, weights, extra in (("target", params, {}), ("draft", noisy, {"pard_token": MASK})):
        save_hf(weights, config | extra, directory / name, progress=False)
        make_tokenizer(directory / name)
    return Directories(str(directory / "target"), str(directory / "draft"))


def run(pair: Directories, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The report of a run that succeeds."""
    path = tmp_path / "report.json"
    assert main(["generate", *arguments, "--model", pair.target, "--output", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["finished"] is True
    return report


def test_methods_side_by_side(pair: Directories, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["pard", "draft_model", "ngram"]
    arguments = ["hello", "world", "--methods", ",".join(methods), "--draft-model", pair.draft, "-k", "2"]
    report = run(pair, tmp_path, *arguments, "--max-tokens", "9", "--repeats", "2")
    results = report["results"]
    assert [r["method"] for r in results] == ["plain", *methods]
    for result in results:
        assert result["num_equal"] == result["num_prompts"] == 2 and result["num_tokens"] == 18
        for figure in ("decode_tokens_per_second", "time_to_first_token", "prefill_tokens_per_second"):
            assert 0 < result[figure]["min"] <= result[figure]["median"] <= result[figure]["max"]
    plain, *drafted = results
    assert plain["acceptance"] is None and plain["ratio_to_plain"] == 1
    for result in drafted:
        found = result["acceptance"]
        assert (
            found["num_tokens"] == 18 and sum(found["histogram"]) == found["num_steps"] and len(found["histogram"]) == 3
        )
        accepted = sum(count * steps for count, steps in enumerate(found["histogram"]))
        assert found["length"] == 1 + accepted / found["num_steps"] == pytest.approx(1 + sum(found["per_position"]))
        assert 18 <= accepted + found["num_steps"] <= 20  # the end may cut a token of the target's off each output
    # The draft is nearly the target: passed one by one, its tokens are mostly right.
    assert drafted[1]["acceptance"]["length"] > 1.5
    assert report["num_prompts"] == {"prompts": 2} and report["environment"]["platform"] == "cpu"
    table = capsys.readouterr().out
    assert "cpu" in table and all(method in table for method in methods)
    assert "draft_model, K=2, float32, batch 1: by position" in table


def test_the_target_as_its_own_draft_is_always_right(pair: Directories, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    methods = "draft_model,transformers,transformers-assisted,transformers-ngram"
    report = run(
        pair, tmp_path, "hello", "--methods", methods, "--draft-model", pair.target, "-k", "2", "--max-tokens", "9",
        "--repeats", "1", "--transformers-dtypes", "float32",
    )  # fmt: skip
    by_method = {r["method"]: r for r in report["results"]}
    assert all(r["num_equal"] == 1 and r["num_tokens"] == 9 for r in report["results"])
    assert all(r["decode_tokens_per_second"]["median"] > 0 for r in report["results"])
    for method in ("draft_model", "transformers-assisted"):
        assert by_method[method]["acceptance"]["histogram"] == [0, 0, 3]
        assert by_method[method]["acceptance"]["length"] == 3
    assert by_method["transformers"]["acceptance"] is None and by_method["transformers"]["dtype"] == "float32"
    assert by_method["transformers-ngram"]["acceptance"]["num_tokens"] == 9


@pytest.mark.parametrize(
    ("method", "k"), [("transformers", None), ("transformers-assisted", 3), ("transformers-ngram", 3)]
)
def test_transformers_ends_where_the_others_do(pair: Directories, method: str, k: int | None) -> None:
    pytest.importorskip("torch")
    (plain,) = measure(pair, "plain", PROMPTS, 12)
    eos = plain.outputs[0][0][4]
    for ids in ((), (eos,)):
        expected = [out[: out.index(eos) + 1] if eos in out and ids else out for out in plain.outputs[0]]
        peer = peers.Peer(Path(pair.target), Path(pair.draft), "float32", ids)
        ((measured,),) = peer.measure(method, k, [Workload(None, {"x": PROMPTS})], 12, 2)
        assert measured.outputs == [expected] * 2
        assert (measured.traces is None) is (k is None)
        for trace, tokens in zip(measured.traces or [], expected, strict=k is not None):
            assert sum(trace.emitted) == len(tokens)
        assert [t.num_prompts for t in measured.timings] == [4, 4]
        assert all(t.decode_tokens <= sum(map(len, expected)) - 4 for t in measured.timings)


def test_sweeps_have_a_baseline_for_each_batch_and_context(pair: Directories, tmp_path: Path) -> None:
    for name, lines in (("code", "def f\nimport x\n"), ("chat", "hello there\n")):
        (tmp_path / f"{name}.txt").write_text(lines)
    figure = tmp_path / "figure.png"
    report = run(
        pair, tmp_path, "--prompts", str(tmp_path / "code.txt"), str(tmp_path / "chat.txt"), "--methods", "ngram",
        "-k", "2,3", "--max-num-seqs", "1,2", "--context", "8,70", "--max-tokens", "6", "--repeats", "1",
        "--plot", str(figure),
    )  # fmt: skip
    keys = ("max_num_seqs", "method", "num_speculative_tokens", "context", "prompts")
    assert [tuple(r[key] for key in keys) for r in report["results"]] == [
        (batch, method, k, context, group)
        for batch in (1, 2)
        for method, k in (("plain", None), ("ngram", 2), ("ngram", 3))
        for context in (8, 70)
        for group in ("code", "chat", "total")
    ]
    assert [r["num_prompts"] for r in report["results"][:3]] == [2, 1, 3]
    assert all(r["num_equal"] == r["num_prompts"] for r in report["results"])
    assert report["prompt_tokens"] == [
        {"context": 8, "code": 16, "chat": 8},
        {"context": 70, "code": 140, "chat": 70},
    ]
    decode = {tuple(r[key] for key in keys): r["decode_tokens_per_second"]["median"] for r in report["results"]}
    for r in report["results"]:
        base = decode[r["max_num_seqs"], "plain", None, r["context"], r["prompts"]]
        assert r["ratio_to_plain"] == pytest.approx(r["decode_tokens_per_second"]["median"] / base)
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_natural_ends_and_the_chat_template(pair: Directories, tmp_path: Path) -> None:
    prompts = ["hello there", "def add(a, b):"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join([*prompts, "a third"]))
    settings = ["--prompts", str(file), "--limit", "2", "--repeats", "1"]
    (plain,) = measure(pair, "plain", [encode(pair, text) for text in prompts], 12)
    chat = run(pair, tmp_path, *settings, "--max-tokens", "2")
    ending = tmp_path / "ending"
    shutil.copytree(pair.target, ending)
    eos = plain.outputs[0][0][4]  # what the first output says in its fifth place, if not before
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos]}))
    pair = pair._replace(target=str(ending))
    settings += ["--raw", "--max-tokens", "12"]
    ended = run(pair, tmp_path, *settings, "--no-ignore-eos", "--methods", "ngram", "-k", "2")
    expected = [out.index(eos) + 1 if eos in out else 12 for out in plain.outputs[0]]
    assert [r["num_tokens"] for r in ended["results"]] == [sum(expected)] * 2 != [24] * 2
    assert [r["num_equal"] for r in ended["results"]] == [2, 2]
    assert ended["results"][1]["acceptance"]["num_tokens"] == sum(expected)
    assert [r["num_tokens"] for r in run(pair, tmp_path, *settings)["results"]] == [24]
    assert chat["prompt_tokens"][0]["prompts"] > ended["prompt_tokens"][0]["prompts"]


def encode(pair: Directories, text: str) -> list[int]:
    from pard_jax.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(pair.target)
    assert tokenizer is not None
    return tokenizer.encode(text)


def measure(
    pair: Directories,
    method: str,
    prompts: list[list[int]],
    max_tokens: int,
    k: int = 3,
    steps: int = 1,
    batch: int = 1,
) -> list[Measurement]:
    """One configuration, its engine looking at the device every ``steps`` steps."""
    speculative = ours.speculative_config(method, k, Path(pair.draft), None)
    engine = EngineConfig(max_model_len=256, steps_per_dispatch=steps)
    parts = ours.load(Path(pair.target), engine, [batch, 2], [speculative], None)
    configured = parts.configured(speculative, batch)
    (measured,) = ours.measure(
        configured, method, [Workload(None, {"x": prompts})], max_tokens, repeats=1, ignore_eos=True
    )
    return measured


PROMPTS = [[5, 9, 200, 7, 31, 8], [44, 3, 17], [9] * 12, [61, 250, 61, 250, 12]]


def by_looking_up(prompt: list[int], output: list[int], k: int, n: int = 5) -> tuple[list[int], list[int]]:
    """Tokens and accepted drafts of every step of prompt look-up, from the finished output alone."""
    emitted, accepted, at = [], [], 0
    while at < len(output):
        text = [*prompt, *output[:at]]
        matches = [i for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
        drafts = text[matches[0] + n :][:k] if matches else []
        right = 0
        while right < min(len(drafts), len(output) - at) and drafts[right] == output[at + right]:
            right += 1
        emitted.append(min(right + 1, len(output) - at))
        accepted.append(right)
        at += emitted[-1]
    return emitted, accepted


def test_every_step_is_counted_as_look_up_takes_it(pair: Directories) -> None:
    (measured,) = measure(pair, "ngram", PROMPTS, 60)
    assert measured.traces is not None
    for prompt, output, trace in zip(PROMPTS, measured.outputs[0], measured.traces, strict=True):
        assert (list(trace.emitted), list(trace.accepted)) == by_looking_up(prompt, output, 3)
    assert max(max(trace.accepted) for trace in measured.traces) == 3  # something was accepted


def test_steps_are_seen_one_by_one_however_many_a_dispatch_has(pair: Directories) -> None:
    (alone,) = measure(pair, "draft_model", PROMPTS, 17)
    for batch in (1, 2):
        (together,) = measure(pair, "draft_model", PROMPTS, 17, steps=4, batch=batch)
        assert alone.traces == together.traces and alone.outputs == together.outputs
        assert together.traces is not None and len(together.outputs) == 2
        assert {sum(trace.emitted) for trace in together.traces} == {17}
        assert len({trace.emitted for trace in together.traces}) > 1
        # Of four steps a dispatch, the timed pass saw more than a step's tokens first.
        (timing,) = together.timings
        assert timing.num_prompts == 4 and timing.prompt_tokens == sum(map(len, PROMPTS))
        assert timing.decode_tokens < 4 * 17 - sum(trace.emitted[0] for trace in together.traces)


def test_nothing_compiles_once_it_is_timed(pair: Directories) -> None:
    speculative = ours.speculative_config("pard", 2, Path(pair.draft), None)
    parts = ours.load(
        Path(pair.target), EngineConfig(max_model_len=256, steps_per_dispatch=4), [1], [speculative], None
    )
    workloads = [Workload(None, {"x": PROMPTS[:1]}), Workload(64, {"x": [PROMPTS[0] * 10]})]
    measuring = ours.measure(parts.configured(speculative, 1), "pard", workloads, 8, repeats=2, ignore_eos=True)
    next(measuring)
    with count_compiles() as compiled:
        next(measuring)
    assert not compiled


def test_one_load_serves_every_method(pair: Directories) -> None:
    speculations = [ours.speculative_config(m, k, Path(pair.draft), None) for m in ours.METHODS for k in (2, 3)]
    parts = ours.load(Path(pair.target), EngineConfig(max_model_len=64), [1, 2], speculations, None)
    assert parts.settings.method == "pard" and parts.settings.num_speculative_tokens == 3
    for speculative in speculations:
        other = parts.configured(speculative, 1)
        drafts = speculative is not None and speculative.model is not None
        assert other.params["target"] is parts.params["target"]
        assert other.params.get("draft") is (parts.params["draft"] if drafts else None)
        assert other.settings.method == ("none" if speculative is None else speculative.drafter)
        assert other.settings.drafter.num_speculative_tokens == other.settings.num_speculative_tokens
        assert other.settings.plan.total_bytes <= parts.settings.plan.total_bytes
        assert (other.settings.draft_model is not None) is drafts


def test_auto_stands_beside_numbers(pair: Directories, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(pair, tmp_path, "hello", "--methods", "ngram", "-k", "2,auto", "--max-tokens", "20", "--repeats", "1")
    plain, two, auto = report["results"]
    assert [r["num_speculative_tokens"] for r in (plain, two, auto)] == [None, 2, "auto"]
    assert all(r["num_equal"] == 1 for r in (plain, two, auto))
    assert set(plain["steps_by_k"]) == {"0"} and set(two["steps_by_k"]) == {"2"}
    assert set(auto["steps_by_k"]) <= {"0", "2", "4", "8", "12"}
    assert len(auto["acceptance"]["histogram"]) == 13 and auto["acceptance"]["num_tokens"] == 20
    assert "ngram   float32   auto" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "subcommand"),
        (["speed"], "invalid choice"),
        (["generate", "x", "--model", "m", "--methods", "magic"], "unknown method 'magic'"),
        (["generate", "x", "--model", "m", "--methods", "pard"], "pard needs --draft-model"),
        (["generate", "x", "--model", "m", "--methods", "pard,draft_model"], "need --draft-model"),
        (["generate", "x", "--model", "m", "-k", "2,x"], "expected whole numbers with commas"),
        (["generate", "x", "--model", "m", "-k", "2,0"], "at least 1"),
        (["generate", "x", "--model", "m", "-k", "auto,often"], "expected whole numbers with commas"),
        (
            ["generate", "x", "--model", "m", "--methods", "transformers-ngram", "-k", "auto"],
            "let -k name one beside auto",
        ),
        (["generate", "x", "--model", "m", "--context", "-5"], "at least 1"),
        (["generate", "x", "--model", "m", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["generate", "x", "--model", "m", "--output", "/no/such/dir/f"], "there is no directory"),
        (["generate", "x", "--model", "m", "--plot", "/no/such/dir/f.png"], "--plot /no/such/dir/f.png: there is no"),
        (["generate", "x", "--model", "m", "--plot", "f.docx"], "ends in .png, .svg, .pdf"),
        (["generate", "x", "--model", "./nowhere"], "does not exist"),
        (["generate", "--model", "m", "--prompts", "/no/such/file"], "/no/such/file"),
        (["generate", "x", "--model", "m", "--methods", "transformers", "--max-num-seqs", "2"], "hold 1"),
        (
            ["generate", "x", "--model", "m", "--methods", "transformers", "--transformers-dtypes", "int8"],
            "unknown dtype 'int8'",
        ),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if any("transformers" in argument for argument in arguments):
        pytest.importorskip("torch")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_refusals_of_a_model(pair: Directories, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    config = hf_config("qwen3", vocab_size=384, num_hidden_layers=1)
    save_hf(random_params(ModelConfig.from_hf(config), 0), config, other, progress=False)
    make_tokenizer(other)
    cases = [
        (["--max-tokens", "600"], "it needs 6"),
        (
            ["--max-tokens", "30", "--context", "100", "--max-model-len", "129"],
            "it needs 130, but --max-model-len is 129",
        ),
        (["--methods", "pard", "--draft-model", pair.target], "For parallel drafting"),
        (["--methods", "ngram", "-k", "200"], "greater than the maximum"),
        (["--methods", "transformers-assisted", "--draft-model", str(other)], "equal vocab_size, got 320 and 384"),
    ]
    for arguments, message in cases:
        assert main(["generate", "x", "--model", pair.target, *arguments]) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
