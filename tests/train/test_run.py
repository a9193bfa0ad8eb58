"""Whole training runs of tiny models: resumed, interrupted, broken; and a draft that is worth something in the end."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax import LLM, SamplingParams
from pard_jax.config import ModelConfig
from pard_jax.models import abstract_params
from pard_jax.train import data, options, run
from pard_jax.train.__main__ import main
from pard_jax.train.data import Batches
from pard_jax.train.evaluate import Evaluation, Evaluator
from pard_jax.weights import load_params
from pard_jax.weights.names import flatten
from pard_jax.weights.save import save_hf
from tests.helpers.models import hf_config, random_params
from tests.helpers.tokenizer import make_tokenizer

VOCAB, NUM_TOKENS = 320, 300
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "head_dim": 8,
    "hidden_size": 32,
}


def write_samples(path: Path, count: int = 200, seed: int = 0) -> Path:
    """Walks of a rule: the next token hangs on the last two. The first three tokens are the prompt."""
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for i in range(count):
            ids = rng.integers(4, 44, 2).tolist()
            while len(ids) < 24:
                ids.append(4 + (3 * ids[-1] + ids[-2]) % 7 + 5 * (ids[-1] % 8))
            file.write(json.dumps({"id": i, "token_ids": ids, "loss_ranges": [[3, 24]]}) + "\n")
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    config = hf_config("qwen3", **SMALL)
    save_hf(random_params(ModelConfig.from_hf(config), 0), config, directory, overwrite=True, progress=False)
    make_tokenizer(directory, NUM_TOKENS)
    write_samples(directory / "samples.jsonl")
    return directory


def command(base: Path, output: Path, *flags: str) -> list[str]:
    given = {"--length": "32", "--batch-size": "8", "--steps": "14", "--save-every": "4", "--evaluate-every": "7",
             "--log-every": "2", "--learning-rate": "0.003", "-k": "3", "--held-out": "10",
             "--devices": "2"}  # fmt: skip
    fixed = [part for pair in given.items() for part in pair]
    return ["--model", str(base), "--data", str(base / "samples.jsonl"), "--output", str(output), *fixed, *flags]


def curve(path: Path) -> list[dict[str, str]]:
    """The rows of a log, without what hangs on the clock."""
    with path.open() as file:
        return [{k: v for k, v in row.items() if "second" not in k and "time" not in k} for row in csv.DictReader(file)]


def weights(directory: Path) -> dict[Any, np.ndarray]:
    config = ModelConfig.from_pretrained(directory)
    return {k: np.asarray(v) for k, v in flatten(load_params(directory, config, dtype="float32")).items()}


def assert_same_weights(a: Path, b: Path) -> None:
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    assert all((one[key] == other[key]).all() for key in one)


@pytest.fixture(scope="module")
def unbroken(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "unbroken"
    assert main(command(base, output)) == 0
    return output


def crash_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    whole = Batches.batch

    def batch(self: Batches, at: int) -> dict[str, np.ndarray]:
        if at == step:
            raise SystemError("pulled the plug")
        return whole(self, at)

    monkeypatch.setattr(Batches, "batch", batch)


@pytest.mark.parametrize("steps", [(3,), (6, 9), (13,)])
def test_a_killed_run_goes_on_exactly(base, unbroken, tmp_path, monkeypatch, steps):
    for step in steps:
        with monkeypatch.context() as patch:
            crash_at(patch, step)
            with pytest.raises(SystemError):
                main(command(base, tmp_path / "run"))
    assert main(command(base, tmp_path / "run")) == 0
    assert_same_weights(tmp_path / "run" / "model", unbroken / "model")
    for name in ("train.csv", "eval.csv"):
        assert curve(tmp_path / "run" / name) == curve(unbroken / name)
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["spd_type"] == "pard"


def test_an_interrupt_leaves_a_checkpoint_and_the_run_goes_on(base, unbroken, tmp_path, monkeypatch, capsys):
    import os
    import signal

    whole = Batches.batch

    def batch(self: Batches, at: int) -> dict[str, np.ndarray]:
        if at == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(Batches, "batch", batch)
        assert main(command(base, tmp_path / "run")) == 130
    assert "with a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model").exists()
    assert main(command(base, tmp_path / "run")) == 0
    assert "going on from the checkpoint" in capsys.readouterr().err
    assert_same_weights(tmp_path / "run" / "model", unbroken / "model")
    assert curve(tmp_path / "run" / "train.csv") == curve(unbroken / "train.csv")


def test_a_loss_that_is_no_number(base, tmp_path, capsys):
    assert main(command(base, tmp_path / "run")) == 0
    flags = ["--learning-rate", "1e30", "--steps", "14"]
    assert main(command(base, tmp_path / "nan", *flags)) == 2
    err = capsys.readouterr().err
    found = re.search(
        r"error: grad_norm of step (\d+) is (\S+), loss of step \1 is (\S+); no checkpoint was written", err
    )
    assert found and {found[2], found[3]} & {"nan", "inf"}
    assert "Traceback" not in err


def test_a_held_out_loss_that_is_no_number(base, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Evaluator, "__call__", lambda *_: Evaluation(float("nan"), [], 1.0, [], 0, 0))
    assert main(command(base, tmp_path / "run", "--steps", "9")) == 2
    assert "held-out loss of step 7 is nan; the checkpoint of step 4 is intact." in capsys.readouterr().err


def test_other_settings_are_refused_before_anything_is_read(base, tmp_path, capsys, monkeypatch):
    assert main(command(base, tmp_path / "run", "--steps", "4")) == 0
    capsys.readouterr()
    for module, name in ((run, "resolve_target"), (run.data, "read_samples"), (run.cli, "open_device")):
        monkeypatch.setattr(module, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
    assert main(command(base, tmp_path / "run", "--steps", "4", "--retention", "0.5")) == 2
    err = capsys.readouterr().err
    assert "retention: 0.7 there, 0.5 now" in err and err.count("\n") == 1


def test_samples_are_refused_before_the_device_is_opened(base, tmp_path, capsys, monkeypatch):
    (tmp_path / "bad.jsonl").write_text('{"token_ids": [5]}\n')
    monkeypatch.setattr(run.cli, "open_device", lambda: pytest.fail("the device was opened"))
    assert main(command(base, tmp_path / "run", "--data", str(tmp_path / "bad.jsonl"))) == 2
    err = capsys.readouterr().err
    assert "bad.jsonl, line 1: " in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--prompt-loss", "--no-prompt-loss"])
def test_files_are_read_once_whatever_is_held_out(base, tmp_path, monkeypatch, flag):
    """What is held out counts the target's 21 tokens of a sample, what is trained on perhaps the prompt's, too."""
    reads = []
    whole = data.read_samples

    def read(paths: Any, *args: Any, **keywords: Any) -> Any:
        reads.append([path.name for path in paths])
        return whole(paths, *args, **keywords)

    monkeypatch.setattr(run.data, "read_samples", read)
    args = options.parser().parse_args(command(base, tmp_path / "run", "--length", "24", flag))
    inputs = run._read_inputs(args)
    assert reads == [["samples.jsonl"]]
    assert inputs.held_out is not None
    trained = 23 if flag == "--prompt-loss" else 21
    assert inputs.batches.packed.loss_mask.sum(axis=1).tolist() == [trained] * 190
    assert inputs.held_out.loss_mask.sum(axis=1).tolist() == [21] * 10
    rows = np.concatenate([inputs.batches.packed.token_ids, inputs.held_out.token_ids]).tolist()
    samples = [json.loads(line)["token_ids"] for line in (base / "samples.jsonl").read_text().splitlines()]
    assert sorted(rows) == sorted(samples)  # everything is in one of them


def test_held_out_files_of_their_own(base, tmp_path):
    other = write_samples(tmp_path / "other.jsonl", 7, seed=3)
    flags = ["--length", "24", "--held-out-data", str(other)]
    inputs = run._read_inputs(options.parser().parse_args(command(base, tmp_path / "run", *flags)))
    assert inputs.held_out is not None
    assert inputs.batches.packed.loss_mask.sum(axis=1).tolist() == [23] * 200
    assert inputs.held_out.loss_mask.sum(axis=1).tolist() == [21] * 7
    inputs = run._read_inputs(options.parser().parse_args(command(base, tmp_path / "run", "--held-out", "0")))
    assert inputs.held_out is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mask-token-id", "5"], "5"),
        (["--mask-token-id", "320"], "320"),
        (["--batch-size", "3", "--accumulation", "2"], "multiple"),
        (["--batch-size", "800"], "800"),
        (["--data", "missing.jsonl"], "missing.jsonl"),
        (["--layers", "0,4"], "layer 4"),
        (["--layers", "first,1"], "indices with commas between them, as 0,1,28,29; got 'first,1'"),
        (["--steps", "0"], "--steps"),
        (["--devices", "9"], "9 devices"),
        (["--attention", "cudnn"], "NVIDIA"),
        (["--beta2", "1"], "beta2"),
        (["--embedding-ratio", "-1"], "--embedding-ratio"),
        (["--final-ratio", "9"], "final rate"),
        (["--save-every", "-1"], "--save-every"),
        (["--log-every", "0"], "--log-every"),
        (["--evaluation-drafts", "0"], "--evaluation-drafts"),
        (["--epochs", "0"], "--epochs"),
        (["--length", "3"], "--length"),
        (["--seed", "-1"], "--seed"),
        (["-k", "500"], "128"),
        (["--distill-from", "demo"], "vocabular"),
        (["--optimizer", "sgd"], "sgd"),
        (["--config", "x.json"], "either"),
        (["--retention", "2"], "retention"),
    ],
)
def test_refusals(base, tmp_path, capsys, flags, message):
    assert main(command(base, tmp_path / "run", *flags)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_an_output_that_is_a_file(base, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main(command(base, tmp_path / "file")) == 2
    assert "is a file" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def acceptance(target: Path, draft: Path, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    llm = LLM(
        str(target),
        speculative_config={"model": str(draft), "num_speculative_tokens": 4, "parallel_drafting": True},
        max_model_len=64,
        max_num_seqs=4,
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return llm.engine.acceptance.mean_acceptance_length, [o.outputs[0].token_ids for o in outputs]


def test_a_trained_draft_is_worth_something(base, tmp_path):
    """Random weights to a target, the target's words to a draft, the draft to the engine."""
    config = tmp_path / "config.json"
    target = hf_config("qwen3", **SMALL | {"num_hidden_layers": 2})
    config.write_text(json.dumps(target))
    common = ["--tokenizer", str(base), "--length", "48", "--batch-size", "16", "--log-every", "100", "--devices", "1",
              "--evaluate-every", "0", "--save-every", "0", "--learning-rate", "0.01",
              "--schedule", "cosine"]  # fmt: skip
    samples = write_samples(tmp_path / "data.jsonl", 600)
    flags = ["--config", str(config), "--data", str(samples), "--output", str(tmp_path / "target"), "-k", "1"]
    assert main([*common, *flags, "--steps", "110"]) == 0
    model = tmp_path / "target" / "model"
    assert "pard_token" not in json.loads((model / "config.json").read_text())

    rng = np.random.default_rng(5)
    prompts = [rng.integers(4, 44, 3).tolist() for _ in range(160)]
    plain = LLM(str(model), max_model_len=64, max_num_seqs=8)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = plain.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    said = [o.outputs[0].token_ids for o in outputs]
    with (tmp_path / "said.jsonl").open("w") as file:
        for prompt, output in zip(prompts[16:], said[16:], strict=True):
            file.write(json.dumps({"token_ids": prompt + output, "loss_ranges": [[3, 3 + len(output)]]}) + "\n")

    draft = hf_config("qwen3", **SMALL)
    config.write_text(json.dumps(draft))
    flags = ["--config", str(config), "--data", str(tmp_path / "said.jsonl"), "--output", str(tmp_path / "draft")]
    assert main([*common, *flags, "-k", "4", "--steps", "150", "--mask-token-id", str(VOCAB - 1)]) == 0
    untrained = tmp_path / "untrained"
    save_hf(random_params(ModelConfig.from_hf(draft), 9), draft | {"pard_token": VOCAB - 1}, untrained, progress=False)
    make_tokenizer(untrained, NUM_TOKENS)

    trained, tokens = acceptance(model, tmp_path / "draft" / "model", prompts[:16])
    baseline, same = acceptance(model, untrained, prompts[:16])
    assert tokens == same == said[:16]
    assert trained > baseline + 0.8, (trained, baseline)
    evaluation = json.loads((tmp_path / "draft" / "model" / "training.json").read_text())["evaluation"]
    assert evaluation["acceptance_length"] > 1.5


def test_exported_weights_are_the_trained_ones(unbroken):
    config = ModelConfig.from_pretrained(unbroken / "model")
    loaded = load_params(unbroken / "model", config, dtype=jnp.float32)
    assert flatten(loaded).keys() == flatten(abstract_params(config, jnp.float32)).keys()
    assert config.mask_token_id is not None
    assert config.mask_token_id >= NUM_TOKENS
