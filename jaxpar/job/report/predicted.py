"""What the planner says of the layout that a run has, to be shown beside what the run measures."""

from collections.abc import Mapping
from typing import Any

from jaxpar.errors import JaxparError
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.plan_model import needs_jax
from jaxpar.job.plan import question
from jaxpar.mesh.chips import find_chip
from jaxpar.parallel.declare import DECLARED
from jaxpar.parallel.layout import Layout
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE


def predicted(job: Job, layout: Layout) -> dict[str, Any]:
    """Returns `seconds` of a step and `bytes` of the fullest device, modelled; or `why` there is no prediction.

    Of simulated devices nothing is predicted: they have no speed, and another memory than any GPU.
    """
    device = layout.on.devices.flat[0]
    chip = None if layout.simulated else find_chip(device.device_kind)
    if chip is None or chip.key not in HARDWARE:
        return {"why": "simulated devices" if layout.simulated else f"no constants of {device.device_kind} are known"}
    if needs_jax(job) or job.sweep.over:
        return {"why": "the planner's formulas are of one decoder, by its settings"}
    try:
        given: Mapping[str, str | None] = {"attention": "fused"}
        asked = question(job, devices=layout.devices, chip=chip.key, per_node=None, given=given)
        mine = candidate_of(job, layout)
        return {"seconds": float(asked.seconds(mine).total), "bytes": float(asked.bytes(mine).total)}
    except JaxparError as error:
        return {"why": error.problems[0].got}


def candidate_of(job: Job, layout: Layout) -> Candidate:
    """Returns the layout of a job as the planner weighs it.

    Raises:
      JaxparError: If the planner does not know it: a schedule of the user's own, a remat.
    """
    sizes, parallel, piped = layout.sizes, layout.parallel, layout.sizes["pipe"] > 1
    microbatches = layout.microbatches if piped else job.train.accumulate
    return Candidate(
        **{axis: sizes[axis] for axis in DECLARED},
        axes={axis: size for axis, size in sizes.items() if axis not in DECLARED},
        zero=parallel.stage, sequence=bool(parallel.sequence), remat=job.train.remat,
        schedule=layout.schedule.name if piped else Candidate.schedule, chunks=layout.schedule.chunks if piped else 1,
        head=parallel.pipeline.head if piped else "last", microbatches=microbatches,
        microbatch=max(1, job.train.global_batch // (layout.replicas * microbatches)),
    )  # fmt: skip
