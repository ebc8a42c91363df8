"""The batches that a job trains on: their source, and their shapes before any is made."""

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
    """Returns the source of a job's batches."""
    named, held = (
        import_object(name, key, allowed=job.allow_import) if ":" in name else None
        for name, key in ((job.data.source, "data.source"), (job.data.evaluation, "data.evaluation"))
    )
    return data.open_data(
        job.data, local_folder(job.run.dir or ".") / "data", seed=job.train.seed, named=named, held=held
    )


def with_own_tokenizer(job: Job, folder: Path) -> Job:
    """Returns the job of a run with the tokenizer that its folder keeps: that which it names may be gone, or another.

    Args:
      job: The job that the folder holds.
      folder: Of the run.
    """
    if not job.data.is_text or job.data.tokenizer in OURS:
        return job
    return replace(job, data=replace(job.data, tokenizer=str(folder / "data" / KEPT)))


def open_sets(job: Job) -> dict[str, EvaluationSet]:
    """Returns the evaluation sets of a job, by name.

    Raises:
      JaxparError: If one cannot be read, or holds no example.
    """
    folder, made = local_folder(job.run.dir or ".") / "data", {}
    for name, table in job.data.sets.items():
        source, key = str(table.get("source", "")), f"data.sets.{name}.source"
        named = import_object(source, key, allowed=job.allow_import) if ":" in source else None
        made[name] = open_set(job.data, name, folder, job.train.global_batch, named=named)
    return made


def check_evaluated(job: Job, source: Source | None) -> None:
    """Refuses evaluations that a job asks for, of a source (or none) that holds no example out."""
    keys = {"train.eval_every": job.train.eval_every, "checkpoint.keep_best": job.checkpoint.keep_best}
    asked = [f"{key} = {value}" for key, value in keys.items() if value]
    if not asked or job.data.sets or (source is not None and source.evaluation(0, job.train.global_batch)):
        return
    own = ":" in job.data.source
    fix = "evaluation(index, size) in it, or data.evaluation" if own else "data.held_out = 0.1, or more examples"
    raise refuse(
        f"{' and '.join(asked)}, and data.source = {job.data.source!r} holds no example out",
        rule="a run is evaluated on examples that are held out",
        fix=f"{fix}; or {' and '.join(f'{key} = 0' for key, value in keys.items() if value)}",
    )


def abstract_batch(job: Job) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch, without packing any text."""
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
