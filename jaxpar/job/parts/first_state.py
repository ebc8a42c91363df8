"""Checks the state that a run would begin or go on with: by the lists of checkpoints, without reading an array.

RUN has no checkpoint   ─►  checkpoint.start_from: is it there, do its parameters fit?
RUN has some            ─►  do the arrays of the newest good one fit, are job and data those of the run?
"""

from pathlib import Path

from jaxpar.buckets import is_address
from jaxpar.checkpoint import listing, paths, reading, replicas, start_from
from jaxpar.checkpoint.differences import differences, problems
from jaxpar.errors import JaxparError, Problem
from jaxpar.job.file import changes
from jaxpar.job.file.run_folder import check_folder, check_same_data, check_writable
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import open_data
from jaxpar.job.parts.optimizers import resolve_optimizer
from jaxpar.models.huggingface.folder import is_folder
from jaxpar.parallel.layout import Layout
from jaxpar.step import state


def check_run(job: Job, layout: Layout) -> list[Problem]:
    """Returns what `train` would refuse of the run folder and the first state before its first step.

    A text is not packed for it, so that other text than the run began with is found by `train` alone.

    Args:
      job: The job, in which nothing else is wrong.
      layout: Of its model.
    """
    if is_address(job.run.dir) or is_address(job.checkpoint.start_from):
        return []  # what a bucket has is read when the run starts
    folder = Path(job.run.dir)
    try:
        steps = check_folder(job, folder)
        check_writable(folder)
        if steps:
            changed = changes.changes(folder, job)
            check_same_data(folder, None if job.data.is_text else open_data(job).fingerprint)
            changes.check(changed, job, _check_goes_on(job, layout, folder / "checkpoints", steps))
        elif job.checkpoint.start_from and not is_folder(job.checkpoint.start_from):
            like = state.abstract(layout, resolve_optimizer(job, layout.blueprint))
            start_from.check(job.checkpoint, like, layout)
    except JaxparError as error:
        return [*error.problems]
    return []


def _check_goes_on(job: Job, layout: Layout, folder: Path, steps: list[int]) -> int:
    """Returns the step of the newest checkpoint that is whole, by names and sizes of its files.

    Raises:
      JaxparError: If none is, or it does not fit the job.
    """
    damaged: list[Problem] = []
    for step in reversed(steps):
        path = folder / listing.name_of(step)
        try:
            made = reading.listed(path)
        except reading.Damaged as error:
            damaged += error.problems
            continue
        how, run = job.checkpoint.replicas, str(folder.parent)
        wanted = paths.described(state.abstract(layout, resolve_optimizer(job, layout.blueprint)))
        if made.replicas and made.replicas.model and not layout.parallel.exchange.differ:
            replicas.check_one_model(made, made.replicas, wanted, how=how, run=run)
        elif how == "same" and (wrong := problems(differences(made.arrays, wanted), run)):
            raise JaxparError(*wrong)  # else arrays are made of others, as the mesh of devices says
        return step
    raise JaxparError(*damaged)
