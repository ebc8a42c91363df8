"""Model, declaration and devices become a `Layout`, or every problem at once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.mesh.axes import infer_sizes
from jaxpar.mesh.build import build
from jaxpar.parallel.declare import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.placement import Placement
from jaxpar.parallel.rule_problems import REGULAR, rule_problems
from jaxpar.parallel.techniques.asked import declared, idle, names_of, settled
from jaxpar.parallel.zero import add_axis, without_axis
from jaxpar.sharding import linen_model, nnx_model
from jaxpar.sharding.names import LARGE, Blueprint, Leaf
from jaxpar.sharding.rules import name_stacks, resolve, spec_of
from jaxpar.sharding.stacks import bare_stack, of_all_layers, one_layer
from jaxpar.units import show_bytes


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
            rule="jp.linen takes an instance of a Linen module",
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
        that do not divide, paths that match nothing, axes that nothing uses, parameters left whole.
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
        parallel = parallel.sized(sizes)  # before it is looked at: fsdp=-1 may become 1
    except JaxparError as error:
        problems += error.problems
    problems += declared(parallel)
    try:
        blueprint = as_blueprint(model)
    except JaxparError as error:
        raise JaxparError(*problems, *error.problems) from error
    if problems:  # what follows reads the sizes and the rules
        raise JaxparError(*problems)
    problems += _leaf_problems(blueprint) + rule_problems(parallel, blueprint)
    if any(problem.rule == REGULAR for problem in problems):
        raise JaxparError(*problems)
    layout, wrong = _placed(parallel, blueprint, mesh)
    if problems + wrong:
        raise JaxparError(*_grouped(problems + wrong))

    def again(other: Parallel) -> tuple[Layout | None, list[Problem]]:
        wrong = declared(other)
        return (None, wrong) if wrong else _placed(other, blueprint, mesh)

    return settled(layout, again)


def _placed(parallel: Parallel, blueprint: Blueprint, mesh: Any) -> tuple[Layout, list[Problem]]:
    """Returns where every array lives, and what is wrong with that."""
    sizes, names = parallel.sizes, names_of(parallel)
    problems: list[Problem] = []
    placements, others = {}, {}
    leaves = name_stacks({**blueprint.leaves, **blueprint.others})
    parts = sum(parallel.pipeline.layers) or parallel.pipe
    stack = bare_stack(name_stacks(blueprint.leaves), parts, parallel.paths) if parallel.pipe > 1 else ()
    for path, leaf in leaves.items():
        trained = path in blueprint.leaves
        if not trained and leaf.names is None and not leaf.large:
            others[path] = _whole(leaf)
            continue
        own = one_layer(leaf) if path in stack else leaf
        choice, wrong = resolve(path, own, sizes, names=names, paths=parallel.paths)
        choice = of_all_layers(choice, names["layers"]) if path in stack else choice
        problems += wrong
        if trained and parallel.pipe > 1 and parallel.pipeline.layers and choice.names[:1] == ("layers",):
            # so many layers cannot be stored as equal pieces, so another dim is
            choice = replace(choice, axes=add_axis(path, choice, leaf, sizes, axis="pipe"))
        if not trained:  # every stage keeps what the model may read or write anywhere
            choice = replace(choice, axes=without_axis(choice, "pipe"))
        used = spec_of(without_axis(choice))
        sharded = spec_of(add_axis(path, choice, leaf, sizes)) if trained or leaf.large else used
        (placements if trained else others)[path] = Placement(
            leaf=leaf,
            names=choice.names,
            stored=sharded if parallel.stage else used,
            used=used,
            sharded=sharded,
            why=("" if trained else "other state; ") + choice.why + _fsdp_reason(parallel, used, sharded),
        )
    layout = Layout(
        parallel=parallel, blueprint=blueprint, placements=placements, others=others, names=names, mesh=mesh
    )
    return layout, problems + idle(layout)


def _whole(leaf: Leaf) -> Placement:
    """Returns the place of a small array of other state: a random key, the statistics of a norm."""
    everywhere, why = PartitionSpec(), f"other state below {show_bytes(LARGE)} is whole"
    none = (None,) * len(leaf.shape)
    return Placement(leaf=leaf, names=none, stored=everywhere, used=everywhere, sharded=everywhere, why=why)


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


def _fsdp_reason(parallel: Parallel, used, sharded) -> str:
    if parallel.stage == 0:
        return ""
    return "; fsdp divides no dim" if used == sharded else "; fsdp on the largest dim"
