"""Settings of an optimizer that are arrays in its state, so that one compiled program runs any of them.

They are optax's own: `optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)` has its learning rate there.
"""

import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from optax.schedules import InjectStatefulHyperparamsState

from jaxpar.errors import refuse

INJECT = InjectStatefulHyperparamsState.__module__


def settings(state: Any, names: Iterable[str]) -> dict[str, jax.Array]:
    """Returns settings in the state of a chain, by name.

    Raises:
      JaxparError: If there are none of such a name.
    """
    found: dict[str, jax.Array] = {}
    _visited(lambda node: found.update(node.hyperparams), state)
    for name in names:
        if name not in found:
            raise refuse(
                f"no setting {name!r} in the optimizer's state, which has {', '.join(found) or 'none'}",
                rule="a setting that members of a population differ in is an array in the optimizer's state",
                fix=f"optax.inject_hyperparams(optax.adamw)({name}=...)",
            )
    return {name: found[name] for name in names}


def with_settings(state: Any, values: Mapping[str, jax.Array]) -> Any:
    """Returns the state of a chain with other values of settings that it has."""

    def one(node: InjectStatefulHyperparamsState) -> InjectStatefulHyperparamsState:
        own = node.hyperparams
        return node._replace(hyperparams={name: values.get(name, own[name]) for name in own})

    return _visited(one, state)


TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextmanager
def naming_static_arguments() -> Iterator[None]:
    """Refuses settings in the state of a chain that Python code of the optimizer reads, as numbers of a trace.

    Raises:
      JaxparError: With the arguments of `optax.inject_hyperparams` that are to be static.
    """
    try:
        yield
    except TRACED as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        at = [index for index, frame in enumerate(frames) if frame.f_globals.get("__name__") == INJECT]
        if not at:
            raise
        injected = frames[at[-1]].f_locals.get("hparams", {})
        below = traceback.extract_tb(error.__traceback__)[at[-1] + 1 :]
        read = next((names for frame in below[::-1] if (names := _named(injected, frame))), [])
        static = ", ".join(f'"{name}"' for name in read or ["..."])
        more = "" if read else f", one or more of {', '.join(injected)}"
        raise refuse(
            f"optax.inject_hyperparams of an optimizer whose Python code reads {' and '.join(read) or 'an argument'}",
            rule="a setting in the optimizer's state is an array; what an `if`, a shape or a loop reads is a number",
            fix=f"optax.inject_hyperparams(..., static_args=({static},)){more}",
        ) from error


def _named(names: Iterable[str], frame: traceback.FrameSummary) -> list[str]:
    """Returns the names that the expression of a frame has as words."""
    line = linecache.getline(frame.filename, frame.lineno or 0)
    if frame.lineno == frame.end_lineno and frame.end_colno:
        line = line.encode()[frame.colno : frame.end_colno].decode(errors="replace")
    words = set(re.findall(r"\w+", line))
    return [name for name in names if name in words]


def _visited(change: Callable, state: Any) -> Any:
    injected = lambda node: isinstance(node, InjectStatefulHyperparamsState)  # noqa: E731
    return jax.tree.map(lambda node: change(node) if injected(node) else node, state, is_leaf=injected)
