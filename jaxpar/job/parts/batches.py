"""The batches of a job: their source, and their shapes without reading any."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxpar.buckets import local_folder
from jaxpar.data import sources as data
from jaxpar.data.spec import OURS, Source
from jaxpar.data.streams.sets import EvaluationSet, open_set
from jaxpar.data.tokens import KEPT
from jaxpar.errors import refuse
from jaxpar.job.file.import_object import import_object
from jaxpar.job.file.schema import Job


def open_data(job: Job) -> Source:
    """Opens the source of a job's batches."""
    source, evaluation = (
        import_object(name, key, allowed=job.allow_import) if ":" in name else None
        for name, key in ((job.data.source, "data.source"), (job.data.evaluation, "data.evaluation"))
    )
    return data.open_data(
        job.data, local_folder(job.run.dir or ".") / "data", seed=job.train.seed, named=source, held_out=evaluation
    )


def with_saved_tokenizer(job: Job, folder: Path) -> Job:
    """Points a run's job to the tokenizer saved in its folder: the one it names may be gone or changed.

    Args:
      job: The job of the run folder.
      folder: The run folder.
    """
    if not job.data.is_text or job.data.tokenizer in OURS:
        return job
    return replace(job, data=replace(job.data, tokenizer=str(folder / "data" / KEPT)))


def open_sets(job: Job) -> dict[str, EvaluationSet]:
    """Opens the evaluation sets of a job, by name.

    Raises:
      JaxparError: If one cannot be read, or has no examples.
    """
    folder, sets = local_folder(job.run.dir or ".") / "data", {}
    for name, table in job.data.sets.items():
        source, key = str(table.get("source", "")), f"data.sets.{name}.source"
        custom_source = import_object(source, key, allowed=job.allow_import) if ":" in source else None
        sets[name] = open_set(job.data, name, folder, job.train.global_batch, named=custom_source)
    return sets


def check_evaluated(job: Job, source: Source | None) -> None:
    """Refuses a job that asks for evaluations while its source (None: no source) has no held-out examples."""
    keys = {"train.eval_every": job.train.eval_every, "checkpoint.keep_best": job.checkpoint.keep_best}
    requests = [f"{key} = {value}" for key, value in keys.items() if value]
    if not requests or job.data.sets or (source is not None and source.evaluation(0, job.train.global_batch)):
        return
    is_custom = ":" in job.data.source
    fix = "evaluation(index, size) in it, or data.evaluation" if is_custom else "data.held_out = 0.1, or more examples"
    raise refuse(
        f"{' and '.join(requests)}, and data.source = {job.data.source!r} holds no example out",
        rule="a run is evaluated on examples that are held out",
        fix=f"{fix}; or {' and '.join(f'{key} = 0' for key, value in keys.items() if value)}",
    )


def abstract_batch(job: Job) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch; text is not packed for this."""
    size = job.train.global_batch
    if job.data.is_text:
        tokens = jax.ShapeDtypeStruct((size, job.data.seq), jnp.int32)
        names = ["inputs", "targets", *["mask"] * job.data.has_mask]
        names += ["segments", "positions"] * (job.data.documents == "apart")
        return dict.fromkeys(names, tokens)
    try:
        batch = open_data(job).batch(0, size)
    except MemoryError as error:
        raise refuse(
            f"train.global_batch = {size}", rule="the memory of this machine holds a batch", fix="global_batch = 32"
        ) from error
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch.items()}
