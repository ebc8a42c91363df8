"""Converts a job for the planner: traces its model, and makes its layout a candidate."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count, product
from typing import Any

import jax
import optax

from jaxpar.errors import JaxparError
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.job.parts.models import batch_errors, frozen_paths, resolve_loss, resolve_model
from jaxpar.job.parts.optimizers import resolve_optimizer
from jaxpar.job.parts.plan_splits import FoundSplit, find_splits
from jaxpar.job.parts.plan_stages import find_stages
from jaxpar.models.experts import Routing
from jaxpar.models.islands import use_islands
from jaxpar.parallel.compose import as_blueprint, compose
from jaxpar.parallel.declaration import DECLARED, Parallel
from jaxpar.parallel.layout import Layout, other_arrays, per_device
from jaxpar.parallel.techniques.expert_slots import mixture
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.model.shape import Dims
from jaxpar.plan.model.splits import AXES, Sizes, split_sizes
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.model.tracing import ModelTrace, ProgramSplit, trace
from jaxpar.plan.techniques.base import divisors
from jaxpar.plan.techniques.expert import NAME as EXPERTS
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.plan.traced_model import TracedModel
from jaxpar.plan.traced_shape import ShardAmounts, TracedShape
from jaxpar.sharding.author.explicit import sharding_translation
from jaxpar.sharding.names import Blueprint, format_path, nest, shard_bytes
from jaxpar.sharding.nnx_hooks import step_hooks
from jaxpar.sharding.rules import name_stacks
from jaxpar.specs.trace import summed_loss
from jaxpar.step.numerics import DTYPES


def trace_job(job: Job, devices: int) -> TracedModel:
    """Traces the model of a job for the planner; see `trace_model`.

    Raises:
      JaxparError: If it cannot be traced.
    """
    loss = resolve_loss(job)
    blueprint, batch = as_blueprint(resolve_model(job, loss)), abstract_batch(job)
    return trace_model(
        blueprint, loss, _recipe(job, blueprint), batch, rows=job.train.global_batch, devices=devices,
        compute=job.train.precision.compute, frozen=frozen_paths(job, blueprint),
        batch_errors=partial(batch_errors, job, blueprint.name),
    )  # fmt: skip


def state_recipe(job: Job) -> Recipe:
    """Returns the bytes of training state per parameter; the optimizer's share comes from the shapes of its state."""
    return _recipe(job, as_blueprint(resolve_model(job, resolve_loss(job))))


def trained_share(job: Job) -> float:
    """Returns the trained share of a decoder's matmul weights; adapters count as weights."""
    blueprint = as_blueprint(resolve_model(job, resolve_loss(job)))
    frozen, tied = frozen_paths(job, blueprint), not any("head" in path for path in blueprint.leaves)
    sizes = {path: leaf.size for path, leaf in blueprint.leaves.items() if tied or not path.startswith("embed")}
    return sum(size for path, size in sizes.items() if path not in frozen) / sum(sizes.values())


def _recipe(job: Job, blueprint: Blueprint) -> Recipe:
    frozen, optimizer = frozen_paths(job, blueprint), resolve_optimizer(job, blueprint)
    return build_recipe(blueprint, optimizer, frozen, name=job.optimizer.name)


def build_recipe(
    blueprint: Blueprint,
    optimizer: optax.GradientTransformation,
    frozen: Collection[str],
    *,
    name: str,
) -> Recipe:
    """Returns the bytes of training state per parameter of a model.

    Args:
      blueprint: The model.
      optimizer: The optimizer; only the shapes of its state are read.
      frozen: Paths of the frozen parameters.
      name: The name of the optimizer.
    """
    params = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in blueprint.leaves.items()}
    tree = nest({tuple(path.split("/")): leaf for path, leaf in params.items()})  # as optax masks expect
    moments = jax.eval_shape(optimizer.init, tree)
    size, state = (sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) for tree in (params, moments))
    count = sum(leaf.size for leaf in params.values())
    trained = sum(leaf.size * leaf.dtype.itemsize for path, leaf in params.items() if path not in frozen)
    note = f"; {trained / size:.2%} is trained" if frozen else ""
    return Recipe(
        name=name, parameters=size / count, gradients=round(trained / count, 3),
        optimizer=round(state / count, 3), sharded_from=1,
        dtypes=f"parameters and gradients as they are stored, and the optimizer's state{note}",
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
    frozen: Collection[str] = (),
    batch_errors: Callable[[Mapping[str, Any]], AbstractContextManager[None]],
) -> TracedModel:
    """Traces a model for planning over data, fsdp, context, tensor, pipe and the axes of added techniques.

    Args:
      blueprint: The model.
      loss: A function of (model, batch), or of (model, batch, key).
      recipe: Bytes per parameter of the training state.
      batch: Shapes and dtypes (or arrays) by name; the first dim is that of examples.
      rows: Examples per step.
      devices: Number of devices to plan for.
      compute: The dtype of matmuls, fp32 or bf16.
      frozen: Paths of the frozen parameters.
      batch_errors: Maps a batch to a context that turns exceptions of the user's model and loss into a `JaxparError`.

    Raises:
      JaxparError: If the model cannot be traced.
    """
    two_rows = {key: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype) for key, leaf in batch.items()}
    with batch_errors(two_rows):
        splits, no_splits = find_splits(
            blueprint, loss, batch, rows=rows, devices=devices, sizes=divisors(devices)[1:], precision=compute,
            frozen=frozen,
        )  # fmt: skip
    buffers: set[int] = set()
    with (
        sharding_translation(),
        step_hooks(),
        batch_errors(two_rows),
        use_islands({"mixture": partial(_mixture, buffers)}),
    ):  # shardings that the model itself names have no effect outside of a step
        model_trace, sums = _trace_loss(blueprint, loss, batch, splits, max(1, rows / devices), compute, frozen)
    with sharding_translation(), step_hooks(), use_islands({"mixture": mixture}):
        stages, no_pipeline = find_stages(
            blueprint, loss, batch, rows=max(1, rows / devices), devices=devices, precision=compute,
            remats=[*model_trace.programs],
        )  # fmt: skip
    named_dims, dtype = _dims(compose(blueprint, Parallel(), 1), buffers), DTYPES[compute]
    axes = _axis_sizes(named_dims, splits, rows)
    named = any(each.trace_context is not nullcontext for each in splits.values())
    named_axes = ("context",) if named else ()
    shards, state_bytes, refused = _shards(blueprint, devices, axes, splits, rows=rows, named_axes=named_axes)
    sharded_axes = ("fsdp", *axes)
    shape = TracedShape(
        name=blueprint.name,
        shards=ShardAmounts(axes=sharded_axes, by_sizes=shards),
        other_state=ShardAmounts(axes=sharded_axes, by_sizes=state_bytes),
        largest_array=_largest_gather(blueprint),
        trace=model_trace,
        itemsize=4 if dtype is None else dtype(0).dtype.itemsize,
        dims=named_dims.dims,
        parameters_by_dim=named_dims.parameters_by_dim,
        stacked=_stacked_share(blueprint),
        arrays=_arrays(blueprint, frozen),
        splits={sizes: each.split for sizes, each in splits.items()},
        no_splits=no_splits,
        named_axes=named_axes,
        stages=stages,
        no_pipeline=no_pipeline,
    )
    return TracedModel(shape=shape, recipe=recipe, sum_loss=sums, unsupported=refused)


def _axis_sizes(dims: Dims, splits: Mapping[Sizes, Any], rows: int) -> dict[str, Collection[int]]:
    """Returns the sizes of `context` and `tensor` that have a split, and those that added techniques allow."""
    found = {axis: sizes for axis in AXES if len(sizes := split_sizes(splits, axis)) > 1}
    return found | {
        axis: technique.allowed_sizes(dims, rows, Choices())
        for axis, technique in TECHNIQUES.items()
        if axis not in DECLARED and not technique.why_not(dims)
    }


def _trace_loss(
    blueprint: Blueprint,
    loss: Callable,
    batch: Mapping[str, Any],
    splits: Mapping[Sizes, FoundSplit],
    rows: float,
    compute: str,
    frozen: Collection[str],
) -> tuple[ModelTrace, bool]:
    """Traces the loss and its gradients; also returns whether the loss is a (sum, count).

    `splits` maps sizes of `context` and `tensor` to the split of the model; `rows` are the examples of a device.
    """
    params, model_state = jax.eval_shape(blueprint.init, jax.random.key(0))

    def forward(remat: str, *, accumulate: int = 1) -> Callable:
        summed = summed_loss(blueprint, loss, DTYPES[compute], remat=remat, accumulate=accumulate)
        return lambda params, inputs: summed(params, *inputs)[0]

    def abstract_inputs(rows: int) -> Any:
        return model_state, {
            key: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for key, leaf in batch.items()
        }

    numbers = _argument_numbers(params, model_state, batch, frozen)
    model_trace = trace(
        forward, params, abstract_inputs, takes_remat=blueprint.takes_remat, name=blueprint.name, rows=rows,
        frozen=frozen,
        splits={
            sizes: ProgramSplit(shares=partial(split.shares, **numbers), trace_context=split.trace_context)
            for sizes, split in splits.items()
        },
    )  # fmt: skip
    return model_trace, _is_sum(forward("none", accumulate=2), params, abstract_inputs(2))


def _argument_numbers(
    params: object, model_state: object, batch: object, frozen: Collection[str]
) -> dict[str, Sequence]:
    """Returns the paths of parameters, the numbers of the arguments of the batch, and those of results by parameter."""
    paths = [format_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)]
    first, results = len(paths) + len(jax.tree.leaves(model_state)), count(1)
    return {
        "paths": paths,
        "batch": range(first, first + len(jax.tree.leaves(batch))),
        "gradients": [-1 if path in frozen else next(results) for path in paths],
    }


def _mixture(buffers: set[int], expert: Any, params: Any, x: jax.Array, routing: Routing) -> tuple[jax.Array, Any]:
    """A mixture of experts, whose number of buffers is added to `buffers`."""
    buffers.add(routing.buffers)
    return mixture(expert, params, x, routing)


def _dims(layout: Layout, buffers: Collection[int]) -> Dims:
    """Collects, per named dim, the greatest common divisor of its sizes and the parameters that have it.

    Devices of `expert` have whole buffers of a mixture, of which there may be fewer than experts.
    """
    dims, holding = {}, {}
    for place in layout.placements.values():
        for name, size in zip(place.names, place.leaf.shape, strict=True):
            if name:
                dims[name] = math.gcd(size, dims.get(name, 0))
                holding[name] = holding.get(name, 0) + place.leaf.size
    if EXPERTS in dims:
        dims[EXPERTS] = math.gcd(dims[EXPERTS], *buffers)
    return Dims(dims=dims, parameters_by_dim=holding)


def _shards(
    blueprint: Blueprint,
    devices: int,
    axes: Mapping[str, Collection[int]],
    splits: Mapping[Sizes, FoundSplit],
    *,
    rows: int,
    named_axes: Collection[str],
) -> tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int], dict[tuple[int, ...], str]]:
    """Returns three dicts from axis sizes: a device's parameters, its bytes of other state, and unsupported sizes.

    `splits` maps sizes of `context` and `tensor` to the split of the model, `rows` are the examples of a step, which
    replicas divide, and `named_axes` the axes that split dims as the model names them.
    """
    counts, state_bytes, refused = {}, {}, {}
    sizes_of_axis = divisors(devices)
    for fsdp, *further in product(
        sizes_of_axis, *([n for n in sizes_of_axis if n in sizes] for sizes in axes.values())
    ):
        sizes, count = (fsdp, *further), math.prod((fsdp, *further))
        if devices % count:
            continue
        axis_sizes = {axis: size for axis, size in zip(axes, further, strict=True) if size > 1}
        split = axis_sizes.get("context", 1), axis_sizes.get("tensor", 1)
        names = splits[split].names if split in splits else None
        if split != (1, 1) and (split not in splits or rows % (devices // math.prod(split))):
            continue
        if EXPERTS in axis_sizes and {*named_axes} & {*axis_sizes}:
            refused[sizes] = f"{EXPERTS} with context: a mixture's slots are priced on unsplit sequences"
            continue
        try:
            parallel = replace(Parallel().with_sizes({"fsdp": fsdp, **axis_sizes}), zero=3 if fsdp > 1 else 0)
            if names:
                parallel = replace(parallel, paths=names.paths, rules=names.rules, activations=names.activations)
            layout = compose(blueprint, parallel, count)
        except JaxparError as error:
            axis = " and ".join(axis for axis in AXES if axis in axis_sizes)
            found = f"{EXPERTS} with {axis}: the names that are found for {axis} leave no dim to {EXPERTS}"
            refused[sizes] = found if names and EXPERTS in axis_sizes else error.problems[0].got
            continue
        counts[sizes] = sum(
            shard_bytes(place.leaf, place.stored, layout.sizes) // jax.numpy.dtype(place.leaf.dtype).itemsize
            for place in layout.placements.values()
        )
        state_bytes[sizes] = per_device(layout, other_arrays(layout))
    return counts, state_bytes, refused


def _stacked_share(blueprint: Blueprint) -> float:
    """Returns the share of the parameters that are stacks of layers."""
    leaves = name_stacks(blueprint.leaves).values()
    stacks = sum(leaf.size for leaf in leaves if leaf.names and leaf.names[0] == "layers")
    return stacks / max(1, sum(leaf.size for leaf in leaves))


def _arrays(blueprint: Blueprint, frozen: Collection[str]) -> tuple[tuple[int, int], ...]:
    """Returns (number of layers, elements per layer) of each trained array; 1 layer if it is not a stack."""
    counts = [
        (leaf.shape[0] if leaf.names and leaf.names[0] == "layers" else 1, leaf.size)
        for path, leaf in name_stacks(blueprint.leaves).items()
        if path not in frozen
    ]
    return tuple((count, size // count) for count, size in counts)


def _largest_gather(blueprint: Blueprint) -> int:
    """Returns the largest number of elements that are gathered at once: of a parameter, or of a layer of a stack."""
    layer, singles = 0, [0]
    for leaf in name_stacks(blueprint.leaves).values():
        if leaf.names and leaf.names[0] == "layers":
            layer += leaf.size // leaf.shape[0]
        else:
            singles.append(leaf.size)
    return max(layer, *singles)


def _is_sum(forward: Callable, *args: Any) -> bool:
    """Whether the loss returns (sum, count); a scalar loss is refused once microbatches are accumulated."""
    try:
        jax.eval_shape(forward, *args)
    except JaxparError:
        return False
    return True


# The layout of a job as a planner candidate; a run records it, so that its report can show the prediction.


def layout_candidate(job: Job, layout: Layout) -> Candidate:
    """Converts the layout of a job to a planner candidate.

    Raises:
      JaxparError: If the planner cannot model it: a custom pipeline schedule, or a remat without a cost model.
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
