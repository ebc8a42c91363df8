"""Sizes and devices become a mesh."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpar.mesh.axes import AXES, infer_sizes


def build(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh with those axes, outermost first as in `AXES`.

    Every axis is an Auto axis: XLA places the collectives, and unmodified Flax models work.

    Args:
      sizes: Axis name to size; at most one is -1.
      devices: The devices to use, all visible ones by default.

    Raises:
      JaxparError: If the sizes do not multiply to the number of devices.
    """
    chosen = list(jax.devices() if devices is None else devices)
    sizes = infer_sizes(sizes, len(chosen), platform=chosen[0].platform)
    names = tuple(axis for axis in AXES if axis in sizes)
    shape = tuple(sizes[axis] for axis in names)
    auto = (AxisType.Auto,) * len(names)
    if chosen[0].platform == "cpu":  # simulated devices have no topology to respect
        return Mesh(np.array(chosen).reshape(shape), names, axis_types=auto)
    return jax.make_mesh(shape, names, axis_types=auto, devices=chosen)
