"""Pictures in a column of Parquet: bytes, or {bytes, path} as Hugging Face's datasets write, and a column of labels.

A row group is read as a whole, so that pictures cannot be read in a random order: they are copied once, still encoded,
to one file.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.documents.row_files import batches
from jaxpar.data.images.config import ImageConfig
from jaxpar.data.images.index import LABELS, Entries
from jaxpar.data.images.tar_files import uniform
from jaxpar.errors import refuse
from jaxpar.files import partial_path

RULE = "a row of Parquet has a picture, as bytes or {bytes, path}, and a label"


def class_names(file: Path, label: str) -> tuple[str, ...]:
    """Returns the names of the classes that Hugging Face's metadata in a file gives; () without any."""
    metadata = _open(file).schema_arrow.metadata or {}
    try:
        feature = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"][label]
        return tuple(map(str, feature["names"]))
    except (ValueError, KeyError, TypeError):
        return ()


def copy_pictures(files: Sequence[Path], config: ImageConfig, target: Path) -> Entries:
    """Copies the pictures of Parquet files to one file, in order.

    Args:
      files: The Parquet files.
      config: The `[data.images]` table.
      target: The file of all pictures.

    Raises:
      JaxparError: If a file cannot be read, has no such columns, or a row has no picture or no label.
    """
    names: list[str] = []
    labels: list[Any] = []
    places: list[tuple[int, int, int]] = []
    end, part = 0, partial_path(target)
    try:
        with part.open("wb") as stream:
            for content, label, where in (row for file in files for row in _rows(file, config)):
                stream.write(content)
                places.append((0, end, len(content)))
                labels.append(label)
                names.append(where)
                end += len(content)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise refuse(
            f"{target}: {error.strerror}",
            rule="the pictures of Parquet are copied into the run folder, where they are read in any order",
            fix="free disk space, another run.dir, or the pictures as files",
        ) from error
    if not names:
        raise refuse(f"{files[0]} has no row", rule=RULE, fix="another data.path")
    return Entries((target,), names, np.array(places, np.int64), uniform(labels, f"{files[0]}, {config.label}"))


def check_columns(file: Path, config: ImageConfig) -> None:
    """Checks that a Parquet file has the columns of pictures and labels.

    Raises:
      JaxparError: If it cannot be read, or lacks one.
    """
    columns = _open(file).schema_arrow.names
    for key in ("image", "label"):
        if (name := getattr(config, key)) not in columns:
            raise refuse(
                f"{file.name} has no column {name!r}, only {', '.join(columns)}",
                rule=RULE,
                fix=f'data.images.{key} = "{columns[0]}"',
            )


def _open(file: Path) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise refuse(
            f"{file.name} without pyarrow", rule="pyarrow reads Parquet", fix="pip install 'jaxpar[images,parquet]'"
        ) from error
    try:
        return parquet.ParquetFile(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise refuse(f"{file}: {error}", rule="a .parquet is as pyarrow reads it", fix="another copy of it") from error


def _rows(file: Path, config: ImageConfig) -> Iterator[tuple[bytes, Any, str]]:
    """Yields the picture, the label and the name of each row."""
    check_columns(file, config)
    table, number = _open(file), 0
    for group in range(table.num_row_groups):
        for batch in batches(table, group, [config.image, config.label]):
            for picture, label in zip(batch.column(config.image), batch.column(config.label), strict=True):
                number += 1
                where = f"{file.name}, row {number}"
                value = picture.as_py()
                content = value.get("bytes") if isinstance(value, dict) else value
                if not isinstance(content, bytes):
                    got = f"{where}: {config.image} is {_describe(value)}"
                    raise refuse(
                        got, rule=RULE, fix="embed the pictures: dataset.cast_column(..., Image()) and to_parquet"
                    )
                if not label.is_valid:
                    raise refuse(f"{where}: {config.label} is null", rule=LABELS, fix="without that row")
                yield content, label.as_py(), where


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {item!r:.40}" for key, item in value.items()) + "}"
    return f"{value!r:.60}"
