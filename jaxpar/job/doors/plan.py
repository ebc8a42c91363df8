"""`jp.plan`: which layout of a job would be fastest on GPUs that nobody has paid for yet."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.errors import refuse
from jaxpar.job.doors.plan_step import of_step
from jaxpar.job.file.parse import load
from jaxpar.job.file.schema import Job
from jaxpar.job.plan import command, planned, question
from jaxpar.plan.pages.shown import ShownPlan
from jaxpar.plan.search import search

if TYPE_CHECKING:  # a job's plan may need no JAX
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
) -> ShownPlan:
    """Returns the layouts of a job or a step that are predicted to be fastest, of those that fit; nothing runs.

        jp.plan("job.toml", "train.global_batch=512", devices=64)
        jp.plan(step, batch, devices=64)     any model made in Python: traced, over data and fsdp

    Prints itself as `jaxpar plan` does, shows itself in a notebook as a picture, and `html(path)` writes the page.

    Args:
      job: The TOML file of a job, or one that is loaded; or what `jp.train_step` returns, under any layout.
      *overrides: Of a job: `section.key=value` each, as on the command line. Of a step: its global batch, as arrays or
        shapes.
      devices: How many GPUs.
      chip: Which, such as h200, or the file of a chip that `jaxpar measure links` and `gemm` wrote.
      per_node: How many of them NVLink joins; None is as many as usual.
      inside: Bytes per second and GPU inside a node, as text: "300GB".
      between: The same between nodes: "46GB", "10Gb/s".
      memory: What a program may use of a GPU: "70GiB".
      attention: fused, cuDNN's where a run has it, but for gathered keys; or unfused, as XLA has it.
      top: How many layouts are kept.
      allow_import: Whether the job may name Python objects from anywhere.

    Raises:
      JaxparError: If the job or a number is wrong, no layout is legal, or none fits: what is missing, what would fit.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise refuse(f"top={top!r:.60}", rule="top is a positive whole number", fix="top=10")
    given = {"inside": inside, "between": between, "memory": memory, "attention": attention}
    if not isinstance(job, str | Path | Job):
        return of_step(job, overrides, top=top, devices=devices, chip=chip, per_node=per_node, given=given)
    if isinstance(job, Job) and overrides:
        raise refuse(
            f"overrides {list(overrides)} of a job that is loaded",
            rule="overrides are of the file of a job",
            fix='jp.plan("job.toml", "train.global_batch=512", devices=64)',
        )
    loaded = job if isinstance(job, Job) else load(Path(job), [*overrides], allow_import=allow_import)
    asked = question(loaded, devices=devices, chip=chip, per_node=per_node, given=given)
    found = search(asked, top=top)
    name = "JOB" if isinstance(job, Job) else str(job)
    made = planned(loaded, found.best[0].candidate, asked.model.layers, asked.hardware)
    return ShownPlan.of(
        found,
        title="a plan" if isinstance(job, Job) else f"{Path(job).stem}: a plan",
        command=command(name, overrides, loaded, made),
    )
