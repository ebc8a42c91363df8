"""Places every array of a model on a mesh: chooses axes for its dims, then applies ZeRO and the pipeline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from jax.sharding import Mesh, PartitionSpec

from jaxpar.errors import Problem, suggest
from jaxpar.mesh.axes import AXES, batch_axes
from jaxpar.models.dim_names import spec_axes
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.placement import Placement
from jaxpar.parallel.state_specs import add_axes, add_zero_and_axes, remove_axis
from jaxpar.parallel.techniques.all_techniques import all_dim_names, idle_problems
from jaxpar.sharding.adapters import adapter_choice, find_base
from jaxpar.sharding.author.rules_in_force import with_author_rules
from jaxpar.sharding.infer_names.from_words import InferredDims
from jaxpar.sharding.infer_names.infer_dims import infer_dims
from jaxpar.sharding.infer_stacks import Lists, stack_choice, unnamed_layers, unstack_choice, unstack_leaf
from jaxpar.sharding.names import LARGE, Blueprint, Leaf
from jaxpar.sharding.rules import Axes, AxisChoice, choose_axes, name_stacks, to_spec
from jaxpar.units import show_bytes

# axes that split no matrix: with these alone the model's use need not be traced
NO_MATRIX = ("pipe", *(axis for axis in batch_axes() if not AXES[axis].splits))


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that a pipeline finds in a model without a dim named `layers`.

    Attributes:
      stack: Paths of parameters that hold all layers.
      lists: Name of each parameter of a layer to its paths in all layers.
      axes: Axes that split the layers.
    """

    stack: frozenset[str]
    lists: Lists
    axes: Axes


def place_arrays(parallel: Parallel, blueprint: Blueprint, mesh: Mesh | None) -> tuple[Layout, list[Problem]]:
    """Places all arrays of a model; returns the layout, and the problems of its placements."""
    names, unknown = with_author_rules(all_dim_names(parallel), blueprint.rules, parallel.rules, parallel.sizes)
    # a parameter and other state may have the same path: a weight and a random key may both be called `key`
    leaves = name_stacks({**blueprint.other_leaves, **blueprint.leaves})
    others = name_stacks({**blueprint.leaves, **blueprint.other_leaves})
    parts = sum(parallel.pipeline.layers) or parallel.pipe
    bases = {path: base for path in blueprint.leaves if (base := find_base(blueprint, path)) is not None}
    params = {path: leaves[path] for path in blueprint.leaves if path not in bases}
    prefix = parallel.pipeline.stack
    candidates = {path: leaf for path, leaf in params.items() if path.startswith(prefix)}
    finds_layers = parallel.pipe > 1 and not parallel.pipeline.stages
    stack, lists = unnamed_layers(candidates, parts, parallel.paths) if finds_layers else (frozenset(), {})
    reads = infer_dims(blueprint, use=any(size > 1 for axis, size in parallel.sizes.items() if axis not in NO_MATRIX))
    find = partial(choose_axes, sizes=parallel.sizes, names=names, paths=parallel.paths, rules=parallel.rules)
    layers = Layers(stack, lists, names["layers"])
    trained = {
        path: _place_parameter(path, leaf, parallel, layers, find, reads.get(path)) for path, leaf in params.items()
    }
    for path, (base, dims) in bases.items():
        choice = adapter_choice(trained[base][1], base, dims)
        trained[path] = (_place(path, leaves[path], parallel, choice, cut=True), choice, [])
    state = {
        path: _place_other_state(path, others[path], parallel, find, reads.get(path)) for path in blueprint.other_leaves
    }
    layout = Layout(
        parallel=parallel,
        blueprint=blueprint,
        placements={path: _note_eight_bits(blueprint, path, trained[path][0]) for path in blueprint.leaves},
        other_state={path: placement for path, (placement, _) in state.items()},
        names=names,
        lists=lists,
        mesh=mesh,
        notes=tuple(_names_without_rule(blueprint, parallel, names, unknown)),
    )
    problems = [problem for *_, errors in (*trained.values(), *state.values()) for problem in errors]
    if prefix and not stack and not lists:
        problems.append(_missing_layers_problem(prefix, params, parts))
    if lists and bases:
        problems.append(_list_adapters_problem(blueprint))
    problems += _eight_bit_problems(layout)
    return layout, problems + idle_problems(layout)


def _names_without_rule(
    blueprint: Blueprint, parallel: Parallel, names: Mapping[str, Axes], unknown: Sequence[str]
) -> list[str]:
    """Returns notes on dim names without a rule, and on axes in the author's rules that the mesh lacks."""
    if all(size == 1 for axis, size in parallel.sizes.items() if axis not in NO_MATRIX):
        return []
    used = [name for leaf in blueprint.leaves.values() for name in leaf.names or () if isinstance(name, str)]
    unknown_names = dict.fromkeys(name for name in used if name not in names and name not in parallel.sizes)
    notes = []
    if unknown_names:
        first = next(iter(unknown_names))
        notes.append(
            f"names without a rule, whose dims are whole: {', '.join(unknown_names)}; rules={{{first!r}: ...}} cuts"
        )
    if unknown:
        axes = ", ".join(dict.fromkeys(unknown))
        notes.append(f"axes in rules around the model that the mesh lacks: {axes}; rules={{{unknown[0]!r}: ...}}")
    return notes


def _note_eight_bits(blueprint: Blueprint, path: str, place: Placement) -> Placement:
    """Appends to the reason of a frozen 8-bit matrix that it is stored in 8 bits."""
    if path not in blueprint.adapters or blueprint.adapters[path].float_dtype is None:
        return place
    return replace(place, why=f"{place.why}; frozen, in 8 bits")


def _missing_layers_problem(prefix: str, leaves: Mapping[str, Leaf], parts: int) -> Problem:
    if not any(path.startswith(prefix) for path in leaves):
        return Problem(
            f"pipeline.stack = {prefix!r}, but no parameter's path begins with it",
            "stack is the start of the paths of the layers that the pipeline runs",
            suggest(prefix, {"/".join(path.split("/")[: prefix.count("/") + 1]) for path in leaves}),
        )
    return Problem(
        f"pipeline.stack = {prefix!r}, but no stack or list of layers there can be divided into {parts} equal parts",
        "layers without names are a stack, whose parameters have one more dim, or a list of equal layers",
        f"another stack, a number of layers that {parts} divides, or pipe = 1",
    )


def _list_adapters_problem(blueprint: Blueprint) -> Problem:
    return Problem(
        f"adapters of {blueprint.name}, whose layers are a list, with pipe > 1",
        "the stages of a pipeline run one layer's program, and adapters beside a list belong to none of its layers",
        "pipe = 1; or layers in one stack, as of jp.Decoder",
    )


def _eight_bit_problems(layout: Layout) -> list[Problem]:
    """Returns the settings that do not support a base model in 8 bits."""
    if not any(matrix.float_dtype for matrix in layout.blueprint.adapters.values()):
        return []
    faults, exchange = [], layout.parallel.exchange
    if layout.sizes["pipe"] > 1:
        faults.append(
            (f"pipe={layout.sizes['pipe']}", "pipe = 1, and fsdp or tensor for a base that is still too large")
        )
    if exchange.per_replica:
        faults.append((f"exchange {exchange}", "no exchange: adapters are few bytes to sum in every step"))
    rule = "a base in 8 bits has no gradients, but pipelines and per-replica steps expect one for every parameter"
    return [Problem(f'adapters with base="int8" and {key}', rule, f'{fix}; or base="float"') for key, fix in faults]


def _place_parameter(
    path: str, leaf: Leaf, parallel: Parallel, layers: Layers, find: Callable, read: InferredDims | None
) -> tuple[Placement, AxisChoice, list[Problem]]:
    """Returns a parameter's placement, choice and problems; places a stack without names as its layers."""
    sizes, stacked, listed = parallel.sizes, path in layers.stack, any(path in paths for paths in layers.lists.values())
    choice, wrong = find(path, unstack_leaf(leaf) if stacked else leaf, read=read)
    if layers.stack or layers.lists:
        choice = stack_choice(choice, layers.axes) if stacked else unstack_choice(choice)
    uneven = parallel.pipe > 1 and parallel.pipeline.layers and choice.names[:1] == ("layers",)
    pieces = parallel.pipe > 1 and bool(parallel.pipeline.stages)
    if uneven or listed or pieces:
        # uneven stages, or one layer of a list, cannot be stored as equal shards of layers: `pipe` takes another dim
        choice = replace(choice, axes=add_zero_and_axes(path, choice, leaf, sizes, parallel.zero_axes, ("pipe",)))
    if listed or pieces:
        reader = "one of a list of layers" if listed else "read by the stages of its pieces"
        choice = replace(choice, why=f"{reader}, pipe on a dim of its own; {choice.why}")
    return _place(path, leaf, parallel, choice, cut=True), choice, wrong


def _place_other_state(
    path: str, leaf: Leaf, parallel: Parallel, find: Callable, read: InferredDims | None
) -> tuple[Placement, list[Problem]]:
    """Returns the placement of an array that is not a parameter, and its problems."""
    if leaf.names is None and not leaf.large:
        return _place_unsharded(leaf), []
    choice, wrong = find(path, leaf, read=read)
    # every stage stores other state whole: the model may read or write it in any layer
    choice = replace(
        choice, axes=remove_axis(choice, "pipe"), why=f"other state; {choice.why}", read_and_stored_axes=None
    )
    return _place(path, leaf, parallel, choice, cut=leaf.large), wrong


def _place(path: str, leaf: Leaf, parallel: Parallel, choice: AxisChoice, *, cut: bool) -> Placement:
    """Returns the placement of an array by its choice of axes; `cut`: whether ZeRO may shard it."""
    stored_choice = choice
    # XLA cannot see a parameter's readers in pipeline stages or per-replica steps: there it is stored as it is used
    if choice.read_and_stored_axes and parallel.pipe == 1 and not parallel.exchange.per_replica:
        choice, stored_choice = (replace(choice, axes=axes) for axes in choice.read_and_stored_axes)
    whole = to_spec(remove_axis(stored_choice))
    sharded = to_spec(add_axes(path, stored_choice, leaf, parallel.sizes, parallel.zero_axes)) if cut else whole
    return Placement(
        leaf=leaf,
        names=choice.names,
        stored=sharded if parallel.stage else whole,
        used=to_spec(remove_axis(choice)),
        whole=whole,
        sharded=sharded,
        why=choice.why + _fsdp_reason(parallel, whole, sharded),
    )


def _place_unsharded(leaf: Leaf) -> Placement:
    replicated, why = PartitionSpec(), f"other state below {show_bytes(LARGE)} is whole"
    unnamed = (None,) * len(leaf.shape)
    return Placement(
        leaf=leaf, names=unnamed, stored=replicated, used=replicated, whole=replicated, sharded=replicated, why=why
    )


def _fsdp_reason(parallel: Parallel, whole, sharded) -> str:
    if parallel.stage == 0:
        return ""
    used = {axis for entry in whole for axis in spec_axes(entry)}
    axes = " x ".join(axis for axis in parallel.zero_axes if parallel.sizes[axis] > 1 and axis not in used)
    if not axes:
        return ""
    return f"; {axes} divides no dim" if whole == sharded else f"; {axes} on the largest dim"
