"""`jp.plan`: predicts the fastest layouts of a job or a step on given GPUs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.errors import refuse
from jaxpar.job.api.plan_step import plan_step
from jaxpar.job.file.parse import load
from jaxpar.job.file.schema import Job
from jaxpar.job.plan import apply_layout, command, question
from jaxpar.plan.pages.displayed_plan import DisplayedPlan
from jaxpar.plan.search import search

if TYPE_CHECKING:  # planning a decoder does not import JAX
    from jaxpar.step.step import Step


def plan(
    job: "str | Path | Job | Step",
    *overrides: Any,
    devices: int,
    chip: str = "h100",
    per_node: int | None = None,
    inside: str | None = None,
    between: str | None = None,
    memory: str | None = None,
    attention: Literal["fused", "unfused"] = "fused",
    top: int = 10,
    allow_import: bool = False,
) -> DisplayedPlan:
    """Predicts the fastest layouts of a job or a step that fit in memory; nothing runs.

        jp.plan("job.toml", "train.global_batch=512", devices=64)
        jp.plan(step, batch, devices=64)     any model made in Python: traced, over data and fsdp

    The result prints like `jaxpar plan`, renders as a picture in a notebook, and `html(path)` writes the page.

    Args:
      job: A TOML job file or a loaded job; or a step of `jp.train_step`, under any layout.
      *overrides: For a job, `section.key=value` strings. For a step, its global batch, as arrays or shapes.
      devices: Number of GPUs.
      chip: The GPU, such as h200, or the chip file that `jaxpar measure links` and `gemm` wrote.
      per_node: GPUs per NVLink domain; None is the chip's usual number.
      inside: Bandwidth per GPU inside a node, as text: "300GB" (per second).
      between: Bandwidth per GPU between nodes: "46GB", "10Gb/s".
      memory: GPU memory that a program may use: "70GiB".
      attention: fused is cuDNN's kernel wherever a run uses it (not for gathered keys); unfused is XLA's code.
      top: Number of layouts to return.
      allow_import: Whether the job may import Python objects from any module.

    Raises:
      JaxparError: If the job or a number is invalid, no layout is legal, or none fits; then it says what is missing.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise refuse(f"top={top!r:.60}", rule="top is a positive whole number", fix="top=10")
    options = {"inside": inside, "between": between, "memory": memory, "attention": attention}
    if not isinstance(job, str | Path | Job):
        return plan_step(job, overrides, top=top, devices=devices, chip=chip, per_node=per_node, options=options)
    if isinstance(job, Job) and overrides:
        raise refuse(
            f"overrides {list(overrides)} of a job that is loaded",
            rule="overrides apply to a job file",
            fix='jp.plan("job.toml", "train.global_batch=512", devices=64)',
        )
    loaded = job if isinstance(job, Job) else load(Path(job), [*overrides], allow_import=allow_import)
    request = question(loaded, devices=devices, chip=chip, per_node=per_node, options=options)
    result = search(request, top=top)
    name = "JOB" if isinstance(job, Job) else str(job)
    best_job = apply_layout(loaded, result.best[0].candidate, request.model.layers, request.hardware)
    return DisplayedPlan.of(
        result,
        title="a plan" if isinstance(job, Job) else f"{Path(job).stem}: a plan",
        command=command(name, overrides, loaded, best_job),
    )
