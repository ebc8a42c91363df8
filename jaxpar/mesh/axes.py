"""The axes of a mesh: the meaning of each for a training job, and the inference of one axis size.

`AXES` is the table, outermost (slowest network) first. An axis belongs to the technique that communicates over it. All
other code looks up here which axes split the batch, which dims an axis splits, and which are manual in a pipeline.

To add one: write a row of `AXES` (or `with add_axis(axis)`, temporarily in a test or a script), and the technique that
uses it in `jaxpar.parallel.techniques`. An axis that no technique uses is refused.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from jaxpar.errors import JaxparError, Problem, refuse, suggest
from jaxpar.tables import insert_row, replace_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One axis of a mesh.

    Attributes:
      name: Its name in a declaration.
      meaning: Its meaning in a few words.
      splits: Names of the dims of parameters and activations that it splits.
      splits_batch: Whether it splits the batch, so that its devices train on different examples.
      shards_state: Whether it shards the training state, in addition to the dims that it splits. A description:
        `Parallel.zero_axes` lists the axes that do.
      manual: Whether the axis is manual (shard_map) inside a pipeline; otherwise XLA partitions it automatically. A
        parameter that a manual axis splits is gathered there, so an axis that splits dims of layers is not manual.
    """

    name: str
    meaning: str
    splits: tuple[str, ...] = ()
    splits_batch: bool = False
    shards_state: bool = False
    manual: bool = False


AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis(name="pipe", meaning="stages of a pipeline", splits=("layers",), manual=True),
        Axis(name="data", meaning="replicas of the parameters", splits_batch=True, manual=True),
        Axis(name="fsdp", meaning="shards of the training state", splits_batch=True, shards_state=True, manual=True),
        Axis(name="expert", meaning="experts of a mixture", splits=("expert",), splits_batch=True, shards_state=True),
        Axis(name="height", meaning="pieces of an image or a volume, along its first dim", splits=("height",)),
        Axis(name="width", meaning="pieces of an image or a volume, along its second dim", splits=("width",)),
        Axis(name="context", meaning="pieces of a long sequence", splits=("seq",)),
        # names in Flax, MaxText and T5X for the dims of Megatron-LM's column and row pairs (Shoeybi et al. 2019,
        # arXiv:1909.08053); `model` is the mesh axis of Flax's guides
        Axis(
            name="tensor",
            meaning="pieces of a matrix",
            splits=("vocab", "embed_table", "heads", "kv_heads", "mlp", "hidden", "model", "joined_kv", "channels"),
        ),
    )
}


def batch_axes(mesh_axes: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Returns the axes that split the batch, of all axes or of those of a mesh."""
    return tuple(name for name, axis in AXES.items() if axis.splits_batch and (mesh_axes is None or name in mesh_axes))


@contextmanager
def add_axis(axis: Axis, *, inside: str = "fsdp") -> Iterator[None]:
    """Adds an axis to `AXES` directly inside another one, until the context ends.

    Raises:
      JaxparError: If an axis of that name exists, or no axis is named `inside`.
    """
    if axis.name in AXES or inside not in AXES:
        raise refuse(
            f"an axis {axis.name!r} inside {inside!r}",
            rule=f"a new axis has a new name, and lies inside one of {', '.join(AXES)}",
            fix="another name, or inside='fsdp'",
        )
    with replace_rows(AXES, insert_row(AXES, axis.name, axis, at=[*AXES].index(inside) + 1)):
        yield


def infer_sizes(sizes: Mapping[str, int], devices: int, *, platform: str = "") -> dict[str, int]:
    """Returns the size of every axis, with `-1` inferred from the number of devices.

    Args:
      sizes: Axis name to size; at most one is -1.
      devices: Number of devices of the mesh.
      platform: Platform of the devices, for the message.

    Raises:
      JaxparError: If a size is not a positive number, two are -1, or the product is not `devices`.

    >>> infer_sizes({"data": -1, "tensor": 2}, 8)
    {'data': 4, 'tensor': 2}
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise refuse(
            f"devices={devices!r}",
            rule="a mesh has a positive whole number of devices",
            fix="devices=8, or leave it out for all visible ones",
        )
    problems = [
        Problem(f"{axis}={size!r}", f"the axes of a mesh are {', '.join(AXES)}", suggest(str(axis), AXES))
        for axis, size in sizes.items()
        if axis not in AXES
    ]
    problems += [
        Problem(
            f"{axis}={size!r}",
            "an axis size is a positive whole number, or -1 to infer it",
            f"{axis}={_meant(size)}",
        )
        for axis, size in sizes.items()
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1)
    ]
    if problems:
        raise JaxparError(*problems)
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise refuse(
            f"{' and '.join(f'{axis}=-1' for axis in open_axes)}",
            rule="at most one axis size is inferred",
            fix=f"give {open_axes[0]} a number",
        )
    product = math.prod(size for size in sizes.values() if size != -1)
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "(all 1)"
    available = f"{devices} {'is' if devices == 1 else 'are'} visible{f' ({platform})' if platform else ''}"
    if open_axes and devices % product == 0:
        return {axis: devices // product if size == -1 else size for axis, size in sizes.items()}
    if open_axes:
        raise refuse(
            f"mesh axes {shown}: {product} does not divide the devices, {available}",
            rule="the product of the axis sizes equals the number of devices",
            fix=f"make the other sizes multiply to a divisor of {devices}",
        )
    if product != devices:
        raise refuse(
            f"mesh axes {shown} need {product} device{'s'[: product != 1]}, {available}",
            rule="the product of the axis sizes equals the number of devices",
            fix=_fix_sizes(sizes, devices),
        )
    return dict(sizes)


def coordinates(device: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the coordinates of the device with this number in a mesh.

    >>> coordinates(5, {"data": 2, "tensor": 4})
    {'data': 1, 'tensor': 1}
    """
    positions = {}
    for axis, size in reversed(list(sizes.items())):
        device, positions[axis] = divmod(device, size)
    return {axis: positions[axis] for axis in sizes}


def nodes_of_axes(sizes: Mapping[str, int], per_node: int) -> dict[str, int]:
    """Returns, per axis, the largest number of nodes that a group of devices along the axis spans.

    >>> nodes_of_axes({"data": 2, "fsdp": 4, "tensor": 4}, per_node=8)
    {'data': 2, 'fsdp': 2, 'tensor': 1}
    """
    count = stride = math.prod(sizes.values())
    spans = {}
    for axis, size in sizes.items():
        stride //= size
        firsts = (device for device in range(count) if device // stride % size == 0)
        spans[axis] = max(len({(first + index * stride) // per_node for index in range(size)}) for first in firsts)
    return spans


def _meant(size: object) -> str:
    text = str(size).removesuffix(".0")
    return text if isinstance(size, str | float) and text.isdecimal() and int(text) else "1"


def _fix_sizes(sizes: Mapping[str, int], devices: int) -> str:
    """Returns a change of one axis that makes the sizes fit, trying the largest axis first."""
    for axis in sorted(sizes, key=lambda axis: -sizes[axis]):
        product = math.prod(size for name, size in sizes.items() if name != axis)
        if devices % product == 0:
            return f"{axis}={devices // product}, or {axis}=-1 to infer it; to try it without them, simulate devices"
    return f"choose sizes that multiply to {devices}; to try other sizes, simulate devices (mesh.simulate, jp.simulate)"
