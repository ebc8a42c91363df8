"""Checks the first state of a run against checkpoint manifests, without reading an array.

RUN has no checkpoint   ─►  checkpoint.start_from: does it exist, do its parameters fit?
RUN has checkpoints     ─►  do the arrays of the newest intact one fit, are job and data unchanged?
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
    """Returns the problems of the run folder and the first state that `train` would report before its first step.

    Text is not packed here, so only `train` detects that the text has changed.

    Args:
      job: A job without other problems.
      layout: The layout of its model.
    """
    if is_address(job.run.dir) or is_address(job.checkpoint.start_from):
        return []  # a bucket is read when the run starts
    folder = Path(job.run.dir)
    try:
        steps = check_folder(job, folder)
        check_writable(folder)
        if steps:
            changed = changes.compare(folder, job)
            check_same_data(folder, None if job.data.is_text else open_data(job).fingerprint)
            changes.check(changed, job, _check_goes_on(job, layout, folder / "checkpoints", steps))
        elif job.checkpoint.start_from and not is_folder(job.checkpoint.start_from):
            shapes = state.abstract(layout, resolve_optimizer(job, layout.blueprint))
            start_from.check(job.checkpoint, shapes, layout)
    except JaxparError as error:
        return [*error.problems]
    return []


def _check_goes_on(job: Job, layout: Layout, folder: Path, steps: list[int]) -> int:
    """Returns the step of the newest intact checkpoint, judged by names and sizes of its files.

    Raises:
      JaxparError: If none is intact, or it does not fit the job.
    """
    damaged: list[Problem] = []
    for step in reversed(steps):
        path = folder / listing.name_of(step)
        try:
            manifest = reading.read_manifest(path)
        except reading.Damaged as error:
            damaged += error.problems
            continue
        replica_mode, run = job.checkpoint.replicas, str(folder.parent)
        arrays = paths.describe(state.abstract(layout, resolve_optimizer(job, layout.blueprint)))
        if manifest.replicas and manifest.replicas.model and not layout.parallel.exchange.replicas_differ:
            replicas.check_one_model(manifest, manifest.replicas, arrays, how=replica_mode, run=run)
        elif replica_mode == "same" and (mismatches := problems(differences(manifest.arrays, arrays), run)):
            raise JaxparError(*mismatches)  # for other values, arrays are derived from the saved ones to fit the mesh
        return step
    raise JaxparError(*damaged)
