"""Specs of the arrays of a training state: parameters, gradients, optimizer state and the model's other state.

parameters        stored between steps, gathered when the model reads them
gradients         sharded from ZeRO stage 2 on; the optimizer computes on shards from stage 1 on
optimizer state   the spec of the array's parameter; for codes in blocks or factors, the axes of ZeRO
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.errors import refuse
from jaxpar.models.dim_names import SPATIAL, spec_axes
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.zero import state_spec
from jaxpar.sharding.names import Tree, nest, path_of, pick


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
        if (path := path_of(keys)) not in layout.other_state:
            raise refuse(
                f"{layout.blueprint.name} has the array {path}, which Flax does not show on shapes alone",
                rule="a model keeps arrays in variables, or in attributes that Flax knows to be data",
                fix="nnx.Variable around it, or nnx.data(...); of a layer of Flax's own a newer Flax: "
                "nnx.WeightNorm with scales needs more than 0.12.8, and use_scale=False does not",
            )
        return layout.other_state[path].stored

    return jax.tree_util.tree_map_with_path(spec, state)


def owner_path(layout: Layout, keys) -> str | None:
    """Returns the path of an optimizer array's parameter, which is the last part of the array's own path.

    If no parameter's path is the last part, the parameter's path is inside of the array's path, because an optimizer
    may hold several arrays per parameter in a tuple.
    """
    words = path_of(keys).split("/")
    spans = ((begin, end) for end in range(len(words), 0, -1) for begin in range(end))
    return next((path for begin, end in spans if (path := "/".join(words[begin:end])) in layout.placements), None)


def optimizer_specs(layout: Layout, state: Tree) -> Tree:
    """Returns a spec for every array of any optax state.

    A leaf belongs to the parameter whose path is in the leaf's path: see `owner_path`. A leaf with the shape of its
    parameter gets the parameter's spec. A leaf of another shape (Adafactor's row and column statistics, 8-bit codes in
    blocks) gets the axes of ZeRO and of the parameter, on dims that they divide: see `zero.state_spec`. Scalars are
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
