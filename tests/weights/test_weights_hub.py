"""What a user may call a model: directories, hub ids with and without a network, and everything that is neither."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pard_jax.weights import CheckpointNotFoundError, resolve_checkpoint

SHA = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).parents[2]


def test_a_directory_is_taken_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_checkpoint(tmp_path) == tmp_path
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("org/name") == Path("org/name")  # what exists wins over the hub
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_checkpoint("~/org") == tmp_path / "org"


@pytest.mark.parametrize("model", ["/absent/model", "./absent", "../absent", "~/absent", "a/b/c", "org/name/", "-x/y"])
def test_a_path_that_does_not_exist(model):
    with pytest.raises(CheckpointNotFoundError, match="does not exist; expected a checkpoint directory or a hub id"):
        resolve_checkpoint(model)


def test_an_empty_name():
    with pytest.raises(CheckpointNotFoundError, match="name is empty"):
        resolve_checkpoint("")


def test_a_path_object_is_never_a_hub_id():
    with pytest.raises(CheckpointNotFoundError, match=r"^org/name does not exist"):
        resolve_checkpoint(Path("org/name"))


def test_a_name_within_an_existing_directory_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"^models/typo does not exist"):
        resolve_checkpoint("models/typo")


@pytest.mark.parametrize(("name", "hint"), [("model.gguf", True), ("model.whl", True), ("model.safetensors", False)])
def test_a_file_is_no_checkpoint(tmp_path, name, hint):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointNotFoundError, match="is a file; expected a checkpoint directory") as error:
        resolve_checkpoint(tmp_path / name)
    assert ("python -m convert gguf-to-hf" in str(error.value)) is hint


def resolve(*models: tuple[str, str | None] | str, **env: str) -> list[str]:
    """The directory or the error's message of each (model, revision), in a fresh process: the hub library reads its
    environment once. Nothing may take longer than 10 s."""
    code = (
        "import json, sys, time\nfrom pard_jax.weights import *\nresults = []\n"
        "for model, revision in json.loads(sys.argv[1]):\n"
        "    start = time.monotonic()\n"
        "    try: results.append(str(resolve_checkpoint(model, revision=revision, progress=False)))\n"
        "    except CheckpointNotFoundError as e: results.append(str(e))\n"
        "    assert time.monotonic() - start < 10\n"
        "print(json.dumps(results))"
    )
    proxies = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and k.lower() not in proxies}
    pairs = [model if isinstance(model, tuple) else (model, None) for model in models]
    command = [sys.executable, "-c", code, json.dumps(pairs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=clean | env, timeout=120)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert not any("\n" in result for result in results)
    return results


@pytest.fixture
def cache(tmp_path):
    """A hub cache that holds org/name at `main` and at one commit."""
    root = tmp_path / "hub" / "models--org--name"
    (root / "snapshots" / SHA).mkdir(parents=True)
    (root / "snapshots" / SHA / "config.json").write_text("{}")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(SHA)
    return tmp_path


def test_offline(cache):
    names = ["org/name", ("org/name", "main"), ("org/name", SHA), "org/other", ("org/name", "v2")]
    *found, other, revision = resolve(*names, HF_HUB_OFFLINE="1", HF_HOME=str(cache))
    assert found == [str(cache / "hub" / "models--org--name" / "snapshots" / SHA)] * 3
    assert "org/other is not a local directory, and HF_HUB_OFFLINE is set" in other
    assert "pass a local checkpoint directory" in other and str(cache) in other
    assert "org/name at revision v2 is not a local directory" in revision


def test_no_network_falls_back_on_the_cache_or_fails_at_once(cache):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # bound, but nobody listens
        endpoint = f"http://127.0.0.1:{s.getsockname()[1]}"
        found, message = resolve("org/name", "org/other", HF_ENDPOINT=endpoint, HF_HOME=str(cache))
    assert found.endswith(SHA)
    assert "org/other is not a local directory, and the Hugging Face hub is out of reach (ConnectError" in message


def test_a_hub_that_never_answers_does_not_hang(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (message,) = resolve("org/name", HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path), HF_HUB_ETAG_TIMEOUT="1")
    assert "out of reach (ReadTimeout" in message


class Hub(http.server.ThreadingHTTPServer):
    """A hub in miniature: ``answers[path]`` is (status, headers)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, dict[str, str]]] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        status, headers = self.server.answers.get(self.path.split("?")[0], (404, {}))
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_the_hub_refuses(hub, tmp_path):
    for repo, status, code in (
        ("private", 401, "RepoNotFound"), ("absent", 404, "RepoNotFound"), ("gated", 403, "GatedRepo"), ("ill", 500, "")
    ):  # fmt: skip
        hub.answers[f"/api/models/org/{repo}"] = (status, {"X-Error-Code": code})
    hub.answers["/api/models/org/fine/revision/v9"] = (404, {"X-Error-Code": "RevisionNotFound"})
    models = ["org/private", "org/absent", "org/gated", "org/ill", ("org/fine", "v9")]
    private, absent, gated, ill, revision = resolve(*models, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path))
    nowhere = "is neither a local directory nor a repository of the Hugging Face hub that can be read"
    assert f"org/private {nowhere}" in private and f"org/absent {nowhere}" in absent and "HF_TOKEN" in private
    assert "org/gated is gated on the Hugging Face hub: accept its terms there and set HF_TOKEN" in gated
    assert "org/ill is not a local directory, and the Hugging Face hub is out of reach (HfHubHTTPError" in ill
    assert revision == "the Hugging Face hub has org/fine, but no revision 'v9' of it"


def test_the_download_takes_what_is_needed(tmp_path, monkeypatch):
    """Which files are asked for is decided here; how they are fetched is the hub library's business."""
    import huggingface_hub

    asked = {}

    def snapshot_download(repo, **kwargs):
        asked.update(kwargs, repo=repo)
        return str(tmp_path)

    class Api:
        def model_info(self, repo, revision, timeout):
            asked.update(probe=(repo, revision), timeout=timeout)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert resolve_checkpoint("org/name", revision="v1") == tmp_path
    assert asked["repo"] == "org/name" and asked["probe"] == ("org/name", "v1") and asked["revision"] == "v1"
    assert 0 < asked["timeout"] <= 30 and asked["local_files_only"] is False
    files = [
        "config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
        "merges.txt", "chat_template.jinja",
    ]  # fmt: skip
    others = [
        "pytorch_model.bin", "original/consolidated.00.pth", "original/params.json", "onnx/model.onnx",
        "consolidated.safetensors", "model.gguf", "README.md", "flax_model.msgpack",
    ]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(
        files + others, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == files


def test_silent_bars_are_silent(capsys):
    from pard_jax.weights.hub import _SilentBar

    for _ in _SilentBar(range(3), total=3, disable=False):
        time.sleep(0.001)
    assert capsys.readouterr().err == ""
