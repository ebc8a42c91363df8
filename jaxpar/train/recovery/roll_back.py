"""Goes back to a checkpoint after a bad step, and on past the batches since it."""

import jax

from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.step.state import State
from jaxpar.train.faults import BadStep
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
    job.watchdog.at(bad.step, "restoring")
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
