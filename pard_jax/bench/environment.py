"""What a measurement ran on: the device, the cores, the versions. Every report carries it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import jax

from pard_jax import __version__

PACKAGES = ("jax", "libtpu", "flax", "transformers", "torch")


def describe() -> dict[str, Any]:
    """Platform and device of JAX, CPU cores, Python and the versions of the packages that are installed."""
    device = jax.devices()[0]
    versions = {"pard-jax": __version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "num_devices": len(jax.devices()),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def in_a_line(environment: dict[str, Any]) -> str:
    """The same for people."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return f"{environment['platform']} ({environment['device']}), {environment['cpu_cores']} CPU cores; {versions}"
