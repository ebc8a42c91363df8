"""A job walks through the rooms: devices, mesh, layout, state, step, source."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType

from jaxpar.errors import JaxparError, Problem, nearest, refuse, users_code
from jaxpar.job.objects import import_object
from jaxpar.job.schema import Job, validated
from jaxpar.mesh.axes import AXES, infer_sizes
from jaxpar.mesh.devices import simulate
from jaxpar.mesh.target import parse_target
from jaxpar.models import decoder, mlp, resnet, vit
from jaxpar.optim import chain
from jaxpar.parallel.compose import compose
from jaxpar.parallel.layout import Layout
from jaxpar.sharding import linen_model
from jaxpar.sharding.names import Blueprint, Compute
from jaxpar.train import losses
from jaxpar.train.data import arrays, text
from jaxpar.train.data import sources as data
from jaxpar.train.data.sound import Sound
from jaxpar.train.data.spec import Source
from jaxpar.train.numerics import PRECISIONS, Numerics
from jaxpar.train.pipelined import Pipelined
from jaxpar.train.step import Step
from jaxpar.train.step import build as build_step
from jaxpar.train.updating import Updating

MODELS: dict[str, tuple[Callable, type]] = {
    "decoder": (decoder.Decoder, decoder.DecoderSettings),
    "vit": (vit.ViT, vit.ViTSettings),
    "resnet": (resnet.ResNet, resnet.ResNetSettings),
    "mlp": (mlp.MLP, mlp.MLPSettings),
}
LOSSES = {"next_token": losses.next_token, "classify": losses.classify}


@dataclass(frozen=True, kw_only=True)
class Built:
    """A job on its devices, ready to train.

    Attributes:
      job: The job.
      layout: Where arrays live.
      step: The step, compiled at its first call.
      optimizer: The optax chain.
      learning_rate: Step to learning rate.
      source: Where batches come from.
    """

    job: Job
    layout: Layout
    step: Step
    optimizer: optax.GradientTransformation
    learning_rate: Callable[[int], float]
    source: Source


def build(job: Job, *, processes: int = 1) -> Built:
    """Returns the job on real or simulated devices.

    Args:
      job: The job.
      processes: Among how many, all connected, simulated devices are divided.

    Raises:
      JaxparError: With what is wrong, before anything is compiled.
    """
    if job.mesh.simulate:
        simulate(job.mesh.simulate, processes=processes)
    devices = jax.devices()
    if job.mesh.devices > len(devices):
        raise refuse(
            f"mesh.devices = {job.mesh.devices}, {len(devices)} visible ({devices[0].platform})",
            rule="a job trains on devices that are there",
            fix=f"mesh.devices = {len(devices)}, or mesh.simulate = {job.mesh.devices}",
        )
    step = assemble(job, devices[: job.mesh.devices or None])
    source = open_source(job)
    steps = job.train.steps
    rates = np.broadcast_to(np.asarray(jax.vmap(chain.schedule(job.optimizer, steps))(jnp.arange(steps))), (steps,))
    return Built(
        job=job,
        layout=step.layout,
        step=step,
        optimizer=step.optimizer,
        source=source,
        learning_rate=lambda index: float(rates[index]),
    )


def assemble(job: Job, devices: Sequence[Any]) -> Step:
    """Returns the step of a job on these devices, which may be absent ones.

    Raises:
      JaxparError: With everything that is wrong with the job.
    """
    if problems := check(job):
        raise JaxparError(*problems)
    loss, train = resolve_loss(job), job.train
    return build_step(
        compose(resolve_model(job, loss), job.parallel, devices), loss, chain.build(job.optimizer, train.steps),
        guard=job.faults.on_bad_step == "skip",
        accumulate=train.accumulate, precision=train.precision, remat=train.remat, offload=train.offload,
    )  # fmt: skip


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

    loss = attempt(resolve_loss, job)
    attempt(_check_data, job)
    attempt(_check_faults, job)
    if whole:
        attempt(_check_path, job)
    sizes = attempt(infer_sizes, job.parallel.sizes, device_count(job))
    if sizes:
        problems.extend(_check_batch(job, sizes))
    # without a loss or a batch, a Linen module cannot be called
    blueprint = (
        attempt(resolve_model, job, loss or losses.next_token)
        if (whole and not problems) or ":" not in job.model["name"]
        else None
    )
    layout = attempt(compose, blueprint, job.parallel, device_count(job)) if blueprint else None
    if blueprint is None:
        problems.extend(problem for problem in job.parallel.problems() if problem not in problems)
    if layout and whole and not problems:
        attempt(_trace, job, layout, loss)
    return problems


def device_count(job: Job) -> int:
    """Returns how many devices the job is for, whether they are there or not."""
    mesh = job.mesh
    return mesh.simulate or mesh.devices or (parse_target(mesh.target).devices if mesh.target else len(jax.devices()))


def resolve_loss(job: Job) -> Callable:
    """Returns the loss function a job names."""
    name = job.train.loss
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise refuse(
            f"train.loss = {name!r}",
            rule=f'a loss is {" or ".join(LOSSES)}, or "package.module:function"',
            fix=nearest(name, LOSSES),
        )
    loss = import_object(name, "train.loss", allowed=job.allow_import)
    if not callable(loss):
        raise refuse(
            f"train.loss = {name!r} is a {type(loss).__name__}",
            rule="a loss is a function of (model, batch)",
            fix="name a function",
        )
    return loss


def resolve_model(job: Job, loss: Callable) -> Blueprint | Callable:
    """Returns the model a job names, with its settings."""
    settings = {key: value for key, value in job.model.items() if key != "name"}
    name = job.model["name"]
    if name in MODELS:
        cls, spec = MODELS[name]
        keys = {field.name for field in dataclasses.fields(spec)}
        if job.data.is_text and "vocab" in keys:
            settings = {"vocab": job.data.tokens, "seq": job.data.seq, **settings}
        made, problems = validated(spec, settings, "model")
        if problems:
            raise JaxparError(*problems)
        if job.data.is_text and "vocab" in keys:
            _check_text(job, made)
        if not job.data.is_text and "classes" in keys:
            _check_labels(job, made)
        return partial(cls, made)
    if ":" not in name:
        raise refuse(
            f"model.name = {name!r}",
            rule=f'a model is {", ".join(MODELS)}, or "package.module:Object"',
            fix=nearest(name, MODELS),
        )
    from flax import linen as nn

    target = import_object(name, "model.name", allowed=job.allow_import)
    if not callable(target):
        raise refuse(
            f"model.name = {name!r} is a {type(target).__name__}",
            rule="a model is a class or a function",
            fix="name a class",
        )
    if inspect.isclass(target) and issubclass(target, nn.Module):
        with users_code(
            name,
            rule="keys of [model] are the module's fields",
            fix=f"its fields: {', '.join(key for key in target.__dataclass_fields__ if key not in ('parent', 'name'))}",
        ):
            module = target(**settings)
        batch = abstract_batch(job)

        def call(model):
            return loss(model, {key: jnp.zeros(leaf.shape, leaf.dtype) for key, leaf in batch.items()})

        return linen_model.blueprint(module, call, name=target.__name__)
    if inspect.isclass(target) or inspect.isfunction(target):
        keys = inspect.signature(target.__init__ if inspect.isclass(target) else target).parameters
        unknown = [key for key in settings if key not in keys or key == "rngs"]
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in keys.values()):
            own = [key for key in keys if key not in ("self", "rngs")]
            raise JaxparError(
                *(
                    Problem(
                        f"unknown key model.{key}",
                        f"{name} takes {', '.join(own) or 'no settings'}",
                        nearest(key, own) if own else "leave it out",
                    )
                    for key in unknown
                )
            )
    return partial(target, **settings) if settings else target


def open_source(job: Job) -> Source:
    """Returns the source of a job's batches."""
    named = None
    if ":" in job.data.source:
        named = import_object(job.data.source, "data.source", allowed=job.allow_import)
    return data.open_source(job.data, Path(job.run.dir or ".") / "data", seed=job.train.seed, named=named)


def abstract_batch(job: Job) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch, without packing any text."""
    size = job.train.global_batch
    if job.data.is_text:
        tokens = jax.ShapeDtypeStruct((size, job.data.seq), jnp.int32)
        return {"inputs": tokens, "targets": tokens}
    try:
        batch = open_source(job).batch(0, size)
    except MemoryError as error:
        raise refuse(
            f"train.global_batch = {size}", rule="a batch fits into memory", fix="global_batch = 32"
        ) from error
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch.items()}


def _check_text(job: Job, settings: Any) -> None:
    problems = []
    if settings.vocab < job.data.tokens:
        problems.append(
            Problem(
                f"model.vocab = {settings.vocab}, the {job.data.tokenizer} tokenizer has {job.data.tokens} tokens",
                "the model has a row for every token",
                f"model.vocab = {job.data.tokens}, or leave it out",
            )
        )
    if settings.position == "learned" and settings.seq < job.data.seq:
        problems.append(
            Problem(
                f"model.seq = {settings.seq}, data.seq = {job.data.seq}",
                "learned positions reach to the end of a sequence",
                f"model.seq = {job.data.seq}, or leave it out",
            )
        )
    if problems:
        raise JaxparError(*problems)


def _check_labels(job: Job, settings: Any) -> None:
    held = getattr(open_source(job), "arrays", {})
    labels = held.get("labels")
    if labels is not None and labels.dtype.kind in "iu" and not 0 <= labels.min() <= labels.max() < settings.classes:
        raise refuse(
            f"model.classes = {settings.classes}, labels are {labels.min()}..{labels.max()}",
            rule="a label is within 0..classes-1",
            fix=f"model.classes = {labels.max() + 1}"
            if labels.min() >= 0
            else "labels from 0, and a mask for rows that do not count",
        )


def _check_path(job: Job) -> None:
    if job.data.path and job.data.source not in ("text", "arrays"):
        raise refuse(
            f"data.path = {job.data.path!r} with data.source = {job.data.source!r}, which reads no path",
            rule="a path is read by text and arrays",
            fix='source = "text"',
        )


def sound(job: Job) -> Sound:
    """Returns what is known of a good batch of a job: ids that the model has, and the arrays of the user's own."""
    like = abstract_batch(job) if ":" in job.data.source else {}
    if job.model["name"] not in MODELS:
        return Sound(like=like)
    spec = MODELS[job.model["name"]][1]
    usual = {"vocab": job.data.tokens} if job.data.is_text else {}
    settings = {field.name: usual.get(field.name, field.default) for field in dataclasses.fields(spec)} | job.model
    below = {"inputs": settings.get("vocab")}
    if job.train.loss == "next_token":
        below["targets"] = settings.get("vocab")
    if job.train.loss == "classify":
        below["labels"] = settings.get("classes")
    return Sound(below={name: count for name, count in below.items() if isinstance(count, int)}, like=like)


def _check_faults(job: Job) -> None:
    if job.faults.on_bad_step == "rollback" and not job.checkpoint.every:
        raise refuse(
            "faults.on_bad_step = 'rollback' with checkpoint.every = 0, which saves at the end only",
            rule="a rollback goes to a checkpoint",
            fix=f"checkpoint.every = {max(1, job.train.steps // 20)}",
        )


def _check_data(job: Job) -> None:
    if job.data.is_text and job.parallel.sequence and job.parallel.tensor > 1 and job.data.seq % job.parallel.tensor:
        ways = job.parallel.tensor
        raise refuse(
            f"data.seq = {job.data.seq}, sequence=true over tensor={ways}",
            rule="`tensor` divides the sequence that it splits",
            fix=f"data.seq = {-(-job.data.seq // ways) * ways}",
        )
    if job.data.source == "text":
        files = text.text_files(job.data)
        if job.data.tokenizer == "bytes":
            text.check_length(sum(file.stat().st_size + 1 for file in files), job.data)
    elif job.data.source == "arrays":
        arrays.load_arrays(Path(str(job.data.path)))


def _check_batch(job: Job, sizes: dict[str, int]) -> list[Problem]:
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
        pieces = {"microbatches": count}
    factors = {"data": sizes["data"], "fsdp": sizes["fsdp"]} | pieces
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


def _trace(job: Job, layout: Layout, loss: Callable) -> None:
    """Runs model and loss on shapes alone: what would fail in the first step fails here, with one message."""
    blueprint = layout.blueprint
    batch = abstract_batch(job)

    def forward(key, batch):
        params, rest = blueprint.init(key)
        model = blueprint.bind(params, rest, lambda path, value: value, Compute(remat=job.train.remat))
        return losses.as_sums(loss(model, batch), accumulate=job.train.accumulate)

    shapes = ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in batch.items())
    with users_code(
        f"{blueprint.name} with loss {job.train.loss} on {shapes}",
        rule="model and loss accept the batches of the data",
        fix="model.name, train.loss and data.source that belong together, or the line of the model that this names",
    ):
        jax.eval_shape(forward, jax.random.key(0), batch)
        if layout.sizes["pipe"] > 1:
            _trace_pipeline(job, layout, loss, batch)


def _trace_pipeline(job: Job, layout: Layout, loss: Callable, batch: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Cuts the model and runs the table on shapes, on a mesh that needs no devices."""
    numerics = Numerics(precision=job.train.precision, remat=job.train.remat)
    axes = [axis for axis in AXES if axis in layout.sizes]
    mesh: Any = AbstractMesh(
        tuple(layout.sizes[axis] for axis in axes), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )
    parts = (dataclasses.replace(layout, mesh=mesh), loss, numerics, PRECISIONS[numerics.precision])
    params, rest = jax.eval_shape(layout.blueprint.init, jax.random.key(0))
    if layout.parallel.pipeline.weights == "flush":
        jax.eval_shape(Pipelined(*parts).gradients, params, rest, batch)
    else:
        optimizer = chain.build(job.optimizer, job.train.steps)
        state = jax.eval_shape(optimizer.init, params)
        jax.eval_shape(partial(Updating(*parts).updated, optimizer), params, state, rest, batch)
