"""Optimizer settings as arrays in the optimizer's state, so that one compiled program runs with any value of them.

Optax stores them: the state of `optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)` has the learning rate.
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


TRACED = (
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
    except TRACED as error:
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
