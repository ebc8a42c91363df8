"""ZeRO shards the training state over the axis `fsdp`, and over `context` if `Parallel.zero_over` names it.

    stage         parameters    as layers read them    gradients     optimizer state
    0  DDP        whole         whole                  whole         whole
    1             / fsdp        gathered for a step    whole         / fsdp
    2             / fsdp        gathered for a step    / fsdp        / fsdp
    3  FSDP       / fsdp        gathered by layer      / fsdp        / fsdp

From stage 1 on, non-parameter state of 64 KiB or more (a frozen base, an average of the weights, a cache) is sharded by
the same rules: it is gathered when the model reads it, and sharded again when the model writes it. So is optimizer
state of any dtype whose shape differs from its parameter's (8-bit codes in blocks): see `state_spec`.

In stages 1 and 2 the float32 parameters are also sharded between steps, as in the distributed optimizers of Megatron-LM
and DeepSpeed: the whole copy has the compute dtype and is gathered at the beginning of a step. Stage 3 gathers a layer
again for its backward pass where remat recomputes the layer, and in pipelines; elsewhere the gathered parameters are
residuals like any other.

"Whole" still means split over `tensor` where the dim names say so. Source: Rajbhandari et al. 2020, arXiv:1910.02054,
figure 1. JAX does not pad arrays at the boundary of a program, so a parameter without a dim that the axis divides stays
whole, is counted whole and is listed; `Parallel.replicate_above` bounds the largest such parameter.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.sharding.names import LARGE, Leaf
from jaxpar.sharding.rules import AxisChoice, count_layer_dims, to_spec


def add_axes(
    path: str, choice: AxisChoice, leaf: Leaf, sizes: Mapping[str, int], axes: tuple[str, ...] = ("fsdp",)
) -> tuple[tuple[str, ...], ...]:
    """Adds `axes` to the axes of one dim; if they divide none together, each to a dim that it divides, if there is one.

    It chooses the largest dim that they still divide, and prefers unsplit dims to dims that `tensor` splits. It never
    chooses a dim named `layers`; for parameters without names, it chooses a leading dim, which may be a stack, only if
    they divide no other dim.
    """
    axes = tuple(axis for axis in axes if sizes.get(axis, 1) > 1 and not any(axis in on for on in choice.axes))
    if not axes:
        return choice.axes  # no such axis, or the model itself says which dim it is
    ways = {dim: _num_shards((*axes, *on), sizes) for dim, on in enumerate(choice.axes)}
    fitting = [
        dim for dim, size in enumerate(leaf.shape) if size and size % ways[dim] == 0 and choice.names[dim] != "layers"
    ]
    if not fitting and len(axes) > 1:
        for axis in axes:
            choice = replace(choice, axes=add_axes(path, choice, leaf, sizes, (axis,)))
    if not fitting:
        return choice.axes
    own_rank = len(leaf.shape) if any(choice.names) else count_layer_dims(path, leaf)
    best = max(fitting, key=lambda dim: (dim >= len(leaf.shape) - own_rank, not choice.axes[dim], leaf.shape[dim], dim))
    return tuple((*on, *axes) if dim == best else on for dim, on in enumerate(choice.axes))


def state_spec(
    leaf: jax.ShapeDtypeStruct, sizes: Mapping[str, int], zero_axes: tuple[str, ...], param_axes: tuple[str, ...] = ()
) -> PartitionSpec:
    """Returns the spec of an array of the optimizer's state whose shape differs from its parameter's.

    Arrays of 64 KiB and more are sharded over the axes of ZeRO and over those that split the parameter, each on the
    largest dim that it still divides. Smaller floating-point arrays, such as Adafactor's row and column statistics, are
    sharded only over the axes of ZeRO. Other small arrays are replicated.

    Args:
      leaf: Shape and dtype of the array.
      sizes: Mesh axis to size.
      zero_axes: The axes of ZeRO, which shard one dim together; none in stage 0.
      param_axes: Further axes that split the parameter.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return PartitionSpec()
    large = math.prod(leaf.shape) * leaf.dtype.itemsize >= LARGE
    if not large and not jnp.issubdtype(leaf.dtype, jnp.floating):
        return PartitionSpec()
    spec: list[tuple[str, ...]] = [()] * len(leaf.shape)

    def fitting_dims(axes: tuple[str, ...]) -> list[int]:
        shape = enumerate(leaf.shape)
        return [dim for dim, size in shape if size and size % _num_shards((*spec[dim], *axes), sizes) == 0]

    together = (zero_axes,) if fitting_dims(zero_axes) else tuple((axis,) for axis in zero_axes)
    for axes in (*together, *((axis,) for axis in param_axes if large and axis not in zero_axes)):
        fitting = fitting_dims(axes)
        if fitting and _num_shards(axes, sizes) > 1:
            best = max(fitting, key=lambda dim: leaf.shape[dim] // _num_shards(spec[dim], sizes))
            spec[best] = (*axes, *spec[best])
    return to_spec(tuple(spec))


def add_zero_and_axes(
    path: str,
    choice: AxisChoice,
    leaf: Leaf,
    sizes: Mapping[str, int],
    zero_axes: tuple[str, ...],
    axes: tuple[str, ...],
) -> tuple[tuple[str, ...], ...]:
    """Adds ZeRO's axes to one dim and `axes` to another dim; adds only `axes` if there is no such dim.

    Inside of a pipeline's table gradients of layers are not split by `axes`, and are sharded as if `axes` were on the
    dim of layers. On a dim that `tensor` also splits, a tick would have to gather gradients over `tensor` first.
    """
    zero = replace(choice, axes=add_axes(path, choice, leaf, sizes, zero_axes))
    final = add_axes(path, zero, leaf, sizes, axes)
    added = [dim for dim, (before, after) in enumerate(zip(zero.axes, final, strict=True)) if before != after]
    if not added:
        return add_axes(path, choice, leaf, sizes, axes)
    return tuple(
        (*on, *final[dim][len(zero.axes[dim]) :]) if dim in added else on for dim, on in enumerate(choice.axes)
    )


def remove_axis(choice: AxisChoice, axis: str = "fsdp") -> tuple[tuple[str, ...], ...]:
    """Removes `axis` from the per-dim axes, for a model that names this axis itself."""
    return tuple(tuple(name for name in on if name != axis) for on in choice.axes)


def _num_shards(axes, sizes) -> int:
    ways = 1
    for axis in axes:
        ways *= sizes[axis]
    return ways
