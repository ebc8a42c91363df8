"""Where every array of a model lives on a mesh: the choice of its dims, then what ZeRO and the pipeline make of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from jaxpar.errors import Problem
from jaxpar.parallel.declare import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.placement import Placement
from jaxpar.parallel.techniques.asked import idle, names_of
from jaxpar.parallel.zero import add_axis, without_axis
from jaxpar.sharding.lists import Lists
from jaxpar.sharding.names import LARGE, Blueprint, Leaf
from jaxpar.sharding.rules import Axes, Choice, name_stacks, resolve, spec_of
from jaxpar.sharding.stacks import of_all_layers, of_another_stack, one_layer, unnamed_layers
from jaxpar.units import show_bytes

Names = Mapping[str, Axes]


def placed(parallel: Parallel, blueprint: Blueprint, mesh: Any) -> tuple[Layout, list[Problem]]:
    """Returns where every array lives, and what is wrong with that."""
    names = names_of(parallel)
    # a parameter and other state may have the same path, as a weight and a random key that are called `key`
    leaves = name_stacks({**blueprint.others, **blueprint.leaves})
    others = name_stacks({**blueprint.leaves, **blueprint.others})
    parts = sum(parallel.pipeline.layers) or parallel.pipe
    own = {path: leaves[path] for path in blueprint.leaves}
    stack, lists = unnamed_layers(own, parts, parallel.paths) if parallel.pipe > 1 else (frozenset(), {})
    trained = {path: _trained(path, leaf, parallel, names, stack, lists) for path, leaf in own.items()}
    held = {path: _held(path, others[path], parallel, names) for path in blueprint.others}
    layout = Layout(
        parallel=parallel,
        blueprint=blueprint,
        placements={path: place for path, (place, _) in trained.items()},
        others={path: place for path, (place, _) in held.items()},
        names=names,
        lists=lists,
        mesh=mesh,
    )
    problems = [problem for _, wrong in (*trained.values(), *held.values()) for problem in wrong]
    return layout, problems + idle(layout)


def _trained(
    path: str, leaf: Leaf, parallel: Parallel, names: Names, stack: frozenset[str], lists: Lists
) -> tuple[Placement, list[Problem]]:
    """Returns the place of a parameter, and what is wrong with it; one of a bare stack is placed as one layer's is."""
    sizes, listed = parallel.sizes, any(path in paths for paths in lists.values())
    own = one_layer(leaf) if path in stack else leaf
    choice, wrong = resolve(path, own, sizes, names=names, paths=parallel.paths)
    if stack or lists:
        choice = of_all_layers(choice, names["layers"]) if path in stack else of_another_stack(choice)
    uneven = parallel.pipe > 1 and parallel.pipeline.layers and choice.names[:1] == ("layers",)
    if uneven or listed:
        # so many layers, or one of a list, cannot be stored as equal pieces, so another dim is
        choice = replace(choice, axes=add_axis(path, choice, leaf, sizes, axis="pipe"))
    if listed:
        choice = replace(choice, why=f"one of a list of layers, pipe on a dim of its own; {choice.why}")
    used, sharded = spec_of(without_axis(choice)), spec_of(add_axis(path, choice, leaf, sizes))
    return _place(parallel, leaf, choice, used, sharded), wrong


def _held(path: str, leaf: Leaf, parallel: Parallel, names: Names) -> tuple[Placement, list[Problem]]:
    """Returns the place of an array that is no parameter, and what is wrong with it."""
    if leaf.names is None and not leaf.large:
        return _whole(leaf), []
    choice, wrong = resolve(path, leaf, parallel.sizes, names=names, paths=parallel.paths)
    # every stage keeps what the model may read or write anywhere
    choice = replace(choice, axes=without_axis(choice, "pipe"))
    used = spec_of(without_axis(choice))
    sharded = spec_of(add_axis(path, choice, leaf, parallel.sizes)) if leaf.large else used
    return _place(parallel, leaf, replace(choice, why=f"other state; {choice.why}"), used, sharded), wrong


def _place(parallel: Parallel, leaf: Leaf, choice: Choice, used: PartitionSpec, sharded: PartitionSpec) -> Placement:
    return Placement(
        leaf=leaf,
        names=choice.names,
        stored=sharded if parallel.stage else used,
        used=used,
        sharded=sharded,
        why=choice.why + _fsdp_reason(parallel, used, sharded),
    )


def _whole(leaf: Leaf) -> Placement:
    """Returns the place of a small array of other state: a random key, the statistics of a norm."""
    everywhere, why = PartitionSpec(), f"other state below {show_bytes(LARGE)} is whole"
    none = (None,) * len(leaf.shape)
    return Placement(leaf=leaf, names=none, stored=everywhere, used=everywhere, sharded=everywhere, why=why)


def _fsdp_reason(parallel: Parallel, used, sharded) -> str:
    if parallel.stage == 0:
        return ""
    return "; fsdp divides no dim" if used == sharded else "; fsdp on the largest dim"
