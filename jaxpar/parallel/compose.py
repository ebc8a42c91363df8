"""Model, declaration and devices become a `Layout`, or every problem at once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.errors import JaxparError, Problem, refuse, users_code
from jaxpar.mesh.axes import infer_sizes
from jaxpar.mesh.build import build
from jaxpar.mesh.devices import Simulated, is_simulated
from jaxpar.models.settings.adapters import Adapters
from jaxpar.parallel.declare import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.placing import placed
from jaxpar.parallel.rule_problems import REGULAR, rule_problems
from jaxpar.parallel.techniques.asked import declared, settled
from jaxpar.sharding import linen_model, nnx_model
from jaxpar.sharding.adapters import merged as merged_params
from jaxpar.sharding.adapters import with_adapters
from jaxpar.sharding.author.rules_in_force import with_rules_in_force
from jaxpar.sharding.names import Blueprint, Tree
from jaxpar.sharding.reading.called import as_called, zeros


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
    if module.scope is not None:
        raise refuse(
            f"jp.linen({type(module).__name__}(...).bind(...)), a module that is bound to variables",
            rule="parameters are made from a seed, and born sharded: those that a module is bound to would be dropped",
            fix=f"jp.linen({type(module).__name__}(...), inputs), and your values into `params` of the first state",
        )
    if not any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves((args, kwargs))):
        raise refuse(
            f"jp.linen({type(module).__name__}(...){', ' * bool(args)}{', '.join(map(repr, args))}) without an array",
            rule="Linen creates parameters from inputs, so it needs an example of them",
            fix=f"jp.linen({type(module).__name__}(...), jnp.zeros([1, ...]))",
        )

    return linen_model.blueprint(module, _with(args, kwargs), name=type(module).__name__)


def nnx(factory: Callable, *args: Any, **kwargs: Any) -> Blueprint:
    """Returns a Flax NNX model, with an example of its inputs, as a model for `compose`.

    By its inputs alone it can be seen what the model does with its parameters, which says how `tensor` cuts those that
    nobody annotated. A factory by itself is a model too: its parameters are then known by their paths and shapes.

    Args:
      factory: A function of `rngs` that returns the module.
      *args: What the model is called with: arrays, or anything with shape and dtype.
      **kwargs: Likewise; what is no array is passed as it is.
    """
    blueprint, call = as_blueprint(factory), _with(args, kwargs)

    def called(model: Any) -> None:
        with users_code(
            blueprint.name,
            rule="an NNX model can be called with its example of inputs",
            fix=f"jp.nnx(lambda rngs: {blueprint.name}(..., rngs=rngs), what its __call__ takes)",
        ):
            call(model)

    return as_called(blueprint, called)


def adapted(model: Callable | Blueprint, **adapters: Any) -> Blueprint:
    """Returns a model with low-rank adapters (LoRA) beside some of its matrices, as a model for `compose`.

    The model itself is trained too, unless the optimizer leaves it alone: `jp.freeze(chain, ["*"], but=["adapters"])`.

    Args:
      model: As for `compose`.
      **adapters: `rank`, `alpha`, `paths`, patterns such as "blocks/attention/*", and base="int8" for these matrices in
        8 bits: see `Adapters`.

    Raises:
      JaxparError: If a pattern matches no matrix of the model.
    """
    return with_adapters(as_blueprint(model), Adapters(**adapters))


def merged(layout: Layout, params: Tree) -> Tree:
    """Returns the parameters of the model itself: W + alpha / rank A B where the layout's model has adapters.

    Args:
      layout: Of the model with adapters.
      params: Its parameters, as in a state.
    """
    return merged_params(layout.blueprint, params)


def _with(args: Any, kwargs: Any) -> Callable[[Any], Any]:
    """Returns a call of a model with zeros like these."""
    return lambda model: model(*jax.tree.map(zeros, args), **jax.tree.map(zeros, kwargs))


def as_blueprint(model: Any) -> Blueprint:
    """Returns the blueprint of whatever the user calls a model.

    Raises:
      JaxparError: If it is an instance where a factory is needed, or no model at all.
    """
    if isinstance(model, Blueprint):
        return model
    from flax import linen as nn
    from flax.nnx import Module

    if isinstance(model, nn.Module) or (isinstance(model, type) and issubclass(model, nn.Module)):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise JaxparError(
            Problem(
                f"a Linen module ({name}) on its own",
                "Linen creates parameters from inputs, so it needs an example of them",
                f"jp.linen({name}(...), jnp.zeros([1, ...]))",
            )
        )
    if isinstance(model, Module) or not callable(model):
        raise JaxparError(
            Problem(
                f"a {type(model).__name__} that is built already"
                if isinstance(model, Module)
                else f"model={' '.join(repr(model).split()):.80}",
                "a model is given as a function of `rngs`, so that no device ever holds all of it",
                f"lambda rngs: {type(model).__name__ if isinstance(model, Module) else 'MyNet'}(..., rngs=rngs)",
            )
        )
    inner = model
    while isinstance(inner, partial):
        inner = inner.func
    factory: Any = model
    return nnx_model.blueprint(factory, name=getattr(inner, "__name__", type(inner).__name__))


def compose(
    model: Callable | Blueprint, parallel: Parallel, devices: Sequence[Any] | Mesh | Simulated | int | None = None
) -> Layout:
    """Returns where every array of a training job lives.

    Args:
      model: A function of `rngs` that returns an `nnx.Module` or a `jp.linen(...)`; or `jp.linen(module, inputs)`,
        or `jp.nnx(function, inputs)`.
      parallel: The declaration.
      devices: The devices to use, all visible ones by default, or a mesh of them; a number stands for
        GPUs that are not there, and gives a layout that can be explained but not trained. So does `Simulated`, for
        simulated devices.

    Raises:
      JaxparError: With every problem at once: sizes that do not multiply to the devices, dims
        that do not divide, paths that match nothing, axes that nothing uses, parameters left whole.
    """
    if not isinstance(parallel, Parallel):
        raise JaxparError(Problem(f"parallel={parallel!r}", "the declaration is a Parallel", "jp.Parallel(data=8)"))
    mesh = None
    problems: list[Problem] = []
    try:
        if isinstance(devices, int | Simulated):
            sizes = infer_sizes(parallel.sizes, devices if isinstance(devices, int) else devices.count)
        else:
            mesh = build(parallel.sizes, devices)
            sizes = dict(mesh.shape)
        parallel = parallel.sized(sizes)  # before it is looked at: fsdp=-1 may become 1
    except JaxparError as error:
        problems += error.problems
    problems += declared(parallel)
    try:
        blueprint = with_rules_in_force(as_blueprint(model))
    except JaxparError as error:
        raise JaxparError(*problems, *error.problems) from error
    if problems:  # what follows reads the sizes and the rules
        raise JaxparError(*problems)
    problems += _leaf_problems(blueprint) + rule_problems(parallel, blueprint)
    if any(problem.rule == REGULAR for problem in problems):
        raise JaxparError(*problems)
    simulated = isinstance(devices, Simulated) if mesh is None else is_simulated(mesh.devices.flat)

    def place(chosen: Parallel) -> tuple[Layout, list[Problem]]:
        layout, wrong = placed(chosen, blueprint, mesh)
        return replace(layout, simulated=simulated), wrong

    def again(other: Parallel) -> tuple[Layout | None, list[Problem]]:
        wrong = declared(other)
        return (None, wrong) if wrong else place(other)

    layout, wrong = place(parallel)
    if problems + wrong:
        raise JaxparError(*_grouped(problems + wrong))

    return settled(layout, again)


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
        held = path in blueprint.adapters and blueprint.adapters[path].wide  # in 8 bits
        if not held and not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
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
