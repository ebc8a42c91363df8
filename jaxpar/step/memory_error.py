"""Recognizes XLA's out-of-memory error. The modules that explain it are loaded only after it occurs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxpar.errors import JaxparError

READ_ONLY_PROGRAMS = ("eval", "parts")  # programs of a step that update nothing
STATUS = "RESOURCE_EXHAUSTED"  # XLA's status, at the beginning of a message


class OutOfMemoryError(JaxparError):
    """The memory of a device does not hold a state or a step."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is XLA's about the memory of a device, or its explanation."""
    return isinstance(error, OutOfMemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and STATUS in str(error)
    )


def explain_error(step: Any, error: BaseException, key: Any = None) -> OutOfMemoryError:
    """Returns the explanation of XLA's error in a step that has one.

    Args:
      step: A `Step`.
      error: XLA's error.
      key: The key of the program in `step.programs`; that of the newest update by default.
    """
    keys = [key] if key else [other for other in step.programs if other[0] not in READ_ONLY_PROGRAMS]
    if isinstance(error, OutOfMemoryError):
        return error
    kind, arrays = keys[-1]
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, shape, dtype, sharding in arrays}
    return step.explain(step, kind, batch, error)


@contextmanager
def explain_compile_error(step: Any, key: Any) -> Iterator[None]:
    """Context that compiles a program of a step: explains it if the memory of a device does not suffice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if step.explain is None or not is_out_of_memory(error):
            raise
        raise explain_error(step, error, key) from error
