"""Inputs of an optimizer in a step besides gradients and parameters: settings in its state, and the loss of the batch.

Settings are arrays in the optimizer's state, so that one compiled program runs with any value of them. Optax stores
them: the state of `optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)` has the learning rate.

Some optimizers need the loss:

    optax.contrib.reduce_on_plateau, momo, polyak_sgd      update(gradients, state, params, value=loss)
    optax.contrib.sam                                      update(gradients, state, params), no `value`

A chain that takes extra arguments receives the loss, unless a transformation in it rejects the argument. A chain that
does not read it compiles to the same program. No chain receives a loss function or per-example gradients.
"""

import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import optax
from optax.schedules import InjectStatefulHyperparamsState

from jaxpar.errors import refuse

INJECT = InjectStatefulHyperparamsState.__module__
PLATEAU = "reduce_on_plateau"  # a transformation in form, but acts as a schedule that follows the loss
NOT_TAKEN = "unexpected keyword argument 'value'"
NEEDED = "keyword-only argument: 'value'"
MISSING = re.compile(r"(grad|obj)_fn must be provided|missing \d+ required keyword-only argument")


def settings(state: optax.OptState, names: Iterable[str]) -> dict[str, jax.Array]:
    """Reads settings from the state of a chain, by name.

    Raises:
      JaxparError: If the state has no such setting.
    """
    available: dict[str, jax.Array] = {}
    _map_injected(lambda node: available.update(node.hyperparams), state)
    for name in names:
        if name not in available:
            raise refuse(
                f"no setting {name!r} in the optimizer's state, which has {', '.join(available) or 'none'}",
                rule="a setting that varies across a population is an array in the optimizer's state",
                fix=f"optax.inject_hyperparams(optax.adamw)({name}=...)",
            )
    return {name: available[name] for name in names}


def with_settings(state: optax.OptState, values: Mapping[str, jax.Array]) -> Any:
    """Replaces settings in the state of a chain."""

    def one(node: InjectStatefulHyperparamsState) -> InjectStatefulHyperparamsState:
        hyperparams = node.hyperparams
        return node._replace(hyperparams={name: values.get(name, hyperparams[name]) for name in hyperparams})

    return _map_injected(one, state)


TRACE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextmanager
def explain_static_arguments() -> Iterator[None]:
    """Explains an error of tracing: the optimizer's Python code needs some of these settings as static numbers.

    Raises:
      JaxparError: The message names the arguments of `optax.inject_hyperparams` that must be static.
    """
    try:
        yield
    except TRACE_ERRORS as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        indices = [index for index, frame in enumerate(frames) if frame.f_globals.get("__name__") == INJECT]
        if not indices:
            raise
        injected = frames[indices[-1]].f_locals.get("hparams", {})
        inner_frames = traceback.extract_tb(error.__traceback__)[indices[-1] + 1 :]
        keys = next((names for frame in inner_frames[::-1] if (names := _names_in(injected, frame))), [])
        static = ", ".join(f'"{name}"' for name in keys or ["..."])
        hint = "" if keys else f", one or more of {', '.join(injected)}"
        raise refuse(
            f"optax.inject_hyperparams of an optimizer whose Python code reads {' and '.join(keys) or 'an argument'}",
            rule="a setting in the optimizer's state is an array; an `if`, a shape or a loop needs a Python number",
            fix=f"optax.inject_hyperparams(..., static_args=({static},)){hint}",
        ) from error


def _names_in(names: Iterable[str], frame: traceback.FrameSummary) -> list[str]:
    """Finds the names that occur as words in the source expression of a stack frame."""
    line = linecache.getline(frame.filename, frame.lineno or 0)
    if frame.lineno == frame.end_lineno and frame.end_colno:
        line = line.encode()[frame.colno : frame.end_colno].decode(errors="replace")
    words = set(re.findall(r"\w+", line))
    return [name for name in names if name in words]


def _map_injected(change: Callable, state: optax.OptState) -> Any:
    is_injected = lambda node: isinstance(node, InjectStatefulHyperparamsState)  # noqa: E731
    return jax.tree.map(lambda node: change(node) if is_injected(node) else node, state, is_leaf=is_injected)


def update(
    optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any, loss: jax.Array | None
) -> tuple[Any, Any]:
    """Calls the chain's update, with the loss if the chain takes it; returns updates and the new state.

    Args:
      optimizer: The chain.
      gradients: Gradients of the loss.
      state: State of the chain.
      params: The parameters.
      loss: The mean loss of the batch; None if it is not available at the update.
    """
    if loss is not None and isinstance(optimizer, optax.GradientTransformationExtraArgs):
        try:
            return optimizer.update(gradients, state, params, value=loss)
        except TypeError as error:  # optax.chain and its like accept any name, and only then a member rejects one
            if NOT_TAKEN not in str(error):
                raise
    return optimizer.update(gradients, state, params)


def check_parameter_tree(state: optax.OptState) -> None:
    """Refuses a chain whose state says that it updates a pair of parameter trees in place of the model's tree.

    Raises:
      JaxparError: If the chain has `optax.lookahead`.
    """
    is_pair = lambda node: isinstance(node, optax.LookaheadState)  # noqa: E731
    if any(map(is_pair, jax.tree.leaves(state, is_leaf=is_pair))):
        raise refuse(
            "optax.lookahead, which updates optax.LookaheadParams: a fast and a slow tree of parameters",
            rule="an optimizer updates the tree of the model's parameters",
            fix="optax.contrib.schedule_free_adamw(3e-4), which also trains one tree and evaluates an average of it",
        )


@contextmanager
def explain_missing_arguments() -> Iterator[None]:
    """Refuses a chain that needs more than gradients, state, parameters and the loss.

    Raises:
      JaxparError: If the chain needs more.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not MISSING.search(str(error)):
            raise
        if NEEDED in str(error):
            raise refuse(
                f"the optimizer's update: {error}; and another transformation of the chain has no argument `value`",
                rule="a chain passes `value`, the loss, to all of its transformations, or to none",
                fix="wrap the one that does not take it: optax.GradientTransformation(member.init, member.update)",
            ) from error
        raise refuse(
            f"the optimizer's update: {error}",
            rule="an update receives gradients, state, parameters and `value`, the loss, but no function for it",
            fix="opaque_mode=False for optax.contrib.sam; in place of a line search, or of sophia, an optimizer of "
            "gradients: optax.adamw(3e-4)",
        ) from error


def rate_follows_steps(state: object) -> bool:
    """Whether the learning rate of a chain depends only on the step.

    Args:
      state: The state of the chain, or its shapes.
    """
    exceptions = (optax.MultiStepsState, optax.contrib.ReduceLROnPlateauState)
    is_exception = lambda node: isinstance(node, exceptions)  # noqa: E731
    return not any(map(is_exception, jax.tree.leaves(state, is_leaf=is_exception)))
