"""Partitions the model of a job by PipeDream's algorithm, and writes the job that runs the plan.

the job's loss, traced for one microbatch ──► pieces ──► a chain ──► stages with replicas ──► [parallel.pipeline]
the job's layers, measured on the local device ──► a profile, which can be partitioned too
"""

import dataclasses
from collections.abc import Sequence
from math import lcm
from pathlib import Path
from typing import Any

import jax

from jaxpar.errors import JaxparError, refuse
from jaxpar.job.check import check
from jaxpar.job.file.schema import Job, MeshTable
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.measure.layer_times import layers
from jaxpar.parallel.compose import compose
from jaxpar.parallel.declaration import FOUND, Pipeline
from jaxpar.partition.chain import dumps
from jaxpar.partition.replicated_stages import PartitionStage
from jaxpar.sharding.names import Compute, leaves_by_path
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined.traced_pieces import TracedPieces, trace_pieces
from jaxpar.step.stochastic_loss import carry_key, key_parameter


def traced_job(job: Job, rows: int) -> TracedPieces:
    """Traces the loss of a job's model for a microbatch, on one device.

    Args:
      job: The job; its mesh and layout are ignored.
      rows: Examples of the microbatch.

    Raises:
      JaxparError: If the job has problems; the message has all of them.
    """
    check_alone(job)
    loss, numerics = resolve_loss(job), Numerics(precision=job.train.precision, remat=job.train.remat)
    layout = compose(resolve_model(job, loss), type(job.parallel)(), jax.devices()[:1])
    if key_parameter(loss):
        layout, loss = carry_key(layout, loss)
    params, state = jax.eval_shape(layout.blueprint.init, jax.random.key(0))
    batch = {
        name: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in abstract_batch(job).items()
    }
    compute = Compute(train=True, dtype=numerics.dtype, remat=numerics.remat)
    whole = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in sorted(leaves_by_path(params).items())
    }
    return trace_pieces(layout, loss, compute, lambda value: value, whole, state, batch)


def apply_stages(job: Job, stages: Sequence[PartitionStage], *, named: bool) -> Job:
    """Returns the job that runs a plan: `pipe` with stages and replicas, or `data` where one stage is best.

    Args:
      job: The job.
      stages: The stages of the plan.
      named: Whether the model names its pieces by `jp.pipelined`; else the cut is found again when it is traced.

    Raises:
      JaxparError: If the global batch has too few examples for a group of microbatches.
    """
    replicas = tuple(stage.replicas for stage in stages)
    devices = sum(replicas)
    if len(stages) == 1:
        parallel = type(job.parallel)(data=devices)
    else:
        group = lcm(*replicas)
        batch, wanted = job.train.global_batch, 2 * len(stages)
        groups = [n for n in range(1, 2 * wanted + 1) if batch % (n * group) == 0]
        if not groups:
            raise refuse(
                f"train.global_batch = {batch} for {'-'.join(map(str, replicas))}",
                rule=f"a tick handles a group of {group} microbatches, the least common multiple of the replicas",
                fix=f"train.global_batch = {-(-batch // group) * group}",
            )
        count = group * min(groups, key=lambda n: (abs(n - wanted), n))
        pieces = tuple(len(stage.layers) for stage in stages) if named else FOUND
        one_each = set(replicas) == {1}
        pipeline = Pipeline(stages=pieces, replicas=() if one_each else replicas, microbatches=count)
        parallel = type(job.parallel)(pipe=devices, pipeline=pipeline)
    mesh = MeshTable(simulate=devices) if job.mesh.simulate else MeshTable(devices=devices)
    train = dataclasses.replace(job.train, accumulate=1)
    return dataclasses.replace(job, parallel=parallel, mesh=mesh, train=train)


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
