"""Builds the model and the loss that a job names, which are jaxpar's or the user's objects."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from importlib import import_module
from typing import Any

import jax

from jaxpar.data.validate import BatchSpec
from jaxpar.errors import JaxparError, Problem, first_problems, refuse, suggest, user_code_errors
from jaxpar.job.file.imports import import_object
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import abstract_batch, open_data
from jaxpar.job.parts.names import LOSSES, PREFERENCES, check_preferences, custom_loss, model_settings, model_table
from jaxpar.models.settings.reference_models import MODELS, REFERENCE_MODELS
from jaxpar.optim.patterns import matching
from jaxpar.parallel.compose import as_blueprint
from jaxpar.parallel.declaration import Parallel
from jaxpar.sharding import linen_model
from jaxpar.sharding.adapters import with_adapters
from jaxpar.sharding.infer_names.infer_dims import with_program, zeros_like_input
from jaxpar.sharding.names import Blueprint
from jaxpar.step.stochastic_loss import traceable_loss

# Object-valued model settings: a table or an import path becomes the config object that the model expects.
#
# [model.config]                          config: Config in the model's signature   ─► Config(layers=2)
# layers = 2
# [model.config]                          any signature                             ─► mine.Config(layers=2)
# name = "mine:Config"
# layers = 2
# config = "mine:small"                   a Config in the module mine, or a function that returns one
#
# Type hints are resolved, so quoted ones and `from __future__ import annotations` work as well.

_PATH = re.compile(r"[\w.-]+:[\w.]+")


def convert_settings(job: Job, target: Callable, settings: Mapping[str, object]) -> dict[str, Any]:
    """Converts a job's model settings to the arguments that the model takes.

    Args:
      job: The job.
      target: The model's class or function.
      settings: The settings of the job's [model] table.

    Raises:
      JaxparError: If a config cannot be imported, or does not accept its table.
    """
    hints = _hints(target)
    return {key: _object(job, key, hints.get(key), value) for key, value in settings.items()}


def _object(job: Job, key: str, hint: object, value: object) -> Any:
    """Converts one setting to an object if it names one or the type hint asks for one."""
    if isinstance(value, str) and hint is not str and _PATH.fullmatch(value):
        target = import_object(value, f"model.{key}", allowed=job.allow_import)
        return _call_target(key, value, target, {}) if inspect.isclass(target) or inspect.isfunction(target) else target
    if not isinstance(value, dict):
        return value
    name = value.get("name")
    if isinstance(name, str) and _PATH.fullmatch(name):
        target = import_object(name, f"model.{key}.name", allowed=job.allow_import)
        return _call_target(key, name, target, {field: entry for field, entry in value.items() if field != "name"})
    if inspect.isclass(hint) and not issubclass(hint, Mapping):
        return _call_target(key, hint.__name__, hint, value)
    return value


def _call_target(key: str, name: str, target: Callable[..., Any], settings: Mapping[str, object]) -> Any:
    with user_code_errors(
        f"model.{key} = {name}({', '.join(settings)})",
        rule=f"[model.{key}] has what {name} takes",
        fix=f"its keys: {', '.join(inspect.signature(target).parameters)}" if callable(target) else "name a class",
    ):
        return target(**settings)


def _hints(target: Callable) -> dict[str, Any]:
    """Returns the type hints of a model's settings, {} if they cannot be resolved."""
    function: Any = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # names that only a type checker imports
        return {}


def resolve_loss(job: Job) -> Callable:
    check_preferences(job)
    loss = custom_loss(job)
    if loss is not None:
        return loss
    function, dpo = _load(LOSSES[job.train.loss].path), job.train.dpo
    if job.train.loss == PREFERENCES:
        return partial(function, beta=dpo.beta, label_smoothing=dpo.label_smoothing)
    return function


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def resolve_model(job: Job, loss: Callable) -> Blueprint | Callable:
    """Returns the model that a job names, with its settings, adapters and reference applied."""
    if job.train.loss == PREFERENCES:
        from jaxpar.job.parts.preference import resolve_policy  # other jobs do not load it

        return resolve_policy(job, partial(_build_model, job))
    model = _build_model(job, loss)
    if job.train.adapters.rank:
        model = with_adapters(as_blueprint(model), job.train.adapters)
    return _with_finder(job, as_blueprint(model), loss) if job.parallel.specs else model


def _build_model(job: Job, loss: Callable) -> Blueprint | Callable:
    name, settings = model_table(job)
    if name in MODELS:
        return _nnx(job, _builtin_model(job), loss)
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
            rule="a model is a class or a function, a Linen module or what jp.from_linen returns",
            fix='"my_module:MyModel", the name of such a class or function',
        )
    if inspect.isclass(target):
        _check_documents(job, target.__call__)
    if inspect.isclass(target) or inspect.isfunction(target):
        settings = convert_settings(job, target, settings)
    if inspect.isclass(target) and issubclass(target, nn.Module):
        fields = ", ".join(key for key in target.__dataclass_fields__ if key not in ("parent", "name"))
        with user_code_errors(name, rule="keys of [model] are the module's fields", fix=f"its fields: {fields}"):
            module = target(**settings)
        return _linen(job, module, loss)
    if inspect.isclass(target) or inspect.isfunction(target):
        _check_settings(name, target, settings)
    if inspect.isfunction(target) and _is_complete(target, settings):
        return _call_factory(job, target, settings, loss)
    factory = partial(target, **settings) if settings else target
    return _nnx(job, factory if inspect.isclass(target) else _wrap_linen(job, factory, loss), loss)


def _wrap_linen(job: Job, factory: Callable, loss: Callable) -> Callable:
    """Wraps a factory that takes `rngs`; a Linen module that it returns gets the job's loss and batch shapes."""
    from flax import linen as nn

    @wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Any:
        model = factory(*args, **kwargs)
        return _linen(job, model, loss) if isinstance(model, nn.Module) else model

    build.__name__ = job.model["name"]
    return build


def _is_complete(target: Callable, settings: Mapping[str, object]) -> bool:
    """Whether a function needs only its settings; a factory of NNX modules also takes `rngs`."""
    free = {key: p for key, p in inspect.signature(target).parameters.items() if key not in settings}
    return "rngs" not in free and all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in free.values()
    )


def _call_factory(job: Job, target: Callable, settings: Mapping[str, object], loss: Callable) -> Blueprint:
    """Calls a factory that takes no `rngs`, and checks its model."""
    from flax import linen as nn

    name = job.model["name"]
    with user_code_errors(name, rule="a function of its settings returns a model", fix="the line that this names"):
        model = target(**settings)
    if isinstance(model, nn.Module):
        return _linen(job, model, loss)
    if not isinstance(model, Blueprint):
        raise refuse(
            f"{name} returned {type(model).__name__}",
            rule="a function without `rngs` returns a Linen module, or jp.from_linen(...); one that makes an NNX "
            "module takes `rngs`, so that its parameters are born sharded",
            fix=f"def {target.__name__}(..., *, rngs), or return jp.from_linen(MyNet(...), jnp.zeros([1, ...]))",
        )
    return model


def _builtin_model(job: Job) -> Callable:
    settings = model_settings(job)
    if not job.data.is_text and hasattr(settings, "classes"):
        _check_labels(job, settings)
    model = _load(REFERENCE_MODELS[job.model["name"]].path)
    _check_documents(job, model.__call__)
    return partial(model, settings)


def _linen(job: Job, module: Any, loss: Callable) -> Blueprint:
    """Wraps a Linen module; its loss on the shapes of the job's batches serves as the example call."""
    batch = abstract_batch(job)
    return linen_model.blueprint(module, partial(_call, loss, batch), name=type(module).__name__)


def _nnx(job: Job, factory: Callable, loss: Callable) -> Blueprint:
    """Wraps a factory of NNX modules; the example call, with its batch, is made only when it is needed."""
    blueprint = as_blueprint(factory)

    def call(model: object) -> None:
        batch = abstract_batch(job)
        with batch_errors(job, blueprint.name, batch):
            _call(loss, batch, model)

    return with_program(blueprint, call)


def frozen_paths(job: Job, blueprint: Blueprint) -> set[str]:
    """Returns the paths of the parameters that the job's optimizer freezes."""
    frozen, exceptions = job.train.frozen
    return set(matching(blueprint.leaves, frozen)) - set(matching(blueprint.leaves, exceptions))


def _with_finder(job: Job, blueprint: Blueprint, loss: Callable) -> Blueprint:
    """Lets a job's `specs="found"` be found for its own loss and batch."""

    def find(parallel: Parallel) -> tuple[Parallel, str]:
        from jaxpar.specs.find import find_specs

        batch = abstract_batch(job)
        with batch_errors(job, blueprint.name, batch):
            found = find_specs(
                blueprint, loss, batch, parallel, precision=job.train.precision.compute,
                frozen=frozen_paths(job, blueprint),
            )  # fmt: skip
        return found.parallel, found.sentence

    return dataclasses.replace(blueprint, find_specs=find)


def _call(loss: Callable, batch: Mapping[str, jax.ShapeDtypeStruct], model: object) -> Any:
    return traceable_loss(loss)(model, jax.tree.map(zeros_like_input, dict(batch)))


def _check_settings(name: str, target: Callable, settings: Mapping[str, object]) -> None:
    keys = inspect.signature(target.__init__ if inspect.isclass(target) else target).parameters
    if any(p.kind is p.VAR_KEYWORD for p in keys.values()):
        return
    names = [key for key in keys if key not in ("self", "rngs")]
    if unknown := [key for key in settings if key not in names]:
        rule = f"{name} takes {', '.join(names) or 'no settings'}"
        fix = "leave it out"
        raise JaxparError(
            *first_problems(
                unknown, lambda key: Problem(f"unknown key model.{key}", rule, suggest(key, names) if names else fix)
            )
        )


def _check_labels(job: Job, settings: Any) -> None:
    if job.data.source == "images":  # see `names.check_pictures`
        return
    arrays = getattr(open_data(job), "arrays", {})
    labels = arrays.get("labels")
    if labels is not None and labels.dtype.kind in "iu" and not 0 <= labels.min() <= labels.max() < settings.classes:
        raise refuse(
            f"model.classes = {settings.classes}, labels are {labels.min()}..{labels.max()}",
            rule="a label is within 0..classes-1",
            fix=f"model.classes = {labels.max() + 1}"
            if labels.min() >= 0
            else "labels from 0, and a mask for rows that do not count",
        )


def _check_documents(job: Job, called: Callable) -> None:
    """Refuses `data.documents = "apart"` for a model whose call takes no `segments` and `positions`."""
    keys = inspect.signature(called).parameters
    if job.data.documents != "apart" or any(parameter.kind is parameter.VAR_KEYWORD for parameter in keys.values()):
        return
    if missing := [name for name in ("segments", "positions") if name not in keys]:
        raise refuse(
            f"data.documents = 'apart' with model.name = {job.model['name']!r}, which takes no {' and '.join(missing)}",
            rule="a model that sees several documents in a sequence takes the document of each token",
            fix="data.documents = 'alone', which any model takes; or a model with __call__(self, tokens, *, segments, "
            "positions)",
        )


# arrays that jaxpar's own losses read, and how to make them
LOSS_INPUTS = {
    "next_token": {"inputs": "tokens[:, :-1]", "targets": "tokens[:, 1:]"},
    "classify": {"inputs": "x", "labels": "y"},
}


def batch_errors(job: Job, name: str, batch: Mapping[str, jax.ShapeDtypeStruct]) -> AbstractContextManager[None]:
    """Context that turns any exception of the model or the loss on a batch into one `JaxparError`."""
    shapes = ", ".join(f"{key} {leaf.dtype}{list(leaf.shape)}" for key, leaf in batch.items())
    rule = "model and loss accept the batches of the data"
    fix = "model.name, train.loss and data.source that belong together, or the line of the model that this names"
    inputs = LOSS_INPUTS.get(job.train.loss, {})
    if inputs.keys() - batch.keys():
        rule = f"the loss {job.train.loss} is computed from arrays named {' and '.join(inputs)}"
        arrays = ", ".join(f"{key}={value}" for key, value in inputs.items())
        way = (
            f"np.savez(path, {arrays})" if job.data.source == "arrays" else f"a data.source that yields dict({arrays})"
        )
        fix = f"{way}; or a train.loss of your own, of the names that these data have"
    return user_code_errors(f"{name} with loss {job.train.loss} on {shapes}", rule=rule, fix=fix)


def batch_spec(job: Job) -> BatchSpec:
    """Returns the batch validation of a job: upper bounds of ids, and the array shapes of a user's own source."""
    shapes = abstract_batch(job) if ":" in job.data.source else {}
    if job.model["name"] not in MODELS:
        return BatchSpec(first_batch=shapes)
    spec = MODELS[job.model["name"]]
    defaults = {"vocab": job.data.tokens} if job.data.is_text else {}
    settings = {field.name: defaults.get(field.name, field.default) for field in dataclasses.fields(spec)} | job.model
    bounds = {"inputs": settings.get("vocab")}
    if job.train.loss == "next_token":
        bounds["targets"] = settings.get("vocab")
    if job.data.preferences:
        arrays = [f"{side}_{name}" for side in ("chosen", "rejected") for name in ("inputs", "targets")]
        bounds |= dict.fromkeys(arrays, settings.get("vocab"))
    if job.train.loss == "classify":
        bounds["labels"] = settings.get("classes")
    return BatchSpec(
        id_counts={name: count for name, count in bounds.items() if isinstance(count, int)}, first_batch=shapes
    )
