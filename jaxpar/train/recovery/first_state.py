"""Explains that the memory of a device does not hold the first state of a run."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import optax

from jaxpar.parallel.layout import Layout
from jaxpar.step.memory_error import is_out_of_memory


@contextmanager
def explained_state(
    layout: Layout, optimizer: optax.GradientTransformation, *, offload: bool = False
) -> Iterator[None]:
    """Context for creating or restoring a state: explains which arrays need the memory if a device runs out of it.

    Args:
      layout: The layout of the state.
      optimizer: The optax chain.
      offload: Whether the optimizer state is in host memory.

    Raises:
      OutOfMemoryError: In place of XLA's error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        from jaxpar.step.checks.out_of_memory import explain_state

        raise explain_state(layout, optimizer, error, offload=offload) from error
