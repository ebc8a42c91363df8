"""Model, declaration and devices become a `Layout`, or every problem at once."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxpar.errors import JaxparError, Problem, nearest, refuse
from jaxpar.mesh.axes import infer_sizes
from jaxpar.mesh.build import build
from jaxpar.parallel.declare import Axes, Parallel
from jaxpar.parallel.head import placed_head
from jaxpar.parallel.layout import Layout, Placement
from jaxpar.parallel.zero import add_axis, without_axis
from jaxpar.sharding import linen_model, nnx_model
from jaxpar.sharding.names import Blueprint
from jaxpar.sharding.rules import NAMES, name_stacks, resolve, spec_of
from jaxpar.sharding.shard_bytes import shard_bytes
from jaxpar.units import show_bytes

REGULAR = "a path rule is a regular expression"


def linen(module: Any, *args: Any, **kwargs: Any) -> Blueprint:
    """Returns a Flax Linen module as a model for `compose`.

    Args:
      module: The module.
      *args: What to call it with to create its parameters: arrays, or anything with shape and dtype.
      **kwargs: Likewise; what is no array is passed as it is (`train=False`).
    """
    from flax import linen as nn

    if not isinstance(module, nn.Module):
        what = module.__name__ + ", a class" if isinstance(module, type) else f"a {type(module).__name__}"
        raise refuse(
            f"jp.linen({what})",
            rule="a Linen module, made",
            fix="jp.linen(MyNet(...), jnp.zeros([1, ...])); an NNX model needs no jp.linen",
        )
    if not any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves((args, kwargs))):
        raise refuse(
            f"jp.linen({type(module).__name__}(...){', ' * bool(args)}{', '.join(map(repr, args))}) without an array",
            rule="Linen creates parameters from inputs, so it needs an example of them",
            fix=f"jp.linen({type(module).__name__}(...), jnp.zeros([1, ...]))",
        )

    def made(value):
        is_array = hasattr(value, "shape") and hasattr(value, "dtype")
        return jax.numpy.zeros(value.shape, value.dtype) if is_array else value

    def call(model):
        return model(*jax.tree.map(made, args), **{key: jax.tree.map(made, value) for key, value in kwargs.items()})

    return linen_model.blueprint(module, call, name=type(module).__name__)


def as_blueprint(model: Any) -> Blueprint:
    """Returns the blueprint of whatever the user calls a model.

    Raises:
      JaxparError: If it is an instance where a factory is needed, or no model at all.
    """
    if isinstance(model, Blueprint):
        return model
    from flax import linen as nn
    from flax import nnx

    if isinstance(model, nn.Module) or (isinstance(model, type) and issubclass(model, nn.Module)):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise JaxparError(
            Problem(
                f"a Linen module ({name}) on its own",
                "Linen creates parameters from inputs, so it needs an example of them",
                f"jp.linen({name}(...), jnp.zeros([1, ...]))",
            )
        )
    if isinstance(model, nnx.Module) or not callable(model):
        raise JaxparError(
            Problem(
                f"a {type(model).__name__} that is built already"
                if isinstance(model, nnx.Module)
                else f"model={model!r:.80}",
                "a model is given as a function of `rngs`, so that no device ever holds all of it",
                f"lambda rngs: {type(model).__name__ if isinstance(model, nnx.Module) else 'MyNet'}(..., rngs=rngs)",
            )
        )
    inner = model
    while isinstance(inner, partial):
        inner = inner.func
    factory: Any = model
    return nnx_model.blueprint(factory, name=getattr(inner, "__name__", type(inner).__name__))


def compose(model: Callable | Blueprint, parallel: Parallel, devices: Sequence[Any] | int | None = None) -> Layout:
    """Returns where every array of a training job lives.

    Args:
      model: A function of `rngs` that returns an `nnx.Module`, or `jp.linen(module, inputs)`.
      parallel: The declaration.
      devices: The devices to use, all visible ones by default; a number stands for devices that
        are not there, and gives a layout that can be explained but not trained.

    Raises:
      JaxparError: With every problem at once: sizes that do not multiply to the devices, dims
        that do not divide, rules that match nothing, axes that nothing uses, parameters left whole.
    """
    if not isinstance(parallel, Parallel):
        raise JaxparError(Problem(f"parallel={parallel!r}", "the declaration is a Parallel", "jp.Parallel(data=8)"))
    mesh = None
    problems: list[Problem] = []
    try:
        if isinstance(devices, int):
            sizes = infer_sizes(parallel.sizes, devices)
        else:
            mesh = build(parallel.sizes, devices)
            sizes = dict(mesh.shape)
        parallel = replace(parallel, **sizes)  # before it is looked at: fsdp=-1 may become 1
    except JaxparError as error:
        problems += error.problems
    problems += parallel.problems()
    try:
        blueprint = as_blueprint(model)
    except JaxparError as error:
        raise JaxparError(*problems, *error.problems) from error
    if problems:  # what follows reads the sizes and the rules
        raise JaxparError(*problems)
    problems += _leaf_problems(blueprint) + _rule_problems(parallel, blueprint)
    if any(problem.rule == REGULAR for problem in problems):
        raise JaxparError(*problems)
    layout, wrong = _placed(parallel, blueprint, mesh)
    if problems + wrong:
        raise JaxparError(*_grouped(problems + wrong))
    return placed_head(layout, lambda other: _placed(other, blueprint, mesh))


def _placed(parallel: Parallel, blueprint: Blueprint, mesh: Any) -> tuple[Layout, list[Problem]]:
    """Returns where every array lives, and what is wrong with that."""
    sizes, names = parallel.sizes, _names(parallel)
    problems: list[Problem] = []
    placements = {}
    for path, leaf in name_stacks(blueprint.leaves).items():
        choice, wrong = resolve(path, leaf, sizes, names=names, paths=parallel.paths)
        problems += wrong
        if parallel.pipe > 1 and parallel.pipeline.layers and choice.names[:1] == ("layers",):
            # so many layers cannot be stored as equal pieces, so another dim is
            choice = replace(choice, axes=add_axis(path, choice, leaf, sizes, axis="pipe"))
        used = spec_of(without_axis(choice))
        sharded = spec_of(add_axis(path, choice, leaf, sizes))
        placements[path] = Placement(
            leaf=leaf,
            names=choice.names,
            stored=sharded if parallel.stage else used,
            used=used,
            sharded=sharded,
            why=choice.why + _fsdp_reason(parallel, used, sharded),
        )
    layout = Layout(parallel=parallel, blueprint=blueprint, placements=placements, names=names, mesh=mesh)
    return layout, problems + _idle_axes(layout) + _left_whole(layout) + _uncut(layout)


def _grouped(problems: list[Problem]) -> list[Problem]:
    """Returns one problem for all that have the same rule and way out, such as every layer of a model."""
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.rule, problem.fix), []).append(problem)
    return [
        replace(first, got=first.got + (f" (and {len(rest)} more like it)" if rest else ""))
        for first, *rest in groups.values()
    ]


def _leaf_problems(blueprint: Blueprint) -> list[Problem]:
    """Returns a model without parameters, and parameters that cannot be trained."""
    if not blueprint.leaves:
        return [
            Problem(
                f"{blueprint.name} has no parameters",
                "a model has parameters to train",
                "nnx.Param, or layers made in __init__",
            )
        ]
    problems = []
    for path, leaf in blueprint.leaves.items():
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            problems.append(
                Problem(
                    f"{path} is {leaf.dtype}",
                    "a parameter has a gradient, so it is floating point",
                    "nnx.Variable, or a Linen collection of its own, for what is not trained",
                )
            )
        elif not leaf.size:
            problems.append(
                Problem(f"{path} of {list(leaf.shape)} is empty", "a parameter has entries", "a width of at least 1")
            )
    return problems


def _names(parallel: Parallel) -> dict[str, Axes]:
    even = parallel.pipe > 1 and not parallel.pipeline.layers
    names = {**NAMES, "seq": ("context", *["tensor"] * parallel.sequence), "layers": "pipe" if even else None}
    if parallel.pipe > 1 and parallel.pipeline.head == "spread":
        names["vocab"] = ("pipe", "tensor")
    user = dict(parallel.rules)
    return {**user, **{name: axes for name, axes in names.items() if name not in user}}


def _fsdp_reason(parallel: Parallel, used, sharded) -> str:
    if parallel.stage == 0:
        return ""
    return "; fsdp divides no dim" if used == sharded else "; fsdp on the largest dim"


def _rule_problems(parallel: Parallel, blueprint: Blueprint) -> list[Problem]:
    """Returns rules for axes that do not exist, and rules that match nothing."""
    known = {name for leaf in blueprint.leaves.values() for name in leaf.names or () if isinstance(name, str)}
    known |= {name for names in parallel.paths.values() for name in names if name}
    problems = []
    for name, axes in parallel.rules.items():
        each = (axes,) if isinstance(axes, str) else tuple(axes or ())
        for axis in each:
            if axis not in parallel.sizes:
                problems.append(
                    Problem(f"rule {name} -> {axis!r}", "a rule names mesh axes", nearest(axis, parallel.sizes))
                )
        if "pipe" in each and name != "layers":
            problems.append(
                Problem(
                    f"rule {name} -> 'pipe'",
                    "the axis `pipe` splits layers and nothing else",
                    f"one of: {', '.join(axis for axis in parallel.sizes if axis != 'pipe')}",
                )
            )
        if len(set(each)) < len(each):
            problems.append(
                Problem(
                    f"rule {name} -> {each}",
                    "a dim is split over an axis once",
                    f"{name} -> {tuple(dict.fromkeys(each))}",
                )
            )
        if name not in known and name not in NAMES:
            problems.append(
                Problem(
                    f"rule {name!r} matches nothing: no dim of {blueprint.name} has that name",
                    "every rule matches at least one dim",
                    nearest(name, known | set(NAMES)),
                )
            )
    for pattern in parallel.paths:
        try:
            hit = any(re.search(rf"(^|/)(?:{pattern})$", path) for path in blueprint.leaves)
        except re.error as error:
            problems.append(
                Problem(
                    f"path rule {pattern!r}: {error}",
                    REGULAR,
                    f"{re.sub(r'(?<![.)])[*]', '.*', pattern)!r}" if "*" in pattern else repr(re.escape(pattern)),
                )
            )
            continue
        if not hit:
            problems.append(
                Problem(
                    f"path rule {pattern!r} matches no parameter of {blueprint.name}",
                    "every rule matches the end of at least one path",
                    nearest(pattern, blueprint.leaves)
                    if len(blueprint.leaves) < 20
                    else "see `jaxpar check --explain`",
                )
            )
    return problems


def _idle_axes(layout: Layout) -> list[Problem]:
    used = {axis for place in layout.placements.values() for entry in place.sharded for axis in _flat(entry)}
    problems = []
    for axis in ("tensor", "fsdp"):
        if layout.sizes[axis] > 1 and axis not in used and not (axis == "fsdp" and layout.parallel.stage == 0):
            problems.append(
                Problem(
                    f"{axis}={layout.sizes[axis]} does nothing: it splits no parameter of {layout.blueprint.name}",
                    f"an axis is there to be used; `{axis}` splits dims "
                    + ("named heads, mlp, vocab (or by your rules)" if axis == "tensor" else "that it divides"),
                    f"{axis}=1 and a larger data, or rules that name dims of this model",
                )
            )
    return problems


def _uncut(layout: Layout) -> list[Problem]:
    """Returns why a model cannot be spread over `pipe` by its schedule."""
    stages = layout.sizes["pipe"]
    if stages == 1:
        return []
    try:
        cut = layout.schedule.cut
        if layout.parallel.pipeline.head == "spread" and not layout.schedule.phased:
            raise refuse(
                f'head="spread" with schedule {layout.schedule.name}',
                rule="all stages come to a head that is spread in the same tick, which a phased table tells beforehand",
                fix='schedule="1f1b_phased" or another phased one, or head="last"',
            )
    except JaxparError as error:
        return list(error.problems)
    stacks = {layout.placements[path].leaf.shape[0] for path in layout.stacked}
    if not stacks and any(place.names[:1] == ("layers",) for place in layout.placements.values()):
        return []  # `resolve` has said why it is not split
    if not stacks:
        return [
            Problem(
                f"pipe={stages} cuts nothing: {layout.blueprint.name} has no stack of layers that {stages} divides",
                "a pipeline cuts parameters stacked along a dim 0 named layers; one named weight of a stack is enough",
                f"stacked layers (nnx.vmap, nn.scan), as jp.Decoder's, a multiple of {stages} of them; or pipe=1",
            )
        ]
    if uneven := layout.parallel.pipeline.layers:
        wrong = {layers for layers in stacks if layers != sum(uneven)}
        chunked = Problem(
            f"layers={tuple(uneven)} with chunks={cut.chunks}",
            "stages with different numbers of layers have one chunk each",
            'schedule="1f1b_phased", or another with one chunk',
        )
        return [chunked] * (cut.chunks > 1) + [
            Problem(
                f"layers={tuple(uneven)} are {sum(uneven)}, {layout.blueprint.name} has {layers}",
                "every layer is on one stage",
                f"{len(uneven)} numbers that sum to {layers}",
            )
            for layers in sorted(wrong)
        ]
    return [
        Problem(
            f"{layers} layers in {cut.parts} parts (pipe={stages} x chunks={cut.chunks})",
            "every part has as many layers as the others",
            f"{-(-layers // cut.parts) * cut.parts} layers, or other pipe and chunks",
        )
        for layers in sorted(stacks)
        if layers % cut.parts
    ]


def _left_whole(layout: Layout) -> list[Problem]:
    """Returns the parameters that should be sharded, are not, and are too big to be silent about."""
    limit = layout.parallel.replicate_above
    problems = []
    for path, place in layout.placements.items():
        own = shard_bytes(place.leaf, place.sharded, layout.sizes)
        if layout.parallel.stage and place.used == place.sharded and own > limit:
            ways = layout.sizes["fsdp"]
            problems.append(
                Problem(
                    f"{path} of {list(place.leaf.shape)} ({show_bytes(own)}) stays whole on all {ways} devices of fsdp",
                    f"a parameter above {show_bytes(limit)} is sharded by zero={layout.parallel.stage}",
                    f"a dim that {ways} divides, another fsdp, or replicate_above = {own}",
                )
            )
    return problems


def _flat(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
