"""Resolves what a job names, once, and finds all of its problems before any compilation.

job file ─► loss, model, optimizer, layout ─► problems: what `check` prints
└► the step that `build` makes and `inspect` compiles
"""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxpar.buckets import check_address, is_address, local_folder
from jaxpar.checkpoint import listing
from jaxpar.data import arrays
from jaxpar.data.sources import check_text
from jaxpar.data.spec import check_path
from jaxpar.data.token_stream import is_token_stream, load_tokens
from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import abstract_batch, batch_factors, check_evaluated, open_data
from jaxpar.job.parts.measures import check_loggers, derived_metrics, evaluation_set_names, resolve_measures
from jaxpar.job.parts.models import batch_errors, resolve_loss, resolve_model
from jaxpar.job.parts.names import check_pictures, has_validation
from jaxpar.job.parts.optimizers import best_evaluation, check_optimizer, note_optimizer, resolve_optimizer
from jaxpar.job.parts.pretrained_start import check_start
from jaxpar.mesh.axes import AXES, infer_sizes
from jaxpar.mesh.devices import Simulated, is_simulated, visible_devices
from jaxpar.mesh.memory_pool import pool_of_environment
from jaxpar.mesh.target import parse_target
from jaxpar.models.blocks.attention import record_sizes
from jaxpar.models.huggingface.folder import check_links, is_folder
from jaxpar.models.settings.computing import model_policy
from jaxpar.parallel.compose import compose
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.rule_problems import check_rules
from jaxpar.parallel.state_specs import abstract_params
from jaxpar.parallel.techniques.all_techniques import ModelUse, declaration_problems, tracing
from jaxpar.parallel.techniques.base import AttentionCall, AttentionChoice
from jaxpar.plan.techniques.auto_context import choose_form
from jaxpar.sharding.names import Compute, shard_bytes
from jaxpar.sharding.nnx_hooks import step_hooks
from jaxpar.step import losses, state
from jaxpar.step.block_inputs import offload_block_inputs
from jaxpar.step.evaluation_loss import check_measures, check_names, compute_measures, evaluation_names
from jaxpar.step.gradient_kinds import check_offload, make_gradients
from jaxpar.step.numerics import DTYPES, Numerics
from jaxpar.step.per_replica.part_norms import check_parts, num_parts
from jaxpar.step.stochastic_loss import traceable_loss
from jaxpar.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class ResolvedJob:
    """A job with the objects that it names.

    Attributes:
      job: The job.
      problems: All of its problems. Without any, every other attribute is set.
      loss: The loss function.
      layout: The model's layout, with notes on choices; without devices if none were given.
      optimizer: The optax chain.
    """

    job: Job
    problems: tuple[Problem, ...]
    loss: Callable | None
    layout: Layout | None
    optimizer: optax.GradientTransformation | None


def check(job: Job, *, as_written: bool = True) -> list[Problem]:
    """Returns all problems of a job, without devices and before any compilation; see `resolve`."""
    return [*resolve(job, as_written=as_written).problems]


def resolve(
    job: Job, devices: Sequence[Any] | None = None, *, as_written: bool = True, publishes: bool = True
) -> ResolvedJob:
    """Resolves the objects that a job names, and finds all of its problems; nothing is compiled.

    Args:
      job: The job.
      devices: The devices of its mesh, present on this machine or not; without any, no arrays can be created.
      as_written: Whether every key has its value from the file. If defaults replace invalid keys, model, loss and data
        may not fit together, so this is not checked.
    """
    problems: list[Problem] = []

    def attempt(function: Callable, *args):
        try:
            return function(*args)
        except JaxparError as error:
            problems.extend(problem for problem in error.problems if problem not in problems)
            return None

    attempt(check_address, job.run.dir, "run.dir")
    attempt(check_address, job.checkpoint.start_from, "checkpoint.start_from")
    loss = attempt(resolve_loss, job)
    attempt(_check_data, job)
    attempt(_check_faults, job)
    attempt(check_loggers, job)
    attempt(resolve_measures, job)
    attempt(derived_metrics, job)
    if as_written:
        attempt(check_path, job.data)
    sizes = attempt(infer_sizes, job.parallel.sizes, device_count(job))
    declaration = attempt(lambda: job.effective_parallel)
    parallel = declaration or job.parallel  # for an invalid sweep, the layout without it
    if declaration:
        attempt(check_optimizer, job)
    if sizes:
        problems.extend(_check_batch(job, sizes, parallel))
    # without a loss or a batch, a Linen module cannot be called
    blueprint = (
        attempt(resolve_model, job, loss or losses.next_token_loss)
        if (as_written and not problems) or ":" not in job.model["name"]
        else None
    )
    # for sizes that do not fit, the count alone: the devices would repeat the problem in other words
    places = devices if devices is not None and sizes else job_devices(job)
    layout = attempt(lambda: annotate_layout(job, compose(blueprint, parallel, places))) if blueprint else None
    if blueprint is None:
        problems.extend(problem for problem in declaration_problems(parallel) if problem not in problems)
    if layout and as_written and not problems and is_folder(job.checkpoint.start_from):
        attempt(check_start, job, layout)
        if publishes:
            attempt(check_links, Path(job.checkpoint.start_from))
    attempt(_check_origin, job)
    if as_written:
        attempt(_check_base, job)
    optimizer = attempt(resolve_optimizer, job, layout.blueprint) if layout and declaration else None
    if layout and optimizer and job.train.frozen[0]:
        attempt(state.abstract, layout, optimizer)
    if layout and declaration and ":" in job.optimizer.name:
        attempt(check_optimizer, job, abstract_params(layout))
    if layout:
        attempt(partial(check_offload, layout, offload=job.train.offload))
    if layout and as_written and not problems:
        traced = attempt(_trace, job, dataclasses.replace(layout, mesh=None), loss, optimizer)
        scores, notes = traced or (0, ())
        layout = dataclasses.replace(layout, notes=(*layout.notes, *notes))
        attempt(_check_memory, job, layout, optimizer, scores)
        attempt(_check_noise, job, layout)
    if as_written and not problems:
        attempt(_check_evaluation, job)
    return ResolvedJob(job=job, problems=tuple(problems), loss=loss, layout=layout, optimizer=optimizer)


def device_count(job: Job) -> int:
    """Returns the number of devices of a job, present or not."""
    mesh = job.mesh
    return (
        mesh.simulate or mesh.devices or (parse_target(mesh.target).devices if mesh.target else len(visible_devices()))
    )


def annotate_layout(job: Job, layout: Layout) -> Layout:
    """Adds the job's target chip and a note about the optimizer to a layout."""
    layout = note_optimizer(job, layout)
    return dataclasses.replace(layout, target=parse_target(job.mesh.target).chip.key) if job.mesh.target else layout


def job_devices(job: Job) -> Simulated | int:
    """Returns the devices argument of `compose` for a job, whose devices may be absent."""
    count = device_count(job)
    simulated = job.mesh.simulate or (not job.mesh.names_devices and is_simulated(visible_devices()))
    return Simulated(count) if simulated else count


def _check_origin(job: Job) -> None:
    start = job.checkpoint.start_from
    if not start or is_folder(start):
        return
    if _has_begun(job) or is_address(start):  # no longer used; or a bucket, which the run's start reads
        return
    if job.checkpoint.rules:
        raise refuse(
            f"checkpoint.rules = {job.checkpoint.rules!r} with start_from = {start!r:.200}, which has no config.json",
            rule="rules read the tensors of a Hugging Face folder",
            fix='start_from = "my-llama"; or rename = {...}, for a run or a checkpoint',
        )
    try:
        listing.find(Path(start))
    except JaxparError as error:
        raise refuse(
            f"checkpoint.start_from = {start!r:.200}: {error.problems[0].got}",
            rule="checkpoint.start_from is a run folder, a checkpoint, or Hugging Face's folder with a config.json",
            fix=error.problems[0].fix,
        ) from error


def _has_begun(job: Job) -> bool:
    try:
        return bool(listing.steps(local_folder(job.run.dir) / "checkpoints"))
    except (OSError, ValueError):  # not a folder: the check of run.dir reports it
        return False


def _check_base(job: Job) -> None:
    if job.train.adapters.base == "int8" and not job.checkpoint.start_from:
        raise refuse(
            'train.adapters.base = "int8" without checkpoint.start_from',
            rule="an int8 base is frozen, so its weights must come from a trained model",
            fix='model.name or checkpoint.start_from = "my-llama"; or base = "float"',
        )


def _check_faults(job: Job) -> None:
    if job.faults.on_bad_step == "rollback" and not job.checkpoint.every:
        raise refuse(
            "faults.on_bad_step = 'rollback' with checkpoint.every = 0, which saves by time only",
            rule="a rollback goes to a checkpoint",
            fix=f"checkpoint.every = {max(1, job.train.steps // 20)}",
        )


def _check_evaluation(job: Job) -> None:
    """Refuses evaluations without held-out examples; does not pack text or pictures for this."""
    if job.data.source == "images":
        if not job.data.held_out and not has_validation(job):
            check_evaluated(job, None)
    elif not job.data.is_text:
        check_evaluated(job, open_data(job))
    elif not job.data.held_out:
        check_evaluated(job, None)


def _check_data(job: Job) -> None:
    parallel = job.parallel
    sequence_axes = {"context": parallel.context, "tensor": parallel.tensor if parallel.sequence else 1}
    divisor = math.prod(max(size, 1) for size in sequence_axes.values())
    if job.data.is_text and job.data.seq % divisor:
        axes_text = " x ".join(f"{axis}={size}" for axis, size in sequence_axes.items() if size > 1)
        raise refuse(
            f"data.seq = {job.data.seq}, split over {axes_text}",
            rule="`context`, and with sequence=true `tensor`, divide the sequence that they split",
            fix=f"data.seq = {-(-job.data.seq // divisor) * divisor}",
        )
    for data_set in (job.data, *map(job.data.evaluation_set, job.data.sets)):
        if data_set.is_text:
            check_text(data_set)
    if job.data.is_text:
        return
    if job.data.source == "images":
        check_pictures(job)
    if job.data.source == "arrays":
        path = Path(str(job.data.path))
        if is_token_stream(path):
            load_tokens(path)
        else:
            arrays.load_arrays(path, check_all=True)


def _check_batch(job: Job, sizes: dict[str, int], parallel: Parallel) -> list[Problem]:
    problems, factors = [], batch_factors(job, sizes, parallel)
    count = factors.get("microbatches", 1)
    if sizes["pipe"] > 1 and job.train.accumulate > 1:
        problems.append(
            Problem(
                f"train.accumulate = {job.train.accumulate} with pipe={sizes['pipe']}",
                "a pipeline accumulates over its microbatches",
                f"accumulate = 1, and parallel.pipeline.microbatches = {job.train.accumulate * count}",
            )
        )
    if sizes["pipe"] > 1 and job.train.grow:
        problems.append(
            Problem(
                f"train.grow with pipe={sizes['pipe']}",
                "a batch grows by more microbatches, and a pipeline's schedule fixes their number",
                "grow = [], and optimizer.drops instead; or pipe = 1",
            )
        )
    divisor = math.prod(factors.values())
    if job.train.global_batch % divisor:
        problems.append(
            Problem(
                f"train.global_batch = {job.train.global_batch} over "
                + " x ".join(f"{name}={size}" for name, size in factors.items()),
                f"{' x '.join(factors)} ({divisor}) divides the global batch",
                f"global_batch = {-(-job.train.global_batch // divisor) * divisor}",
            )
        )
    return problems


def _check_memory(job: Job, layout: Layout, optimizer: optax.GradientTransformation, scores: int) -> None:
    """Refuses a training state larger than the memory pool of the target GPUs, even without activations.

    `scores`: bytes of one layer's materialised attention scores, which are added.
    """
    if not job.mesh.target or job.mesh.simulate:
        return
    chip, pool = parse_target(job.mesh.target).chip, pool_of_environment(os.environ)
    shapes = state.abstract(layout, optimizer)
    specs = state.specs(layout, shapes)
    trees = {"parameters": (shapes.params, specs.params), "other state": (shapes.model_state, specs.model_state)}
    if not job.train.offload:
        trees["optimizer state"] = (shapes.optimizer, specs.optimizer)
    trees["state of the exchange"] = (shapes.exchange, specs.exchange)
    sizes = {
        name: sum(jax.tree.leaves(jax.tree.map(partial(_leaf_bytes, layout), *tree))) for name, tree in trees.items()
    }
    state_alone, capacity = sum(sizes.values()), pool.program_bytes(chip.visible_memory)
    sizes |= {"scores of attention, in each layer,": scores} if scores else {}
    if sum(sizes.values()) > capacity:
        amounts = " and ".join(f"{name} {show_bytes(size)}" for name, size in sizes.items() if size)
        limit = f"{show_bytes(capacity)} of its {show_bytes(chip.visible_memory)}"
        raise refuse(
            f"a device holds {amounts}",
            rule=f"an {chip.name} has {limit} for them: {pool}",
            fix="parallel.zero = 3, a larger parallel.fsdp, parallel.tensor or parallel.pipe; or train.offload = true"
            if state_alone > capacity
            else "parallel.context_by = 'ring', which keeps no scores",
        )


def _check_noise(job: Job, layout: Layout) -> None:
    """Refuses to measure gradient noise if the batch cannot be split into parts."""
    if job.metrics.noise_every:
        count = num_parts(layout, Numerics(accumulate=job.train.accumulate))
        check_parts(layout, count, job.train.global_batch)


def _leaf_bytes(layout: Layout, leaf: object, spec: PartitionSpec) -> int:
    return shard_bytes(leaf, spec, layout.sizes)


def _trace(
    job: Job, layout: Layout, loss: Callable, optimizer: optax.GradientTransformation
) -> tuple[int, tuple[str, ...]]:
    """Traces model and loss on shapes, so that errors of the first step appear here, with one message each.

    It returns the bytes of attention scores that one layer materialises for a microbatch, or 0, and a pipeline's notes.
    """
    blueprint = layout.blueprint
    batch = abstract_batch(job)

    def bound(key, values=None):
        params, model_state = blueprint.init(key)
        params = params if values is None else values
        compute = Compute(remat=model_policy(job.train.remat))
        return blueprint.bind(params, model_state, lambda path, value: value, compute)

    def forward(key, batch, values=None):
        model = bound(key, values)
        microbatches = job.train.accumulate * job.train.growth.factors[-1]
        return losses.as_sums(traceable_loss(loss)(model, batch), accumulate=microbatches)

    def layers(key, batch):
        return offload_block_inputs(lambda params: forward(key, batch, params), blueprint.name)(blueprint.init(key)[0])

    measures = resolve_measures(job)
    check_measures(layout, measures)
    usage, mesh = ModelUse(), _mesh_without_devices(layout)
    with batch_errors(job, blueprint.name, batch), jax.sharding.use_abstract_mesh(mesh):  # as in a step
        chooser, keeps_activations = partial(_choose_as_in_step, job, layout.microbatches), job.train.remat == "none"
        with tracing(layout, usage, chooser, saves_activations=keeps_activations), record_sizes() as scores:
            metrics = jax.eval_shape(layers if job.train.remat == "offload" else forward, jax.random.key(0), batch)
            extras = jax.eval_shape(
                lambda key, batch: compute_measures(measures, bound(key), batch), jax.random.key(0), batch
            )
        notes: tuple[str, ...] = ()
        if layout.sizes["pipe"] > 1:
            with step_hooks():
                notes = _trace_pipeline(job, dataclasses.replace(layout, mesh=mesh), loss, optimizer, batch)
    measure_names = (*extras, *derived_metrics(job))
    check_names(metrics, measure_names)
    check_rules(layout.parallel, blueprint, usage.names)
    if not layout.parallel.exchange.per_replica:  # each member of a population adds metrics of its own
        rows = {
            name: 0.0
            for set_name in evaluation_set_names(job)
            for name in evaluation_names((*metrics, *measure_names), set_name)
        }
        best_evaluation(job).check(rows, keeps=job.checkpoint.keep_best)
    return max(scores, default=0) // (job.train.accumulate * layout.microbatches), notes


def _choose_as_in_step(job: Job, microbatches: int, call: AttentionCall) -> AttentionChoice:
    """Chooses an implementation as in a step: for a microbatch in the compute dtype instead of all traced rows."""
    dtype = DTYPES[job.train.precision.compute]
    name = call.dtype if dtype is None else jax.numpy.dtype(dtype).name
    rows = max(1, call.sequences // (job.train.accumulate * microbatches))
    return choose_form(dataclasses.replace(call, sequences=rows, dtype=name))


def _trace_pipeline(
    job: Job,
    layout: Layout,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    batch: dict[str, jax.ShapeDtypeStruct],
) -> tuple[str, ...]:
    """Splits the model into stages and traces the pipeline schedule on shapes; returns notes."""
    numerics = Numerics(precision=job.train.precision, remat=job.train.remat)
    gradients = make_gradients(layout, loss, numerics)
    jax.eval_shape(
        partial(gradients.update, optimizer, on_device=lambda leaf: leaf), state.abstract(layout, optimizer), batch
    )
    return gradients.notes


def _mesh_without_devices(layout: Layout) -> Any:
    axes = [axis for axis in AXES if axis in layout.sizes]
    return AbstractMesh(
        tuple(layout.sizes[axis] for axis in axes), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )
