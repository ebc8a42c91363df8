"""Where every array of a model lives on a mesh: the choice of its dims, then what ZeRO and the pipeline make of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec

from jaxpar.errors import Problem, nearest
from jaxpar.mesh.axes import batch_axes
from jaxpar.parallel.declare import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.placement import Placement
from jaxpar.parallel.techniques.asked import idle, names_of
from jaxpar.parallel.zero import add_axes, beside_zero, without_axis
from jaxpar.sharding.adapters import as_base, base_of
from jaxpar.sharding.author.rules_in_force import with_author_rules
from jaxpar.sharding.lists import Lists
from jaxpar.sharding.names import LARGE, Blueprint, Leaf
from jaxpar.sharding.reading.read import read
from jaxpar.sharding.reading.use import Read
from jaxpar.sharding.rules import Axes, Choice, name_stacks, resolve, spec_of
from jaxpar.sharding.stacks import of_all_layers, of_another_stack, one_layer, unnamed_layers
from jaxpar.units import show_bytes

NO_MATRIX = ("pipe", *batch_axes())  # axes that cut no matrix: for them nobody asks what a model does with one


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model that names none, as a pipeline finds them.

    Attributes:
      stack: Paths of parameters that hold all layers.
      lists: A name for each parameter of a layer, with the paths of those of all layers.
      axes: What splits layers.
    """

    stack: frozenset[str]
    lists: Lists
    axes: Axes


def placed(parallel: Parallel, blueprint: Blueprint, mesh: Any) -> tuple[Layout, list[Problem]]:
    """Returns where every array lives, and what is wrong with that."""
    names, unknown = with_author_rules(names_of(parallel), blueprint.rules, parallel.rules, parallel.sizes)
    # a parameter and other state may have the same path, as a weight and a random key that are called `key`
    leaves = name_stacks({**blueprint.others, **blueprint.leaves})
    others = name_stacks({**blueprint.leaves, **blueprint.others})
    parts = sum(parallel.pipeline.layers) or parallel.pipe
    beside = {path: base for path in blueprint.leaves if (base := base_of(blueprint, path)) is not None}
    own = {path: leaves[path] for path in blueprint.leaves if path not in beside}
    prefix = parallel.pipeline.stack
    candidates = {path: leaf for path, leaf in own.items() if path.startswith(prefix)}
    stack, lists = unnamed_layers(candidates, parts, parallel.paths) if parallel.pipe > 1 else (frozenset(), {})
    reads = read(blueprint, use=any(size > 1 for axis, size in parallel.sizes.items() if axis not in NO_MATRIX))
    find = partial(resolve, sizes=parallel.sizes, names=names, paths=parallel.paths, rules=parallel.rules)
    layers = Layers(stack, lists, names["layers"])
    trained = {path: _trained(path, leaf, parallel, layers, find, reads.get(path)) for path, leaf in own.items()}
    for path, (base, dims) in beside.items():
        choice = as_base(trained[base][1], base, dims)
        trained[path] = (_place(path, leaves[path], parallel, choice, cut=True), choice, [])
    held = {path: _held(path, others[path], parallel, find, reads.get(path)) for path in blueprint.others}
    layout = Layout(
        parallel=parallel,
        blueprint=blueprint,
        placements={path: _told(blueprint, path, trained[path][0]) for path in blueprint.leaves},
        others={path: place for path, (place, _) in held.items()},
        names=names,
        lists=lists,
        mesh=mesh,
        notes=tuple(_names_without_rule(blueprint, parallel, names, unknown)),
    )
    problems = [problem for *_, wrong in (*trained.values(), *held.values()) for problem in wrong]
    if prefix and not stack and not lists:
        problems.append(_no_layers_at(prefix, own, parts))
    if lists and beside:
        problems.append(_beside_a_list(blueprint))
    problems += _in_eight_bits(layout)
    return layout, problems + idle(layout)


def _names_without_rule(
    blueprint: Blueprint, parallel: Parallel, names: Mapping[str, Axes], unknown: Sequence[str]
) -> list[str]:
    """Returns the names of dims, and the axes in the author's rules, that no axis of the mesh answers to."""
    if all(size == 1 for axis, size in parallel.sizes.items() if axis not in NO_MATRIX):
        return []
    given = [name for leaf in blueprint.leaves.values() for name in leaf.names or () if isinstance(name, str)]
    free = dict.fromkeys(name for name in given if name not in names and name not in parallel.sizes)
    notes = []
    if free:
        first = next(iter(free))
        notes.append(f"names without a rule, whose dims are whole: {', '.join(free)}; rules={{{first!r}: ...}} cuts")
    if unknown:
        axes = ", ".join(dict.fromkeys(unknown))
        notes.append(f"axes in rules around the model that the mesh lacks: {axes}; rules={{{unknown[0]!r}: ...}}")
    return notes


def _told(blueprint: Blueprint, path: str, place: Placement) -> Placement:
    """Returns the place of a parameter, which says of a matrix that it is kept in 8 bits."""
    if path not in blueprint.adapters or blueprint.adapters[path].wide is None:
        return place
    return replace(place, why=f"{place.why}; frozen, in 8 bits")


def _no_layers_at(prefix: str, leaves: Mapping[str, Leaf], parts: int) -> Problem:
    """Returns that no layers were found where `Pipeline.stack` says that they are."""
    if not any(path.startswith(prefix) for path in leaves):
        return Problem(
            f"pipeline.stack = {prefix!r}, where no parameter's path begins",
            "stack is the start of the paths of the layers that the pipeline runs",
            nearest(prefix, {"/".join(path.split("/")[: prefix.count("/") + 1]) for path in leaves}),
        )
    return Problem(
        f"pipeline.stack = {prefix!r}, where no stack or list of layers begins that {parts} parts divide",
        "layers without names are a stack, whose parameters have one more dim, or a list of equal layers",
        f"another stack, a number of layers that {parts} divides, or pipe = 1",
    )


def _beside_a_list(blueprint: Blueprint) -> Problem:
    return Problem(
        f"adapters of {blueprint.name}, whose layers are a list, with pipe > 1",
        "the stages of a pipeline run one layer's program, and adapters beside a list belong to none of its layers",
        "pipe = 1; or layers in one stack, as of jp.Decoder",
    )


def _in_eight_bits(layout: Layout) -> list[Problem]:
    """Returns what keeps a base in 8 bits from being read as it is stored."""
    if not any(each.wide for each in layout.blueprint.adapters.values()):
        return []
    found, exchange = [], layout.parallel.exchange
    if layout.sizes["pipe"] > 1:
        found.append(
            (f"pipe={layout.sizes['pipe']}", "pipe = 1, and fsdp or tensor for a base that is still too large")
        )
    if exchange.apart:
        found.append((f"exchange {exchange}", "no exchange: adapters are few bytes to sum in every step"))
    rule = "a base in 8 bits has no gradients, which stages and replicas apart keep a place for"
    return [Problem(f'adapters with base="int8" and {what}', rule, f'{fix}; or base="float"') for what, fix in found]


def _trained(
    path: str, leaf: Leaf, parallel: Parallel, layers: Layers, find: Callable, read: Read | None
) -> tuple[Placement, Choice, list[Problem]]:
    """Returns the place of a parameter, its choice, and what is wrong; one of a bare stack goes as one layer's does."""
    sizes, stacked, listed = parallel.sizes, path in layers.stack, any(path in each for each in layers.lists.values())
    choice, wrong = find(path, one_layer(leaf) if stacked else leaf, read=read)
    if layers.stack or layers.lists:
        choice = of_all_layers(choice, layers.axes) if stacked else of_another_stack(choice)
    uneven = parallel.pipe > 1 and parallel.pipeline.layers and choice.names[:1] == ("layers",)
    if uneven or listed:
        # so many layers, or one of a list, cannot be stored as equal pieces, so another dim is
        choice = replace(choice, axes=beside_zero(path, choice, leaf, sizes, parallel.zero_axes, ("pipe",)))
    if listed:
        choice = replace(choice, why=f"one of a list of layers, pipe on a dim of its own; {choice.why}")
    return _place(path, leaf, parallel, choice, cut=True), choice, wrong


def _held(
    path: str, leaf: Leaf, parallel: Parallel, find: Callable, read: Read | None
) -> tuple[Placement, list[Problem]]:
    """Returns the place of an array that is no parameter, and what is wrong with it."""
    if leaf.names is None and not leaf.large:
        return _whole(leaf), []
    choice, wrong = find(path, leaf, read=read)
    # every stage keeps what the model may read or write anywhere
    choice = replace(choice, axes=without_axis(choice, "pipe"), why=f"other state; {choice.why}", moved=None)
    return _place(path, leaf, parallel, choice, cut=leaf.large), wrong


def _place(path: str, leaf: Leaf, parallel: Parallel, choice: Choice, *, cut: bool) -> Placement:
    """Returns the place of an array by its choice; `cut` says whether ZeRO may shard it."""
    kept = choice
    # where stages or replicas step apart, what reads a parameter is not XLA's to see: it is stored as it is used
    if choice.moved and parallel.pipe == 1 and not parallel.exchange.apart:
        choice, kept = (replace(choice, axes=axes) for axes in choice.moved)
    whole = spec_of(without_axis(kept))
    sharded = spec_of(add_axes(path, kept, leaf, parallel.sizes, parallel.zero_axes)) if cut else whole
    return Placement(
        leaf=leaf,
        names=choice.names,
        stored=sharded if parallel.stage else whole,
        used=spec_of(without_axis(choice)),
        whole=whole,
        sharded=sharded,
        why=choice.why + _fsdp_reason(parallel, whole, sharded),
    )


def _whole(leaf: Leaf) -> Placement:
    """Returns the place of a small array of other state: a random key, the statistics of a norm."""
    everywhere, why = PartitionSpec(), f"other state below {show_bytes(LARGE)} is whole"
    none = (None,) * len(leaf.shape)
    return Placement(
        leaf=leaf, names=none, stored=everywhere, used=everywhere, whole=everywhere, sharded=everywhere, why=why
    )


def _fsdp_reason(parallel: Parallel, whole, sharded) -> str:
    if parallel.stage == 0:
        return ""
    axes = " x ".join(axis for axis in parallel.zero_axes if parallel.sizes[axis] > 1)
    return f"; {axes} divides no dim" if whole == sharded else f"; {axes} on the largest dim"
