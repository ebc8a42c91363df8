"""Writes a job as TOML: all defaults with their meaning, or one resolved job that parses back to itself."""

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
    """Returns every key of a job with its default and meaning, as valid TOML."""
    lines = ["# Every key of a job, its default and its meaning."]
    model = ["", "[model]", f'{"name = " + toml_value("decoder"):<28}# {", ".join(models)}, or "package.module:Object"']
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
            row = f"{key} = {toml_value(value)}" if value is not None else f"# {key} ="
            rows.append(f"{row:<28}# {meaning}")
    return rows


def toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join('""' if item is None else toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (int, float)):
        return repr(value)  # also inf and nan, which JSON spells differently
    return "null" if value is None else _text(str(value))


def _text(value: str) -> str:
    """Quotes text for TOML: like JSON, but DEL is escaped and surrogates are replaced."""
    literal = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return literal.encode("utf-8", "replace").decode()


def _key(word: str) -> str:
    """Quotes a key unless TOML allows it bare."""
    return word if re.fullmatch(r"[\w-]+", word, re.ASCII) else _text(word)


def dumps(job: Job) -> str:
    """Returns the resolved job as TOML; `loads` reads it back as an equal job."""
    return "\n".join(line for name in SECTIONS for line in _table(name, getattr(job, name)))


def _table(section: str, value: Any) -> list[str]:
    """Returns the lines of a table: its own keys, then its inner tables."""
    items = value if isinstance(value, dict) else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    inner = {key: item for key, item in items.items() if dataclasses.is_dataclass(item)}
    rows = [f"{_key(key)} = {toml_value(item)}" for key, item in items.items() if item is not None and key not in inner]
    inner_lines = [line for key, item in inner.items() for line in _table(f"{section}.{key}", item)]
    return [f"[{section}]", *rows, "", *inner_lines]
