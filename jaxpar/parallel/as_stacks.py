"""A layout with a list of equal layers, as its pipeline runs it: as a stack.

    between steps   blocks/0/w .. blocks/7/w   [16, 16]      pipe on another dim: names and shapes as without pipe
    in a step       blocks/*/w                 [8, 16, 16]   layers over pipe, made of them and taken apart again

So a checkpoint is the same with and without a pipeline. The price is an all-to-all of a stage's weights over `pipe` per
step, and one of its gradients (`tests/test_pipeline_gpu.py`), as where stages have different numbers of layers.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec

from jaxpar.parallel.layout import Layout, Placement
from jaxpar.sharding.lists import Lists
from jaxpar.sharding.names import Blueprint, Compute, Tree, Use, by_path, nest


def as_stacks(layout: Layout) -> Layout:
    """Returns the layout whose parameters are stacks where those of this one are lists of layers."""
    if not layout.lists:
        return layout
    members = {path for paths in layout.lists.values() for path in paths}
    alone = {path: place for path, place in layout.placements.items() if path not in members}
    stacks = {stack: _stacked(layout, paths) for stack, paths in layout.lists.items()}
    blueprint = replace(
        layout.blueprint,
        leaves={path: place.leaf for path, place in (alone | stacks).items()},
        bind=partial(_bind, layout.blueprint, layout.lists),
    )
    return replace(layout, placements=alone | stacks, blueprint=blueprint)


def _stacked(layout: Layout, paths: tuple[str, ...]) -> Placement:
    place = layout.placements[paths[0]]
    leaf = replace(place.leaf, shape=(len(paths), *place.leaf.shape), names=None)
    over = None if layout.parallel.pipeline.layers else "pipe"  # stages that differ cannot store equal pieces

    def spec(own: PartitionSpec) -> PartitionSpec:
        axes = [(entry,) if isinstance(entry, str) else entry or () for entry in own]
        return PartitionSpec(over, *(tuple(axis for axis in each if axis != over) or None for each in axes))

    specs = {which: spec(getattr(place, which)) for which in ("stored", "used", "sharded")}
    return replace(place, leaf=leaf, names=("layers", *place.names), **specs)


def _bind(blueprint: Blueprint, lists: Lists, params: Tree, state: Tree, use: Use, compute: Compute) -> Any:
    """Binds the model to the layers of its stacks; where there are fewer, to the last of them in place of the rest."""
    flat, names = by_path(params), {}
    for stack, members in lists.items():
        value = flat.pop(stack)
        each = [value[i] for i in range(value.shape[0])]
        flat |= {path: each[min(i, len(each) - 1)] for i, path in enumerate(members)}
        names |= dict.fromkeys(members, stack)
    params = nest({tuple(path.split("/")): value for path, value in flat.items()})
    return blueprint.bind(params, state, lambda path, value: use(names.get(path, path), value), compute)
