"""The layout in which a pipeline runs a list of equal layers: as a stack.

    between steps   blocks/0/w .. blocks/7/w   [16, 16]      pipe on another dim: names and shapes as without pipe
    in a step       blocks/*/w                 [8, 16, 16]   layers over pipe, stacked from them and unstacked again

So a checkpoint is the same with and without a pipeline. The price is an all-to-all of a stage's weights over `pipe` per
step, and one of its gradients (`tests/pipeline/test_compiled.py`), as where stages have different numbers of layers.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec

from jaxpar.parallel.layout import Layout, Placement
from jaxpar.sharding.lists import Lists
from jaxpar.sharding.names import Blueprint, Compute, Tree, Use, by_path, nest


def as_stacks(layout: Layout) -> Layout:
    """Returns the layout with each list of layers replaced by a stack."""
    if not layout.lists:
        return layout
    members = {path for paths in layout.lists.values() for path in paths}
    unlisted = {path: place for path, place in layout.placements.items() if path not in members}
    stacks = {stack: _stacked(layout, paths) for stack, paths in layout.lists.items()}
    blueprint = replace(
        layout.blueprint,
        leaves={path: place.leaf for path, place in (unlisted | stacks).items()},
        bind=partial(_bind, layout.blueprint, layout.lists),
    )
    return replace(layout, placements=unlisted | stacks, blueprint=blueprint)


def _stacked(layout: Layout, paths: tuple[str, ...]) -> Placement:
    place = layout.placements[paths[0]]
    leaf = replace(place.leaf, shape=(len(paths), *place.leaf.shape), names=None)
    pipe_axis = None if layout.parallel.pipeline.layers else "pipe"  # stages that differ cannot store equal pieces

    def spec(layer_spec: PartitionSpec) -> PartitionSpec:
        axes = [(entry,) if isinstance(entry, str) else entry or () for entry in layer_spec]
        return PartitionSpec(pipe_axis, *(tuple(axis for axis in names if axis != pipe_axis) or None for names in axes))

    specs = {kind: spec(getattr(place, kind)) for kind in ("stored", "used", "sharded")}
    return replace(place, leaf=leaf, names=("layers", *place.names), **specs)


def _bind(blueprint: Blueprint, lists: Lists, params: Tree, state: Tree, use: Use, compute: Compute) -> Any:
    """Binds the model to the layers of its stacks; if a stack has fewer, its last layer stands for the missing ones."""
    flat, names = by_path(params), {}
    for stack, members in lists.items():
        value = flat.pop(stack)
        slices = [value[i] for i in range(value.shape[0])]
        flat |= {path: slices[min(i, len(slices) - 1)] for i, path in enumerate(members)}
        names |= dict.fromkeys(members, stack)
    params = nest({tuple(path.split("/")): value for path, value in flat.items()})
    return blueprint.bind(params, state, lambda path, value: use(names.get(path, path), value), compute)
