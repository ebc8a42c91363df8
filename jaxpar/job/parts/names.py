"""The models and losses that a job may name, and their settings, checked: all that is known of them without JAX.

What runs under each name is in `models.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxpar.data.spec import OURS
from jaxpar.data.tokenizers.saved import saved
from jaxpar.errors import JaxparError, Problem, nearest, refuse
from jaxpar.job.file.import_object import import_object
from jaxpar.job.file.parse import validated
from jaxpar.job.file.schema import Job
from jaxpar.models.settings.table import MODELS

COUNTED = {"next_token": "tokens", "classify": "examples"}  # jaxpar's losses, and what their counts are of


def named(job: Job) -> tuple[str, dict[str, Any]]:
    """Returns the name of a job's model, of `MODELS` or an import path, and the settings as the job says them.

    Raises:
      JaxparError: If it is neither.
    """
    name = job.model["name"]
    if name not in MODELS and ":" not in name:
        known = f'a model is {", ".join(MODELS)}, "package.module:Object", or a folder with a config.json'
        raise refuse(f"model.name = {name!r}", rule=known, fix=nearest(name, MODELS))
    return name, {key: value for key, value in job.model.items() if key != "name"}


def settings_of(job: Job) -> Any:
    """Returns the settings of a job's model, one of `MODELS`; of text, the data says how many tokens there are.

    Raises:
      JaxparError: With every key that is unknown, of another type or out of its range, or does not go with the data.
    """
    name, settings = named(job)
    reads_text = job.data.is_text and "vocab" in {field.name for field in dataclasses.fields(MODELS[name])}
    if reads_text:
        settings = {"vocab": job.data.tokens, "seq": job.data.seq, **settings}
    made, problems = validated(MODELS[name], settings, "model")
    if problems:
        raise JaxparError(*problems)
    if reads_text:
        _check_text(job, made)
    return made


def own_loss(job: Job) -> Callable | None:
    """Returns the user's own loss that a job names; None where it names one of jaxpar's.

    Raises:
      JaxparError: If it is neither, or no function.
    """
    name = job.train.loss
    if name in COUNTED:
        return None
    if ":" not in name:
        known = f'a loss is {" or ".join(COUNTED)}, or "package.module:function"'
        raise refuse(f"train.loss = {name!r}", rule=known, fix=nearest(name, COUNTED))
    target = import_object(name, "train.loss", allowed=job.allow_import)
    if not callable(target):
        raise refuse(
            f"train.loss = {name!r} is a {type(target).__name__}",
            rule="a loss is a function of (model, batch)",
            fix="name a function",
        )
    return target


def _check_text(job: Job, settings: Any) -> None:
    problems = []
    if job.data.tokenizer not in OURS:
        saved(job.data.tokenizer).check_model(settings.vocab)
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
