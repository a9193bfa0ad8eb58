"""``python -m pard_jax.bench``: its table, its report and its refusals, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pard_jax.bench.__main__ import main
from pard_jax.config import ModelConfig
from pard_jax.weights import save_hf
from tests.helpers.models import hf_config, random_params
from tests.helpers.tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("bench") / "model"
    config = hf_config("qwen3", vocab_size=320, num_hidden_layers=1)
    save_hf(random_params(ModelConfig.from_hf(config), 0), config, directory, progress=False)
    make_tokenizer(directory)
    return str(directory)


def test_methods_side_by_side(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    report = tmp_path / "report.json"
    methods = ["plain", "ngram", "transformers"]
    arguments = ["generate", "hello", "world", "--model", model, "--methods", ",".join(methods), "-k", "2"]
    assert main([*arguments, "--max-tokens", "6", "--repeats", "2", "--output", str(report)]) == 0
    written = json.loads(report.read_text())
    # transformers runs in two dtypes; bfloat16 need not agree.
    assert [r["method"] for r in written["results"]] == [*methods, "transformers"]
    assert [r["equal"] for r in written["results"][:3]] == [True, True, True]
    assert all(r["decode_tokens_per_second"] > 0 and r["time_to_first_token"] > 0 for r in written["results"])
    assert written["results"][0]["mean_acceptance_length"] is None
    assert 1 <= written["results"][1]["mean_acceptance_length"] <= 3
    assert written["num_prompts"] == 2 and written["environment"]["platform"] == "cpu"
    table = capsys.readouterr().out
    assert "cpu" in table and all(method in table for method in methods)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "subcommand"),
        (["speed"], "invalid choice"),
        (["generate", "x"], "--model"),
        (["generate", "x", "--model", "m", "--methods", "magic"], "unknown method 'magic'"),
        (["generate", "x", "--model", "m", "--methods", "pard"], "need --draft-model"),
        (["generate", "x", "--model", "m", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["generate", "x", "--model", "m", "--output", "/no/such/dir/f"], "there is no directory"),
        (["generate", "x", "--model", "./nowhere"], "does not exist"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
