"""Records where a number was measured: devices, machine, versions and commit."""

import os
import platform
from typing import Any

from jaxpar.measure.record import commit, versions
from jaxpar.mesh.devices import describe, visible_devices


def where() -> dict[str, Any]:
    """Returns the devices, the machine, the versions and the commit of this process."""
    return {
        "devices": describe(visible_devices()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": versions(),
        "commit": commit(),
    }
