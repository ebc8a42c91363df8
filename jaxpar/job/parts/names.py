"""Checks, without importing JAX, the model and loss names of a job, their settings, and whether its pictures fit them.

`models.py` builds the model and the loss.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxpar.data.spec import OURS
from jaxpar.data.tokenizers.tokenizer_facts import PADDING, most_rows, read_tokenizer
from jaxpar.errors import JaxparError, Problem, refuse, suggest
from jaxpar.job.file.imports import import_object, unknown_model_problem
from jaxpar.job.file.parse import validate
from jaxpar.job.file.schema import Job
from jaxpar.models.settings.fine_tuning import DPO
from jaxpar.models.settings.reference_models import MODELS


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceLoss:
    """A loss that jaxpar brings.

    Attributes:
      unit: What it counts.
      path: Its function, `module:function`.
    """

    unit: str
    path: str


PREFERENCES = "dpo"  # the loss whose model has a frozen reference
LOSSES: Mapping[str, ReferenceLoss] = {
    "next_token": ReferenceLoss("tokens", "jaxpar.step.losses:next_token_loss"),
    "classify": ReferenceLoss("examples", "jaxpar.step.losses:classification_loss"),
    PREFERENCES: ReferenceLoss("pairs", "jaxpar.step.preference_loss:dpo_loss"),
}


def counted_unit(job: Job) -> str:
    """Returns the unit that a job's loss counts."""
    return LOSSES[job.train.loss].unit if job.train.loss in LOSSES else "loss terms"


def model_table(job: Job) -> tuple[str, dict[str, Any]]:
    """Returns the name of a job's model (a key of `MODELS` or an import path) and its unchecked settings.

    Raises:
      JaxparError: If the name is neither.
    """
    name = job.model["name"]
    if name not in MODELS and (":" not in name or "://" in name):
        raise JaxparError(unknown_model_problem(name))
    return name, {key: value for key, value in job.model.items() if key != "name"}


def model_settings(job: Job) -> Any:
    """Returns the checked settings of a job's model, one of `MODELS`; text data gives default `vocab` and `seq`.

    Raises:
      JaxparError: With every key that is unknown, has a wrong type, is out of range, or contradicts the data.
    """
    name, settings = model_table(job)
    reads_text = job.data.is_text and "vocab" in {field.name for field in dataclasses.fields(MODELS[name])}
    if reads_text:
        settings = {"vocab": job.data.tokens, "seq": job.data.seq, **settings}
    config, problems = validate(MODELS[name], settings, "model")
    if problems:
        raise JaxparError(*problems)
    if reads_text:
        _check_text(job, config)
    return config


def custom_loss(job: Job) -> Callable | None:
    """Imports the user's own loss that a job names; None if it names one of jaxpar's.

    Raises:
      JaxparError: If it is neither, or not callable.
    """
    name = job.train.loss
    if name in LOSSES:
        return None
    if ":" not in name:
        rule = f'a loss is {" or ".join(LOSSES)}, or "package.module:function"'
        raise refuse(f"train.loss = {name!r}", rule=rule, fix=suggest(name, LOSSES))
    target = import_object(name, "train.loss", allowed=job.allow_import)
    if not callable(target):
        raise refuse(
            f"train.loss = {name!r} is a {type(target).__name__}",
            rule="a loss is a function of (model, batch)",
            fix='"my_module:my_loss", the name of such a function',
        )
    return target


def check_preferences(job: Job) -> None:
    """Checks that loss, data and settings of preferences come together.

    Raises:
      JaxparError: If the job has only one of the two.
    """
    is_dpo = job.train.loss == PREFERENCES
    if not is_dpo and job.train.dpo != DPO():
        raise refuse(
            f"[train.dpo] with train.loss = {job.train.loss!r}",
            rule="these are settings of the loss dpo",
            fix='train.loss = "dpo", or leave them out',
        )
    if is_dpo and not job.data.preferences and ":" not in job.data.source:
        raise refuse(
            f'train.loss = "dpo" with data.source = {job.data.source!r}, without data.preferences',
            rule="DPO learns from rows with a prompt, a chosen and a rejected answer",
            fix='source = "jsonl", path = "pairs.jsonl", preferences = true in [data]',
        )
    if job.data.preferences and not is_dpo and job.train.loss in LOSSES:
        raise refuse(
            f"data.preferences with train.loss = {job.train.loss!r}",
            rule="pairs of answers are learned by the loss dpo",
            fix='train.loss = "dpo"; or data.messages, for answers that are all good',
        )


def vocabulary(job: Job) -> list[Problem]:
    """Reports a vocabulary with far more rows than the data has tokens: most rows would never be trained.

    Only for jobs that are trained; the data of a plan or an inspection is a placeholder.
    """
    if job.model["name"] not in MODELS or not job.data.is_text or job.data.tokenizer not in OURS:
        return []  # `_check_text` always checks saved tokenizers
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
        read_tokenizer(job.data.tokenizer).check_model(settings.vocab)
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
                "a model has learned positions for all tokens of a sequence: model.seq is at least data.seq",
                f"model.seq = {job.data.seq}, or leave it out",
            )
        )
    if problems:
        raise JaxparError(*problems)


def check_pictures(job: Job) -> None:
    """Checks the pictures of a job, and the settings of its model that must be those of its images.

    Raises:
      JaxparError: If there are no pictures; if `model.channels` or `model.size` is not that of the images; if
        `model.classes` is less than the number of their classes.
    """
    from jaxpar.data.images.pixels import pillow
    from jaxpar.data.images.source import peek

    pillow()
    index, _ = peek(job.data)
    if job.model["name"] not in MODELS:
        return
    fields = dataclasses.fields(MODELS[job.model["name"]])
    settings: dict[str, Any] = {field.name: field.default for field in fields} | job.model
    height, width, channels = job.data.images.shape
    problems = []
    if settings.get("channels", channels) != channels:
        got = f"model.channels = {settings['channels']}, data.images.channels = {channels}"
        problems.append(Problem(got, "the model reads the channels of the images", f"model.channels = {channels}"))
    if "size" in settings and (settings["size"], settings["size"]) != (height, width):
        got = f"model.size = {settings['size']}, data.images.size = {job.data.images.size}"
        fix = f"model.size = {height}" if height == width else f"data.images.size = {settings['size']}"
        problems.append(Problem(got, "the model reads images of its size", fix))
    count = len(index.classes) if index else 0
    if job.train.loss == "classify" and isinstance(settings.get("classes"), int) and settings["classes"] < count:
        got = f"model.classes = {settings['classes']}, the pictures have {count} classes"
        problems.append(Problem(got, "the model has an output for each class", f"model.classes = {count}"))
    if problems:
        raise JaxparError(*problems)


def describe_pictures(job: Job) -> str:
    """Describes the pictures of a job and their classes in a line; "" for other data."""
    if job.data.source != "images":
        return ""
    from jaxpar.data.images.source import peek

    return peek(job.data)[1]


def has_validation(job: Job) -> bool:
    """Whether the pictures come with a split for validation."""
    from jaxpar.data.images.source import has_val

    return has_val(job.data)
