"""The plan of a step that was made in Python: its model is traced, as that of a job that has no formulas for it."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpar.errors import refuse, users_code
from jaxpar.job.plan import question_of
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.pages.shown import ShownPlan
from jaxpar.plan.search import search

if TYPE_CHECKING:
    from jaxpar.step.step import Step


def of_step(step: Any, batches: Sequence[Any], *, top: int, devices: int, **asked: Any) -> ShownPlan:
    """Returns the layouts of a step's model, loss and optimizer that are predicted to be fastest.

    Args:
      step: As `jp.train_step` returns it; its own layout does not count, but for how its replicas agree.
      batches: One: name to anything with a shape and a dtype, with as many examples as a step takes.
      top: How many layouts are kept.
      devices: How many GPUs.
      **asked: `chip`, `per_node` and `given` of `jaxpar.job.plan.question`.

    Raises:
      JaxparError: If it is no step, or no batch that it takes; if no layout is legal, or none fits.
    """
    made = sys.modules.get("jaxpar.step.step")  # without it there is no step, and what else there may be needs no JAX
    if made is None or not isinstance(step, made.Step):
        raise refuse(
            f"jp.plan of {step!r:.60}",
            rule="a plan is of a job, or of a step and its global batch",
            fix='jp.plan("job.toml", devices=64), or jp.plan(step, batch, devices=64) of what jp.train_step returns',
        )
    batch = _batch(batches)
    rows = next(iter(batch.values())).shape[0]
    question = question_of(
        lambda: _traced(step, batch, rows, devices), rows=rows, exchange=step.layout.parallel.exchange,
        remat=step.numerics.remat, steps=0, devices=devices, **asked,
    )  # fmt: skip
    found = search(question, top=top)
    command = _command(found.best[0].candidate, step)
    return ShownPlan.of(found, title=f"{step.layout.blueprint.name}: a plan", command=command)


def _batch(batches: Sequence[Any]) -> Mapping[str, Any]:
    """Returns the global batch, each array as its shape and dtype."""
    import jax

    shapes: dict[str, Any] = {}
    if len(batches) == 1 and isinstance(batches[0], Mapping) and batches[0]:
        arrays = {
            key: each for key, each in batches[0].items() if getattr(each, "shape", ()) and hasattr(each, "dtype")
        }
        if len(arrays) == len(batches[0]):
            shapes = {key: jax.ShapeDtypeStruct(each.shape, each.dtype) for key, each in arrays.items()}
    if len({each.shape[0] for each in shapes.values()}) != 1:
        raise refuse(
            f"jp.plan of a step and {', '.join(map(_shown, batches)) or 'no batch'}",
            rule="a step is planned for its global batch: a dict of arrays or shapes, with the same first dim",
            fix='jp.plan(step, {"x": jax.ShapeDtypeStruct((512, 784), "float32")}, devices=64)',
        )
    return shapes


def _shown(batch: Any) -> str:
    """Returns what is given as a batch, with shapes for arrays."""
    if isinstance(batch, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shown(each)}' for key, each in batch.items())}}}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {', '.join(map(_shown, batch))}"
    return (
        f"{batch.dtype}{list(batch.shape)}" if hasattr(batch, "shape") and hasattr(batch, "dtype") else f"{batch!r:.60}"
    )


def _traced(step: "Step", batch: Mapping[str, Any], rows: int, devices: int) -> Any:
    from jaxpar.job.parts.plan_traced import recipe_of, trace_model

    blueprint = step.layout.blueprint
    recipe = recipe_of(blueprint, step.optimizer, step.layout.frozen, name="the step's optimizer")
    said = ", ".join(f"{key} {leaf.dtype}{list(leaf.shape)}" for key, leaf in batch.items())
    rule, fix = "model and loss accept the batch", "the arrays that they read, or the line of the model that this names"
    return trace_model(
        blueprint, step.loss, recipe, batch, rows=rows, devices=devices, compute=step.numerics.matmuls.compute,
        accepting=lambda _: users_code(f"{blueprint.name} and its loss on {said}", rule=rule, fix=fix),
    )  # fmt: skip


def _command(candidate: Candidate, step: "Step") -> str:
    """Returns a layout as Python, with what the step has and the plan goes by."""
    exchange, precision = step.layout.parallel.exchange, step.numerics.matmuls
    sizes = {"data": candidate.data, "fsdp": candidate.fsdp, "zero": candidate.zero if candidate.shards > 1 else None}
    said = [f"{key}={size}" for key, size in sizes.items() if size is not None and (key == "zero" or size > 1)]
    said += [f"axes={dict(candidate.axes)}"] if any(size > 1 for size in candidate.axes.values()) else []
    said += [f"exchange={exchange!r}"] * (exchange != type(step.layout.parallel)().exchange)
    text = {"compute": precision.compute, "allow": [*precision.allow]} if precision.allow else precision.compute
    more = [f"precision={text!r}"] * (text != "fp32")
    more += [f"accumulate={candidate.microbatches}"] * bool(candidate.microbatches > 1)
    more += [f"remat={candidate.remat!r}"] * (candidate.remat != "none")
    parallel = f"layout = jp.compose(model, jp.Parallel({', '.join(said)}))"
    return f"{parallel}; step = jp.train_step({', '.join(['layout', 'loss', 'optimizer', *more])})"
