"""A decoder is written as Hugging Face keeps it, one tensor at a time."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpar.errors import JaxparError, Problem, differences, refuse
from jaxpar.files import check_local
from jaxpar.models.huggingface.config import config_of
from jaxpar.models.huggingface.folder import special_ids, take_along
from jaxpar.models.huggingface.load import few
from jaxpar.models.huggingface.rules import Rule, rules, whole
from jaxpar.models.huggingface.safetensors import FLOATS, Made, write
from jaxpar.models.settings.decoder import DecoderSettings


def export(
    params: Mapping[str, Any],
    settings: DecoderSettings,
    folder: str | Path,
    *,
    dtype: Any = None,
    most: int = 5 * 10**9,
    origin: str | Path | None = None,
) -> list[Path]:
    """Writes a decoder in files that transformers, and programs that read its format, can load.

    Args:
      params: The parameters, nested or by path: anything with `shape`, `dtype` and `[...]`, on devices or off.
      settings: The decoder's.
      folder: Where; without a model in it.
      dtype: Dtype of the written tensors: float32, bfloat16 or float16; unchanged by default.
      most: Bytes of a file; more become several with an index.
      origin: A folder of Hugging Face's that the decoder came from: its tokenizer, special ids and generation config
        are written too.

    Returns:
      What was written.

    Raises:
      JaxparError: If Hugging Face has no such model, parameters do not fit the settings, or files cannot be written.
    """
    flat = _flat(params)
    each = None if dtype is None else _float(dtype)
    kind, config = config_of(settings, (each or np.dtype(flat["embed"].dtype)).name if "embed" in flat else "float32")
    table = rules(kind, settings)
    if problems := _unfit(flat, table, settings):
        raise JaxparError(*problems)
    groups: dict[str, list[Rule]] = {}
    for rule in table:
        groups.setdefault(rule.theirs, []).append(rule)
    tensors = [
        Made(
            name.format(layer),
            each or np.dtype(flat[group[0].ours].dtype),
            whole(group),
            partial(_fetch, group, flat, layer),
        )
        for name, group in groups.items()
        for layer in (range(settings.layers) if group[0].stacked else range(1))
    ]
    check_local(folder, "folder")
    folder = Path(folder).expanduser()
    rule = "a model is exported into a folder that holds none"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if found := [*folder.glob("*.safetensors*"), *folder.glob("config.json")]:
            raise refuse(f"{folder} holds {found[0].name}", rule=rule, fix="another folder, or empty this one")
        written = write(folder, tensors, most=most)
        config |= special_ids(Path(origin)) if origin else {}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise refuse(f"{folder}: {error.strerror}", rule=rule, fix="a folder that can be written, with room") from error
    return [*written, folder / "config.json", *(take_along(Path(origin), folder) if origin else ())]


def _float(dtype: Any) -> np.dtype:
    try:
        made = jnp.dtype(dtype)
    except TypeError:
        made = None
    if made is None or made not in FLOATS:
        names = ", ".join(known.name for known in FLOATS)
        raise refuse(f"dtype={dtype!r:.60}", rule=f"weights are written in {names}", fix='dtype="float32"')
    return made


def _fetch(group: list[Rule], flat: Mapping[str, Any], layer: int) -> np.ndarray:
    """Returns a tensor of theirs; one layer of a stack is all that comes off the devices."""
    parts = [rule.given(np.asarray(flat[rule.ours][layer] if rule.stacked else flat[rule.ours][...])) for rule in group]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{above}{key}/") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat


def _unfit(flat: Mapping[str, Any], table: list[Rule], settings: DecoderSettings) -> list[Problem]:
    """Returns which parameters are missing, unexpected or of another shape."""
    wanted = {rule.ours: (settings.layers, *rule.shape) if rule.stacked else rule.shape for rule in table}
    found = differences(flat, wanted, of="this decoder")
    rule, fix = "they are those of a decoder of these settings", "its own settings"
    return [Problem(f"parameters {what}: {few(names)}", rule, fix) for what, names in found.items()]
