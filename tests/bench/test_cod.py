"""The comparison of COD with training on all rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pard_jax.bench.__main__ import main
from tests.helpers.models import hf_config
from tests.helpers.tokenizer import make_tokenizer


def test_rows_time_and_acceptance_of_both(tmp_path: Path, capsys):
    config = hf_config("qwen3", num_hidden_layers=1, vocab_size=320, tie_word_embeddings=True, head_dim=8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    make_tokenizer(tmp_path / "tokenizer", 300)
    rng = np.random.default_rng(0)
    with (tmp_path / "samples.jsonl").open("w") as file:
        for _ in range(40):
            start = int(rng.integers(4, 200))
            ids = [start + i % 5 for i in range(30)]
            file.write(json.dumps({"token_ids": ids, "loss_ranges": [[5, 30]]}) + "\n")
    flags = {
        "--config": str(tmp_path / "config.json"),
        "--tokenizer": str(tmp_path / "tokenizer"),
        "--data": str(tmp_path / "samples.jsonl"),
        "--output": str(tmp_path / "run"),
        "--json": str(tmp_path / "report.json"),
        "--length": "32", "--batch-size": "4", "--steps": "6", "-k": "4", "--devices": "1", "--held-out": "4",
        "--save-every": "0", "--evaluate-every": "0", "--learning-rate": "0.01",
    }  # fmt: skip
    assert main(["cod", *[part for pair in flags.items() for part in pair]]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    cod, everything = report["results"]
    assert (cod["rows"], everything["rows"]) == (32 + 22 + 15 + 10, 4 * 32)
    for row in report["results"]:
        assert row["seconds_per_update"] > 0
        assert 1 <= row["acceptance_length"] <= 5
        assert len(row["per_position"]) == 4
        assert np.isfinite(row["loss"])
    out = capsys.readouterr().out
    assert "cod" in out and "128" in out


def test_no_training_without_something_to_measure_on(tmp_path: Path, capsys):
    assert main(["cod", "--data", "none.jsonl", "--output", str(tmp_path)]) == 2
    assert "--model" in capsys.readouterr().err
    begin = ["cod", "--model", "demo", "--data", "none.jsonl", "--output", str(tmp_path)]
    assert main([*begin, "--held-out", "0"]) == 2
    assert "nothing is held out" in capsys.readouterr().err and not list(tmp_path.iterdir())
