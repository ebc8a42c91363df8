"""Records of which code and versions a number is; on which devices, too, says `where.py`. Imports no JAX."""

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import jaxpar
from jaxpar.mesh.devices import describe, visible_devices

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
COMMIT = "JAXPAR_COMMIT"  # the commit of a copy that has no history, such as one sent to another machine


def versions() -> dict[str, str]:
    """Returns the versions of what computes; makes no device.

    jaxpar's own is that of its code: it may be on the path and not installed. A package that is missing is "missing".
    """
    found = {"jaxpar": jaxpar.__version__} | {name: installed(name) for name in PACKAGES}
    return found | {"python": platform.python_version()}


def installed(name: str) -> str:
    """Returns the version of a package that is installed, or "missing"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def commit() -> str:
    """Returns the commit of the working directory, `+` for uncommitted changes, or "" outside of git.

    The variable JAXPAR_COMMIT, where it is set, is believed instead.
    """
    if given := os.environ.get(COMMIT):
        return given
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


# Records where a number was measured: devices, machine, versions and commit.


def where() -> dict[str, Any]:
    """Returns the devices, the machine, the versions and the commit of this process."""
    return {
        "devices": describe(visible_devices()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": versions(),
        "commit": commit(),
    }
