"""The axes of a mesh: their names, their order, and sizes with at most one left to infer.

Outermost (slowest network) first. An axis belongs to the technique that communicates over it:

    pipe     stages of a pipeline            data    replicas of the parameters
    fsdp     shards of the training state    expert  experts of a mixture
    context  pieces of a long sequence       tensor  pieces of a matrix
"""

import math
from collections.abc import Mapping

from jaxpar.errors import JaxparError, Problem, refuse

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
TRAINED = ("pipe", "data", "fsdp", "context", "tensor")  # those that jaxpar trains over
BATCH_AXES = ("data", "fsdp")  # the axes that each see other examples


def infer_sizes(sizes: Mapping[str, int], devices: int, *, platform: str = "") -> dict[str, int]:
    """Returns the size of every axis, a `-1` replaced by what is left over.

    Args:
      sizes: Axis name to size; at most one is -1.
      devices: How many devices the mesh has.
      platform: What those devices are, for the message.

    Raises:
      JaxparError: If a size is no positive number, two are -1, or the product is not `devices`.

    >>> infer_sizes({"data": -1, "tensor": 2}, 8)
    {'data': 4, 'tensor': 2}
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise refuse(
            f"devices={devices!r}",
            rule="a mesh has a positive whole number of devices",
            fix="devices=8, or leave it out for all visible ones",
        )
    wrong = [
        Problem(
            f"{axis}={size!r}",
            "an axis size is a positive whole number, or -1 to infer it",
            f"{axis}={_meant(size)}",
        )
        for axis, size in sizes.items()
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1)
    ]
    if wrong:
        raise JaxparError(*wrong)
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise refuse(
            f"{' and '.join(f'{axis}=-1' for axis in open_axes)}",
            rule="at most one axis size is inferred",
            fix=f"give {open_axes[0]} a number",
        )
    known = math.prod(size for size in sizes.values() if size != -1)
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "(all 1)"
    there = f"{devices} {'is' if devices == 1 else 'are'} visible{f' ({platform})' if platform else ''}"
    if open_axes and devices % known == 0:
        return {axis: devices // known if size == -1 else size for axis, size in sizes.items()}
    if open_axes:
        raise refuse(
            f"mesh axes {shown}: {known} does not divide the devices, {there}",
            rule="the product of the axis sizes equals the number of devices",
            fix=f"make the other sizes multiply to a divisor of {devices}",
        )
    if known != devices:
        raise refuse(
            f"mesh axes {shown} need {known} device{'s'[: known != 1]}, {there}",
            rule="the product of the axis sizes equals the number of devices",
            fix=_fix_sizes(sizes, devices),
        )
    return dict(sizes)


def _meant(size: object) -> str:
    text = str(size).removesuffix(".0")
    return text if isinstance(size, str | float) and text.isdecimal() and int(text) else "1"


def _fix_sizes(sizes: Mapping[str, int], devices: int) -> str:
    """Returns the one-axis change that would make the sizes fit, the biggest axis first."""
    for axis in sorted(sizes, key=lambda axis: -sizes[axis]):
        rest = math.prod(size for other, size in sizes.items() if other != axis)
        if devices % rest == 0:
            return f"{axis}={devices // rest}, or {axis}=-1 to infer it; to try it without them, simulate devices"
    return f"choose sizes that multiply to {devices}; to try other sizes, simulate devices (mesh.simulate, jp.simulate)"
