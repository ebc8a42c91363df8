"""A job as TOML: with every default and its meaning, or resolved, as it is read back."""

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping
from typing import Any

from jaxpar.exchange.base import Exchange
from jaxpar.exchange.table import EXCHANGES
from jaxpar.job.file.schema import SECTIONS, TABLES, Job, default, inner_tables, meanings


def show_defaults(models: Mapping[str, type]) -> str:
    """Returns every key of a job with its default and meaning, as TOML that can be used."""
    lines = ["# Every key of a job, its default and its meaning."]
    model = ["", "[model]", f'{"name = " + shown("decoder"):<28}# {", ".join(models)}, or "package.module:Object"']
    for name, settings in models.items():
        model += [f"# -- of {name}:", *("# " + row for row in _rows(settings))]
    for section, cls in TABLES.items():
        lines += [*(model if section == "data" else ()), "", f"[{section}]", *_rows(cls)]
        for name, kind in EXCHANGES.items() if issubclass(cls, Exchange) else ():
            lines += [f"# -- of {name}:", *("# " + row for row in _rows(kind))] if kind is not cls else ()
    return "\n".join(lines)


def _rows(cls: type) -> list[str]:
    rows = []
    for key, meaning in meanings(cls).items():
        if key in {f.name for f in dataclasses.fields(cls)} - inner_tables(cls).keys():
            value = default(cls, key)
            row = f"{key} = {shown(value)}" if value is not None else f"# {key} ="
            rows.append(f"{row:<28}# {meaning}")
    return rows


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (int, float)):
        return repr(value)  # also inf and nan, which JSON spells otherwise
    return "null" if value is None else _text(str(value))


def _text(value: str) -> str:
    """Returns text as TOML writes it: as JSON does, but for the pairs of surrogates and the last control character."""
    shown = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return shown.encode("utf-8", "replace").decode()


def _key(word: str) -> str:
    """Returns a key as TOML writes it: bare where it may be."""
    return word if re.fullmatch(r"[\w-]+", word, re.ASCII) else _text(word)


def dumps(job: Job) -> str:
    """Returns the resolved job as TOML, which `load` reads back as the same job."""
    return "\n".join(line for name in SECTIONS for line in _table(name, getattr(job, name)))


def _table(section: str, value: Any) -> list[str]:
    """Returns a table, and the tables within it after its own keys."""
    own = value if isinstance(value, dict) else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    inner = {key: each for key, each in own.items() if dataclasses.is_dataclass(each)}
    rows = [f"{_key(key)} = {shown(each)}" for key, each in own.items() if each is not None and key not in inner]
    below = [line for key, each in inner.items() for line in _table(f"{section}.{key}", each)]
    return [f"[{section}]", *rows, "", *below]
