"""ZeRO: which copy of the training state carries the axis `fsdp`, and `context` where `Parallel.zero_over` names it.

    stage         parameters    as layers read them    gradients     optimizer state
    0  DDP        whole         whole                  whole         whole
    1             / fsdp        gathered for a step    whole         / fsdp
    2             / fsdp        gathered for a step    / fsdp        / fsdp
    3  FSDP       / fsdp        gathered by layer      / fsdp        / fsdp

State that is no parameter and has 64 KiB or more (a frozen base, an average of the weights, a cache) is cut by the same
rules from stage 1 on, and gathered where the model reads it; what the model writes is cut again. So is an array of the
optimizer's that has another shape than its parameter, of any dtype (codes of 8 bits in blocks): `cut_of`.

Between steps the float32 parameters of stages 1 and 2 are shards too, as in the distributed optimizers of Megatron-LM
and DeepSpeed: what is whole is a copy in the dtype that products run in, gathered at the beginning of a step.
A layer that stage 3 gathers is gathered again for its backward pass where remat computes it again, and in pipelines;
else what was gathered is a result like any other, and kept.

"Whole" still means split over `tensor` where the names say so. Source: Rajbhandari et al.
2020, arXiv:1910.02054, figure 1. JAX does not pad arrays where they enter or leave a
program, so a parameter none of whose dims the axis divides stays whole, is counted whole
and is listed; the largest such one is bounded by `Parallel.replicate_above`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.sharding.names import LARGE, Leaf
from jaxpar.sharding.rules import Choice, own_dims, spec_of


def add_axes(
    path: str, choice: Choice, leaf: Leaf, sizes: Mapping[str, int], axes: tuple[str, ...] = ("fsdp",)
) -> tuple[tuple[str, ...], ...]:
    """Returns the per-dim axes with `axes` added to one dim, or unchanged where no dim divides by all of them.

    The dim is the largest that still divides, one that nothing splits yet before one that
    `tensor` splits already; never a dim named `layers`, and for parameters without names a
    leading dim, which may be a stack, only if no other divides.
    """
    axes = tuple(axis for axis in axes if sizes.get(axis, 1) > 1 and not any(axis in on for on in choice.axes))
    if not axes:
        return choice.axes  # no such axis, or the model itself says which dim it is
    ways = {dim: _ways((*axes, *on), sizes) for dim, on in enumerate(choice.axes)}
    fitting = [
        dim for dim, size in enumerate(leaf.shape) if size and size % ways[dim] == 0 and choice.names[dim] != "layers"
    ]
    if not fitting:
        return choice.axes
    own = len(leaf.shape) if any(choice.names) else own_dims(path, leaf)
    best = max(fitting, key=lambda dim: (dim >= len(leaf.shape) - own, not choice.axes[dim], leaf.shape[dim], dim))
    return tuple((*on, *axes) if dim == best else on for dim, on in enumerate(choice.axes))


def cut_of(
    leaf: jax.ShapeDtypeStruct, sizes: Mapping[str, int], zero_axes: tuple[str, ...], others: tuple[str, ...] = ()
) -> PartitionSpec:
    """Returns where an array of the optimizer's state goes that has not the shape of its parameter.

    Arrays of 64 KiB and more are cut by the axes of ZeRO and by those that split the parameter, each on the largest dim
    that still divides; smaller ones of floating point, such as Adafactor's rows and columns, by the axes of ZeRO alone;
    other small ones are whole.

    Args:
      leaf: Its shape and dtype.
      sizes: Mesh axis to size.
      zero_axes: Axes that cut it together, on one dim; none in stage 0.
      others: Further axes that split its parameter.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return PartitionSpec()
    large = math.prod(leaf.shape) * leaf.dtype.itemsize >= LARGE
    if not large and not jnp.issubdtype(leaf.dtype, jnp.floating):
        return PartitionSpec()
    on: list[tuple[str, ...]] = [()] * len(leaf.shape)
    for axes in (zero_axes, *((axis,) for axis in others if large and axis not in zero_axes)):
        fitting = [dim for dim, size in enumerate(leaf.shape) if size and size % _ways((*on[dim], *axes), sizes) == 0]
        if fitting and _ways(axes, sizes) > 1:
            best = max(fitting, key=lambda dim: leaf.shape[dim] // _ways(on[dim], sizes))
            on[best] = (*axes, *on[best])
    return spec_of(tuple(on))


def beside_zero(
    path: str, choice: Choice, leaf: Leaf, sizes: Mapping[str, int], zero_axes: tuple[str, ...], axes: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Returns the per-dim axes with `axes` added to another dim than ZeRO's, where `axes` divide one.

    A pipeline sums gradients of layers with `axes` taken away again: they are then cut as where `axes` are on the dim
    of the layers. On a dim that `tensor` splits too, a tick could scatter them only after a gather over `tensor`.
    """
    cut = replace(choice, axes=add_axes(path, choice, leaf, sizes, zero_axes))
    both = add_axes(path, cut, leaf, sizes, axes)
    added = [dim for dim, (one, other) in enumerate(zip(cut.axes, both, strict=True)) if one != other]
    if not added:
        return add_axes(path, choice, leaf, sizes, axes)
    return tuple((*on, *both[dim][len(cut.axes[dim]) :]) if dim in added else on for dim, on in enumerate(choice.axes))


def without_axis(choice: Choice, axis: str = "fsdp") -> tuple[tuple[str, ...], ...]:
    """Returns the per-dim axes with `axis` taken away: where the model itself named it."""
    return tuple(tuple(other for other in on if other != axis) for on in choice.axes)


def _ways(axes, sizes) -> int:
    ways = 1
    for axis in axes:
        ways *= sizes[axis]
    return ways
