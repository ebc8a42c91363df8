"""The models and losses that a job may name, and their settings, checked: all that is known of them without JAX.

What runs under each name is in `models.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxpar.data.spec import OURS
from jaxpar.data.tokenizers.saved import PADDING, most_rows, saved
from jaxpar.errors import JaxparError, Problem, nearest, refuse
from jaxpar.job.file.folder import no_model
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
        raise JaxparError(no_model(name))
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
            fix='"my_module:my_loss", the name of such a function',
        )
    return target


def vocabulary(job: Job) -> list[Problem]:
    """Returns the problem of a vocabulary with far more rows than the data has tokens: most would never be trained.

    Asked of a job that is trained. A plan or an inspection, whose data stands for any other, does not ask.
    """
    if job.model["name"] not in MODELS or not job.data.is_text or job.data.tokenizer not in OURS:
        return []  # of a tokenizer that was saved it is asked always
    tokens, vocab = job.data.tokens, job.model.get("vocab", 0)
    if not isinstance(vocab, int) or vocab <= most_rows(tokens):
        return []
    way_out = "data.tokenizer = the folder of the model that it was trained with"
    larger = f'tokenizer = "bpe" and data.vocab = {vocab}, to train one on the text; or {way_out}'
    return [
        Problem(
            f"model.vocab = {vocab}, the {job.data.tokenizer} tokenizer has {tokens} tokens",
            f"rows beyond the tokens are padding: {PADDING}",
            f"model.vocab = {tokens}; or {larger}",
        )
    ]


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
