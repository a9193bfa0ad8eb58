"""``python -m pard_jax.bench step`` on tiny shapes: what it runs, its figures, report, figure and refusals."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.bench import step, step_report, step_run
from pard_jax.bench.__main__ import main
from pard_jax.bench.spread import Spread
from pard_jax.bench.step_report import Result
from pard_jax.bench.step_run import Bench, Measured, copy_rate
from pard_jax.bench.step_setup import Setup
from pard_jax.config import ModelConfig
from pard_jax.models import init_params, make_mesh
from tests.helpers.engine import count_compiles
from tests.helpers.models import hf_config

V, MASK = 96, 95


class Configs(NamedTuple):
    target: str
    draft: str
    other: str  # a draft with a smaller vocabulary


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Configs:
    directory = tmp_path_factory.mktemp("configs")
    contents = {
        "target": hf_config("qwen3", vocab_size=V, num_hidden_layers=2),
        "draft": hf_config("llama", vocab_size=V, num_hidden_layers=1, tie_word_embeddings=True, pard_token=MASK),
        "other": hf_config("llama", vocab_size=V - 1, num_hidden_layers=1),
    }
    for name, config in contents.items():
        (directory / f"{name}.json").write_text(json.dumps(config))
    return Configs(*(str(directory / f"{name}.json") for name in Configs._fields))


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_copy_bytes", lambda device: 1 << 16)


def setup_of(configs: Configs, **overrides: Any) -> Setup:
    values: dict[str, Any] = {
        "target": ModelConfig.from_file(Path(configs.target)),
        "draft": ModelConfig.from_file(Path(configs.draft)),
        "mask_token_id": MASK,
        "dtype": jnp.dtype("float32"),
        "implementation": "xla",
        "specialize": True,
        "chunk_size": 16,
        "num_steps": 4,
        "cache": 128,
        "context": 40,
        "memory_bytes": None,
        "mesh": make_mesh(1),
    }
    return Setup(**values | overrides)


def bench_of(setup: Setup, batch: int, k: int) -> Bench:
    common: dict[str, Any] = {"mesh": setup.mesh, "quantization": setup.quantization}
    params = {"target": init_params(setup.target, **common)}
    if k and setup.draft is not None:
        params["draft"] = init_params(setup.draft, **common, seed=1)
    return Bench(setup, params, batch, k)


def used_slots(cache: Any) -> list[int]:
    """The slots that hold keys in every layer, row and head."""
    return np.flatnonzero(np.all(np.any(np.asarray(cache.k) != 0, axis=-1), axis=(0, 1, 2))).tolist()


# -- what runs ------------------------------------------------------------------------------------------------------


def test_a_dispatch_runs_all_steps_from_the_context_on(configs: Configs) -> None:
    bench = bench_of(setup_of(configs), 2, 3)
    ((host, total),) = bench._dispatch(0)
    assert 0 < host <= total
    state = bench.state
    # Random weights: a step keeps one token, or a draft that is right by chance.
    assert np.all(np.asarray(state.length) >= 44) and np.all(np.asarray(state.length) <= 40 + 4 * 4)
    assert np.all(np.asarray(state.active)) and np.all(np.asarray(state.cached) == np.asarray(state.length) - 1)
    assert used_slots(state.cache)[0] == 39 and used_slots(state.draft.cache)[0] == 39
    # Then the same again, and nothing compiles or moves.
    with count_compiles() as compiled:
        assert len(bench._dispatch(2)) == 2
    assert not compiled
    again = bench.state
    assert jax.tree.map(lambda x: x.sharding, again) == bench._shardings
    np.testing.assert_array_equal(again.length, state.length)
    rewound = bench._rewound()
    assert np.asarray(rewound.length).tolist() == [40, 40]
    assert np.asarray(rewound.cached).tolist() == np.asarray(rewound.draft.cached).tolist() == [39, 39]


def test_the_target_alone_reads_the_drafts_and_the_last_token(configs: Configs) -> None:
    bench = bench_of(setup_of(configs), 2, 3)
    bench._target(1)
    # 4 passes over 4 tokens each, one slot apart.
    assert used_slots(bench.state.cache) == list(range(39, 39 + 4 + 3))
    assert not used_slots(bench.state.draft.cache)


def test_the_draft_alone_goes_on_by_a_token_a_step(configs: Configs) -> None:
    bench = bench_of(setup_of(configs), 2, 3)
    bench._draft(1)
    # 4 passes over 2K = 6 tokens each.
    assert used_slots(bench.state.draft.cache) == list(range(39, 39 + 4 - 1 + 6))
    assert not used_slots(bench.state.cache)
    assert np.asarray(bench.state.draft.cached).tolist() == [43, 43]


@pytest.mark.parametrize("batch", [2, 8])
def test_prefill_reads_the_context_but_its_last_token(configs: Configs, batch: int) -> None:
    bench = bench_of(setup_of(configs), batch, 3)
    width = bench.plan.prefill_rows
    assert width == {2: 1, 8: 2}[batch]
    found = bench._prefill(1)
    assert found.median > 0
    for cache in (bench.state.cache, bench.state.draft.cache):
        rows = np.any(np.asarray(cache.k) != 0, axis=(0, 2, 4))
        assert np.all(rows[:width, :39]) and not rows[width:].any()


def test_measured_and_bytes(configs: Configs) -> None:
    setup = setup_of(configs)
    bench = bench_of(setup, 2, 3)
    found = bench.measure(2, prefill=False)
    assert found.window == 128 + 16 * 8 and found.num_slots == 256 and found.prefill_tokens_per_second is None
    assert found.draft is not None and found.compilation > found.step.median
    for spread in (found.step, found.host, found.target, found.draft):
        assert 0 < spread.min <= spread.median <= spread.max
    assert bench_of(setup, 1, 0).measure(1, prefill=True).draft is None


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_bytes_of_a_step_and_of_the_plan(configs: Configs, quantization: str | None) -> None:
    """Of the target every matrix but its embedding, of the draft all (its head is the embedding); 40 tokens of each."""
    setup = setup_of(configs, quantization=quantization)
    bench = bench_of(setup, 2, 3)
    sizes = {name: sum(x.nbytes for x in jax.tree.leaves(p)) for name, p in bench.params.items()}
    live = 2 * 2 * 40 * 2 * 16 * 4  # k and v, rows, tokens, heads, their width, bytes
    plain = sizes["target"] - V * 32 * 4 + 2 * live
    assert setup.step_bytes(2, 0) == plain
    assert setup.step_bytes(2, 3) == plain + sizes["draft"] + live
    assert bench.plan.weight_bytes == sum(sizes.values())


def test_copy_rate_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=2.0)
    monkeypatch.setattr(step_run.time, "perf_counter", lambda: next(clock))
    assert copy_rate(4096, 3) == Spread(*[2 * 4096 * step_run._COPIES / 2.0] * 3)


# -- what is said ---------------------------------------------------------------------------------------------------


def run(configs: Configs, tmp_path: Path, *arguments: str, draft: str | None = None) -> dict[str, Any]:
    path = tmp_path / "report.json"
    models = ["--target", configs.target, "--draft", draft or configs.draft]
    sizes = ["--cache", "128", "--context", "40", "--repeats", "2", "--steps-per-dispatch", "2"]
    assert main(["step", *models, *sizes, "--output", str(path), *arguments]) == 0
    return json.loads(path.read_text())


def test_report_and_table(configs: Configs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "steps.svg"
    report = run(configs, tmp_path, "-k", "2", "--batch", "2", "--prefill", "--plot", str(plot))
    assert report["finished"] is True and report["environment"]["platform"] == "cpu"
    settings = report["settings"]
    assert (settings["dtype"], settings["implementation"], settings["context"], settings["cache"]) == (
        "float32", "xla", 40, 128,
    )  # fmt: skip
    assert settings["mask_token_id"] == MASK and settings["greedy_program"] is False
    results = report["results"]
    assert [(r["batch"], r["num_speculative_tokens"]) for r in results] == [(2, 0), (2, 2)]
    plain = results[0]
    for r in results:
        assert r["plain_seconds"] == plain["step_seconds"]
        assert r["break_even"] == r["step_seconds"]["median"] / plain["step_seconds"]["median"]
        assert (r["draft_seconds"] is None) == (r["draft_share"] is None) == (r["num_speculative_tokens"] == 0)
        assert math.isclose((r["draft_share"] or 0) + r["target_share"] + r["rest_share"], 1)
        assert r["bytes_per_second"] == r["bytes_per_step"] / r["step_seconds"]["median"]
        assert r["share_of_copy"] == r["bytes_per_second"] / report["copy_bytes_per_second"]["median"]
        assert r["prefill_tokens_per_second"]["median"] > 0 and r["compile_seconds"] > 0
        assert r["peak_bytes"] is None  # a CPU does not tell
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("batch"))
    assert len(lines) == header + 1 + len(results)
    assert [line.split()[:2] for line in lines[header + 1 :]] == [["2", "-"], ["2", "2"]]
    assert "device copy" in lines[header - 2] and "<svg" in plot.read_text()


def test_without_a_draft(configs: Configs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(configs, tmp_path, "--batch", "2", draft="none")
    (result,) = report["results"]
    assert (result["num_speculative_tokens"], result["break_even"], result["draft_share"]) == (0, 1.0, None)
    assert result["prefill_tokens_per_second"] is None and "prefill" not in capsys.readouterr().out
    assert list(report["settings"]["num_parameters"]) == ["target"]


def test_the_pair_that_comes_with_the_package_is_the_default_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_hand(setup: Setup, cases: list[tuple[int, int]], args: Any) -> Iterator[tuple[int, int, Measured]]:
        for batch, k in cases:
            yield batch, k, measured(batch * (k + 2.0))

    monkeypatch.setattr(step, "_measure", by_hand)
    path = tmp_path / "report.json"
    assert main(["step", "--output", str(path)]) == 0
    report = json.loads(path.read_text())
    settings = report["settings"]
    assert (settings["target"], settings["draft"], settings["mask_token_id"]) == ("demo-target", "demo-draft", 3)
    assert (settings["cache"], settings["context"], settings["steps_per_dispatch"]) == (1024, 512, 8)
    # Every batch beside its own plain decoding.
    found = [(r["batch"], r["num_speculative_tokens"], r["break_even"]) for r in report["results"]]
    assert found == [(b, k, pytest.approx((k + 2) / 2)) for b in (1, 8) for k in (0, 4, 8, 12)]


def measured(step_ms: float = 4.0, draft_ms: float | None = None, **values: Any) -> Measured:
    def spread(ms: float) -> Spread:
        return Spread(ms / 1e3, ms / 2e3, ms / 1e3)

    draft = None if draft_ms is None else spread(draft_ms)
    found = Measured(256, 384, spread(step_ms), spread(0.25), 7.06, spread(3.0), draft, None)
    return dataclasses.replace(found, **values)


def results_by_hand() -> list[Result]:
    copy = Spread(4e12, 4e12, 4e12)
    plain = measured(prefill_tokens_per_second=Spread(123.4, 1, 200))
    drafted = measured(10.0, 2.0, prefill_tokens_per_second=Spread(99.5, 1, 200))
    return [
        Result(1, 0, plain, plain.step, 16_000_000_000, copy, None),
        Result(1, 8, drafted, plain.step, 20_000_000_000, copy, 3 << 29),
    ]


def test_rows_by_hand() -> None:
    table = step_report.table(prefill=True)
    plain, drafted = map(table.row, results_by_hand())
    assert plain.split() == [
        "1", "-", "4.00", "-", "1.00", "-", "75%", "25%", "16.000", "4000.0", "100%", "0.25", "7.1", "-", "123",
    ]  # fmt: skip
    assert drafted.split() == [
        "1", "8", "4.00", "10.00", "2.50", "20%", "30%", "50%", "20.000", "2000.0", "50%", "0.25", "7.1", "1.50", "100",
    ]  # fmt: skip
    for header, value in (("PARD ms", "10.00"), ("of copy", "50%"), ("peak GiB", "1.50")):
        end = table.header.index(header) + len(header)
        assert drafted[:end].endswith(value)
    assert "prefill" not in step_report.table(prefill=False).header


def test_figure_by_hand() -> None:
    pytest.importorskip("matplotlib")
    times, parts = step_report.draw(results_by_hand(), "title").axes
    plain, drafted = times.lines[:2]
    assert list(plain.get_ydata()) == [4.0, 4.0] and (list(drafted.get_xdata()), list(drafted.get_ydata())) == (
        [8],
        [10],
    )
    assert [label.get_text() for label in parts.get_yticklabels()] == ["plain, batch 1", "K=8, batch 1"]
    np.testing.assert_allclose([bar.get_width() for bar in parts.patches], [0, 0.2, 0.75, 0.3, 0.25, 0.5])


# -- what is refused ------------------------------------------------------------------------------------------------

TINY = ["--cache", "128", "--context", "40", "--steps-per-dispatch", "8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "qwen4", "--draft", "none"], "'qwen4' is neither"),
        (["--target", "TARGET", "--draft", "gpt-2"], "demo-draft"),
        (["--target", "TARGET"], "needs a draft"),
        (["--draft", "none", "-k", "4"], "-k belongs to a draft"),
        (["--draft", "none", "--mask-token-id", "4"], "--mask-token-id belongs to a draft"),
        (["--target", "TARGET", "--draft", "OTHER", *TINY], f"lacks mask id {V - 1}"),
        (["--target", "TARGET", "--draft", "DRAFT", "--mask-token-id", str(V), *TINY], f"the mask token id {V} is not"),
        (["--target", "TARGET", "--draft", "DRAFT", "-k", "11", *TINY], "what fits: --context 32, --cache 136"),
        (["--target", "TARGET", "--draft", "DRAFT", "-k", "129", *TINY, "--steps-per-dispatch", "1"], "129"),
        (["--target", "TARGET", "--draft", "DRAFT", "--cache", "1024"], "max_position_embeddings=512"),
        (["--target", "qwen3-32b", "--draft", "qwen3-0.6b", "--dtype", "int3"], "int3"),
        (["--implementation", "pallas"], "needs one NVIDIA GPU"),
        (["--context", "1"], "--context must be at least 2"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--batch", "1,0"], "expected numbers of at least 1"),
        (["--plot", "steps.gif"], "expected a name that ends in"),
        (["--output", "/no/such/place/report.json"], "there is no directory"),
    ],
)  # fmt: skip
def test_refusals(
    configs: Configs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(step, "copy_rate", lambda *_: pytest.fail("measured something before it refused"))
    names = {"TARGET": configs.target, "DRAFT": configs.draft, "OTHER": configs.other}
    assert main(["step", *(names.get(a, a) for a in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_a_context_that_just_fits(configs: Configs) -> None:
    setup_of(configs, num_steps=8).check(1, 10)
    with pytest.raises(ValueError, match=r"can add are 129, but --cache is 128; what fits: --context 40, --cache 129"):
        setup_of(configs, num_steps=8, context=41).check(1, 10)
    with pytest.raises(ValueError, match=r"what fits: --cache 168, or fewer"):  # no context does
        setup_of(configs, num_steps=8).check(1, 15)


def test_too_little_memory(
    configs: Configs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "device_memory", lambda device: 8 << 20)
    models = ["--target", configs.target, "--draft", configs.draft]
    assert main(["step", *models, *TINY, "-k", "4", "--batch", "1,512"]) == 2
    err = capsys.readouterr().err
    assert "max_num_seqs=512 needs" in err and "What fits: " in err and "max_num_seqs is --batch" in err
