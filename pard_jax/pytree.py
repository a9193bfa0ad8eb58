"""Frozen dataclasses that JAX takes apart and puts together."""

from __future__ import annotations

import dataclasses
from typing import TypeVar, dataclass_transform, no_type_check

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass and a pytree, every field a child.

    Its annotations document shapes but are not checked: JAX rebuilds pytrees with placeholders in place of arrays.
    """
    return no_type_check(jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls)))
