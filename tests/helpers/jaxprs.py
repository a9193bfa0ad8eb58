"""What a function is made of: the primitives of its jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

# What would sort or scan the vocabulary; XLA does neither well on any backend.
SORTING = {"sort", "top_k", "approx_top_k", "cumsum", "cummax", "cumlogsumexp"}
# Work over the vocabulary that only a row's settings may cause.
COSTLY = {"while", "scan", "exp", "log", "random_bits", "random_fold_in", "scatter"}


def primitives(function: Callable[..., Any], *args: Any, into_cond: bool = True) -> set[str]:
    """Names of all primitives of ``function(*args)``; ``into_cond=False`` leaves out the branches of ``lax.cond``."""
    return {equation.primitive.name for equation in _equations(jax.make_jaxpr(function)(*args).jaxpr, into_cond)}


def _equations(jaxpr: Any, into_cond: bool) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "cond" and not into_cond:
            continue
        for value in equation.params.values():
            for item in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(item, "jaxpr", item)  # a ClosedJaxpr holds one
                if hasattr(inner, "eqns"):
                    yield from _equations(inner, into_cond)
