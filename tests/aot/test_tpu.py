"""Prefill and the step compiled for real TPUs by libtpu, on a machine that has none. Byte counts are the compiler's."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pard_jax.bench.__main__ import main
from pard_jax.bench.aot_compile import WEIGHTS, Analysis, analyse, chip_memory, open_topology
from pard_jax.bench.shapes import model_shape
from pard_jax.bench.step_setup import Setup
from pard_jax.models import param_bytes

pytestmark = [
    pytest.mark.aot_tpu,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
    pytest.mark.timeout(600),
]

MIB = 1 << 20
Case = tuple[str, int, int, int, str]
TARGET, K = model_shape("qwen3-4b"), 12
# Topology, cache, rows, K, weights. Single tokens (K = 0) are what a compiler rearranges caches for.
CASES = [
    ("v5e:1x1", 4096, 1, K, "bfloat16"),
    ("v5e:1x1", 4096, 1, K, "int8"),
    ("v6e:1x1", 32768, 1, K, "bfloat16"),
    ("v5e:2x2", 32768, 1, K, "bfloat16"),
    ("v5e:1x1", 4096, 1, 0, "bfloat16"),
    ("v6e:1x1", 4096, 8, 0, "bfloat16"),
]


@pytest.fixture(scope="module", autouse=True)
def no_cache() -> Iterator[None]:
    """JAX warns where it cannot read a TPU's program back."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@functools.cache
def analysis(topology: str, cache: int, rows: int, k: int, weights: str) -> Analysis:
    """Qwen3-4B with PARD-Qwen3-0.6B."""
    dtype, quantization = WEIGHTS[weights]
    mesh = open_topology(topology)
    setup = Setup(
        target=TARGET,
        draft=model_shape("qwen3-0.6b"),
        mask_token_id=151670,
        dtype=jnp.dtype(dtype),
        implementation="xla",
        specialize=False,
        chunk_size=256,
        num_steps=8,
        cache=cache,
        context=cache,
        memory_bytes=None,
        mesh=mesh,
        quantization=quantization,
    )
    return analyse(setup, rows, k, chip_memory(mesh))


def layers(case: Case) -> int:
    return 36 + (28 if case[3] else 0)


def chips(case: Case) -> int:
    return 4 if case[0] == "v5e:2x2" else 1


@pytest.mark.parametrize(("topology", "gib"), [("v5e:1x1", 15.75), ("v5e:2x2", 15.75), ("v6e:1x1", 31.25)])
def test_memory_of_a_chip(topology: str, gib: float) -> None:
    assert chip_memory(open_topology(topology)) == gib * 1024 * MIB


@pytest.mark.parametrize("case", CASES)
def test_temporaries_are_small(case: Case) -> None:
    for program in analysis(*case).programs:
        assert program.temporaries is not None and program.temporaries < 64 * MIB, program


@pytest.mark.parametrize("case", CASES)
def test_caches_are_given_back_in_place(case: Case) -> None:
    found = analysis(*case)
    assert found.cache_bytes == 2 * layers(case) * 8 * found.plan.num_slots * 128 * 2 * case[2] // chips(case)
    for program in found.programs:
        # And the small arrays of the state.
        assert program.aliased is not None and found.cache_bytes <= program.aliased < found.cache_bytes + MIB


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[4] != "int8"]
)  # a layer's weights are, to vector memory
def test_no_cache_is_copied(case: Case) -> None:
    """Neither as a whole nor layer by layer, which would need fewer temporaries."""
    found = analysis(*case)
    layer = found.cache_bytes // (2 * layers(case))
    for program in found.programs:
        assert program.hlo is not None and program.hlo.largest_copy < layer


@pytest.mark.parametrize("case", CASES)
def test_arguments_are_hardly_padded(case: Case) -> None:
    for program in analysis(*case).programs:
        assert program.hlo is not None and program.arguments is not None
        assert program.hlo.worst_padding < 2
        arguments = program.hlo.arguments
        assert sum(a.padded for a in arguments) < 1.01 * sum(a.size for a in arguments)
        # What is read of the program's text is what the compiler counts.
        assert abs(sum(a.padded for a in arguments) - program.arguments) < MIB


@pytest.mark.parametrize("case", CASES)
def test_no_sort_over_the_vocabulary(case: Case) -> None:
    for program in analysis(*case).programs:
        assert program.hlo is not None and program.hlo.longest_sort <= 32  # stop ids may be


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_enough_and_hardly_more(case: Case) -> None:
    found = analysis(*case)
    assert found.fits and found.needed < found.memory_bytes
    assert found.needed <= found.plan.total_bytes < 1.05 * found.needed


def test_wide_prefill_copies_no_cache_either() -> None:
    """Rows by their ids. Sampling for so many needs more memory than the bound on temporaries; it is planned for."""
    case = ("v6e:1x1", 256, 128, 0, "bfloat16")
    found = analysis(*case)
    assert found.plan.prefill_rows == 2
    prefill, _ = found.programs
    assert prefill.hlo is not None and prefill.hlo.largest_copy < found.cache_bytes // (2 * layers(case))
    assert prefill.temporaries is not None and prefill.temporaries < 64 * MIB
    assert found.needed <= found.plan.total_bytes < 1.05 * found.needed


def test_int8_weights_are_read_as_they_are() -> None:
    """Half the bytes, and no matrix in bfloat16 beside them: it is converted within the product."""
    weights = sum(param_bytes(config, jnp.bfloat16, "int8") for config in (TARGET, model_shape("qwen3-0.6b")))
    plain, eight = (analysis("v5e:1x1", 4096, 1, K, kind) for kind in ("bfloat16", "int8"))
    assert eight.needed < plain.needed - 0.98 * weights


def test_two_collectives_a_layer() -> None:
    for program in analysis("v5e:2x2", 32768, 1, K, "bfloat16").programs:
        assert program.hlo is not None
        assert program.hlo.layers == [{"all-reduce": 2}, {"all-reduce": 2}]  # draft and target
        assert set(program.hlo.others) == {"all-reduce"}
    for program in analysis("v5e:1x1", 4096, 1, K, "bfloat16").programs:
        assert program.hlo is not None and program.hlo.layers == [{}, {}] and program.hlo.others == {}


def test_what_does_not_fit_is_said_and_what_it_would_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    arguments = ["--target", "qwen3-14b", "--draft", "none", "--json", str(path), "--table"]
    assert main(["aot", *arguments]) == 0
    (result,) = json.loads(path.read_text())["results"]
    weights = model_shape("qwen3-14b").num_parameters * 2
    assert result["fits"] is False and weights < result["needed_bytes"] < 1.1 * weights
    assert result["programs"][0] == {
        "program": "prefill", "fits": False, "needed_bytes": result["programs"][0]["needed_bytes"],
        "argument_bytes": None, "temporary_bytes": None, "alias_bytes": None, "peak_bytes": None,
        "compile_seconds": None,
    }  # fmt: skip
    assert f"| qwen3-14b | bfloat16 | no ({result['needed_bytes'] / 2**30:.1f}) |" in capsys.readouterr().out


@pytest.mark.parametrize("topology", ["v5e", "v9:1x1", "v5e:3x3"])
def test_topologies_that_are_none(topology: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aot", "--topology", topology]) == 2
    err = capsys.readouterr().err
    assert f"libtpu cannot make the topology '{topology}'" in err and len(err.splitlines()) == 1
