"""Implements `jp.plan`, for a job or a step."""

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.errors import refuse, user_code_errors
from jaxpar.job.file.parse import load, replacement_note, shipped_job
from jaxpar.job.file.schema import Job
from jaxpar.job.plan import apply_layout, command, model_question, question
from jaxpar.parallel.declaration import OPTIONAL
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.option_texts import argument_text
from jaxpar.plan.model.splits import AXES
from jaxpar.plan.pages.html import DisplayedPlan
from jaxpar.plan.search import search

if TYPE_CHECKING:
    from jaxpar.step.step import Step


# Plans a step made in Python: its model is traced, like that of a job without formulas.


def plan_step(step: Any, batches: Sequence[Any], *, top: int, devices: int, **asked: Any) -> DisplayedPlan:
    """Predicts the fastest layouts of a step's model, loss and optimizer.

    Args:
      step: A step of `jp.train_step`; only the exchange of its layout matters.
      batches: Exactly one global batch: name to anything with a shape and a dtype.
      top: Number of layouts to return.
      devices: Number of GPUs.
      **asked: `chip`, `per_node` and `options` of `jaxpar.job.plan.question`.

    Raises:
      JaxparError: If `step` is not a step, the batch does not fit it, or no layout is legal and fits in memory.
    """
    module = sys.modules.get("jaxpar.step.step")  # not imported: `step` is no step, and JAX is not needed
    if module is None or not isinstance(step, module.Step):
        raise refuse(
            f"jp.plan of {step!r:.60}",
            rule="jp.plan takes a job, or a step and its global batch",
            fix='jp.plan("job.toml", devices=64), or jp.plan(step, batch, devices=64) of what jp.train_step returns',
        )
    batch = _batch(batches)
    rows = next(iter(batch.values())).shape[0]
    question = model_question(
        lambda: _trace_step(step, batch, rows, devices), rows=rows, exchange=step.layout.parallel.exchange,
        remat=step.numerics.remat, steps=0, devices=devices, option_text=argument_text, **asked,
    )  # fmt: skip
    result = search(question, top=top)
    command = _command(result.best[0].candidate, step, question.model.named_axes)
    return DisplayedPlan.from_plan(result, title=f"{step.layout.blueprint.name}: a plan", command=command)


def _batch(batches: Sequence[object]) -> Mapping[str, Any]:
    """Returns the global batch as shapes and dtypes."""
    import jax

    shapes: dict[str, Any] = {}
    if len(batches) == 1 and isinstance(batches[0], Mapping) and batches[0]:
        arrays = {
            key: leaf for key, leaf in batches[0].items() if getattr(leaf, "shape", ()) and hasattr(leaf, "dtype")
        }
        if len(arrays) == len(batches[0]):
            shapes = {key: jax.eval_shape(lambda x: x, leaf) for key, leaf in arrays.items()}  # JAX casts 64 bits to 32
    if len({leaf.shape[0] for leaf in shapes.values()}) != 1:
        raise refuse(
            f"jp.plan of a step and {', '.join(map(_format_argument, batches)) or 'no batch'}",
            rule="a step is planned for its global batch: a dict of arrays or shapes, with the same first dim",
            fix='jp.plan(step, {"x": jax.ShapeDtypeStruct((512, 784), "float32")}, devices=64)',
        )
    return shapes


def _format_argument(batch: Any) -> str:
    """Formats an argument for the error message, arrays by dtype and shape."""
    if isinstance(batch, Mapping):
        return f"{{{', '.join(f'{key!r}: {_format_argument(item)}' for key, item in batch.items())}}}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {', '.join(map(_format_argument, batch))}"
    return (
        f"{batch.dtype}{list(batch.shape)}" if hasattr(batch, "shape") and hasattr(batch, "dtype") else f"{batch!r:.60}"
    )


def _trace_step(step: "Step", batch: Mapping[str, Any], rows: int, devices: int) -> Any:
    from jaxpar.job.parts.plan_traced import build_recipe, trace_model

    blueprint = step.layout.blueprint
    recipe = build_recipe(blueprint, step.optimizer, step.layout.frozen, name="the step's optimizer")
    arrays = ", ".join(f"{key} {leaf.dtype}{list(leaf.shape)}" for key, leaf in batch.items())
    rule, fix = "model and loss accept the batch", "the arrays that they read, or the line of the model that this names"
    return trace_model(
        blueprint, step.loss, recipe, batch, rows=rows, devices=devices, compute=step.numerics.matmuls.compute,
        frozen=step.layout.frozen,
        batch_errors=lambda _: user_code_errors(f"{blueprint.name} and its loss on {arrays}", rule=rule, fix=fix),
    )  # fmt: skip


def _command(candidate: Candidate, step: "Step", named: Collection[str]) -> str:
    """Formats a layout as Python code, with the step's own exchange and precision.

    No specs are found for the axes in `named`, which split dims as the model names them.
    """
    exchange, precision = step.layout.parallel.exchange, step.numerics.matmuls
    fields = {axis: size for axis, size in candidate.axes.items() if axis in OPTIONAL}
    further = {axis: size for axis, size in candidate.axes.items() if axis not in OPTIONAL}
    zero = candidate.zero if candidate.shards > 1 or any(size > 1 for size in fields.values()) else None
    sizes = {
        "pipe": candidate.pipe,
        "data": candidate.data,
        "fsdp": candidate.fsdp,
        "context": candidate.context,
        "tensor": candidate.tensor,
        **fields,
        "zero": zero,
    }
    parallel_args = [f"{key}={size}" for key, size in sizes.items() if size is not None and (key == "zero" or size > 1)]
    found = any(candidate.size(axis) > 1 for axis in AXES if axis not in named)
    has_example = step.layout.blueprint.example is not None
    parallel_args += ['specs="found"'] * (found and has_example)
    parallel_args += [f"axes={further}"] if any(size > 1 for size in further.values()) else []
    parallel_args += [_pipeline(candidate)] * (candidate.pipe > 1)
    parallel_args += [f"exchange={exchange!r}"] * (exchange != type(step.layout.parallel)().exchange)
    text = {"compute": precision.compute, "allow": [*precision.allow]} if precision.allow else precision.compute
    step_args = [f"precision={text!r}"] * (text != "fp32")
    step_args += [f"accumulate={candidate.microbatches}"] * bool(candidate.microbatches > 1 and candidate.pipe == 1)
    step_args += [f"remat={candidate.remat!r}"] * (candidate.remat != "none")
    parallel = f"jp.Parallel({', '.join(parallel_args)})"
    if found and not has_example:  # `compose` would not know the inputs
        found_for = f", precision={precision.compute!r}" * (precision.compute != "fp32")
        parallel = f"jp.find_specs(model, loss, batch, {parallel}{found_for}).parallel"
    step_args = ["layout", "loss", "optimizer", *step_args]
    return f"layout = jp.compose(model, {parallel}); step = jp.train_step({', '.join(step_args)})"


def _pipeline(candidate: Candidate) -> str:
    """Formats the pipeline of a layout as an argument of `jp.Parallel`."""
    chunks = f", chunks={candidate.chunks}" * (candidate.chunks > 1)
    return (
        f"pipeline=jp.Pipeline(schedule={candidate.schedule!r}, microbatches={candidate.microbatches}{chunks}, "
        f"keep='residuals', head={candidate.head!r})"
    )


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
        jp.plan(step, batch, devices=64)     any model made in Python: traced, its equal layers over pipe

    The result prints like `jaxpar plan`, renders as a picture in a notebook, and `html(path)` writes the page.

    Args:
      job: A TOML job file or a loaded job; or a step of `jp.train_step`, under any layout. If the working directory
        lacks a file of `configs/`, the installed file is used, and a line says so.
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
    if isinstance(job, Job):
        loaded = job
    else:
        loaded = load(_job_file(Path(job)), [*overrides], allow_import=allow_import)
    request = question(
        loaded, devices=devices, chip=chip, per_node=per_node, options=options, option_text=argument_text
    )
    result = search(request, top=top)
    name = "JOB" if isinstance(job, Job) else str(job)
    best_job = apply_layout(
        loaded, result.best[0].candidate, request.model.layers, request.hardware, named=request.model.named_axes
    )
    return DisplayedPlan.from_plan(
        result,
        title="a plan" if isinstance(job, Job) else f"{Path(job).stem}: a plan",
        command=command(name, overrides, loaded, best_job),
    )


def _job_file(path: Path) -> Path:
    """Returns the job file, or the shipped one in its place, which is printed once."""
    shipped = shipped_job(path)
    if shipped is None:
        return path
    _print_once(replacement_note(path))
    return shipped


@cache
def _print_once(line: str) -> None:
    print(line)
