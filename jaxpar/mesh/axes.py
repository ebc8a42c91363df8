"""The axes of a mesh: what each of them means for a training job, and sizes with at most one left to infer.

`AXES` is the table, outermost (slowest network) first. An axis belongs to the technique that communicates over it. All
else reads it from here: which axes split the batch, which dims an axis splits, what is manual inside a pipeline.

To add one: a row of `AXES` (or `with added(axis)`, for as long as a test or a script runs), and the technique that uses
it in `jaxpar.parallel.techniques`. An axis that no technique uses is refused.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from jaxpar.errors import JaxparError, Problem, nearest, refuse
from jaxpar.tables import changed, inserted


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One axis of a mesh.

    Attributes:
      name: As it is declared.
      meaning: Its meaning in a few words.
      splits: Names of dims that it splits, of parameters and activations.
      examples: Whether its devices see other examples.
      state: Whether it shards the training state, besides the dims that it splits.
      manual: Whether it is manual inside the table of a pipeline; else it is XLA's there.
    """

    name: str
    meaning: str
    splits: tuple[str, ...] = ()
    examples: bool = False
    state: bool = False
    manual: bool = False


AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis(name="pipe", meaning="stages of a pipeline", splits=("layers",), manual=True),
        Axis(name="data", meaning="replicas of the parameters", examples=True, manual=True),
        Axis(name="fsdp", meaning="shards of the training state", examples=True, state=True, manual=True),
        Axis(name="expert", meaning="experts of a mixture"),
        Axis(name="context", meaning="pieces of a long sequence", splits=("seq",)),
        # in the names that Flax, MaxText and T5X use for the dims of Megatron-LM's column and row pairs (Shoeybi et al.
        # 2019, arXiv:1909.08053); `model` is the mesh axis of Flax's own guides
        Axis(
            name="tensor",
            meaning="pieces of a matrix",
            splits=("vocab", "embed_table", "heads", "kv_heads", "mlp", "hidden", "model", "joined_kv"),
        ),
    )
}


def batch_axes(among: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Returns the axes whose devices each see other examples, of all or of those that a mesh has."""
    return tuple(name for name, axis in AXES.items() if axis.examples and (among is None or name in among))


@contextmanager
def added(axis: Axis, *, inside: str = "fsdp") -> Iterator[None]:
    """Adds an axis to `AXES`, next to another one on its inner side, until the context ends.

    Raises:
      JaxparError: If there is an axis of that name, or none called `inside`.
    """
    if axis.name in AXES or inside not in AXES:
        raise refuse(
            f"an axis {axis.name!r} inside {inside!r}",
            rule=f"a new axis has a new name, and lies inside one of {', '.join(AXES)}",
            fix="another name, or inside='fsdp'",
        )
    with changed(AXES, inserted(AXES, axis.name, axis, at=[*AXES].index(inside) + 1)):
        yield


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
        Problem(f"{axis}={size!r}", f"the axes of a mesh are {', '.join(AXES)}", nearest(str(axis), AXES))
        for axis, size in sizes.items()
        if axis not in AXES
    ]
    wrong += [
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


def coordinates(device: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns where a device is in a mesh, by its number in it.

    >>> coordinates(5, {"data": 2, "tensor": 4})
    {'data': 1, 'tensor': 1}
    """
    found = {}
    for axis, size in reversed(list(sizes.items())):
        device, found[axis] = divmod(device, size)
    return {axis: found[axis] for axis in sizes}


def nodes_of_axes(sizes: Mapping[str, int], per_node: int) -> dict[str, int]:
    """Returns over how many nodes one group of each axis goes, at most.

    >>> nodes_of_axes({"data": 2, "fsdp": 4, "tensor": 4}, per_node=8)
    {'data': 2, 'fsdp': 2, 'tensor': 1}
    """
    count = stride = math.prod(sizes.values())
    found = {}
    for axis, size in sizes.items():
        stride //= size
        firsts = (device for device in range(count) if device // stride % size == 0)
        found[axis] = max(len({(first + turn * stride) // per_node for turn in range(size)}) for first in firsts)
    return found


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
