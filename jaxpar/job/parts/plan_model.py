"""The model of a job as a plan sees it: a decoder by formulas over every axis, any other traced, over data and fsdp."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxpar.errors import JaxparError, refuse
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.job.parts.models import accepting, resolve_loss, resolve_model
from jaxpar.models.decoder import Decoder
from jaxpar.optim import chain
from jaxpar.parallel.compose import as_blueprint, compose
from jaxpar.parallel.declare import Parallel
from jaxpar.plan.enumerate import divisors
from jaxpar.plan.model.base import Model, Transformer
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.model.traced import Traced
from jaxpar.plan.model.tracing import trace
from jaxpar.sharding.names import Blueprint, Compute
from jaxpar.sharding.rules import name_stacks
from jaxpar.sharding.shard_bytes import shard_bytes
from jaxpar.step.losses import as_sums
from jaxpar.step.numerics import PRECISIONS


def subject(job: Job, devices: int) -> Model:
    """Returns the model of a job, to be planned for so many devices.

    Raises:
      JaxparError: If a decoder computes in float32, for which there are no formulas, or a model cannot be traced.
    """
    loss = resolve_loss(job)
    model: Any = resolve_model(job, loss)
    blueprint = as_blueprint(model)
    recipe = _recipe(job, blueprint)
    if getattr(model, "func", None) is not Decoder:
        return _traced(job, blueprint, loss, recipe, devices)
    if job.train.precision != "bf16":
        raise refuse(
            f"train.precision = {job.train.precision!r}",
            rule="the planner's formulas are of a decoder that computes in bfloat16",
            fix="train.precision=bf16, after JOB on the command line",
        )
    return Transformer(shape=dataclasses.replace(Shape.of(model.args[0]), seq=job.data.seq), recipe=recipe)


def _recipe(job: Job, blueprint: Blueprint) -> Recipe:
    """Returns the bytes per parameter that training keeps, the optimizer's read off its state's shapes."""
    params = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in blueprint.leaves.items()}
    moments = jax.eval_shape(chain.build(job.optimizer, job.train.steps).init, params)
    own, its = (sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) for tree in (params, moments))
    count = sum(leaf.size for leaf in params.values())
    return Recipe(
        name=job.optimizer.name, parameters=own / count, gradients=own / count, optimizer=round(its / count, 3),
        since=1,
        why="parameters and gradients as they are stored, and the optimizer's state",
    )  # fmt: skip


def _traced(job: Job, blueprint: Blueprint, loss: Callable, recipe: Recipe, devices: int) -> Traced:
    use, dtype = compose(blueprint, Parallel(), 1).use, PRECISIONS[job.train.precision]
    params, model_state = jax.eval_shape(blueprint.init, jax.random.key(0))
    batch = abstract_batch(job)

    def forward(remat: str, *, accumulate: int = 1) -> Callable:
        def run(params, known):
            model = blueprint.bind(params, known[0], use, Compute(dtype=dtype, remat=remat))
            return as_sums(loss(model, known[1]), accumulate=accumulate)["loss"][0]

        return run

    def known(rows: int) -> Any:
        return model_state, {
            key: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for key, leaf in batch.items()
        }

    with accepting(job, blueprint.name, known(2)[1]):
        found = trace(forward, params, known, takes_remat=blueprint.takes_remat, name=blueprint.name)
    shards, refused = _shards(blueprint, devices)
    return Traced(
        name=blueprint.name, shards=shards, refused=refused, piece=_piece(blueprint), recipe=recipe, trace=found,
        itemsize=4 if dtype is None else dtype(0).dtype.itemsize,
        sums=_is_sum(forward("none", accumulate=2), params, known(2)),
    )  # fmt: skip


def _shards(blueprint: Blueprint, devices: int) -> tuple[dict[int, int], dict[int, str]]:
    """Returns the parameters on each of so many devices of fsdp, for all numbers of them; or why it can't be."""
    found, refused = {}, {}
    for fsdp in divisors(devices):
        try:
            layout = compose(blueprint, Parallel(fsdp=fsdp, zero=3 if fsdp > 1 else 0), fsdp)
        except JaxparError as error:
            refused[fsdp] = error.problems[0].got
            continue
        places = layout.placements.values()
        sizes = [
            shard_bytes(each.leaf, each.stored, layout.sizes) // jax.numpy.dtype(each.leaf.dtype).itemsize
            for each in places
        ]
        found[fsdp] = sum(sizes)
    return found, refused


def _piece(blueprint: Blueprint) -> int:
    """Returns the parameters that are gathered at once: of the largest parameter, or of a layer of a stack."""
    layer, alone = 0, [0]
    for leaf in name_stacks(blueprint.leaves).values():
        if leaf.names and leaf.names[0] == "layers":
            layer += leaf.size // leaf.shape[0]
        else:
            alone.append(leaf.size)
    return max(layer, *alone)


def _is_sum(forward: Callable, *args: Any) -> bool:
    """Returns whether a loss comes with its count; a scalar is refused where microbatches are summed."""
    try:
        jax.eval_shape(forward, *args)
    except JaxparError:
        return False
    return True
