"""Builds a mesh from axis sizes and devices."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpar.errors import refuse
from jaxpar.mesh.axes import AXES, infer_sizes
from jaxpar.mesh.devices import visible_devices


def build(sizes: Mapping[str, int], devices: Sequence[Any] | Mesh | None = None) -> Mesh:
    """Returns a mesh with these axes, outermost first as in `AXES`.

    Every axis is an Auto axis: XLA places the collectives, and unmodified Flax models work.

    Args:
      sizes: Axis name to size; at most one is -1.
      devices: The devices to use, all visible ones by default; or a mesh, whose axis types are ignored.

    Raises:
      JaxparError: If the sizes do not multiply to the number of devices.
    """
    if isinstance(devices, Mesh):
        devices = _in_order(devices, sizes)
    chosen = visible_devices() if devices is None else list(devices) if isinstance(devices, Iterable) else [devices]
    if not chosen or not all(isinstance(device, jax.Device) for device in chosen) or len(set(chosen)) < len(chosen):
        raise refuse(
            f"devices={devices!r:.80}",
            rule="a mesh has devices, each once, or a number of devices that need not be there",
            fix="devices=jax.devices()[:8], or leave it out for all visible ones",
        )
    sizes = infer_sizes(sizes, len(chosen), platform=chosen[0].platform)
    names = tuple(axis for axis in AXES if axis in sizes)
    shape = tuple(sizes[axis] for axis in names)
    auto = (AxisType.Auto,) * len(names)
    if chosen[0].platform == "cpu":  # simulated devices have no topology to respect
        return Mesh(np.array(chosen).reshape(shape), names, axis_types=auto)
    return jax.make_mesh(shape, names, axis_types=auto, devices=chosen)


def _in_order(mesh: Mesh, sizes: Mapping[str, int]) -> list[Any]:
    """Returns the devices of a mesh, transposed to the order of `AXES` if all of its axes are known.

    Raises:
      JaxparError: If an axis has another size in `sizes`.
    """
    for axis, size in mesh.shape.items():
        if sizes.get(axis, size) not in (size, -1):
            raise refuse(
                f"{axis}={sizes[axis]} on a mesh with {axis}={size}",
                rule="an axis of a mesh has one size",
                fix=f"{axis}={size}, or devices=list(mesh.devices.flat)",
            )
    if not set(mesh.axis_names) <= set(AXES):
        return list(mesh.devices.flat)
    order = sorted(range(len(mesh.axis_names)), key=lambda dim: list(AXES).index(mesh.axis_names[dim]))
    return list(mesh.devices.transpose(order).flat)
