"""A job that names a folder of Hugging Face's as its model: the folder says the settings, and a run begins with it.

[model]                    [model]
name = "my-llama"    ─►    name = "decoder", and the keys that my-llama/config.json says
                           [checkpoint]
                           start_from = "my-llama"
"""

import dataclasses
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, Problem
from jaxpar.models.huggingface.config import settings_of
from jaxpar.models.huggingface.folder import CONFIG, described, is_folder, read_config
from jaxpar.models.settings.table import MODELS

OWN = ("dropout", "scan")  # settings that change no number of a trained model, which config.json does not say


def unfolded(raw: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the tables of a job with the settings of the folder that it names as its model; any other as it is."""
    model = raw.get("model")
    if not isinstance(model, dict):
        return raw, []
    name = model.get("name")
    if not isinstance(name, str) or name in MODELS or ":" in name or not is_folder(name):
        return raw, []
    try:
        _, made = settings_of(read_config(Path(name).expanduser() / CONFIG))
    except JaxparError as error:
        return raw | {"model": {"name": "decoder"}}, list(error.problems)
    settings = {key: value for key, value in dataclasses.asdict(made).items() if key not in OWN}
    begun = raw.get("checkpoint", {})
    if isinstance(begun, dict):
        begun = {"start_from": name, **begun}
    return raw | {"model": described(settings, model), "checkpoint": begun}, []
