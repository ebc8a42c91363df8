"""Chooses the stages on which a pipeline runs embedding and head: the first and the last stage, or all stages.

    last      every stage holds both ends whole, since one program runs on all of them
    spread    every stage holds its shard of `vocab`; the input and the output of the layers go over `pipe` for every
              microbatch, and so do their gradients

While the table runs, a parameter of embedding or head takes `HELD` bytes on a device. `auto` chooses `spread` if it
frees at least `LEAST` bytes and all its requirements are met.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from jaxpar.errors import Problem
from jaxpar.mesh.axes import AXES
from jaxpar.parallel.declaration import HELD, LEAST, PHASED, UNNAMED, Parallel
from jaxpar.parallel.layout import Layout, Placement, with_note
from jaxpar.sharding.infer_stacks import Lists
from jaxpar.sharding.names import Blueprint, Compute, Tree, Use, leaves_by_path, nest, shard_bytes
from jaxpar.units import show_bytes

Compose = Callable[[Parallel], tuple[Layout | None, list[Problem]]]


def place_head(layout: Layout, compose: Compose) -> Layout:
    """Chooses the stages that run embedding and head, and adds the reason to `Layout.notes`.

    Args:
      layout: The declared layout, in which `auto` is placed like `last`.
      compose: Composes the same model and devices under another declaration; returns the layout, or its problems.
    """
    if layout.parallel.pipeline.stages:
        return replace(layout, parallel=_with_head_option(layout.parallel, "last"))
    if layout.parallel.pipeline.head != "auto":
        return with_note(layout, f"head: {_WHERE[layout.parallel.pipeline.head]}, as declared")
    last, spread = (_with_head_option(layout.parallel, head) for head in ("last", "spread"))
    spread_layout, problems = compose(spread)
    if problems or spread_layout is None:
        why = f"not spread, because of {problems[0].got}: {problems[0].rule}"
    elif splits_lookups(layout):
        why = (
            f"not spread, because of context={layout.sizes['context']}: a loss that looks labels up could not be "
            "compiled; with jp.next_token_loss head='spread' is possible"
        )
    else:
        whole, share = head_bytes(layout), head_bytes(spread_layout)
        if whole - share >= LEAST:
            size = f"{show_bytes(share)} of embedding and head on each device instead of {show_bytes(whole)}"
            return with_note(spread_layout, f"head: {_WHERE['spread']}: {size}")
        why = f"spread would free {show_bytes(whole - share)} on each device, less than {show_bytes(LEAST)}"
    return with_note(replace(layout, parallel=last), f"head: {_WHERE['last']}; {why}")


def head_bytes(layout: Layout) -> int:
    """Returns the bytes of embedding and head (parameters with a dim `vocab`) on a device while the table runs."""
    ends = (place for path, place in layout.placements.items() if path not in layout.stacked_paths)
    places = (place for place in ends if {"vocab", "vocab_table"} & {*place.names})
    return sum(HELD * shard_bytes(p.leaf, p.used, layout.sizes) // np.dtype(p.leaf.dtype).itemsize for p in places)


def splits_lookups(layout: Layout) -> bool:
    """Whether only a spread head would split sequences and lookup tables: see `context.splits_tables`."""
    return layout.sizes["context"] > 1 and layout.sizes["tensor"] == 1


_WHERE = {"last": "on the last stage", "spread": "spread over pipe"}


def _with_head_option(parallel: Parallel, head: str) -> Parallel:
    return replace(parallel, pipeline=replace(parallel.pipeline, head=head))


# The layout in which a pipeline runs a list of equal layers: as a stack.
#
#     between steps   blocks/0/w .. blocks/7/w   [16, 16]      pipe on another dim: names and shapes as without pipe
#     in a step       blocks/*/w                 [8, 16, 16]   layers over pipe, stacked from them and unstacked again
#
# So a checkpoint is the same with and without a pipeline. The price is an all-to-all of a stage's weights over `pipe`
# per step, and one of its gradients (`tests/pipeline/test_compiled.py`), as where stages have different numbers of
# layers.


def merge_lists_into_stacks(layout: Layout) -> Layout:
    """Returns the layout with each list of layers replaced by a stack."""
    if not layout.lists:
        return layout
    members = {path for paths in layout.lists.values() for path in paths}
    unlisted = {path: place for path, place in layout.placements.items() if path not in members}
    stacks = {stack: _stack_placement(layout, paths) for stack, paths in layout.lists.items()}
    blueprint = replace(
        layout.blueprint,
        leaves={path: place.leaf for path, place in (unlisted | stacks).items()},
        bind=partial(_bind, layout.blueprint, layout.lists),
    )
    return replace(layout, placements=unlisted | stacks, blueprint=blueprint)


def _stack_placement(layout: Layout, paths: tuple[str, ...]) -> Placement:
    place = layout.placements[paths[0]]
    leaf = replace(place.leaf, shape=(len(paths), *place.leaf.shape), names=None)
    pipe_axis = None if layout.parallel.pipeline.layers else "pipe"  # uneven stages cannot store equal shards

    def spec(layer_spec: PartitionSpec) -> PartitionSpec:
        axes = [(entry,) if isinstance(entry, str) else entry or () for entry in layer_spec]
        return PartitionSpec(pipe_axis, *(tuple(axis for axis in names if axis != pipe_axis) or None for names in axes))

    specs = {kind: spec(getattr(place, kind)) for kind in ("stored", "used", "sharded")}
    return replace(place, leaf=leaf, names=("layers", *place.names), **specs)


def _bind(blueprint: Blueprint, lists: Lists, params: Tree, state: Tree, use: Use, compute: Compute) -> Any:
    """Binds the model to the layers of its stacks; if a stack has too few, its last layer replaces the missing ones."""
    flat, names = leaves_by_path(params), {}
    for stack, members in lists.items():
        value = flat.pop(stack)
        slices = [value[i] for i in range(value.shape[0])]
        flat |= {path: slices[min(i, len(slices) - 1)] for i, path in enumerate(members)}
        names |= dict.fromkeys(members, stack)
    params = nest({tuple(path.split("/")): value for path, value in flat.items()})
    return blueprint.bind(params, state, lambda path, value: use(names.get(path, path), value), compute)


# The schedule of a pipeline whose declaration names none: `1f1b_phased`, and `1f1b` on simulated devices.
#
#     1f1b_phased    in a tick all stages run the same kind of op. The program has no conditional, so idle stages
# compute
#                    too, and drop the result
#     1f1b           each stage takes the branch of its own op; an idle stage computes nothing
#
# An idle GPU has nothing else to do, and a conditional costs it a round trip to its host in every tick. Simulated
# devices share the cores of one machine: there, the work of idle stages takes time from the others. Both schedules make
# the same updates, up to rounding: microbatches are summed in the same order.

MIXED = "1f1b"


def choose_schedule(layout: Layout) -> Layout:
    """Sets the schedule of a layout whose pipeline names none, and adds the reason to `Layout.notes`.

    Args:
      layout: A layout with a placed head; if the head is spread over the stages, the table must be phased.
    """
    pipeline = layout.parallel.pipeline
    if pipeline.schedule != UNNAMED:
        return layout
    if pipeline.stages:
        name, why = MIXED, "stages of different programs take a branch in every tick, whatever the schedule"
    elif not layout.simulated:
        name = PHASED
        why = "in a tick all stages go the same way, without a conditional, which costs a GPU a host round trip"
    elif needs := _needs_phased(layout):
        name, why = PHASED, f"{MIXED} would compute less on simulated devices, but {needs}"
    else:
        from jaxpar.pipeline.tables.price import OpTimes, price

        name, times = MIXED, price(layout.schedule, OpTimes()).work_ratio  # the same for any times of its ops
        why = f"simulated devices share a processor, and {PHASED} computes {times:.2f} x its work, idle cells included"
    parallel = replace(layout.parallel, pipeline=replace(pipeline, schedule=name))
    return with_note(replace(layout, parallel=parallel), f"schedule: {name}: {why}")


def _needs_phased(layout: Layout) -> str:
    """Explains why all stages must run the same kind of op in a tick; "" if they need not."""
    pipeline = layout.parallel.pipeline
    if pipeline.head == "spread":
        return "a head that is spread over all stages runs on all of them in the same tick"
    if pipeline.weights != "flush":  # the table decides the weights of each forward, and so the losses
        return f'with weights="{pipeline.weights}" the losses of a run depend on its table, so devices do not choose it'
    for axis, size in layout.sizes.items():
        if size > 1 and not AXES[axis].manual:
            return f"collectives over {axis} inside of one stage may wait for other stages, which run another op"
    return ""
