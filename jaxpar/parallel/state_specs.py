"""Specs of the arrays of a training state: parameters, gradients, optimizer state and the model's other state.

ZeRO shards the training state over the axis `fsdp`, and over `context` if `Parallel.zero_over` names it.

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
whole, is counted whole and is listed; `Parallel.replicate_above` bounds such arrays: see `unsharded_arrays.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.errors import refuse
from jaxpar.models.dim_names import SPATIAL, spec_axes
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import LARGE, Leaf, Tree, format_path, nest, pick
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


def abstract_params(layout: Layout) -> Tree:
    """Returns the parameters as abstract arrays."""
    return _tree(layout, lambda place: jax.ShapeDtypeStruct(place.leaf.shape, place.leaf.dtype))


def stored_specs(layout: Layout) -> Tree:
    """Returns the specs of the parameters between steps."""
    return _tree(layout, lambda place: place.stored)


def gradient_specs(layout: Layout) -> Tree:
    """Returns the specs of the gradients and their accumulator, which are sharded from stage 2 on."""
    return _zero_specs(layout, layout.parallel.stage >= 2)


def update_specs(layout: Layout) -> Tree:
    """Returns the specs in which the optimizer computes, which are sharded from stage 1 on."""
    return _zero_specs(layout, layout.parallel.stage >= 1)


def model_state_specs(layout: Layout, state: Tree) -> Tree:
    """Returns a spec for every array of the model's state that is not a parameter."""

    def spec(keys, _) -> PartitionSpec:
        if (path := format_path(keys)) not in layout.other_state:
            raise refuse(
                f"{layout.blueprint.name} has the array {path}, which Flax does not show on shapes alone",
                rule="a model keeps arrays in variables, or in attributes that Flax knows to be data",
                fix="nnx.Variable around it, or nnx.data(...). If the layer is one of Flax, a newer Flax may do this: "
                "nnx.WeightNorm needs a Flax above 0.12.8, or use_scale=False",
            )
        return layout.other_state[path].stored

    return jax.tree_util.tree_map_with_path(spec, state)


def owner_path(layout: Layout, keys) -> str | None:
    """Returns the path of an optimizer array's parameter, which is the last part of the array's own path.

    If no parameter's path is the last part, the parameter's path is inside of the array's path, because an optimizer
    may hold several arrays per parameter in a tuple.
    """
    words = format_path(keys).split("/")
    spans = ((begin, end) for end in range(len(words), 0, -1) for begin in range(end))
    return next((path for begin, end in spans if (path := "/".join(words[begin:end])) in layout.placements), None)


def optimizer_specs(layout: Layout, state: Tree) -> Tree:
    """Returns a spec for every array of any optax state.

    A leaf belongs to the parameter whose path is in the leaf's path: see `owner_path`. A leaf with the shape of its
    parameter gets the parameter's spec. A leaf of another shape (Adafactor's row and column statistics, 8-bit codes in
    blocks) gets the axes of ZeRO and of the parameter, on dims that they divide: see `state_spec`. Scalars are
    replicated.
    """
    axes = tuple(axis for axis in layout.parallel.zero_axes if layout.sizes[axis] > 1)
    axes = axes if layout.parallel.stage >= 1 else ()

    def spec(keys, leaf) -> PartitionSpec:
        param_path = owner_path(layout, keys)
        if param_path and tuple(leaf.shape) == layout.placements[param_path].leaf.shape:
            return pick(update_specs(layout), tuple(param_path.split("/")))
        param = pick(update_specs(layout), tuple(param_path.split("/"))) if param_path else ()
        return state_spec(leaf, layout.sizes, axes, tuple(axis for entry in param for axis in spec_axes(entry)))

    return jax.tree_util.tree_map_with_path(spec, state)


def batch_sharding(layout: Layout, shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding of a batch array: examples over all axes whose devices see different examples.

    If an axis splits images, it also splits dim 1 (height) and dim 2 (width) of arrays of three and more dims, images,
    volumes or their labels, where it divides them; elsewhere its devices receive whole images.
    """
    if not shape:
        return layout.sharding(PartitionSpec())
    spatial = [_spatial_axes(layout, name, size) for name, size in zip(SPATIAL, shape[1:], strict=False)]
    spec = (layout.parallel.batch_axes, *spatial) if len(shape) > 2 and any(spatial) else (layout.parallel.batch_axes,)
    return layout.sharding(PartitionSpec(*spec))


def _spatial_axes(layout: Layout, name: str, size: int) -> tuple[str, ...] | None:
    entry = layout.names.get(name)
    axes = tuple(axis for axis in spec_axes(entry) if layout.sizes.get(axis, 1) > 1)
    return axes if axes and size % math.prod(layout.sizes[axis] for axis in axes) == 0 else None


@lru_cache(maxsize=32)  # a step asks several times
def _zero_specs(layout: Layout, sharded: bool) -> Tree:
    return _tree(layout, lambda place: place.sharded if sharded else place.whole)


def _tree(layout: Layout, value: Callable[[Any], Any]) -> Tree:
    return nest({tuple(path.split("/")): value(place) for path, place in layout.placements.items()})
