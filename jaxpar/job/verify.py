"""Checks planned layouts by compiling them for their GPUs: XLA's memory use, and the step time of its program.

XLA cannot compile cuDNN's kernels without a GPU. An empty kernel with the same operands and results replaces them, so
that all other memory is as in the real program. The plan gives the time of cuDNN's kernels, without recomputation.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import jax

from jaxpar.errors import JaxparError
from jaxpar.inspector import stand_in_attention
from jaxpar.job.file.schema import Job
from jaxpar.job.inspect import observe
from jaxpar.job.plan import apply_layout, compiled_chip, machines
from jaxpar.mesh.chips import Chip
from jaxpar.mesh.memory_pool import Pool
from jaxpar.mesh.target import Target
from jaxpar.models import islands
from jaxpar.models.blocks import fused as parts
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.model_protocol import Transformer
from jaxpar.plan.search import Question, Ranked
from jaxpar.plan.validation import CompiledLayout


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
