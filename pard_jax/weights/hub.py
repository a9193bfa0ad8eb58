"""From what a user calls a model, a local directory or a Hugging Face hub id, to a directory on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from pard_jax.weights.errors import CheckpointNotFoundError

# What the loader and the tokenizer read, and no other format of the same weights.
ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# Subdirectories (`original/`, `onnx/`) and Mistral's consolidated.safetensors hold the weights a second time.
IGNORE_PATTERNS = ("*/*", "consolidated*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class _SilentBar(tqdm):
    """A progress bar that never draws."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def resolve_checkpoint(model: str | Path, *, revision: str | None = None, progress: bool = True) -> Path:
    """The local directory of a checkpoint, downloaded if need be.

    Args:
        model: a directory (Hugging Face layout, or an Orbax directory made by ``python -m convert hf-to-orbax``), or
            a hub id such as ``"amd/PARD-Qwen3-0.6B"``. What exists on disk wins.
        revision: branch, tag or commit of a hub id; a local directory has none.
        progress: show a progress bar while downloading.

    Raises:
        CheckpointNotFoundError: a path that does not exist or is a file; or a hub id that cannot be had: unknown,
            gated, or the hub is out of reach (``HF_HUB_OFFLINE`` or no network) and the local cache has no copy.
    """
    if not str(model):
        raise CheckpointNotFoundError("the model's name is empty; expected a checkpoint directory or a hub id")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        hint = "; convert it with `python -m convert gguf-to-hf`" if path.suffix in (".gguf", ".whl") else ""
        raise CheckpointNotFoundError(f"{model} is a file; expected a checkpoint directory or a hub id{hint}")
    if _looks_like_path(model):
        raise CheckpointNotFoundError(f"{model} does not exist; expected a checkpoint directory or a hub id")
    return _download(str(model), revision, progress)


def _looks_like_path(model: str | Path) -> bool:
    """Whether no hub id was meant. ``org/name`` is a path only where the directory ``org`` exists."""
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        return True
    return "/" in model and Path(model).parent.is_dir()


def _download(repo: str, revision: str | None, progress: bool) -> Path:
    # Imported here: it takes a while, and local directories need none of it.
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    wanted = repo if revision is None else f"{repo} at revision {revision}"
    unreachable = None
    try:
        # snapshot_download looks the repository up without any time limit; this look-up has one.
        HfApi().model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except GatedRepoError as e:
        raise _gated(wanted) from e
    except RevisionNotFoundError as e:
        raise CheckpointNotFoundError(f"the Hugging Face hub has {repo}, but no revision {revision!r} of it") from e
    except RepositoryNotFoundError as e:
        raise CheckpointNotFoundError(
            f"{repo} is neither a local directory nor a repository of the Hugging Face hub that can be read; check the "
            "spelling, or set HF_TOKEN if it is private"
        ) from e
    except Exception as e:  # the errors of the HTTP library beneath the hub's, which changes with its version
        unreachable = e
    try:
        directory = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(ALLOW_PATTERNS),
            ignore_patterns=list(IGNORE_PATTERNS),
            local_files_only=unreachable is not None,
            tqdm_class=None if progress else _SilentBar,
        )
    except GatedRepoError as e:
        raise _gated(wanted) from e
    except Exception as e:  # as above
        cause = unreachable or e
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set and the local cache has no complete copy"
        elif unreachable is not None:
            why = f"the Hugging Face hub is out of reach ({_one_line(cause)}) and the local cache has no complete copy"
        else:
            why = f"the download failed ({_one_line(cause)})"
        raise CheckpointNotFoundError(
            f"{wanted} is not a local directory, and {why}; pass a local checkpoint directory, or download it "
            f"once with network access (cache: {os.environ.get('HF_HUB_CACHE', constants.HF_HUB_CACHE)})"
        ) from cause
    return Path(directory)


def _gated(wanted: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{wanted} is gated on the Hugging Face hub: accept its terms there and set HF_TOKEN, or pass a local directory"
    )


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no details'}"
