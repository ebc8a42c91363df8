"""Where a number was taken: without it a number is a rumour."""

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

from jaxpar.mesh.devices import describe, visible

PACKAGES = ("jaxpar", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def where() -> dict[str, Any]:
    """Returns the devices, the machine, the versions and the commit of this process."""
    return {
        "devices": describe(visible()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": versions(),
        "commit": commit(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of what computes; makes no device."""
    return {name: importlib.metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}


def commit() -> str:
    """Returns the commit of the working directory, `+` for uncommitted changes, or "" outside of git."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if head.returncode else head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
