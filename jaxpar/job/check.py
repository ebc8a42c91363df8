"""Everything that is wrong with a job, without a device and before any compile."""

import dataclasses
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jaxpar.buckets import check_address, is_address, local_folder
from jaxpar.checkpoint import listing
from jaxpar.data import arrays
from jaxpar.data.look import look
from jaxpar.data.rows.token_stream import is_token_stream, load_tokens
from jaxpar.data.spec import check_path
from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import abstract_batch, check_evaluated, open_data
from jaxpar.job.parts.loggers import check_loggers
from jaxpar.job.parts.measures import derived_of, resolve_measures, sets_of
from jaxpar.job.parts.models import accepting, resolve_loss, resolve_model
from jaxpar.job.parts.optimizers import best_of, check_optimizer, note_optimizer, resolve_optimizer
from jaxpar.job.parts.start import check_start
from jaxpar.mesh.axes import AXES, infer_sizes
from jaxpar.mesh.devices import Simulated, is_simulated, visible
from jaxpar.mesh.memory_pool import taken
from jaxpar.mesh.target import parse_target
from jaxpar.models.blocks.whole_scores import noted
from jaxpar.models.huggingface.folder import is_folder
from jaxpar.models.settings.computing import by_model
from jaxpar.parallel.compose import compose
from jaxpar.parallel.declare import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.rule_problems import check_rules
from jaxpar.parallel.techniques.asked import Used, declared, traced
from jaxpar.parallel.techniques.open_choice import Call, Choice
from jaxpar.plan.techniques.chosen import choose
from jaxpar.sharding.names import Compute
from jaxpar.sharding.nnx.hooks import hooked
from jaxpar.sharding.shard_bytes import shard_bytes
from jaxpar.step import losses, state
from jaxpar.step.apart.parts import check_parts, parts_of
from jaxpar.step.block_inputs import offloading
from jaxpar.step.keyed.loss import shaped
from jaxpar.step.kinds import check_offload, gradients_of
from jaxpar.step.measures.beside import check_measures, check_names, measured
from jaxpar.step.measures.functions import evaluated
from jaxpar.step.numerics import DTYPES, Numerics
from jaxpar.units import show_bytes


def check(job: Job, *, whole: bool = True) -> list[Problem]:
    """Returns everything that is wrong with a job, without a device and before any compile.

    Args:
      job: The job.
      whole: Whether it is as it was written. Where some keys have their defaults instead, model,
        loss and data need not belong together, so that is not asked.
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
    attempt(derived_of, job)
    if whole:
        attempt(check_path, job.data)
    sizes = attempt(infer_sizes, job.parallel.sizes, device_count(job))
    sound = attempt(lambda: job.declared)
    parallel = sound or job.parallel  # of a sweep that is wrong, what it is without one
    if sound:
        attempt(check_optimizer, job)
    if sizes:
        problems.extend(_check_batch(job, sizes, parallel))
    # without a loss or a batch, a Linen module cannot be called
    blueprint = (
        attempt(resolve_model, job, loss or losses.next_token)
        if (whole and not problems) or ":" not in job.model["name"]
        else None
    )
    layout = attempt(lambda: meant(job, compose(blueprint, parallel, devices_of(job)))) if blueprint else None
    if blueprint is None:
        problems.extend(problem for problem in declared(parallel) if problem not in problems)
    if layout and whole and not problems and is_folder(job.checkpoint.start_from):
        attempt(check_start, job, layout)
    attempt(_check_origin, job)
    if whole:
        attempt(_check_base, job)
    if layout and sound and job.train.frozen[0]:
        attempt(lambda: state.abstract(layout, resolve_optimizer(job, layout.blueprint)))
    if layout and sound and ":" in job.optimizer.name:
        attempt(check_optimizer, job, layout.params)
    if layout:
        attempt(partial(check_offload, layout, offload=job.train.offload))
    if layout and whole and not problems:
        scores = attempt(_trace, job, layout, loss)
        attempt(_check_room, job, layout, scores or 0)
        attempt(_check_noise, job, layout)
    if whole and not problems:
        attempt(_check_evaluation, job)
    return problems


def device_count(job: Job) -> int:
    """Returns how many devices the job is for, whether they are there or not."""
    mesh = job.mesh
    return mesh.simulate or mesh.devices or (parse_target(mesh.target).devices if mesh.target else len(visible()))


def meant(job: Job, layout: Layout) -> Layout:
    """Returns the layout, which knows the chip that its job is meant for, and says what its optimizer chose."""
    layout = note_optimizer(job, layout)
    return dataclasses.replace(layout, target=parse_target(job.mesh.target).chip.key) if job.mesh.target else layout


def devices_of(job: Job) -> Simulated | int:
    """Returns what stands for the devices of a job in `compose`, whether they are there or not."""
    count = device_count(job)
    simulated = job.mesh.simulate or (not job.mesh.declared and is_simulated(visible()))
    return Simulated(count) if simulated else count


def _check_origin(job: Job) -> None:
    start = job.checkpoint.start_from
    if not start or is_folder(start):
        return
    if _has_begun(job) or is_address(start):  # nothing is taken from it any more; or a bucket is read at the start
        return
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
    except (OSError, ValueError):  # no folder, which is said of run.dir
        return False


def _check_base(job: Job) -> None:
    if job.train.adapters.base == "int8" and not job.checkpoint.start_from:
        raise refuse(
            'train.adapters.base = "int8" without checkpoint.start_from',
            rule="a base in 8 bits is frozen, so that it has been trained before",
            fix='model.name or checkpoint.start_from = "my-llama"; or base = "float"',
        )


def _check_faults(job: Job) -> None:
    if job.faults.on_bad_step == "rollback" and not job.checkpoint.every:
        raise refuse(
            "faults.on_bad_step = 'rollback' with checkpoint.every = 0, which saves by the clock alone",
            rule="a rollback goes to a checkpoint",
            fix=f"checkpoint.every = {max(1, job.train.steps // 20)}",
        )


def _check_evaluation(job: Job) -> None:
    """Refuses evaluations that are asked for and cannot be; of text nothing is packed to see it."""
    if not job.data.is_text:
        check_evaluated(job, open_data(job))
    elif not job.data.held_out:
        check_evaluated(job, None)


def _check_data(job: Job) -> None:
    parallel = job.parallel
    cut = {"context": parallel.context, "tensor": parallel.tensor if parallel.sequence else 1}
    ways = math.prod(max(size, 1) for size in cut.values())
    if job.data.is_text and job.data.seq % ways:
        over = " x ".join(f"{axis}={size}" for axis, size in cut.items() if size > 1)
        raise refuse(
            f"data.seq = {job.data.seq}, split over {over}",
            rule="`context`, and with sequence=true `tensor`, divide the sequence that they split",
            fix=f"data.seq = {-(-job.data.seq // ways) * ways}",
        )
    for each in (job.data, *map(job.data.set_of, job.data.sets)):
        if each.is_text:
            look(each)
    if job.data.is_text:
        return
    if job.data.source == "arrays":
        path = Path(str(job.data.path))
        if is_token_stream(path):
            load_tokens(path)
        else:
            arrays.load_arrays(path, whole=True)


def _check_batch(job: Job, sizes: dict[str, int], parallel: Parallel) -> list[Problem]:
    problems, pieces = [], {"accumulate": job.train.accumulate}
    if sizes["pipe"] > 1:
        try:
            count = job.parallel.pipeline.table(sizes["pipe"]).microbatches
        except JaxparError:  # `compose` says so
            count = 1
        if job.train.accumulate > 1:
            problems.append(
                Problem(
                    f"train.accumulate = {job.train.accumulate} with pipe={sizes['pipe']}",
                    "a pipeline accumulates over its microbatches",
                    f"accumulate = 1, and parallel.pipeline.microbatches = {job.train.accumulate * count}",
                )
            )
        if job.train.grow:
            problems.append(
                Problem(
                    f"train.grow with pipe={sizes['pipe']}",
                    "a batch grows by more microbatches, of which a pipeline has as many as its table says",
                    "grow = [], and optimizer.drops instead; or pipe = 1",
                )
            )
        pieces = {"microbatches": count}
    axes = parallel.sized(sizes).batch_axes
    factors = {axis: sizes[axis] for axis in axes} | pieces
    ways = math.prod(factors.values())
    if job.train.global_batch % ways:
        problems.append(
            Problem(
                f"train.global_batch = {job.train.global_batch} over "
                + " x ".join(f"{name}={size}" for name, size in factors.items()),
                f"{' x '.join(factors)} ({ways}) divides the global batch",
                f"global_batch = {-(-job.train.global_batch // ways) * ways}",
            )
        )
    return problems


def _check_room(job: Job, layout: Layout, scores: int) -> None:
    """Refuses a state that is more than a run gets of the GPUs the job is meant for, activations or not.

    With it the scores of one layer, where they are materialised: `scores` is their bytes.
    """
    if not job.mesh.target or job.mesh.simulate:
        return
    chip, pool = parse_target(job.mesh.target).chip, taken(os.environ)
    shapes = state.abstract(layout, resolve_optimizer(job, layout.blueprint))
    placed = state.specs(layout, shapes)
    held = {"parameters": (shapes.params, placed.params), "other state": (shapes.model_state, placed.model_state)}
    if not job.train.offload:
        held["optimizer state"] = (shapes.optimizer, placed.optimizer)
    held["state of the exchange"] = (shapes.exchange, placed.exchange)
    sizes = {what: sum(jax.tree.leaves(jax.tree.map(partial(_held, layout), *each))) for what, each in held.items()}
    state_alone, room = sum(sizes.values()), pool.room(chip.visible)
    sizes |= {"scores of attention, in each layer,": scores} if scores else {}
    if sum(sizes.values()) > room:
        words = " and ".join(f"{what} {show_bytes(size)}" for what, size in sizes.items() if size)
        of = f"{show_bytes(room)} of its {show_bytes(chip.visible)}"
        raise refuse(
            f"a device holds {words}",
            rule=f"an {chip.name} has {of} for them: {pool}",
            fix="parallel.zero = 3, a larger parallel.fsdp, parallel.tensor or parallel.pipe; or train.offload = true"
            if state_alone > room
            else "parallel.context_by = 'ring', which keeps no scores",
        )


def _check_noise(job: Job, layout: Layout) -> None:
    """Refuses to measure the noise of gradients where the batch does not fall into parts."""
    if job.metrics.noise_every:
        count = parts_of(layout, Numerics(accumulate=job.train.accumulate))
        check_parts(layout, count, job.train.global_batch)


def _held(layout: Layout, leaf: Any, spec: Any) -> int:
    return shard_bytes(leaf, spec, layout.sizes)


def _trace(job: Job, layout: Layout, loss: Callable) -> int:
    """Runs model and loss on shapes alone: what would fail in the first step fails here, with one message.

    Returns the bytes of the scores that one layer materialises for a microbatch, or 0.
    """
    blueprint = layout.blueprint
    batch = abstract_batch(job)

    def bound(key, given=None):
        params, model_state = blueprint.init(key)
        params = params if given is None else given
        compute = Compute(remat=by_model(job.train.remat))
        return blueprint.bind(params, model_state, lambda path, value: value, compute)

    def forward(key, batch, given=None):
        model = bound(key, given)
        most = job.train.accumulate * job.train.growth.factors[-1]
        return losses.as_sums(shaped(loss)(model, batch), accumulate=most)

    def layers(key, batch):
        return offloading(lambda params: forward(key, batch, params), blueprint.name)(blueprint.init(key)[0])

    measures = resolve_measures(job)
    check_measures(layout, measures)
    used, mesh = Used(), _mesh_without_devices(layout)
    with accepting(job, blueprint.name, batch), jax.sharding.use_abstract_mesh(mesh):  # as a step has it
        answers, keeps = partial(_as_it_computes, job, layout.microbatches), job.train.remat == "none"
        with traced(layout, used, answers, keeps=keeps), noted() as scores:
            found = jax.eval_shape(layers if job.train.remat == "offload" else forward, jax.random.key(0), batch)
            beside = jax.eval_shape(lambda key, batch: measured(measures, bound(key), batch), jax.random.key(0), batch)
        if layout.sizes["pipe"] > 1:
            with hooked():
                _trace_pipeline(job, dataclasses.replace(layout, mesh=mesh), loss, batch)
    said = (*beside, *derived_of(job))
    check_names(found, said)
    check_rules(layout.parallel, blueprint, used.names)
    if not layout.parallel.exchange.apart:  # members of a population say more, each of their own
        rows = {name: 0.0 for each in sets_of(job) for name in evaluated((*found, *said), each)}
        best_of(job).check(rows, keeps=job.checkpoint.keep_best)
    return max(scores, default=0) // (job.train.accumulate * layout.microbatches)


def _as_it_computes(job: Job, microbatches: int, call: Call) -> Choice:
    """Returns the form of a call as a step makes it: here all rows are traced at once, in the parameters' dtype."""
    dtype = DTYPES[job.train.precision.compute]
    name = call.dtype if dtype is None else jax.numpy.dtype(dtype).name
    rows = max(1, call.rows // (job.train.accumulate * microbatches))
    return choose(dataclasses.replace(call, rows=rows, dtype=name))


def _trace_pipeline(job: Job, layout: Layout, loss: Callable, batch: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Cuts the model and runs the table on shapes."""
    numerics = Numerics(precision=job.train.precision, remat=job.train.remat)
    gradients = gradients_of(layout, loss, numerics)
    optimizer = resolve_optimizer(job, layout.blueprint)
    jax.eval_shape(
        partial(gradients.update, optimizer, on_device=lambda held: held), state.abstract(layout, optimizer), batch
    )


def _mesh_without_devices(layout: Layout) -> Any:
    axes = [axis for axis in AXES if axis in layout.sizes]
    return AbstractMesh(
        tuple(layout.sizes[axis] for axis in axes), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )
