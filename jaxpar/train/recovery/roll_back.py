"""Rollbacks after bad steps, the check of parameters before a save, and a save before an error of user code."""

from collections.abc import Callable, Iterator, Mapping
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
    """Restores the newest checkpoint, and makes the run skip the batches since it. Returns the restored state.

    If the first step after a checkpoint is bad, the checkpoint itself may be bad: it is renamed, and the one before it
    restored.

    Args:
      job: The run.
      bad: The error that ended the training. Only a `BadStep` is handled; any other error is raised again.
      start: The step at which this training began.

    Raises:
      JaxparError: `bad` itself, after pending saves have finished, if `faults.on_bad_step` is not "rollback"; if there
        is no checkpoint to restore; if the run has used up its rollbacks.
    """
    faults, skipped = job.watch.faults, job.skipped
    if job.store and (isinstance(bad, BadStep) or jax.process_count() == 1):  # else others may never join the save
        job.store.wait()
    if not isinstance(bad, BadStep):
        raise bad
    steps = job.store.steps() if job.store else []
    older = [step for step in steps if step < start]
    at_once = bad.step == start + 1 and start in steps and bool(older)
    if faults.on_bad_step != "rollback":
        raise _suggest_older_checkpoint(bad, older[-1]) if at_once else bad
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
            job.progress.say(f"the first step after step {start} is bad: its checkpoint is renamed to {left}")
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


def _suggest_older_checkpoint(bad: BadStep, step: int) -> BadStep:
    """Adds to the error the command that continues from an older checkpoint, as the newest one may be bad."""
    problem = bad.problems[0]
    return BadStep(bad.step, Problem(problem.got, problem.rule, f"{problem.fix}; or jaxpar train JOB --from {step}"))


# Checks the parameters before a save.

_are_finite = jax.jit(are_finite)


def check_before_save(step: int, params: Mapping[str, Any]) -> None:
    """Checks the parameters before a save: an update may overflow although its loss and gradients are finite.

    Raises:
      BadStep: If a parameter is NaN or infinite.
    """
    if not _are_finite(params):
        got = f"the parameters of step {step} are not finite, though its loss and gradients are"
        raise BadStep(step, Problem(got, "a checkpoint is saved only while all parameters are finite", LOWER_RATE))


# Saves the state when user code raises between two steps: data that end, a wrong batch size, an evaluation.

WAIT = 10.0  # seconds to wait for the other processes to raise the same error


@contextmanager
def saves_before_errors(save: Callable[[], None]) -> Iterator[None]:
    """Calls `save` before an error is raised again, except a `BadStep`, whose state must not be saved."""
    try:
        yield
    except BadStep:
        raise
    except Exception:
        # all exceptions, because user code (data, loggers, measures) may raise any; each is raised again
        save()
        raise


def can_save(run: Run, state: State, start: int) -> bool:
    """Returns whether the state is newer than the start, and all processes have reached this point to save it.

    Args:
      run: The run.
      state: The state after the newest step.
      start: The step at which this training began.
    """
    if run.store is None or run.watch.is_skipping or any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        return False  # an error inside the step: it has already donated its input state
    step = int(state.step)
    return step > start and processes.barrier(f"rescue/{step}", WAIT)


def say_saved(run: Run, step: int, save: Callable[[], None]) -> None:
    """Saves a step and prints the result; a failed save is printed, not raised, as the first error is raised later."""
    say = run.progress.say if run.progress else print
    try:
        save()
    except JaxparError as error:
        say(f"step {step} could not be saved before the error below: {error.problems[0].got}")
    else:
        say(f"step {step} is saved before the error below: the same command goes on from there")
