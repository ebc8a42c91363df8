"""Layouts of a plan, compiled for the GPUs that were asked about: what XLA makes of them, and how long it takes.

XLA cannot compile cuDNN's kernels where no GPU is. Where a plan is of these, a kernel with their operands and results
and nothing inside stands in, so that all memory around it is that of the program that runs; its seconds are the plan's,
without what remat runs of it again.
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
from jaxpar.job.plan import compiled_chip, machines, planned
from jaxpar.mesh.chips import Chip
from jaxpar.mesh.memory_pool import Pool
from jaxpar.mesh.target import Target
from jaxpar.models import islands
from jaxpar.models.blocks import fused as parts
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.planned import Transformer
from jaxpar.plan.search import Question, Ranked
from jaxpar.plan.validation import Checked


def verify(job: Job, asked: Question, layouts: Iterable[Ranked], *, memory: int = 0) -> Iterator[Checked]:
    """Yields what XLA makes of layouts, compiled for the GPUs that were asked about, and replayed over their links.

    Args:
      job: What is laid out.
      asked: About which GPUs.
      layouts: Which.
      memory: Bytes that XLA takes a program to have, as it computes again what does not fit; 0 means as asked.

    Raises:
      JaxparError: If XLA can't compile for them.
    """
    target = machines(asked.hardware, asked.devices, _as_asked(asked, memory or asked.room))
    for ranked in layouts:
        yield _checked(job, ranked, asked, target)


def _as_asked(asked: Question, memory: int) -> Chip:
    """Returns the chip with as much memory for a program, and with links as much faster or slower as they were asked.

    The inspector has shares of the sheet of its own, so links are given in proportion to those usually planned with.
    """
    chip = compiled_chip(asked.hardware)
    usual, meant = HARDWARE[chip.key], asked.hardware
    return dataclasses.replace(
        chip,
        reported=math.ceil(Pool().memory(memory)),
        nvlink=chip.nvlink * meant.inside.bandwidth / usual.inside.bandwidth,
        network=(chip.network or 0.0) * meant.between.bandwidth / usual.between.bandwidth or None,
    )


def _checked(job: Job, ranked: Ranked, asked: Question, target: Target) -> Checked:
    meant = planned(job, ranked.candidate, asked.model.layers)
    fused, pieces = asked.software.attention == "fused", _by_kernel(asked, ranked)
    calls: list[jax.Array] = []  # of the stand-in, which runs whole sequences

    def stand_in(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
        calls.append(q)
        return stand_in_attention.attention(q, k, v, causal=causal)

    try:
        with ExitStack() as kernels_of_gpus:
            if fused:
                kernels_of_gpus.enter_context(islands.in_place_of_cudnn(stand_in))
            if pieces:  # compiled as they are called, as nothing runs them
                kernels_of_gpus.enter_context(parts.in_place_of_cudnn(parts.CUDNN))
            report = observe(meant, target)
    except JaxparError as error:
        return Checked(ranked=ranked, seconds=None, bytes=None, fits=False, refusal=str(error.problems[0]))
    causes = {share.cause: share.bytes for share in report.memory}
    seconds, exposed = (report.timeline.seconds, report.timeline.exposed) if report.timeline else (None, {})
    kernels = ranked.time.get("attention", 0.0) if (calls or pieces) and seconds is not None else 0.0
    return Checked(
        ranked=ranked, seconds=seconds and seconds + kernels, bytes=report.total, fits=report.total <= asked.room,
        kernels=kernels, causes=causes, exposed=exposed, refusal="" if report.timeline else "no time",
        squeezed=report.flop.squeezed / (report.flop.total or 1),
    )  # fmt: skip


def _by_kernel(asked: Question, ranked: Ranked) -> bool:
    """Returns whether a plan has cuDNN's kernel meet pieces of sequences that travel."""
    travel = ranked.candidate.context > 1 and ranked.candidate.context_by != "gather"
    return (
        travel
        and asked.software.attention == "fused"
        and isinstance(asked.model, Transformer)
        and not asked.model.in_blocks
    )
