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
    """Context that makes or reads a training state: if the memory of a device does not hold it, says what needs it.

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
