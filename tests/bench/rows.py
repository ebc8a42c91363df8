"""Rows of a bench, kept in a file as soon as they are measured, so that a run that was stopped goes on after them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import file_errors


def kept(path: str, like: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines whose entries are `like`; none where there is no file, or path is "".

    Raises:
      JaxparError: If a line of it is not JSON, such as one that was half written when the bench was killed.
    """
    if not path or not Path(path).exists():
        return []
    rule = "a file of rows has one JSON object in each line"
    with file_errors(Path(path), rule=rule, fix="delete the line that is not whole, or give --out another file"):
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if all(row.get(key) == value for key, value in like.items())]


def keep(path: str, row: Mapping[str, Any]) -> None:
    """Adds a row to a file; nothing where path is ""."""
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
