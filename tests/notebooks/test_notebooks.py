"""The notebooks run from their first cell to their last, and lie in the repository without outputs."""

from __future__ import annotations

import glob
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


class _KernelManager(AsyncKernelManager):
    """Starts kernels with the interpreter that runs the tests, whatever kernels are registered on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Executes a notebook in an empty directory; returns it with its outputs, and what an expression is at its end."""
    # A kernel is a process of its own and gets its settings from the environment. What it runs is worth optimizing,
    # unlike the tests' small programs.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    for name in ("PARD_NOTEBOOK_MODEL", "PARD_SOURCE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "PARD_JAX_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    (directory := tmp_path / "work").mkdir()

    def run(name: str, expression: str) -> tuple[nbformat.NotebookNode, Any]:
        notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
        probe = f"import json as _json\nprint(_json.dumps({expression}))"
        notebook.cells.append(nbformat.v4.new_code_cell(probe))
        client = NotebookClient(
            notebook,
            kernel_manager_class=_KernelManager,
            timeout=240,  # seconds a cell
            resources={"metadata": {"path": str(directory)}},
        )
        client.execute()
        return notebook, json.loads(_printed(notebook.cells.pop()))

    return run


def _printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def _shown(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    """What the notebook displays of a MIME type."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


def test_quickstart(run) -> None:
    notebook, found = run(
        "quickstart.ipynb",
        "dict(k=K, equal=equal, tokens=len(answer.outputs[0].token_ids), histogram=acceptance.acceptance_histogram, "
        "blocks=sum(block.num_tokens for block in recorder.blocks), plain=plain_speed, speeds=speeds, ks=ks, "
        "prompts_equal=[result['num_equal'] for result in results])",
    )
    assert found["equal"] is True
    assert found["tokens"] == found["blocks"] > 0
    assert len(found["histogram"]) == found["k"] + 1 and sum(found["histogram"][1:]) > 0  # something was accepted
    assert found["ks"] == [1, 2, 4, 8] and len(found["speeds"]) == 4 and min(found["plain"], *found["speeds"]) > 0
    assert found["prompts_equal"] == [2] * 5  # plain decoding and every K, on both prompts
    assert len(_shown(notebook, "image/png")) == 2
    (blocks,) = (html for html in _shown(notebook, "text/html") if "draft accepted" in html)
    assert blocks.count("<span title=") >= sum(found["histogram"])


@pytest.mark.timeout(600)
def test_train_a_draft(run) -> None:
    notebook, found = run(
        "train_a_draft.ipynb",
        "dict(equal=tokens['trained'] == tokens['untrained'], first=first['loss'], second=second['loss'], "
        "held_out=held_out, lengths={name: acceptance_length(histogram) for name, histogram in steps.items()}, "
        "settings=[FIRST_STEPS, STEPS, NUM_PROMPTS, len(samples)])",
    )
    first_steps, num_steps, num_prompts, num_samples = found["settings"]
    assert num_prompts // 2 < num_samples <= num_prompts
    assert len(found["first"]) == first_steps and len(found["second"]) == num_steps
    for losses in (found["first"], found["second"]):
        assert sum(losses[-4:]) / 4 < losses[0] - 0.5
    assert found["held_out"]["step"][-1] == num_steps and min(found["held_out"]["acceptance_length"]) >= 1
    assert found["equal"] is True
    assert found["lengths"]["trained"] > found["lengths"]["untrained"] + 0.05
    assert len(_shown(notebook, "image/png")) == 2


def test_qwen3_without_a_tpu(run) -> None:
    notebook, found = run(
        "qwen3_on_tpu.ipynb",
        "dict(model=MODEL, on_tpu=on_tpu, fitting=fitting, cases=cases, parameters={name: config.num_parameters for "
        "name, config in configs.items()}, metrics=answer.metrics.speculative_decoding.num_accepted_draft_tokens, "
        "results=_json.load(open('qwen3.json'))['results'])",
    )
    assert (found["model"], found["on_tpu"]) == ("demo", False)
    assert "No TPU is found" in "".join(map(_printed, (c for c in notebook.cells if c.cell_type == "code")))
    # The sizes that the models' cards state, in thousand millions.
    published = {"Qwen3-0.6B": 0.6, "Qwen3-1.7B": 1.7, "Qwen3-4B": 4.0, "Qwen3-8B": 8.2, "Qwen3-14B": 14.8}
    assert {name: round(count / 1e9, 1) for name, count in found["parameters"].items()} == published
    assert found["cases"][0] == [16, 1] and found["cases"][3] == [32, 1]
    for name, lengths in found["fitting"].items():
        # Weights of both models in bfloat16 against nine tenths of the memory: no plan can fit where they do not.
        weights = 2 * (found["parameters"][name] + found["parameters"]["Qwen3-0.6B"])
        assert [length is not None for length in (lengths[0], lengths[3])] == [weights < 14.4e9, weights < 28.8e9]
        assert [x or 0 for x in lengths[:3]] == sorted((x or 0 for x in lengths[:3]), reverse=True)
    assert found["metrics"] > 0
    assert [(r["method"], r["num_equal"]) for r in found["results"]] == [("plain", 3), ("pard", 3)]
    assert len(_shown(notebook, "image/png")) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_notebook_is_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    for cell in notebook.cells:
        assert cell.source
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            assert max(map(len, cell.source.splitlines())) <= 120
    assert {*notebook.metadata} <= {"accelerator", "colab", "kernelspec", "language_info"}
    # As Jupyter writes it, so that saving one changes no other line.
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"


def _installation() -> str:
    """The cell that installs, which stands first and is the same in all notebooks."""
    cells = [nbformat.read(path, as_version=4).cells for path in NOTEBOOKS]
    (source,) = {next(cell.source for cell in notebook if cell.cell_type == "code") for notebook in cells}
    return source


@pytest.mark.parametrize(
    ("there", "source", "packages"),
    [
        ({"pard_jax", "matplotlib"}, "", []),
        ({"pard_jax"}, "", ["matplotlib"]),
        ({"matplotlib"}, "git+https://host/pard-jax.git", ["pard-jax[train] @ git+https://host/pard-jax.git"]),
        ({"matplotlib", "/dev/vfio/[0-9]*"}, str(ROOT), [f"pard-jax[train,tpu] @ {ROOT.as_uri()}"]),
        ({"matplotlib", "libtpu"}, str(ROOT), [f"pard-jax[train,tpu] @ {ROOT.as_uri()}"]),
        ({"matplotlib", "nvidia-smi"}, str(ROOT), [f"pard-jax[train,cuda] @ {ROOT.as_uri()}"]),
        (
            {"matplotlib", "jax_cuda12_plugin", "nvidia-smi"},
            str(ROOT),
            ["jax[cuda12]", f"pard-jax[train] @ {ROOT.as_uri()}"],
        ),
        (set(), "", ["matplotlib", f"pard-jax[train] @ {ROOT.as_uri()}"]),  # the checkout around the notebook
    ],
)
def test_installation(there: set[str], source: str, packages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(glob, "glob", lambda pattern: [pattern] if pattern in there else [])
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append((command, check)))
    monkeypatch.setenv("PARD_SOURCE", source)
    monkeypatch.chdir(ROOT / "notebooks")
    exec(_installation(), {})
    assert commands == ([([sys.executable, "-m", "pip", "install", "-q", *packages], True)] if packages else [])


def test_installation_asks_for_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("PARD_SOURCE", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="pard-jax is not installed: set SOURCE"):
        exec(_installation(), {})
