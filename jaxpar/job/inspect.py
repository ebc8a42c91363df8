"""Compiles a job for its target GPUs and reports on the program; nothing runs.

Planned layouts are checked likewise: XLA's memory use, and the step time of its program. XLA cannot compile cuDNN's
kernels without a GPU. An empty kernel with the same operands and results replaces them, so that all other memory is as
in the real program. The plan gives the time of cuDNN's kernels, without recomputation.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import jax

from jaxpar.errors import JaxparError, refuse
from jaxpar.inspector import stand_in_attention
from jaxpar.inspector.findings import REPEATED
from jaxpar.inspector.report import Report, build_report
from jaxpar.inspector.subject import step_subject
from jaxpar.job.build import assemble
from jaxpar.job.check import device_count
from jaxpar.job.file.schema import Job, MeshTable
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.job.plan import apply_layout, compiled_chip, machines
from jaxpar.mesh.absent_gpus import target_devices
from jaxpar.mesh.chips import Chip
from jaxpar.mesh.devices import simulate
from jaxpar.mesh.memory_pool import Pool
from jaxpar.mesh.target import Target, missing_plugin, parse_target
from jaxpar.models import islands
from jaxpar.models.blocks import fused as parts
from jaxpar.models.settings.computing import Precision
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.model_protocol import Transformer
from jaxpar.plan.search import Question, Ranked
from jaxpar.plan.validation import CompiledLayout
from jaxpar.step.checks.precision import NOT_BF16
from jaxpar.units import show_count

CPU = "cpu"


def inspect(job: Job, target: str = "") -> Report:
    """Reports on the compiled step of a job; if it does not fit in memory, also lists changes that free memory.

    Args:
      job: The job.
      target: `CHIP:NODESxGPUS`, `CHIP` alone for as many GPUs as the job has devices, or `cpu`; defaults to the job's
        `mesh.target`, then to `cpu` if the job simulates its devices.

    Raises:
      JaxparError: If the job or the target has problems; the message has all of them.
    """
    target = target or job.mesh.target or (CPU if job.mesh.simulate else "")
    if not target:
        raise refuse(
            "a job that names no target",
            rule="a job that is inspected names its target, or simulates its devices",
            fix=f"--target h100, or mesh.target = 'h100:{max(1, device_count(job) // 8)}x8' in the job",
        )
    result = observe(job, target)
    if result.fits is False:
        result = dataclasses.replace(result, knobs=tuple(_knobs(job, target, result.total)))
    return result


def observe(job: Job, target: str | Target) -> Report:
    """Reports on the compiled step of a job; `inspect` adds changes that free memory if it does not fit."""
    chip = None
    if target == CPU:
        count = device_count(job)
        simulate(count)
        target_job, devices = dataclasses.replace(job, mesh=MeshTable(simulate=count)), jax.devices()
    else:
        gpus = target if isinstance(target, Target) else parse_target(target, devices=_count_declared_devices(job))
        devices, chip = target_devices(gpus), gpus.chip
        target_job = dataclasses.replace(job, mesh=MeshTable(devices=gpus.devices))
    step = assemble(target_job, devices)
    result = build_report(step_subject(step, abstract_batch(target_job)), chip)
    return dataclasses.replace(result, title=f"{job.run.dir.rsplit('/', 1)[-1] or 'job'}: {result.title}")


def matmul_summary(job: Job) -> str:
    """Summarizes the matmuls that each device of a job computes: its share of them, or repeated work.

    A further line names computations that are not in bf16 although that was requested. If the job cannot be compiled
    here, the summary says so.
    """
    target = job.mesh.target or (CPU if job.mesh.simulate else "")
    reason = (
        "the job names no target, and simulates no devices"
        if not target
        else (missing_plugin() if target != CPU else "")
    )
    if reason:
        return f"matmuls of each device: not compiled, as {reason}"
    result = observe(job, target)
    repeats = [flag for flag in result.flags if flag.kind == REPEATED]
    summary = f"matmuls of each device: {show_count(result.flop.total)} FLOP in a step, its share"
    notes = [note for note in result.notes if note.startswith(NOT_BF16)]
    return "\n".join([*(map(str, repeats) if repeats else [summary]), *notes])


def _count_declared_devices(job: Job) -> int:
    """Returns the number of devices that a job declares, with 1 for every open size."""
    if job.mesh.simulate or job.mesh.devices or job.mesh.target:
        return device_count(job)
    product = 1
    for size in job.parallel.sizes.values():
        product *= max(size, 1)
    return product


def _knobs(job: Job, target: str, total: int) -> list[tuple[str, int]]:
    """Compiles single changes of a job; returns (change, freed bytes) of changes that free memory, largest first."""
    train, parallel = job.train, job.parallel
    changes = [
        ("train.remat = 'full'", {"train": dataclasses.replace(train, remat="full")}, train.remat != "full"),
        *(_microbatch_changes(job) if parallel.pipe == 1 else _pipeline_changes(job)),
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
        shards = parallel.data * parallel.fsdp
        split = dataclasses.replace(parallel, data=1, fsdp=shards)
        changes.append((f"parallel.data = 1, parallel.fsdp = {shards}", {"parallel": split}, True))
    results = []
    for change, fields, makes_sense in changes:
        if makes_sense:
            try:
                freed = total - observe(dataclasses.replace(job, **fields), target).total
            except JaxparError:  # the job does not allow this change
                continue
            if freed > 0:
                results.append((change, freed))
    return sorted(results, key=lambda entry: -entry[1])


def _microbatch_changes(job: Job) -> list[tuple[str, dict, bool]]:
    train, parallel = job.train, job.parallel
    count = 2 * train.accumulate
    halves = parallel.data > 0 < parallel.fsdp and train.global_batch % (parallel.data * parallel.fsdp * count) == 0
    return [(f"train.accumulate = {count}", {"train": dataclasses.replace(train, accumulate=count)}, halves)]


def _pipeline_changes(job: Job) -> list[tuple[str, dict, bool]]:
    """Returns the changes to smaller microbatches, to fewer saved activations, and to fewer layers per stage."""
    train, parallel, spec = job.train, job.parallel, job.parallel.pipeline
    lean = dataclasses.replace(parallel, pipeline=dataclasses.replace(spec, keep="inputs"))
    ticks = dataclasses.replace(parallel, pipeline=dataclasses.replace(spec, gather="tick"))
    changes = [
        ("parallel.pipeline.keep = 'inputs'", {"parallel": lean}, spec.keep != "inputs"),
        ("parallel.pipeline.gather = 'tick'", {"parallel": ticks}, spec.gather != "tick" and parallel.stage == 3),
    ]
    if min(parallel.sizes.values()) < 1 or spec.schedule.endswith(".csv"):  # a custom table fixes its own numbers
        return changes
    count = 2 * (spec.microbatches or 2 * parallel.pipe)
    finer = dataclasses.replace(spec, microbatches=count)
    halves = train.global_batch % (parallel.data * parallel.fsdp * count) == 0
    change = f"parallel.pipeline.microbatches = {count}"
    changes.append((change, {"parallel": dataclasses.replace(parallel, pipeline=finer)}, halves))
    for axis in ("data", "fsdp"):  # as many examples at once as before, on half as many replicas
        size = parallel.sizes[axis] // 2
        deeper = dataclasses.replace(parallel, pipe=2 * parallel.pipe, pipeline=finer, **{axis: size})
        changes_text = f"parallel.pipe = {2 * parallel.pipe}, parallel.{axis} = {size}, {change}"
        changes.append((changes_text, {"parallel": deeper}, parallel.sizes[axis] % 2 == 0))
    return changes


def verify(job: Job, question: Question, layouts: Iterable[Ranked], *, memory: int = 0) -> Iterator[CompiledLayout]:
    """Compiles layouts for the plan's GPUs; yields their memory, and their step time modelled from the program.

    Args:
      job: The job.
      question: The plan's question, which names the GPUs.
      layouts: The layouts to check.
      memory: Memory limit in bytes, which XLA meets by rematerialization; 0 means the plan's.

    Raises:
      JaxparError: If XLA can't compile for these GPUs.
    """
    target = machines(question.hardware, question.devices, _target_chip(question, memory or question.memory_limit))
    for ranked in layouts:
        yield _check_layout(job, ranked, question, target)


def _target_chip(question: Question, memory: int) -> Chip:
    """Returns the chip with the given program memory, and with links scaled by the plan's ratio to the usual links.

    The inspector reduces data-sheet bandwidths itself, so only the ratio matters.
    """
    chip = compiled_chip(question.hardware)
    usual_hardware, hardware = HARDWARE[chip.key], question.hardware
    return dataclasses.replace(
        chip,
        reported_memory=math.ceil(Pool().memory_for(memory)),
        nvlink=chip.nvlink * hardware.inside.bandwidth / usual_hardware.inside.bandwidth,
        network=(chip.network or 0.0) * hardware.between.bandwidth / usual_hardware.between.bandwidth or None,
    )


def _check_layout(job: Job, ranked: Ranked, question: Question, target: Target) -> CompiledLayout:
    planned_job = apply_layout(job, ranked.candidate, question.model.layers, named=question.model.named_axes)
    fused, chunks_by_kernel = question.software.attention == "fused", _uses_chunk_kernel(question, ranked)
    calls: list[jax.Array] = []  # calls of the stand-in, on whole sequences

    def stand_in(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
        calls.append(q)
        return stand_in_attention.attention(q, k, v, causal=causal)

    try:
        with ExitStack() as kernels_of_gpus:
            if fused:
                kernels_of_gpus.enter_context(islands.override_cudnn(stand_in))
            if chunks_by_kernel:  # cuDNN's calls are compiled but never run
                kernels_of_gpus.enter_context(parts.override_kernel(parts.CUDNN))
            report = observe(planned_job, target)
    except JaxparError as error:
        return CompiledLayout(ranked=ranked, seconds=None, bytes=None, fits=False, refusal=str(error.problems[0]))
    causes = {share.cause: share.bytes for share in report.memory}
    seconds, exposed = (report.timeline.seconds, report.timeline.exposed) if report.timeline else (None, {})
    kernels = ranked.time.get("attention", 0.0) if (calls or chunks_by_kernel) and seconds is not None else 0.0
    return CompiledLayout(
        ranked=ranked,
        seconds=seconds and seconds + kernels,
        bytes=report.total,
        fits=report.total <= question.memory_limit,
        kernels=kernels,
        causes=causes,
        exposed=exposed,
        refusal="" if report.timeline else "no time",
        xla_remat=report.flop.squeezed / (report.flop.total or 1),
    )


def _uses_chunk_kernel(question: Question, ranked: Ranked) -> bool:
    """Whether the plan runs cuDNN's kernel on chunks of sequences that rotate between devices."""
    travel = ranked.candidate.context > 1 and ranked.candidate.context_by != "gather"
    return (
        travel
        and question.software.attention == "fused"
        and isinstance(question.model, Transformer)
        and not question.model.no_kernel_reason
    )
