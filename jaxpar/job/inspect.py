"""Compiles a job for the GPUs it is meant for, and reports on the program; nothing is run."""

import dataclasses

import jax

from jaxpar.errors import JaxparError, refuse
from jaxpar.inspector.findings import REPEATED
from jaxpar.inspector.report import Report, report
from jaxpar.job.build import assemble
from jaxpar.job.check import device_count
from jaxpar.job.file.schema import Job, MeshTable
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.mesh.absent import target_devices
from jaxpar.mesh.devices import simulate
from jaxpar.mesh.target import Target, find_plugin, parse_target
from jaxpar.models.settings.computing import Precision
from jaxpar.step.checks.precision import NOT_BF16
from jaxpar.step.inspectable import subject
from jaxpar.units import show_count

CPU = "cpu"


def inspect(job: Job, target: str = "") -> Report:
    """Returns the report about a job's compiled step.

    Args:
      job: The job.
      target: `CHIP:NODESxGPUS`, `CHIP` alone for as many GPUs as the job has devices, or `cpu`; the job's own
        `mesh.target` if it is left out, and `cpu` if that is too and the job simulates its devices.

    Raises:
      JaxparError: With everything that is wrong with the job, or the target.
    """
    target = target or job.mesh.target or (CPU if job.mesh.simulate else "")
    if not target:
        raise refuse(
            "a job that names no target",
            rule="a job that is inspected names its target, or simulates its devices",
            fix=f"--target h100, or mesh.target = 'h100:{max(1, device_count(job) // 8)}x8' in the job",
        )
    found = observe(job, target)
    if found.fits is False:
        found = dataclasses.replace(found, knobs=tuple(_knobs(job, target, found.total)))
    return found


def observe(job: Job, target: str | Target) -> Report:
    """Returns the report about a job's compiled step; `inspect` adds changes that free memory if it does not fit."""
    chip = None
    if target == CPU:
        count = device_count(job)
        simulate(count)
        meant, devices = dataclasses.replace(job, mesh=MeshTable(simulate=count)), jax.devices()
    else:
        chosen = target if isinstance(target, Target) else parse_target(target, devices=_declared(job))
        devices, chip = target_devices(chosen), chosen.chip
        meant = dataclasses.replace(job, mesh=MeshTable(devices=chosen.devices))
    step = assemble(meant, devices)
    made = report(subject(step, abstract_batch(meant)), chip)
    return dataclasses.replace(made, title=f"{job.run.dir.rsplit('/', 1)[-1] or 'job'}: {made.title}")


def work(job: Job) -> str:
    """Returns, in a sentence, what each device of a job computes, as compiled for them: its share, or more than that.

    Another says what is not computed in bf16, where that was asked for.

    Where it cannot be compiled, the sentence says so.
    """
    target = job.mesh.target or (CPU if job.mesh.simulate else "")
    missing = (
        "the job names no target, and simulates no devices" if not target else (find_plugin() if target != CPU else "")
    )
    if missing:
        return f"matmuls of each device: not compiled, as {missing}"
    found = observe(job, target)
    repeated = [flag for flag in found.flags if flag.kind == REPEATED]
    made = f"matmuls of each device: {show_count(found.flop.total)} FLOP in a step, its share"
    kept = [note for note in found.notes if note.startswith(NOT_BF16)]
    return "\n".join([*(map(str, repeated) if repeated else [made]), *kept])


def _declared(job: Job) -> int:
    """Returns how many devices a job says it has, 1 where it leaves that open."""
    if job.mesh.simulate or job.mesh.devices or job.mesh.target:
        return device_count(job)
    product = 1
    for size in job.parallel.sizes.values():
        product *= max(size, 1)
    return product


def _knobs(job: Job, target: str, total: int) -> list[tuple[str, int]]:
    """Returns (change, bytes it frees) for every single change that frees any, each compiled; most first."""
    train, parallel = job.train, job.parallel
    tries = [
        ("train.remat = 'full'", {"train": dataclasses.replace(train, remat="full")}, train.remat != "full"),
        *(_pieces(job) if parallel.pipe == 1 else _pieces_of_pipeline(job)),
        (
            "train.precision = 'bf16'",
            {"train": dataclasses.replace(train, precision=Precision("bf16"))},
            train.precision.compute == "fp32",
        ),
        (
            "parallel.zero = 3",
            {"parallel": dataclasses.replace(parallel, zero=3)},
            parallel.stage < 3 and parallel.fsdp != 1,
        ),
    ]
    if not parallel.stage and parallel.data > 1:
        ways = parallel.data * parallel.fsdp
        split = dataclasses.replace(parallel, data=1, fsdp=ways)
        tries.append((f"parallel.data = 1, parallel.fsdp = {ways}", {"parallel": split}, True))
    found = []
    for change, replaced, makes_sense in tries:
        if makes_sense:
            try:
                freed = total - observe(dataclasses.replace(job, **replaced), target).total
            except JaxparError:  # this change is not legal for this job, so it is no way out
                continue
            if freed > 0:
                found.append((change, freed))
    return sorted(found, key=lambda entry: -entry[1])


def _pieces(job: Job) -> list[tuple[str, dict, bool]]:
    """Returns the change to fewer examples at once."""
    train, parallel = job.train, job.parallel
    count = 2 * train.accumulate
    halves = parallel.data > 0 < parallel.fsdp and train.global_batch % (parallel.data * parallel.fsdp * count) == 0
    return [(f"train.accumulate = {count}", {"train": dataclasses.replace(train, accumulate=count)}, halves)]


def _pieces_of_pipeline(job: Job) -> list[tuple[str, dict, bool]]:
    """Returns the changes to fewer examples at once, to less kept of each, and to fewer layers on a stage."""
    train, parallel, how = job.train, job.parallel, job.parallel.pipeline
    kept = dataclasses.replace(parallel, pipeline=dataclasses.replace(how, keep="inputs"))
    ticks = dataclasses.replace(parallel, pipeline=dataclasses.replace(how, gather="tick"))
    found = [
        ("parallel.pipeline.keep = 'inputs'", {"parallel": kept}, how.keep != "inputs"),
        ("parallel.pipeline.gather = 'tick'", {"parallel": ticks}, how.gather != "tick" and parallel.stage == 3),
    ]
    if min(parallel.sizes.values()) < 1 or how.schedule.endswith(".csv"):  # a table of its own has its own numbers
        return found
    count = 2 * (how.microbatches or 2 * parallel.pipe)
    more = dataclasses.replace(how, microbatches=count)
    halves = train.global_batch % (parallel.data * parallel.fsdp * count) == 0
    change = f"parallel.pipeline.microbatches = {count}"
    found.append((change, {"parallel": dataclasses.replace(parallel, pipeline=more)}, halves))
    for axis in ("data", "fsdp"):  # as many examples at once as before, on half as many replicas
        size = parallel.sizes[axis] // 2
        deeper = dataclasses.replace(parallel, pipe=2 * parallel.pipe, pipeline=more, **{axis: size})
        both = f"parallel.pipe = {2 * parallel.pipe}, parallel.{axis} = {size}, {change}"
        found.append((both, {"parallel": deeper}, parallel.sizes[axis] % 2 == 0))
    return found
