"""A job that names a folder of Hugging Face's as its model: the folder says the settings, and a run begins with it.

[model]                    [model]
name = "my-llama"    ─►    name = "decoder", and the keys that my-llama/config.json says
                           [checkpoint]
                           start_from = "my-llama"
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, Problem, nearest
from jaxpar.models.huggingface.config import settings_of
from jaxpar.models.huggingface.folder import CONFIG, described, is_folder, read_config
from jaxpar.models.settings.table import MODELS

HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # as models are called on Hugging Face's Hub
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


def no_model(name: str) -> Problem:
    """Returns the problem of a `model.name` that is no model of jaxpar's, no import path and no folder of a model."""
    got = f"model.name = {name!r:.200}"
    rule = f'a model is {", ".join(MODELS)}, "package.module:Object", or a folder with a config.json'
    try:
        path = Path(name).expanduser()
        is_file, is_there = path.is_file(), path.is_dir()
        above = path.parent if path.parent.is_dir() else None
        beside = [str(each.parent) for each in above.glob(f"*/{CONFIG}")] if above else []
    except (OSError, RuntimeError, ValueError) as error:  # too long, of a user that there is not, or with a null byte
        return Problem(f"{got}: {getattr(error, 'strerror', None) or error}", rule, nearest(name, MODELS))
    if is_file:
        within = is_folder(path.parent)
        fix = f'name = "{path.parent}"' if within else "the folder that save_pretrained of transformers has written"
        return Problem(f"{got} is a file", rule, fix)
    if is_there:
        return Problem(
            f"{got} is a folder without {CONFIG}", rule, "the folder that save_pretrained of transformers has written"
        )
    if path.parent == Path() and not name.startswith((".", "~")):  # it may be either
        either = f"one of: {', '.join(sorted(MODELS))}; or the path of a folder that is there"
        return Problem(f"{got}, no such model or folder", rule, nearest(name, [*MODELS, *beside], otherwise=either))
    get = f'hf download {name} --local-dir {path.name}, and name = "{path.name}"; or ' * bool(HUB.fullmatch(name))
    other = f"{get}the path of a folder that is there"
    return Problem(f"{got}: no such folder", rule, nearest(str(path), beside, otherwise=other))
