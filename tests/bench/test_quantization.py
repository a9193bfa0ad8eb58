"""``python -m pard_jax.bench quantization`` on a tiny pair: its figures against NumPy and against decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pard_jax import LLM, SamplingParams
from pard_jax.bench.__main__ import main
from pard_jax.bench.quantization import Text, accepted_at, compare_logits
from pard_jax.config import EngineConfig, SpeculativeConfig
from pard_jax.loading import Loaded, load_engine
from pard_jax.tokenizer import load_tokenizer
from tests.bench.test_generate import MASK, Directories, pair  # noqa: F401  (a fixture)
from tests.helpers.models import full_forward, quantized_params, stands_for

K = 2


def load(directories: Directories, max_model_len: int = 96) -> Loaded:
    speculative = SpeculativeConfig(
        model=directories.draft, num_speculative_tokens=K, parallel_drafting=True, mask_token_id=MASK
    )
    return load_engine(
        directories.target, EngineConfig(max_model_len=max_model_len, max_num_seqs=2), speculative, progress=False
    )


@pytest.mark.parametrize("agreeing", [0.5, 0.9])
def test_drafts_count_as_long_as_the_target_says_the_text(agreeing: float):
    rng = np.random.default_rng(0)
    length, k = 30, 4
    tokens = rng.integers(0, 9, length)
    said = np.append(tokens[1:], -1)  # what a target that says the text chooses
    best = np.where(rng.random(length) < agreeing, said, rng.integers(0, 9, length))
    ahead = np.minimum(np.arange(length)[:, None] + np.arange(k)[None, :], length - 1)
    drafts = np.where(rng.random((length, k)) < 0.7, best[ahead], rng.integers(0, 9, (length, k)))
    hits = accepted_at(drafts, best, tokens)
    assert hits.shape == (k, length)
    for anchor in range(length - k - 1):
        accepted, at = 0, anchor
        while accepted < k and drafts[anchor, accepted] == best[at]:
            accepted += 1
            if best[at] != tokens[at + 1]:
                break
            at += 1
        assert int(np.argmin(np.append(hits[:, anchor], False))) == accepted


def test_the_change_of_logits_is_numpys(pair: Directories):  # noqa: F811
    parts = load(pair).parts
    config, plain = parts.settings.config, parts.params["target"]
    quantized = quantized_params(config, plain)
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(0, 300, n).tolist(), rng.integers(0, 300, 40).tolist()) for n in (3, 1)]
    change, best = compare_logits(parts, {None: {"target": plain}, "int8": {"target": quantized}}, texts)
    forwards = [full_forward(config, params, 64) for params in (plain, stands_for(quantized))]
    squares, spread, divergences, same = [], [], [], []
    for i, text in enumerate(texts):
        ids = [*text.prompt, *text.output]
        before, after = (forward(ids)[len(text.prompt) - 1 : -1].astype(np.float64) for forward in forwards)
        np.testing.assert_array_equal(best[None][i, text.predicted], before.argmax(axis=-1))
        np.testing.assert_array_equal(best["int8"][i, text.predicted], after.argmax(axis=-1))
        squares += (after - before).var(axis=-1).tolist()
        spread += before.var(axis=-1).tolist()
        p, q = (np.exp(x - x.max(axis=-1, keepdims=True)) for x in (before, after))
        p, q = (x / x.sum(axis=-1, keepdims=True) for x in (p, q))
        divergences += (p * np.log(p / q)).sum(axis=-1).tolist()
        same += (after.argmax(axis=-1) == before.argmax(axis=-1)).tolist()
    assert change.error == pytest.approx(np.sqrt(np.mean(squares) / np.mean(spread)), rel=1e-2)
    assert change.divergence == pytest.approx(np.mean(divergences), rel=1e-2, abs=1e-6)
    assert change.agreement == np.mean(same)
    assert change.error > 1e-3


def test_the_report(pair: Directories, tmp_path: Path, capsys: pytest.CaptureFixture[str]):  # noqa: F811
    """Of the weights as they are, acceptance is what decoding gets, but for a last step that is cut off."""
    path = tmp_path / "report.json"
    arguments = ["hello", "world", "--model", pair.target, "--draft-model", pair.draft, "-k", str(K), "--raw"]
    assert main(["quantization", *arguments, "--max-tokens", "60", "--max-num-seqs", "2", "--output", str(path)]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["num_prompts"] == 2
    rows = {(row["target"], row["draft"]): row for row in report["drafts"]}
    assert set(rows) == {(t, d) for t in (None, "int8") for d in (None, "int8")}
    for row in rows.values():
        assert row["length"] == pytest.approx(1 + sum(row["per_position"])) and len(row["per_position"]) == K
    assert 0.9 < report["logits"]["agreement"] <= 1 and 0 < report["logits"]["error"] < 0.1
    printed = capsys.readouterr().out
    assert "same token" in printed and printed.count("int8") == 5

    tokenizer = load_tokenizer(pair.target)
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in ("hello", "world")]
    llm = LLM.from_loaded(load(pair, max(map(len, prompts)) + 60))
    params = SamplingParams(temperature=0.0, max_tokens=60)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == report["num_tokens"]
    assert rows[None, None]["length"] == pytest.approx(llm.engine.acceptance.mean_acceptance_length, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--dtype", "int8"], "dtype='int8' is not supported"),
        (["--draft-model", "/d"], "--draft-model needs -k/--num-speculative-tokens"),
        (["--output", "/no/such/file"], "--output /no/such/file: there is no directory /no/such"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["quantization", "x", "--model", "/no/model", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
