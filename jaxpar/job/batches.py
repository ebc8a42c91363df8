"""The batches that a job trains on: their source, and their shapes before any is made."""

from pathlib import Path

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.job.objects import import_object
from jaxpar.job.tables import Job
from jaxpar.train.data import sources as data
from jaxpar.train.data.spec import Source


def open_source(job: Job) -> Source:
    """Returns the source of a job's batches."""
    named = None
    if ":" in job.data.source:
        named = import_object(job.data.source, "data.source", allowed=job.allow_import)
    return data.open_source(job.data, Path(job.run.dir or ".") / "data", seed=job.train.seed, named=named)


def abstract_batch(job: Job) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch, without packing any text."""
    size = job.train.global_batch
    if job.data.is_text:
        tokens = jax.ShapeDtypeStruct((size, job.data.seq), jnp.int32)
        return {"inputs": tokens, "targets": tokens}
    try:
        batch = open_source(job).batch(0, size)
    except MemoryError as error:
        raise refuse(
            f"train.global_batch = {size}", rule="a batch fits into memory", fix="global_batch = 32"
        ) from error
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch.items()}
