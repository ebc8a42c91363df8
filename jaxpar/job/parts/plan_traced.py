"""The model of a job as a plan sees it that has no formulas for it: traced over data, fsdp and what is added."""

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import Any

import jax
import optax

from jaxpar.errors import JaxparError
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.job.parts.models import accepting, resolve_loss, resolve_model
from jaxpar.job.parts.optimizers import resolve_optimizer
from jaxpar.optim.patterns import meant
from jaxpar.parallel.compose import as_blueprint, compose
from jaxpar.parallel.declare import DECLARED, Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.plan.choices import Choices
from jaxpar.plan.model.dims import Dims
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.model.tracing import trace
from jaxpar.plan.techniques.base import divisors
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.plan.traced import Traced
from jaxpar.sharding.author.explicit import sharding_translation
from jaxpar.sharding.names import Blueprint, Compute, nest
from jaxpar.sharding.nnx.hooks import hooked
from jaxpar.sharding.rules import name_stacks
from jaxpar.sharding.shard_bytes import shard_bytes
from jaxpar.step.keyed.loss import shaped
from jaxpar.step.losses import as_sums
from jaxpar.step.numerics import DTYPES


def traced(job: Job, devices: int) -> Traced:
    """Returns any model of a job, traced over data, fsdp and what is added.

    Raises:
      JaxparError: If it cannot be traced.
    """
    loss = resolve_loss(job)
    blueprint, batch = as_blueprint(resolve_model(job, loss)), abstract_batch(job)
    return trace_model(
        blueprint, loss, _recipe(job, blueprint), batch, rows=job.train.global_batch, devices=devices,
        compute=job.train.precision.compute, accepting=partial(accepting, job, blueprint.name),
    )  # fmt: skip


def counted(job: Job) -> Recipe:
    """Returns the bytes per parameter that training a job keeps, the optimizer's read off its state's shapes."""
    return _recipe(job, as_blueprint(resolve_model(job, resolve_loss(job))), timed=True)


def trained_share(job: Job) -> float:
    """Returns the share of a decoder's weights in matmuls that is trained; its adapters count as weights."""
    blueprint = as_blueprint(resolve_model(job, resolve_loss(job)))
    held, tied = _held(job, blueprint), not any("head" in path for path in blueprint.leaves)
    sizes = {path: leaf.size for path, leaf in blueprint.leaves.items() if tied or not path.startswith("embed")}
    return sum(size for path, size in sizes.items() if path not in held) / sum(sizes.values())


def _held(job: Job, blueprint: Blueprint) -> set[str]:
    """Returns the paths of the parameters that are frozen."""
    frozen, but = job.train.frozen
    return set(meant(blueprint.leaves, frozen)) - set(meant(blueprint.leaves, but))


def _recipe(job: Job, blueprint: Blueprint, *, timed: bool = False) -> Recipe:
    held, optimizer = _held(job, blueprint), resolve_optimizer(job, blueprint)
    return recipe_of(blueprint, optimizer, held, name=job.optimizer.name, timed=timed)


def recipe_of(
    blueprint: Blueprint,
    optimizer: optax.GradientTransformation,
    held: Collection[str],
    *,
    name: str,
    timed: bool = False,
) -> Recipe:
    """Returns the bytes per parameter that training a model keeps.

    Args:
      blueprint: The model.
      optimizer: Whose state's shapes are read.
      held: Paths of the parameters that are frozen.
      name: Of the optimizer.
      timed: Whether times follow from what is trained, as a decoder's do.
    """
    params = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in blueprint.leaves.items()}
    tree = nest({tuple(path.split("/")): leaf for path, leaf in params.items()})  # as a chain's masks have it
    moments = jax.eval_shape(optimizer.init, tree)
    own, its = (sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) for tree in (params, moments))
    count = sum(leaf.size for leaf in params.values())
    trained = sum(leaf.size * leaf.dtype.itemsize for path, leaf in params.items() if path not in held)
    part = f"; {trained / own:.2%} is trained" + ", and times are as if all were" * (not timed) if held else ""
    return Recipe(
        name=name, parameters=own / count, gradients=round(trained / count, 3),
        optimizer=round(its / count, 3), since=1,
        why=f"parameters and gradients as they are stored, and the optimizer's state{part}",
    )  # fmt: skip


def trace_model(
    blueprint: Blueprint,
    loss: Callable,
    recipe: Recipe,
    batch: Mapping[str, Any],
    *,
    rows: int,
    devices: int,
    compute: str,
    accepting: Callable[[Mapping[str, Any]], AbstractContextManager[None]],
) -> Traced:
    """Returns a model traced over data, fsdp and what is added.

    Args:
      blueprint: The model.
      loss: Of (model, batch), or of (model, batch, key).
      recipe: Bytes per parameter of the training state.
      batch: Name to what has a shape and a dtype; examples are the first dim.
      rows: Examples of a step.
      devices: How many it is to be divided among.
      compute: The dtype of matmuls, fp32 or bf16.
      accepting: Makes of a batch a context in which the user's model and loss may raise.

    Raises:
      JaxparError: If it cannot be traced.
    """
    alone, dtype = compose(blueprint, Parallel(), 1), DTYPES[compute]
    params, model_state = jax.eval_shape(blueprint.init, jax.random.key(0))

    def forward(remat: str, *, accumulate: int = 1) -> Callable:
        def run(params, known):
            model = blueprint.bind(params, known[0], alone.use, Compute(dtype=dtype, remat=remat))
            return as_sums(shaped(loss)(model, known[1]), accumulate=accumulate)["loss"][0]

        return run

    def known(rows: int) -> Any:
        return model_state, {
            key: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for key, leaf in batch.items()
        }

    with (
        sharding_translation(),
        hooked(),
        accepting(known(2)[1]),
    ):  # a model may name shardings itself: outside of a step they say nothing
        found = trace(forward, params, known, takes_remat=blueprint.takes_remat, name=blueprint.name)
        sums = _is_sum(forward("none", accumulate=2), params, known(2))
    named = _dims(alone)
    axes = {
        axis: each.legal(named, rows, Choices())
        for axis, each in TECHNIQUES.items()
        if axis not in DECLARED and not each.lacks(named)
    }
    shards, beside, refused = _shards(blueprint, devices, axes)
    return Traced(
        name=blueprint.name, shards=shards, beside=beside, refused=refused, piece=_piece(blueprint), recipe=recipe,
        trace=found,
        itemsize=4 if dtype is None else dtype(0).dtype.itemsize,
        sums=sums,
        axes=tuple(axes), dims=named.dims, holding=named.holding,
    )  # fmt: skip


def _dims(layout: Layout) -> Dims:
    """Returns the named dims of a model's parameters."""
    dims, holding = {}, {}
    for place in layout.placements.values():
        for name, size in zip(place.names, place.leaf.shape, strict=True):
            if name:
                dims[name] = math.gcd(size, dims.get(name, 0))
                holding[name] = holding.get(name, 0) + place.leaf.size
    return Dims(dims=dims, holding=holding)


def _shards(
    blueprint: Blueprint, devices: int, axes: Mapping[str, Collection[int]]
) -> tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int], dict[tuple[int, ...], str]]:
    """Returns the parameters on each device, and the bytes of other state, for all sizes of fsdp and of further axes.

    And why they can't be, for those that can't.
    """
    found, beside, refused = {}, {}, {}
    every = divisors(devices)
    for fsdp, *further in product(every, *([n for n in every if n in sizes] for sizes in axes.values())):
        sizes, count = (fsdp, *further), math.prod((fsdp, *further))
        if devices % count:
            continue
        more = {axis: size for axis, size in zip(axes, further, strict=True) if size > 1}
        try:
            layout = compose(blueprint, Parallel(fsdp=fsdp, zero=3 if fsdp > 1 else 0, axes=more), count)
        except JaxparError as error:
            refused[sizes] = error.problems[0].got
            continue
        found[sizes] = sum(
            shard_bytes(each.leaf, each.stored, layout.sizes) // jax.numpy.dtype(each.leaf.dtype).itemsize
            for each in layout.placements.values()
        )
        beside[sizes] = layout.per_device(layout.other_arrays)
    return found, beside, refused


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
