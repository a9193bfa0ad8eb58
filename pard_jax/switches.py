"""Environment variables that turn off what is on by default."""

from __future__ import annotations

import os


def is_on(name: str) -> bool:
    """Whether the environment variable leaves something on: unset, empty and ``on`` do, ``off`` does not.

    Raises:
        ValueError: any other value.
    """
    value = os.environ.get(name, "").strip().lower()
    if value not in ("", "on", "off"):
        raise ValueError(f"{name}={os.environ[name]} was given; expected on or off")
    return value != "off"
