"""Saves the state when code of the user's raises between two steps: data that end, a batch of odd size, an evaluation.

step i is good ─► batch i + 1 cannot be read ─► step i is saved ─► the error is raised again
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from jaxpar.checkpoint import processes
from jaxpar.errors import JaxparError
from jaxpar.step.state import State
from jaxpar.train.faults import BadStep
from jaxpar.train.run import Run

WAIT = 10.0  # seconds for the other processes to meet the same error


@contextmanager
def saves_before_errors(save: Callable[[], None]) -> Iterator[None]:
    """Calls `save` before an error is raised again; not before a bad step, whose state is what is wrong."""
    try:
        yield
    except BadStep:
        raise
    except Exception:
        # everything, because a user's data, loggers and measures may raise anything; nothing is swallowed
        save()
        raise


def can_save(run: Run, state: State, start: int) -> bool:
    """Returns whether a state holds steps that no checkpoint has, and all processes have come here to save it.

    Args:
      run: The run.
      state: After the newest step.
      start: The step that this training began with.
    """
    if run.store is None or run.watch.is_skipping or any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        return False  # an error inside of a step has taken the state that the step was given
    step = int(state.step)
    return step > start and processes.barrier(f"rescue/{step}", WAIT)


def say_saved(run: Run, step: int, save: Callable[[], None]) -> None:
    """Saves a step, and says so; where that fails too, it is said, as the first error is the one to be raised."""
    say = run.progress.say if run.progress else print
    try:
        save()
    except JaxparError as error:
        say(f"step {step} could not be saved before the error below: {error.problems[0].got}")
    else:
        say(f"step {step} is saved before the error below: the same command goes on from there")
