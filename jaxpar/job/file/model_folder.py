"""A job whose model is a Hugging Face folder: its config.json gives the settings, and the run starts from its weights.

[model]                    [model]
name = "my-llama"    ─►    name = "decoder", and the settings of my-llama/config.json
                           [checkpoint]
                           start_from = "my-llama"
"""

import dataclasses
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, Problem, suggest
from jaxpar.models.huggingface.config import read_settings
from jaxpar.models.huggingface.folder import CONFIG, hub_download, is_folder, model_table, newest_snapshot, read_config
from jaxpar.models.settings.reference_models import MODELS

OWN = ("dropout", "scan")  # jaxpar's own settings, absent from config.json; they do not change a trained model


def expand_model_folder(raw: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Replaces a model folder by its settings in the tables of a job; other jobs are returned unchanged."""
    model = raw.get("model")
    if not isinstance(model, dict):
        return raw, []
    name = model.get("name")
    if not isinstance(name, str) or name in MODELS or ":" in name or not is_folder(name):
        return raw, []
    try:
        _, config = read_settings(read_config(Path(name).expanduser() / CONFIG))
    except JaxparError as error:
        return raw | {"model": {"name": "decoder"}}, list(error.problems)
    settings = {key: value for key, value in dataclasses.asdict(config).items() if key not in OWN}
    checkpoint = raw.get("checkpoint", {})
    if isinstance(checkpoint, dict):
        checkpoint = {"start_from": name, **checkpoint}
    return raw | {"model": model_table(settings, model), "checkpoint": checkpoint}, []


def unknown_model_problem(name: str) -> Problem:
    """Describes a `model.name` that is no jaxpar model, no import path and no model folder."""
    got = f"model.name = {name!r:.200}"
    rule = f'a model is {", ".join(MODELS)}, "package.module:Object", or a folder with a config.json'
    path_fallback = "the path of a folder that is there"
    if download := hub_download(name):
        path_fallback = f'{download[0]}, and name = "{download[1]}"; or {path_fallback}'
    if "://" in name:
        on_disk = f'name = "{name.removeprefix("file://")}"' if name.startswith("file://") else path_fallback
        return Problem(f"{got}, an address", rule, on_disk)
    try:
        path = Path(name).expanduser()
        is_file, is_directory = path.is_file(), path.is_dir()
        parent = path.parent if path.parent.is_dir() else None
        siblings = [str(file.parent) for file in parent.glob(f"*/{CONFIG}")] if parent else []
    except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown ~user, or a null byte
        return Problem(f"{got}: {getattr(error, 'strerror', None) or error}", rule, suggest(name, MODELS))
    if is_file:
        is_model = is_folder(path.parent)
        fix = f'name = "{path.parent}"' if is_model else "the folder that save_pretrained of transformers has written"
        return Problem(f"{got} is a file", rule, fix)
    if is_directory:
        snapshot = newest_snapshot(path)
        written = "the folder that save_pretrained of transformers has written"
        return Problem(f"{got} is a folder without {CONFIG}", rule, f'name = "{snapshot}"' if snapshot else written)
    if path.parent == Path() and not name.startswith((".", "~")):  # it may be meant as a model or as a folder
        fallback = f"one of: {', '.join(sorted(MODELS))}; or the path of a folder that is there"
        return Problem(f"{got}, no such model or folder", rule, suggest(name, [*MODELS, *siblings], otherwise=fallback))
    return Problem(f"{got}: no such folder", rule, suggest(str(path), siblings, otherwise=path_fallback))
