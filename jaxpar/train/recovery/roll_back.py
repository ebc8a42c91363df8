"""A bad step: kept out of checkpoints, undone by a rollback, and saved around an error of the user's code."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxpar.checkpoint import processes
from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.step.numerics import are_finite
from jaxpar.step.state import State
from jaxpar.train.faults import LOWER_RATE, BadStep
from jaxpar.train.run import Run


def roll_back(job: Run, bad: JaxparError, start: int) -> State:
    """Returns the state of the newest checkpoint, after which the batches since it are passed over.

    Where the first step after a checkpoint is bad, the checkpoint may be: it is set aside, and the one before it taken.

    Args:
      job: The run.
      bad: The error that ended the run so far: a bad step, or another, which is raised again.
      start: The step whose state this training began with.

    Raises:
      JaxparError: `bad` itself, after the last checkpoint was committed, if the job does not want this; if there is
        no checkpoint to go back to, or the run went back too often.
    """
    faults, skipped = job.watch.faults, job.skipped
    if job.store and (isinstance(bad, BadStep) or jax.process_count() == 1):  # else the others may never come to it
        job.store.wait()
    if not isinstance(bad, BadStep):
        raise bad
    steps = job.store.steps() if job.store else []
    older = [step for step in steps if step < start]
    at_once = bad.step == start + 1 and start in steps and bool(older)
    if faults.on_bad_step != "rollback":
        raise _with_older(bad, older[-1]) if at_once else bad
    if job.store is None or skipped is None or not steps:
        raise refuse(f"{bad.problems[0].got}, and no checkpoint to go back to", rule="faults.on_bad_step = 'rollback' "
            "goes back to a checkpoint", fix="a smaller checkpoint.every") from bad  # fmt: skip
    if skipped.rollbacks >= faults.rollbacks:
        raise refuse(f"{bad.problems[0].got}, after {skipped.rollbacks} rollbacks", rule=f"a run goes back at most "
            f"faults.rollbacks = {faults.rollbacks} times", fix=bad.problems[0].fix) from bad  # fmt: skip
    job.watchdog.begin_activity(bad.step, "restoring")
    if at_once and jax.process_index() == 0:
        left = ", ".join(job.store.set_aside_after(older[-1]))
        if job.progress:
            job.progress.say(f"the first step after step {start} is bad: what was saved there is called {left} now")
    state, back = job.store.restore(job.step.abstract())
    skipped.go_back(job.growth.total_draws(bad.step), to=job.growth.total_draws(back), why=bad.problems[0].got)
    job.watch.rewind(back)
    if job.log:
        job.log.rewind(back)
        job.watch.skipped = job.log.skipped
        job.noise.resume(job.log.measured)
    if job.progress:
        job.progress.say(f"{bad.problems[0].got}: back to step {back}, on with the batch after it")
    return state


def _with_older(bad: BadStep, step: int) -> BadStep:
    """Returns the error of a first step after a checkpoint, which may be to blame, with the way to an older one."""
    problem = bad.problems[0]
    return BadStep(bad.step, Problem(problem.got, problem.rule, f"{problem.fix}; or jaxpar train JOB --from {step}"))


# A look at parameters before they are saved.

_are_finite = jax.jit(are_finite)


def check_before_save(step: int, params: Any) -> None:
    """Looks at parameters before they are saved: an update can spoil them while its loss and gradients are fine.

    Raises:
      BadStep: If a number is nan or inf.
    """
    if not _are_finite(params):
        got = f"the parameters of step {step} are not finite, though its loss and gradients are"
        raise BadStep(step, Problem(got, "a checkpoint is saved only while all parameters are finite", LOWER_RATE))


# Saves the state when code of the user's raises between two steps: data that end, a batch of odd size, an evaluation.

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
