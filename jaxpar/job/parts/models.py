"""The model and the loss that a job names, as what runs: jaxpar's, or the user's own objects."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

import jax

from jaxpar.data.validate import BatchSpec
from jaxpar.errors import JaxparError, Problem, first_problems, nearest, refuse, users_code
from jaxpar.job.file.import_object import import_object
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import abstract_batch, open_data
from jaxpar.job.parts.names import MODELS, named, own_loss, settings_of
from jaxpar.job.parts.settings import given
from jaxpar.models.decoder import Decoder
from jaxpar.models.mlp import MLP
from jaxpar.models.resnet import ResNet
from jaxpar.models.settings.decoder import DecoderSettings
from jaxpar.models.settings.mlp import MLPSettings
from jaxpar.models.settings.resnet import ResNetSettings
from jaxpar.models.settings.vit import ViTSettings
from jaxpar.models.vit import ViT
from jaxpar.parallel.compose import as_blueprint
from jaxpar.sharding import linen_model
from jaxpar.sharding.adapters import with_adapters
from jaxpar.sharding.names import Blueprint
from jaxpar.sharding.reading.called import as_called, zeros
from jaxpar.step.keyed.loss import shaped
from jaxpar.step.losses import classify, next_token

MADE: Mapping[type, Callable] = {DecoderSettings: Decoder, ViTSettings: ViT, ResNetSettings: ResNet, MLPSettings: MLP}
LOSSES: Mapping[str, Callable] = {"next_token": next_token, "classify": classify}


def resolve_loss(job: Job) -> Callable:
    """Returns the loss function a job names."""
    own = own_loss(job)
    return LOSSES[job.train.loss] if own is None else own


def resolve_model(job: Job, loss: Callable) -> Blueprint | Callable:
    """Returns the model a job names, with its settings and the job's adapters."""
    made = _named(job, loss)
    return with_adapters(as_blueprint(made), job.train.adapters) if job.train.adapters.rank else made


def _named(job: Job, loss: Callable) -> Blueprint | Callable:
    name, settings = named(job)
    if name in MODELS:
        return _ours(job)
    from flax import linen as nn

    target: Any = import_object(name, "model.name", allowed=job.allow_import)
    if isinstance(target, Blueprint | nn.Module):
        if settings:
            raise refuse(
                f"model.{next(iter(settings))} with model.name = {name!r}, which is made already",
                rule="settings are for a class or a function",
                fix="leave it out, or name a function that takes it",
            )
        return target if isinstance(target, Blueprint) else _linen(job, target, loss)
    if not callable(target):
        raise refuse(
            f"model.name = {name!r} is a {type(target).__name__}",
            rule="a model is a class or a function, a Linen module or what jp.linen returns",
            fix='"my_module:MyModel", the name of such a class or function',
        )
    if inspect.isclass(target):
        _check_apart(job, target.__call__)
    if inspect.isclass(target) or inspect.isfunction(target):
        settings = given(job, target, settings)
    if inspect.isclass(target) and issubclass(target, nn.Module):
        fields = ", ".join(key for key in target.__dataclass_fields__ if key not in ("parent", "name"))
        with users_code(name, rule="keys of [model] are the module's fields", fix=f"its fields: {fields}"):
            module = target(**settings)
        return _linen(job, module, loss)
    if inspect.isclass(target) or inspect.isfunction(target):
        _check_settings(name, target, settings)
    if inspect.isfunction(target) and _is_complete(target, settings):
        return _returned(job, target, settings, loss)
    factory = partial(target, **settings) if settings else target
    return _nnx(job, factory if inspect.isclass(target) else _of_either_flax(job, factory, loss), loss)


def _of_either_flax(job: Job, factory: Callable, loss: Callable) -> Callable:
    """Returns a factory of models by `rngs` that may return a Linen module: called as the job's loss does, then."""
    from flax import linen as nn

    @wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        model = factory(*args, **kwargs)
        return _linen(job, model, loss) if isinstance(model, nn.Module) else model

    made.__name__ = job.model["name"]
    return made


def _is_complete(target: Callable, settings: Mapping[str, Any]) -> bool:
    """Returns whether a function needs no more than its settings: then it makes no NNX module, which takes `rngs`."""
    open_ = {key: each for key, each in inspect.signature(target).parameters.items() if key not in settings}
    return "rngs" not in open_ and all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in open_.values()
    )


def _returned(job: Job, target: Callable, settings: Mapping[str, Any], loss: Callable) -> Blueprint:
    """Returns the model that a function returns, which needs no `rngs`."""
    from flax import linen as nn

    name = job.model["name"]
    with users_code(name, rule="a function of its settings returns a model", fix="the line that this names"):
        made = target(**settings)
    if isinstance(made, nn.Module):
        return _linen(job, made, loss)
    if not isinstance(made, Blueprint):
        raise refuse(
            f"{name} returned {type(made).__name__}",
            rule="a function without `rngs` returns a Linen module, or jp.linen(...); one that makes an NNX module "
            "takes `rngs`, so that its parameters are born sharded",
            fix=f"def {target.__name__}(..., *, rngs), or return jp.linen(MyNet(...), jnp.zeros([1, ...]))",
        )
    return made


def _ours(job: Job) -> Callable:
    settings = settings_of(job)
    if not job.data.is_text and hasattr(settings, "classes"):
        _check_labels(job, settings)
    _check_apart(job, MADE[type(settings)].__call__)
    return partial(MADE[type(settings)], settings)


def _linen(job: Job, module: Any, loss: Callable) -> Blueprint:
    """Returns a Linen module as a model that is called as its loss does, on the shapes of the job's batches."""
    batch = abstract_batch(job)
    return linen_model.blueprint(module, partial(_call, loss, batch), name=type(module).__name__)


def _nnx(job: Job, factory: Callable, loss: Callable) -> Blueprint:
    """Returns the model of a factory, which is called likewise where that is asked for: its batch is then made."""
    blueprint = as_blueprint(factory)

    def call(model: Any) -> None:
        batch = abstract_batch(job)
        with accepting(job, blueprint.name, batch):
            _call(loss, batch, model)

    return as_called(blueprint, call)


def _call(loss: Callable, batch: Mapping[str, jax.ShapeDtypeStruct], model: Any) -> Any:
    return shaped(loss)(model, jax.tree.map(zeros, dict(batch)))


def _check_settings(name: str, target: Callable, settings: dict[str, Any]) -> None:
    keys = inspect.signature(target.__init__ if inspect.isclass(target) else target).parameters
    if any(p.kind is p.VAR_KEYWORD for p in keys.values()):
        return
    own = [key for key in keys if key not in ("self", "rngs")]
    if unknown := [key for key in settings if key not in own]:
        rule = f"{name} takes {', '.join(own) or 'no settings'}"
        usual = "leave it out"
        raise JaxparError(
            *first_problems(
                unknown, lambda key: Problem(f"unknown key model.{key}", rule, nearest(key, own) if own else usual)
            )
        )


def _check_labels(job: Job, settings: Any) -> None:
    held = getattr(open_data(job), "arrays", {})
    labels = held.get("labels")
    if labels is not None and labels.dtype.kind in "iu" and not 0 <= labels.min() <= labels.max() < settings.classes:
        raise refuse(
            f"model.classes = {settings.classes}, labels are {labels.min()}..{labels.max()}",
            rule="a label is within 0..classes-1",
            fix=f"model.classes = {labels.max() + 1}"
            if labels.min() >= 0
            else "labels from 0, and a mask for rows that do not count",
        )


def _check_apart(job: Job, called: Callable) -> None:
    """Refuses rows of several documents for a model that is not told of them."""
    keys = inspect.signature(called).parameters
    if job.data.documents != "apart" or any(each.kind is each.VAR_KEYWORD for each in keys.values()):
        return
    if missing := [name for name in ("segments", "positions") if name not in keys]:
        raise refuse(
            f"data.documents = 'apart' with model.name = {job.model['name']!r}, which takes no {' and '.join(missing)}",
            rule="a model that sees several documents in a row is told which token is of which",
            fix="data.documents = 'alone', which any model takes; or a model with __call__(self, tokens, *, segments, "
            "positions)",
        )


def accepting(job: Job, name: str, batch: Mapping[str, jax.ShapeDtypeStruct]) -> AbstractContextManager[None]:
    """Returns a context in which a model and a loss that do not take a batch are refused with one message."""
    shapes = ", ".join(f"{key} {leaf.dtype}{list(leaf.shape)}" for key, leaf in batch.items())
    return users_code(
        f"{name} with loss {job.train.loss} on {shapes}",
        rule="model and loss accept the batches of the data",
        fix="model.name, train.loss and data.source that belong together, or the line of the model that this names",
    )


def sound(job: Job) -> BatchSpec:
    """Returns what is known of a good batch of a job: ids that the model has, and the arrays of the user's own."""
    like = abstract_batch(job) if ":" in job.data.source else {}
    if job.model["name"] not in MODELS:
        return BatchSpec(like=like)
    spec = MODELS[job.model["name"]]
    usual = {"vocab": job.data.tokens} if job.data.is_text else {}
    settings = {field.name: usual.get(field.name, field.default) for field in dataclasses.fields(spec)} | job.model
    below = {"inputs": settings.get("vocab")}
    if job.train.loss == "next_token":
        below["targets"] = settings.get("vocab")
    if job.train.loss == "classify":
        below["labels"] = settings.get("classes")
    return BatchSpec(below={name: count for name, count in below.items() if isinstance(count, int)}, like=like)
