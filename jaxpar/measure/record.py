"""Records the devices, package versions and commit that a measured number belongs to."""

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
    """Returns the versions of Python, jaxpar and the packages that compute; does not initialize any device.

    The version of jaxpar comes from its code, since it may be on the path without being installed. The version of a
    package that is not installed is "missing".
    """
    found = {"jaxpar": jaxpar.__version__} | {name: installed(name) for name in PACKAGES}
    return found | {"python": platform.python_version()}


def installed(name: str) -> str:
    """Returns the version of an installed package, or "missing"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def commit() -> str:
    """Returns the commit of the working directory, `+` for uncommitted changes, or "" outside of git.

    The environment variable JAXPAR_COMMIT overrides it.
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
