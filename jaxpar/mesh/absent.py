"""GPUs that are not there, as JAX's devices: they can be compiled for, and hold nothing.

The one module that knows of JAX's experimental topologies.
"""

from functools import cache
from importlib.metadata import version
from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.mesh.devices import leave_alone
from jaxpar.mesh.plugin import hush_plugin
from jaxpar.mesh.target import Target, description, find_plugin, parse_target

_DESCRIBED: dict[Any, str] = {}


def target_devices(target: str | Target) -> list[Any]:
    """Returns GPUs that are not there, to build a mesh or a layout of: they can be compiled for, and hold nothing.

    Args:
      target: `CHIP:NODESxGPUS`, such as `h100:16x8`.

    Raises:
      JaxparError: If there is no such target, or the plugin is missing or does not fit the installed jax.
    """
    return list(absent_devices(target if isinstance(target, Target) else parse_target(str(target))))


@cache
def absent_devices(target: Target) -> tuple[Any, ...]:
    """Returns devices that can be compiled for, node by node.

    Raises:
      JaxparError: If the chip is one that is only planned for, or the plugin is missing or does not fit the
        installed jax.
    """
    from jax.experimental import topologies

    described = description(target.chip)
    if missing := find_plugin():
        raise refuse(
            f"target {target}: {missing}",
            rule="compiling for absent GPUs needs XLA's GPU compiler",
            fix=f"pip install jax-cuda13-pjrt=={version('jaxlib')} (extra gpu-plan), or --target cpu",
        )
    hush_plugin()
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if before is None:  # else the plugin looks for CUDA's libraries, which compiling does not need
        leave_alone()
    try:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=described, topology=f"1x{target.nodes}x{target.per_node}"
        )
    except (RuntimeError, ValueError) as error:
        raise refuse(
            f"target {target}: {str(error).splitlines()[0]}",
            rule="jax-cuda13-pjrt is of the same version as jaxlib",
            fix=f"pip install jax-cuda13-pjrt=={version('jaxlib')}, or --target cpu",
        ) from error
    _DESCRIBED.update(dict.fromkeys(found.devices, described))
    return tuple(found.devices)


def description_of(device: Any) -> str | None:
    """Returns what XLA was told of a GPU that is not there; None for a device that is."""
    return _DESCRIBED.get(device)
