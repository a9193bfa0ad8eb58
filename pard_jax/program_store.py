"""Compiled programs on disk that are found again without being traced.

JAX's compilation cache finds a program by its code, so that a start which compiles nothing still traces and lowers all
of it: most of what is left of such a start. Here a program is found by what its code follows from: this package's
source, the versions of what it stands on, the settings of JAX and XLA, the devices, and what the caller says it is made
of. What differs in any of these is another program; nothing ever goes stale.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import os
import pickle
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
from jax.experimental import serialize_executable
from jaxlib import xla_client  # JAX's own cache takes the processor's features from here; they are nowhere else

_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_THRESHOLD = "jax_persistent_cache_min_compile_time_secs"
_COMPILING = threading.Lock()

logger = logging.getLogger(__name__)


class ProgramStore:
    """Programs for some devices, in one directory that nobody else may write to: reading one can run anything."""

    def __init__(self, directory: Path, devices: Sequence[Any]) -> None:
        self._directory, self._devices = directory, tuple(devices)

    def keep(self, name: str, jitted: Any, made_of: Any) -> KeptProgram:
        """What ``jitted`` computes, by programs of this store.

        Args:
            name: of the function.
            jitted: by ``jax.jit``; all static arguments are passed by keyword.
            made_of: everything but the arguments and the package's source that the program depends on; its ``repr``
                says it all.
        """
        return KeptProgram(self, name, jitted, repr(made_of))

    def path(self, name: str, made_of: str, args: Any, static: Any) -> Path:
        """Where the program for arguments like ``args`` lies, if it does."""
        described = (name, made_of, _describe(args), static, _surroundings(self._devices))
        return self._directory / f"{name}-{hashlib.sha256(repr(described).encode()).hexdigest()[:32]}.program"

    def get(self, path: Path, compile: Callable[[], jax.stages.Compiled]) -> Any:
        """The program of this path: read, or else compiled and written."""
        if (program := self._read(path)) is None:
            with _without_jaxs_cache() as hits:
                program = compile()
            if not hits:
                self._write(path, program)
        return program

    def _read(self, path: Path) -> Any:
        try:
            content = pickle.loads(zlib.decompress(path.read_bytes()))
            return serialize_executable.deserialize_and_load(*content, execution_devices=self._devices)
        except FileNotFoundError:
            return None
        except Exception as e:  # XLA, pickle and zlib have many kinds; whatever it is, compiling mends it
            logger.warning("%s cannot be read and is made anew: %s: %s", path, type(e).__name__, e)
            return None

    def _write(self, path: Path, program: jax.stages.Compiled) -> None:
        beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            beside.write_bytes(zlib.compress(pickle.dumps(serialize_executable.serialize(program)), level=1))
            beside.replace(path)  # whole or not at all, whoever reads or writes it meanwhile
        except Exception as e:  # a full disk, or a backend that cannot serialize: the program runs all the same
            logger.info("%s is not kept: %s: %s", path, type(e).__name__, e)
            beside.unlink(missing_ok=True)


class KeptProgram:
    """A jitted function whose programs are kept."""

    def __init__(self, store: ProgramStore, name: str, jitted: Any, made_of: str) -> None:
        self._store, self._name, self._jitted, self._made_of = store, name, jitted, made_of
        self._ready: dict[Any, Any] = {}

    def is_kept(self, *args: Any, **static: Any) -> bool:
        """Whether the program for such arguments lies in the store."""
        return self._store.path(self._name, self._made_of, args, static).is_file()

    def prepare(self, *args: Any, **static: Any) -> Any:
        """Have the program for such arguments ready; for arrays, ``ShapeDtypeStruct``s with shardings will do."""
        # Pytrees are taken to be the same in every call; only arrays that are arguments themselves tell calls apart.
        key = (*(getattr(arg, "shape", None) for arg in args), *static.items())
        if (program := self._ready.get(key)) is None:
            path = self._store.path(self._name, self._made_of, args, static)
            program = self._store.get(path, lambda: self._jitted.lower(*args, **static).compile())
            self._ready[key] = program
        return program

    def __call__(self, *args: Any, **static: Any) -> Any:
        return self.prepare(*args, **static)(*args)


def is_kept(program: Any, *args: Any, **static: Any) -> bool:
    """Whether an earlier process has left the program for arguments like these; of a jitted one that is not known."""
    return isinstance(program, KeptProgram) and program.is_kept(*args, **static)


def prepare(program: Any, *args: Any, **static: Any) -> None:
    """Compile a jitted or a kept program for arguments like these, without running it."""
    if isinstance(program, KeptProgram):
        program.prepare(*args, **static)
    else:
        program.lower(*args, **static).compile()  # JAX's own caches have it from here on


@contextlib.contextmanager
def _without_jaxs_cache() -> Iterator[list[str]]:
    """Keeps programs out of JAX's cache, and lists those that come from there all the same.

    XLA for CPUs serializes a program that was itself read from disk without an error, and without all of its functions.
    """
    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    with _COMPILING:  # the setting is all threads'
        threshold = getattr(jax.config, _THRESHOLD)
        jax.config.update(_THRESHOLD, math.inf)
        jax.monitoring.register_event_listener(listen)
        try:
            yield hits
        finally:
            jax.monitoring.unregister_event_listener(listen)
            jax.config.update(_THRESHOLD, threshold)


def _describe(args: Any) -> Any:
    leaves, structure = jax.tree.flatten(args)
    return str(structure), [(leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves]


def _surroundings(devices: tuple[Any, ...]) -> Any:
    settings = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    jaxlib_version = jaxlib.__version__  # pyright: ignore[reportPrivateImportUsage]
    versions = (jax.__version__, jaxlib_version, flax.__version__, devices[0].client.platform_version)
    flags = [os.environ.get(name) for name in _ENVIRONMENT]
    kinds = [(device.id, device.device_kind) for device in devices]
    return versions, flags, sorted(settings.items()), kinds, _fingerprint(devices), _source()


@functools.cache
def _fingerprint(devices: tuple[Any, ...]) -> int | None:
    try:
        return xla_client.get_topology_for_devices(list(devices)).fingerprint()
    except jax.errors.JaxRuntimeError:  # a backend that does not describe itself, as JAX's cache takes it
        return None


@functools.cache
def _source() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
