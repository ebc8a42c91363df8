"""Pictures of a job: whether there are any, and whether they fit the model."""

import dataclasses
from typing import Any

from jaxpar.errors import JaxparError, Problem
from jaxpar.job.file.schema import Job
from jaxpar.models.settings.table import MODELS


def check_pictures(job: Job) -> None:
    """Checks the pictures of a job, and the settings of its model that must be those of its images.

    Raises:
      JaxparError: If there are none, or the model has other channels, another size or fewer classes.
    """
    from jaxpar.data.images.listing import peek
    from jaxpar.data.images.pixels import pillow

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
    from jaxpar.data.images.listing import peek

    return peek(job.data)[1]


def has_validation(job: Job) -> bool:
    """Whether the pictures come with a split for validation."""
    from jaxpar.data.images.listing import has_val

    return has_val(job.data)
