"""Composes model, declaration and devices into a `Layout`, or reports every problem at once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.errors import JaxparError, Problem, refuse, user_code_errors
from jaxpar.mesh.axes import infer_sizes
from jaxpar.mesh.devices import Simulated, build_mesh, is_simulated
from jaxpar.models.settings.fine_tuning import Adapters
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout, with_note
from jaxpar.parallel.place_arrays import place_arrays
from jaxpar.parallel.rule_problems import REGULAR, rule_problems
from jaxpar.parallel.techniques.all_techniques import declaration_problems, resolve
from jaxpar.sharding import linen_model, nnx_model
from jaxpar.sharding.adapters import merge_adapters as merged_params
from jaxpar.sharding.adapters import with_adapters
from jaxpar.sharding.author.rules_in_force import with_rules_in_force
from jaxpar.sharding.infer_names.infer_dims import with_program, zeros_like_input
from jaxpar.sharding.names import Blueprint, Tree


def from_linen(module: object, *args: Any, **kwargs: Any) -> Blueprint:
    """Wraps a Flax Linen module as a model for `compose`.

    Args:
      module: The module.
      *args: Example inputs that create its parameters: arrays, or anything with shape and dtype.
      **kwargs: Likewise; other values are passed unchanged (`train=False`).
    """
    from flax import linen as nn

    if not isinstance(module, nn.Module):
        description = module.__name__ + ", a class" if isinstance(module, type) else f"a {type(module).__name__}"
        raise refuse(
            f"jp.from_linen({description})",
            rule="jp.from_linen takes an instance of a Linen module",
            fix="jp.from_linen(MyNet(...), jnp.zeros([1, ...])); an NNX model needs no jp.from_linen",
        )
    if module.scope is not None:
        raise refuse(
            f"jp.from_linen({type(module).__name__}(...).bind(...)), a module that is bound to variables",
            rule="parameters are made from a seed, and born sharded: those that a module is bound to would be dropped",
            fix=f"jp.from_linen({type(module).__name__}(...), inputs), and your values into `params` of the "
            f"first state",
        )
    if not any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves((args, kwargs))):
        raise refuse(
            f"jp.from_linen({type(module).__name__}(...){', ' * bool(args)}{', '.join(map(repr, args))}) "
            f"without an array",
            rule="Linen creates parameters from inputs, so it needs an example of them",
            fix=f"jp.from_linen({type(module).__name__}(...), jnp.zeros([1, ...]))",
        )

    blueprint = linen_model.blueprint(module, _example_call(args, kwargs), name=type(module).__name__)
    return replace(blueprint, example=(args, kwargs))


def from_nnx(factory: Callable, *args: Any, **kwargs: Any) -> Blueprint:
    """Wraps a Flax NNX model and example inputs as a model for `compose`.

    With inputs, jaxpar traces the use of the model's parameters, which decides how `tensor` splits parameters without
    annotations. A factory alone is also a model; jaxpar then infers dims from paths and shapes of its parameters.

    Args:
      factory: A function of `rngs` that returns the module.
      *args: Example inputs of the model: arrays, or anything with shape and dtype.
      **kwargs: Likewise; other values are passed unchanged.
    """
    blueprint, call = as_blueprint(factory), _example_call(args, kwargs)

    def call_with_example(model: object) -> None:
        with user_code_errors(
            blueprint.name,
            rule="an NNX model can be called with its example of inputs",
            fix=f"jp.from_nnx(lambda rngs: {blueprint.name}(..., rngs=rngs), what its __call__ takes)",
        ):
            call(model)

    return replace(with_program(blueprint, call_with_example), example=(args, kwargs))


def add_lora(model: Callable | Blueprint, **adapters: Any) -> Blueprint:
    """Adds low-rank adapters (LoRA) to some of a model's matrices; returns a model for `compose`.

    The base model is also trained, unless the optimizer freezes it: `jp.freeze(chain, ["*"], but=["adapters"])`.

    Args:
      model: As for `compose`.
      **adapters: `rank`, `alpha`, `paths` (patterns such as "blocks/attention/*"), and base="int8" to store these
        matrices in 8 bits: see `Adapters`.

    Raises:
      JaxparError: If a pattern matches no matrix of the model.
    """
    return with_adapters(as_blueprint(model), Adapters(**adapters))


def merge_lora(layout: Layout, params: Tree) -> Tree:
    """Merges adapters into the base model: returns its parameters, W + alpha / rank A B for each adapted matrix W.

    Args:
      layout: Layout of the model with adapters.
      params: Its parameters, as in a state.
    """
    return merged_params(layout.blueprint, params)


def _example_call(args: tuple, kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    """Returns a function that calls a model with zeros of these shapes and dtypes."""
    return lambda model: model(*jax.tree.map(zeros_like_input, args), **jax.tree.map(zeros_like_input, kwargs))


def as_blueprint(model: object) -> Blueprint:
    """Converts any supported model (a factory, or `jp.from_linen(...)`, `jp.from_nnx(...)`) to a blueprint.

    Raises:
      JaxparError: If it is an instance instead of a factory, or not a model.
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
                f"jp.from_linen({name}(...), jnp.zeros([1, ...]))",
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
    """Composes a model, a declaration and devices into a `Layout`, which has the sharding of every array of a job.

    Args:
      model: A function of `rngs` that returns an `nnx.Module` or a `jp.from_linen(...)`; or `jp.from_linen(module,
        inputs)`, or `jp.from_nnx(function, inputs)`.
      parallel: The declaration.
      devices: Devices, or a mesh of them; all visible devices by default. A number stands for that many GPUs, and
        `Simulated` for simulated devices, which need not be present: such a layout can be explained but not trained.

    Raises:
      JaxparError: If there are problems; the message has all of them: sizes whose product is not the number of devices,
        dims that do not divide, paths that match nothing, unused axes, large unsharded parameters.
    """
    if not isinstance(parallel, Parallel):
        raise JaxparError(Problem(f"parallel={parallel!r}", "the declaration is a Parallel", "jp.Parallel(data=8)"))
    mesh = None
    problems: list[Problem] = []
    try:
        if isinstance(devices, int | Simulated):
            sizes = infer_sizes(parallel.sizes, devices if isinstance(devices, int) else devices.count)
        else:
            mesh = build_mesh(parallel.sizes, devices)
            sizes = dict(mesh.shape)
        parallel = parallel.with_sizes(sizes)  # before any check: fsdp=-1 may become 1
    except JaxparError as error:
        problems += error.problems
    problems += declaration_problems(parallel)
    try:
        blueprint = with_rules_in_force(as_blueprint(model))
    except JaxparError as error:
        raise JaxparError(*problems, *error.problems) from error
    if problems:  # the checks below read the sizes and the rules
        raise JaxparError(*problems)
    parallel, note = add_found_specs(parallel, blueprint)
    problems += _reference_problems(blueprint, parallel.pipe)
    problems += _leaf_problems(blueprint) + rule_problems(parallel, blueprint)
    if any(problem.rule == REGULAR for problem in problems):
        raise JaxparError(*problems)
    simulated = isinstance(devices, Simulated) if mesh is None else is_simulated(mesh.devices.flat)

    def place(declaration: Parallel) -> tuple[Layout, list[Problem]]:
        layout, errors = place_arrays(declaration, blueprint, mesh)
        return replace(layout, simulated=simulated), errors

    def place_alternative(alternative: Parallel) -> tuple[Layout | None, list[Problem]]:
        errors = declaration_problems(alternative)
        return (None, errors) if errors else place(alternative)

    layout, errors = place(parallel)
    if problems + errors:
        raise JaxparError(*_merge_problems(problems + errors))

    layout = resolve(layout, place_alternative)
    return with_note(layout, note) if note else layout


def add_found_specs(parallel: Parallel, blueprint: Blueprint) -> tuple[Parallel, str]:
    """Returns the declaration with the names found for `specs="found"`, and a sentence about them.

    Raises:
      JaxparError: If nothing is known of the model's inputs, or no choice of dims is possible.
    """
    if not parallel.specs:
        return parallel, ""
    if blueprint.find_specs is None:
        raise refuse(
            f'specs="found" for {blueprint.name}, whose inputs are unknown',
            rule="specs are found in a traced call of the model",
            fix=f"jp.from_nnx({blueprint.name}, inputs) or jp.from_linen(module, inputs) as the model, with the shapes "
            "of a global batch; or jp.find_specs(model, loss, batch, parallel).parallel",
        )
    return blueprint.find_specs(parallel)


def _merge_problems(problems: list[Problem]) -> list[Problem]:
    """Merges problems with the same rule and fix, such as a problem of every layer of a model."""
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.rule, problem.fix), []).append(problem)
    return [
        replace(first, got=first.got + (f" (and {len(repeats)} more like it)" if repeats else ""))
        for first, *repeats in groups.values()
    ]


def _reference_problems(blueprint: Blueprint, pipe: int) -> list[Problem]:
    if not blueprint.has_reference or pipe == 1:
        return []
    rule = "a pipeline splits the layers of one model, and a model with a reference has those of two"
    return [Problem(f"pipe={pipe} with a reference", rule, "pipe=1, with fsdp or tensor in its place")]


def _leaf_problems(blueprint: Blueprint) -> list[Problem]:
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
        quantized = path in blueprint.adapters and blueprint.adapters[path].float_dtype  # frozen, in 8 bits
        if not quantized and not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
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


def add_reference(model: Callable | Blueprint, *, trained: Iterable[str] | None = None) -> Blueprint:
    """Adds a frozen reference, the model as it is at the start; returns a model for `compose`.

    The optimizer has to freeze it: `jp.freeze(chain, ["reference"])`. A model of `jp.add_lora` is its own reference
    without the adapters, so that nothing is copied: `jp.freeze(chain, ["*"], but=["adapters"])`.

    Args:
      model: As for `compose`.
      trained: Patterns of the parameters that are trained, if not all are: the reference has copies of these, and
        shares the others, which the optimizer has to freeze too.

    Raises:
      JaxparError: If a pattern matches no parameter, or the model has BatchNorm or other state that training changes.
    """
    from jaxpar.sharding.reference import with_reference  # only a model for `jp.dpo_loss` has a reference

    return with_reference(as_blueprint(model), None if trained is None else tuple(trained))
