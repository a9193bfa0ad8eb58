"""``python -m pard_jax.bench aot`` where libtpu is not needed: the same on CPUs, its figures by hand, its refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from pard_jax.bench import aot, aot_compile, aot_report
from pard_jax.bench.__main__ import main
from pard_jax.bench.aot_compile import Analysis, Compiled, analyse
from pard_jax.bench.aot_report import Case, Result
from pard_jax.bench.hlo import Argument, Hlo
from pard_jax.bench.step_setup import Setup
from pard_jax.engine.memory import MemoryPlan
from pard_jax.models import make_mesh
from tests.helpers.models import hf_config, model_config

V, MASK = 96, 95
GIB = 1 << 30
NO_ROOM = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (16.5G) exceeds "
    "available HBM (15.75G)."
)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """The command sets some for the whole process."""
    names = ("jax_platforms", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, str]:
    contents = {
        "target": hf_config("qwen3", vocab_size=V, num_hidden_layers=2),
        "draft": hf_config("llama", vocab_size=V, num_hidden_layers=3, tie_word_embeddings=True, pard_token=MASK),
    }
    for name, config in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    return {name: str(tmp_path / f"{name}.json") for name in contents}


def setup_of(mesh: Mesh) -> Setup:
    return Setup(
        target=model_config(vocab_size=V, num_hidden_layers=2),
        draft=model_config("llama", vocab_size=V, num_hidden_layers=3, tie_word_embeddings=True),
        mask_token_id=MASK,
        dtype=jnp.dtype("float32"),
        implementation="xla",
        specialize=False,
        chunk_size=16,
        num_steps=4,
        cache=128,
        context=128,
        memory_bytes=None,
        mesh=mesh,
    )


# -- what is compiled -----------------------------------------------------------------------------------------------


def test_both_programs_of_two_devices() -> None:
    setup = setup_of(make_mesh(2))
    found = analyse(setup, 1, 4, GIB)
    slots = found.plan.num_slots
    assert [program.program for program in found.programs] == ["prefill", "decode"] and found.fits
    assert found.cache_bytes == (2 + 3) * 2 * slots * 16 * 4  # keys and values of two heads, of which each has one
    for program in found.programs:
        assert program.hlo is not None and program.seconds is not None
        assert [layer["all-reduce"] for layer in program.hlo.layers] == [2, 2]
        assert program.arguments is not None and program.aliased is not None and program.temporaries is not None
        assert found.cache_bytes <= program.aliased < program.arguments <= program.needed
    prefill, decode = found.programs
    # The target's output matrix, which prefill does not take, is counted all the same.
    assert prefill.arguments is not None and decode.arguments is not None
    assert decode.arguments - prefill.arguments >= V * 32 * 4 // 2
    assert prefill.needed >= decode.arguments


class Fails:
    """What lowering gave, by stand-in."""

    def __init__(self, message: str) -> None:
        self.message = message

    def compile(self) -> Any:
        raise jax.errors.JaxRuntimeError(self.message)


def test_what_does_not_fit() -> None:
    found = aot_compile._compile("decode", lambda: Fails(NO_ROOM))
    assert (found.fits, found.needed, found.arguments) == (False, int(16.5 * GIB), None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        aot_compile._compile("decode", lambda: Fails("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"))


# -- what is said ---------------------------------------------------------------------------------------------------


def analysis_of(needed_gib: float, *, fits: bool = True) -> Analysis:
    plan = MemoryPlan(4096, 4224, (4224,), 2 * GIB, GIB, GIB // 2, None)
    found = Hlo(
        [{"all-reduce": 2}, {"all-reduce": 2}], {"all-reduce": 3}, 1 << 19, 32, [Argument("s8[]", 100000, 125000)]
    )
    needed = int(needed_gib * GIB)
    if not fits:
        return Analysis(plan, GIB, 16 * GIB, (Compiled("prefill", 1), Compiled("decode", needed)))
    decode = Compiled("decode", needed, 3 * GIB, 12 << 20, GIB, 4 * GIB, found, 7.06)
    prefill = dataclasses.replace(decode, program="prefill", needed=1, hlo=dataclasses.replace(found, layers=[{}, {}]))
    return Analysis(plan, GIB, 16 * GIB, (prefill, decode))


def results_by_hand() -> list[Result]:
    return [
        Result(Case("v5e:1x1", "qwen3-4b", "bfloat16", 4096), analysis_of(9.66)),
        Result(Case("v5e:1x1", "qwen3-4b", "bfloat16", 1000), analysis_of(9.5)),
        Result(Case("v5e:1x1", "qwen3-14b", "bfloat16", 4096), analysis_of(28.4, fits=False)),
    ]


def test_rows_by_hand() -> None:
    results = results_by_hand()
    table = aot_report.table([r.case for r in results])
    prefill, decode = map(table.row, aot_report.lines(results[0]))
    assert decode.split() == [
        "v5e:1x1", "qwen3-4b", "bfloat16", "4096", "decode", "yes", "9.66", "16.00", "3.50", "4.00", "3.00", "1.25",
        "12.0", "1024.0", "1024.0", "0.5", "7.1", "2", "all-reduce",
    ]  # fmt: skip
    assert prefill.endswith("none")
    for header, value in (("needed GiB", "9.66"), ("compile s", "7.1")):
        end = table.header.index(header) + len(header)
        assert decode[:end].endswith(value)
    _, decode = map(table.row, aot_report.lines(results[2]))
    assert decode.split()[5:10] == ["no", "28.40", "16.00", "3.50", "-"] and decode.endswith("-")


def test_what_fits_by_hand() -> None:
    assert aot_report.what_fits(results_by_hand()).splitlines() == [
        "| target | weights | v5e:1x1 (16.00 GiB), 4k | v5e:1x1 (16.00 GiB), 1000 |",
        "| --- | --- | --- | --- |",
        "| qwen3-4b | bfloat16 | 9.7 | 9.5 |",
        "| qwen3-14b | bfloat16 | no (28.4) | - |",
    ]


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topologies of CPUs, by the numbers in their names."""

    def open_topology(name: str) -> Mesh:
        return make_mesh(int(name.removeprefix("cpu:")))

    monkeypatch.setattr(aot, "open_topology", open_topology)
    monkeypatch.setattr(aot, "chip_memory", lambda mesh: GIB)


def test_report(
    configs: dict[str, str], tmp_path: Path, on_cpus: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked = []

    def by_hand(setup: Setup, num_rows: int, k: int, memory_bytes: int) -> Analysis:
        asked.append((setup.mesh.size, setup.dtype.name, setup.cache, num_rows, k, memory_bytes))
        return analysis_of(setup.cache / 100)

    monkeypatch.setattr(aot, "analyse", by_hand)
    path = tmp_path / "report.json"
    models = ["--target", configs["target"], "--draft", configs["draft"], "--json", str(path), "--table"]
    sizes = ["--topology", "cpu:1,cpu:2", "--cache", "128,256", "--weights", "float32", "-k", "3", "--batch", "2"]
    assert main(["aot", *models, *sizes]) == 0
    assert asked == [(n, "float32", cache, 2, 3, GIB) for n in (1, 2) for cache in (128, 256)]
    report = json.loads(path.read_text())
    assert report["finished"] is True and report["environment"]["platform"] == "cpu"
    first = report["results"][0]
    assert (first["topology"], first["cache"], first["weights"], first["fits"]) == ("cpu:1", 128, "float32", True)
    assert first["planned_bytes"] == int(3.5 * GIB) and first["memory_bytes"] == 16 * GIB
    decode = first["programs"][1]
    assert decode["layer_collectives"] == [{"all-reduce": 2}] * 2 and decode["other_collectives"] == {"all-reduce": 3}
    assert (decode["worst_padding"], decode["longest_sort"], decode["largest_copy_bytes"]) == (1.25, 32, 1 << 19)
    lines = capsys.readouterr().out.splitlines()
    assert "batch 2" in lines[0] and "K=3" in lines[0]
    assert sum(line.startswith("cpu:") for line in lines) == 2 * len(asked)
    assert lines[-1].startswith("| ") and lines[-1].endswith("| float32 | 1.3 | 2.6 | 1.3 | 2.6 |")


# -- what is refused ------------------------------------------------------------------------------------------------


def test_without_libtpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(aot_compile.importlib.util, "find_spec", lambda name: None)
    assert main(["aot"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f'pip install "jax[tpu]=={jax.__version__}"' in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "qwen4"], "'qwen4' is neither"),
        (["--target", "qwen3-4b,,"], "expected names with commas between them"),
        (["--draft", "gpt-2"], "'gpt-2' is neither"),
        (["--draft", "none", "-k", "4"], "-k belongs to a draft"),
        (["--weights", "int3"], "expected of bfloat16, int8, float32"),
        (["--cache", "0"], "expected numbers of at least 1"),
        (["--cache", "50000"], "max_position_embeddings=40960"),
        (["--batch", "0"], "max_num_seqs=0"),
        (["-k", "0"], "-k must be at least 1"),
        (["-k", "200"], "200"),
        (["--target", "smollm2-135m"], "the mask token id"),
        (["--topology", "cpu:1,cpu:3"], "tensor_parallel_size=3 does not divide"),
        (["--json", "/no/such/place/report.json"], "there is no directory"),
    ],
)
def test_refusals(
    on_cpus: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(aot, "analyse", lambda *_: pytest.fail("compiled something before it refused"))
    if "--topology" not in arguments:
        arguments = [*arguments, "--topology", "cpu:1"]
    if "smollm2-135m" in arguments:
        arguments = [*arguments, "--mask-token-id", "151936"]
    assert main(["aot", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
