"""What is made once and kept: directories under ``$PARD_JAX_HOME`` (``~/.cache/pard_jax``), whole or not there at all.

A name says what a directory was made of, so nothing in it ever goes stale. All of it can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

HOME = "PARD_JAX_HOME"


def cache_home() -> Path:
    """``$PARD_JAX_HOME``, or ``~/.cache/pard_jax``; it need not exist."""
    return Path(os.environ.get(HOME) or "~/.cache/pard_jax").expanduser().absolute()


def cached_directory(name: str, make: Callable[[Path], None]) -> Path:
    """The directory ``name`` of the cache, made if it is not there.

    It is made under another name and then renamed. Where two processes make it at once, the first to end wins, the
    other takes what is there by then: a directory that somebody may be reading is never replaced.

    Args:
        name: says what it is made of.
        make: is given a path that does not exist, and makes the directory there.

    Raises:
        OSError: the cache cannot be written to.
    """
    home = cache_home()
    target = home / name
    if target.is_dir():
        return target
    try:
        home.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=f".{name}.partial-", dir=home)
    except OSError as e:
        raise type(e)(
            f"cannot write to the cache {home}: {e.strerror}; set {HOME} to a directory that can be written"
        ) from e
    with scratch:
        made = Path(scratch.name) / name
        make(made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def stamp(files: Iterable[Path]) -> str:
    """12 hexadecimal digits that change when a file is another one or was written again: path, size, time of change."""
    digest = hashlib.sha256()
    for file in sorted(file.resolve() for file in files):
        about = file.stat()
        digest.update(f"{file}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:12]
