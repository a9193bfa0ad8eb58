"""Compiling before programs are called, in a thread beside the one that reads weights."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent import futures
from typing import Any

import jax
from tqdm.auto import tqdm

from pard_jax.program_store import is_kept, prepare


class Ahead:
    """Programs that another thread compiles, or reads where an earlier start has left them, one after the other."""

    def __init__(self, calls: Iterable[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        """
        Args:
            calls: program, arguments (of arrays, :func:`shapes` will do) and static arguments.
        """
        calls = list(calls)
        self.num_to_compile = sum(not is_kept(program, *args, **static) for program, args, static in calls)
        pool = futures.ThreadPoolExecutor(1, "compiling")
        self.tasks = [pool.submit(prepare, program, *args, **static) for program, args, static in calls]
        pool.shutdown(wait=False)

    def stop(self) -> None:
        """Leave what has not begun."""
        for task in self.tasks:
            task.cancel()

    def wait(self, progress: bool = False) -> None:
        """Wait until all are ready.

        Args:
            progress: count them in a bar, on a terminal.

        Raises:
            Exception: what the first that fails has raised; the others are left.
        """
        try:
            for task in tqdm(self.tasks, "Compiling", unit=" programs", disable=None if progress else True):
                task.result()
        finally:
            self.stop()


def shapes(tree: Any) -> Any:
    """``ShapeDtypeStruct``s with shardings in place of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
