"""Checkpoints of a training run: complete or absent, checked when they are read, and bound to the run's settings.

Orbax writes them, and a checkpoint that a killed run left half-written never counts for it. What Orbax does not see is
a file that changed afterwards (a flipped bit in an array is read as another number), so each checkpoint carries a list
of its files with their checksums, and of the arrays in it:

    DIR/settings.json           what the run was started with
    DIR/100/                    Orbax's checkpoint of step 100
    DIR/100/contents.json       its files and arrays
    DIR/damaged-200/            a checkpoint that could not be read, moved aside when the run went on from an older one
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

logger = logging.getLogger(__name__)

SETTINGS = "settings.json"
CONTENTS = "contents.json"
_OVERHEAD_BYTES = 1 << 20  # of Orbax's own files, generously


class Checkpoints:
    """The checkpoints in a directory, for one run.

    Args:
        directory: made when it is missing.
        settings: what decides how the run goes on, as JSON can hold it. A directory that holds checkpoints of other
            settings is refused.
        keep: how many checkpoints to keep, the latest ones; at least 1. With 2 there is one to fall back to.

    Raises:
        ValueError: the settings differ (every key is listed), or cannot be read.
        OSError: the directory cannot be written to.
    """

    def __init__(self, directory: str | Path, *, settings: Mapping[str, Any], keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1 checkpoint, got {keep}")
        check_settings(directory, settings)
        self.directory = Path(directory).expanduser().absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                enable_async_checkpointing=False,
                cleanup_tmp_directories=True,
            ),
        )
        self._current: int | None = None  # the step this object saved or restored last
        if not self.steps:  # of a run that ended before its first checkpoint nothing is left to contradict
            _write(self.directory / SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any) -> None:
        """Write the checkpoint of a step and wait until it is there. A second time for one step does nothing.

        Args:
            step: above those that are there.
            state: a tree of arrays, however sharded, and numbers.

        Raises:
            ValueError: there is a checkpoint of this step or a later one that this run has not restored.
            OSError: it could not be written (no space left, say). What was written of it is removed again, the
                checkpoints before are as they were, and it can be tried again.
        """
        if step == self._current:
            return
        if self.steps and step <= self.steps[-1]:
            raise ValueError(
                f"{self.directory} holds a checkpoint of step {self.steps[-1]}, so step {step} cannot be saved after "
                "it; resume from it, or choose another directory"
            )
        intact = f"that of step {self.steps[-1]} is intact" if self.steps else "there is none before it"
        failed = f"the checkpoint of step {step} could not be written to {self.directory} ({intact})"
        # Looked up first: when the space runs out within Orbax, its threads print pages of tracebacks.
        needed = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(state)) + _OVERHEAD_BYTES
        if (free := shutil.disk_usage(self.directory).free) < needed:
            raise OSError(
                errno.ENOSPC,
                f"{failed}: it takes {_size(needed)}, and {_size(free)} are free; make room, or keep fewer checkpoints",
            )
        try:
            self._manager.save(step, args=ocp.args.StandardSave(state))
        except Exception as e:  # Orbax raises what its storage raises, of many kinds
            for partial in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(partial, ignore_errors=True)
            self._manager.reload()
            raise OSError(f"{failed}: {_first_line(e)}") from e
        root = self.directory / str(step)
        files = {str(file.relative_to(root)): _checksum(file) for file in sorted(root.rglob("*")) if file.is_file()}
        _write(root / CONTENTS, json.dumps({"arrays": _described(state), "files": files}, indent=1))
        self._current = step

    def restore(self, abstract_state: Any) -> tuple[int, Any] | None:
        """(step, state) of the latest checkpoint that can be read; None where there is none at all.

        A damaged one is moved aside with a warning, and the one before is taken.

        Args:
            abstract_state: the tree as arrays or ``jax.ShapeDtypeStruct``; the arrays get its shardings, whatever they
                were saved with, and lie on the default device where it names none.

        Raises:
            ValueError: there are checkpoints, and none can be read; or the arrays in it are not those of
                ``abstract_state`` (all that differ are listed).
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps):
            root = self.directory / str(step)
            if fault := _fault(root):
                damaged[step] = fault
                continue
            _check_arrays(root, abstract_state)
            try:
                state = self._manager.restore(
                    step, args=ocp.args.StandardRestore(jax.tree.map(_placed, abstract_state))
                )
            except Exception as e:
                damaged[step] = _first_line(e)
                continue
            for other, fault in damaged.items():
                aside = self.directory / f"damaged-{other}"
                shutil.rmtree(aside, ignore_errors=True)
                (self.directory / str(other)).rename(aside)
                logger.warning(
                    "the checkpoint of step %d is damaged (%s); going on from step %d, and %s keeps what is left of it",
                    other, fault, step, aside,
                )  # fmt: skip
            self._manager.reload()
            self._current = step
            return step, state
        if damaged:
            faults = "; ".join(f"step {step}: {fault}" for step, fault in damaged.items())
            raise ValueError(
                f"no checkpoint in {self.directory} can be read ({faults}); remove them or choose another directory to "
                "start again"
            )
        return None

    def close(self) -> None:
        """Let go of the directory."""
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_settings(directory: str | Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on from checkpoints of other settings. Looks at the files alone, and writes nothing.

    Raises:
        ValueError: the settings differ (every key is listed), or cannot be read.
    """
    directory = Path(directory).expanduser().absolute()
    if not any(entry.name.isdigit() for entry in directory.glob("*")):
        return
    try:
        before = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ValueError(
            f"{directory} holds checkpoints, but its {SETTINGS} cannot be read ({e}), so it cannot be told "
            "whether they belong to this run; choose another directory"
        ) from None
    old, new = _flat(before), _flat(json.loads(json.dumps(settings)))  # as they would be read back
    differing = [
        f"{key}: {_shown(old, key)} there, {_shown(new, key)} now"
        for key in sorted(old.keys() | new.keys())
        if _shown(old, key) != _shown(new, key)
    ]
    if differing:
        raise ValueError(
            f"the run in {directory} was started with other settings ({'; '.join(differing)}); "
            "resume it with its own, or choose another directory"
        )


def _write(path: Path, text: str) -> None:
    """Write a file that is complete or as it was before."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys."""
    if not isinstance(settings, dict) or (prefix and not settings):
        return {prefix.removesuffix("."): settings}
    return {k: v for key, value in settings.items() for k, v in _flat(value, f"{prefix}{key}.").items()}


def _shown(flat: dict[str, Any], key: str) -> str:
    return json.dumps(flat[key], ensure_ascii=False) if key in flat else "absent"


def _checksum(file: Path) -> list[int]:
    """Size in bytes, and CRC-32."""
    size = crc = 0
    with file.open("rb") as f:
        while block := f.read(1 << 20):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return [size, crc]


def _described(tree: Any) -> dict[str, str]:
    """Every leaf by its path: dtype and shape, or the type of what is no array."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _fault(root: Path) -> str | None:
    """What is wrong with the files of a checkpoint."""
    path = root / CONTENTS
    if not path.is_file():
        return None  # the run was killed after Orbax was done and before the list was: complete by Orbax's own word
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError) as e:
        return f"{CONTENTS} cannot be read: {e}"
    for name, expected in files.items():
        if not (root / name).is_file():
            return f"{name} is missing"
        found = _checksum(root / name)
        if found[0] != expected[0]:
            return f"{name} has {found[0]} bytes, and had {expected[0]}"
        if found != expected:
            return f"the contents of {name} have changed"
    return None


def _check_arrays(root: Path, abstract_state: Any) -> None:
    path = root / CONTENTS
    if not path.is_file():
        return
    there, wanted = json.loads(path.read_text(encoding="utf-8"))["arrays"], _described(abstract_state)
    differing = [
        f"{key}: {there.get(key, 'absent')} there, {wanted.get(key, 'absent')} expected"
        for key in sorted(there.keys() | wanted.keys())
        if there.get(key) != wanted.get(key)
    ]
    if differing:
        raise ValueError(f"the checkpoint {root} is of another model or optimizer: {'; '.join(differing)}")


def _placed(leaf: Any) -> Any:
    """An abstract array that says where it shall lie: without, Orbax would use the devices it was saved from."""
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
        sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return leaf


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
