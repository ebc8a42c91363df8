"""Measures a job's model layer by layer on the local device."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError
from jaxpar.job.check import check
from jaxpar.job.file.schema import Job, MeshTable
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.measure.layers import layers
from jaxpar.partition.profile import dumps
from jaxpar.step.numerics import Numerics


def check_alone(job: Job) -> None:
    """Refuses a job that has problems on one device, whatever its mesh and layout.

    Raises:
      JaxparError: With all problems.
    """
    train = dataclasses.replace(job.train, accumulate=1)
    alone = dataclasses.replace(job, mesh=MeshTable(devices=1), parallel=type(job.parallel)(), train=train)
    if problems := check(alone):
        raise JaxparError(*problems)


def measure_layers(job: Job, write: str | None = None) -> dict[str, Any]:
    """Measures and prints the layers of a job's model; returns them as JSON values, with the device and versions.

    The minibatch is the job's global batch, on one device; the job's mesh and layout are ignored.

    Args:
      job: Model, loss, data, batch, precision and remat.
      write: File for the profile in PipeDream's format; an existing file is replaced.

    Raises:
      JaxparError: If the job has problems; the message has all of them.
    """
    check_alone(job)
    loss = resolve_loss(job)
    numerics = Numerics(precision=job.train.precision, remat=job.train.remat)
    found = layers(resolve_model(job, loss), loss, abstract_batch(job), numerics)
    profile = found["profile"]
    if write:
        Path(write).write_text(dumps(profile), encoding="utf-8")
        print(f"profile: {write}")
    nodes = [{**dataclasses.asdict(node), "storage": node.storage} for node in profile.nodes]
    work = [dataclasses.asdict(each) for each in found["work"]]
    for node, each in zip(nodes[1:], work, strict=True):  # the input computes nothing
        node |= each
    return {"layers": nodes, "where": found["where"], "how": {"times": "measured", "bytes": "exact"}}
