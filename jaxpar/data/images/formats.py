"""Pictures and their labels in files of three formats.

folders    a folder for each class, as torchvision's `ImageFolder` has them
.tar       of webdataset: KEY.jpg with KEY.cls, or with a label in KEY.json. The headers are read once, and the
           pictures are skipped: a picture is then read at its offset, in any order
Parquet    a column of bytes, or of {bytes, path} as Hugging Face's datasets write, and a column of labels. A row
           group is read as a whole, so that pictures cannot be read in a random order: they are copied once, still
           encoded, to one file
"""

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.documents.row_files import batches
from jaxpar.data.images.image_config import ImageConfig
from jaxpar.data.images.index import LABELS, SUFFIXES, Entries
from jaxpar.errors import refuse
from jaxpar.files import partial_path

FOLDER_RULE = "pictures lie in a folder for each class: pictures/cat/1.jpg, pictures/dog/2.jpg"
TAR_RULE = "a .tar has members KEY.jpg (or another picture) and KEY.cls or KEY.json, one after the other"
LARGEST = 2**20  # maximum bytes of a .cls or .json member
PARQUET_RULE = "a row of Parquet has a picture, as bytes or {bytes, path}, and a label"


def class_folders(folder: Path) -> list[Path]:
    """Returns the folders of the classes, sorted by name, without hidden ones."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def list_folders(folder: Path) -> tuple[Entries, tuple[str, ...], tuple[str, ...]]:
    """Lists the pictures of a folder with a folder for each class, sorted by class and path.

    Returns:
      The pictures, the names of all class folders, also of those without a picture, and messages to the user.

    Raises:
      JaxparError: If there is no folder of a class, or a picture lies beside the folders.
    """
    if stray := next((path for path in sorted(folder.iterdir()) if _is_picture(path.name) and path.is_file()), None):
        raise refuse(
            f"data.path = '{folder}': {stray.name} lies in no class's folder",
            rule=FOLDER_RULE,
            fix=f"{folder}/CLASS/{stray.name}",
        )
    classes = class_folders(folder)
    if not classes:
        raise refuse(
            f"data.path = '{folder}' has no folder of a class, no .tar and no .parquet",
            rule=FOLDER_RULE,
            fix=FOLDER_RULE.partition(": ")[2],
        )
    try:
        listed = [_pictures(path) for path in classes]
    except OSError as error:
        raise refuse(
            f"{error.filename}: {error.strerror}",
            rule="pictures can be read, and links among them lead to files",
            fix="its permissions, or without it",
        ) from error
    files = [file for pictures, _ in listed for file, _ in pictures]
    if not files:
        raise refuse(
            f"data.path = '{folder}' has no picture in {len(classes)} folders",
            rule=f"a picture's name ends in {', '.join(SUFFIXES)}",
            fix="the folder above or below it",
        )
    labels = [path.name for path, (pictures, _) in zip(classes, listed, strict=True) for _ in pictures]
    sizes = np.array([size for pictures, _ in listed for _, size in pictures], np.int64)
    places = np.stack([np.arange(len(files)), np.zeros_like(sizes), sizes], axis=1)
    names = [file[len(os.path.join(folder, "")) :] for file in files]
    entries = Entries(files, names, places, labels)
    return entries, tuple(path.name for path in classes), _notes([file for _, others in listed for file in others])


def _notes(others: list[str]) -> tuple[str, ...]:
    if not others:
        return ()
    subject = f"{len(others)} files of data.path are" if len(others) > 1 else "1 file of data.path is"
    return (f"{subject} no picture by name and not read (the first: {min(others)})",)


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _pictures(folder: Path | str) -> tuple[list[tuple[str, int]], list[str]]:
    """Returns the pictures in and below a folder with their sizes, sorted, and the other files.

    Hidden ones are in neither. Paths are texts, since there may be millions.
    """
    pictures, others = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                inner, rest = _pictures(entry.path)
                pictures += inner
                others += rest
            elif _is_picture(entry.name):
                pictures.append((entry.path, entry.stat().st_size))
            else:
                others.append(entry.path)
    return sorted(pictures), others


def list_tars(files: Sequence[Path], label: str) -> Entries:
    """Lists the pictures of tar files.

    Args:
      files: The files, in order.
      label: The key of the label in a .json.

    Raises:
      JaxparError: If a file is no tar, is compressed or truncated, or a key has no picture or no label.
    """
    names: list[str] = []
    labels: list[str | int] = []
    places: list[tuple[int, int, int]] = []
    for number, file in enumerate(files):
        for key, members in _samples(file):
            where = f"{file.name}: {key}"
            pictures = [member for suffix, member in members.items() if f".{suffix}" in SUFFIXES]
            if len(pictures) != 1:
                got = f"{where} has {len(pictures)} pictures, of members {', '.join(members)}"
                raise refuse(got, rule=TAR_RULE, fix="one picture for each key")
            if "cls" not in members and "json" not in members:
                got = f"{where} has no label, only {', '.join(members)}"
                raise refuse(got, rule=TAR_RULE, fix=f"{key}.cls with the number or the name of its class")
            labels.append(_label(members, label, where))
            places.append((number, *pictures[0][:2]))
            names.append(where)
    if not names:
        raise refuse(f"{', '.join(map(str, files[:3]))} without a picture", rule=TAR_RULE, fix="another data.path")
    return Entries(tuple(files), names, np.array(places, np.int64), uniform(labels, str(files[0])))


def uniform(labels: Sequence[Any], where: str) -> Sequence[str] | np.ndarray:
    """Returns labels as a list of names, or as an array of numbers.

    Raises:
      JaxparError: If some are names and others numbers, or one is neither.
    """
    kinds = {type(label) for label in labels}
    if kinds == {int} and all(abs(label) < 2**31 for label in labels):
        return np.array(labels, np.int64)
    if kinds == {str}:
        return list(labels)
    raise refuse(
        f"{where}: labels of {', '.join(sorted(kind.__name__ for kind in kinds))}",
        rule=LABELS,
        fix="all as numbers, or all as names",
    )


def _samples(file: Path) -> Iterator[tuple[str, dict[str, tuple[int, int, bytes]]]]:
    """Yields each key with its members: a dict from suffix to (offset, size, content if it is a label)."""
    key, members = "", {}
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                if not member.isreg():
                    continue
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                if not stem:  # hidden, such as ._1.jpg of macOS
                    continue
                if (name := f"{folder}/{stem}" if folder else stem) != key:
                    if members:
                        yield key, members
                    key, members = name, {}
                stream = archive.extractfile(member) if suffix in ("cls", "json") and member.size <= LARGEST else None
                content = stream.read() if stream else b""
                members[suffix.lower()] = member.offset_data, member.size, content
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue] (else it keeps every header)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise refuse(
            f"{file}: {getattr(error, 'strerror', None) or error}",
            rule="pictures are read at their offsets in whole .tar files, which are not compressed",
            fix=f"gunzip {file.name}" if file.suffix in (".gz", ".tgz") else "another copy of it, or another data.path",
        ) from error
    if members:
        yield key, members


def _label(members: dict[str, tuple[int, int, bytes]], label: str, where: str) -> str | int:
    """Returns the label of a sample: a number, if its text is one."""
    try:
        if "cls" in members:
            text = members["cls"][2].decode().strip()
            return int(text) if text.isascii() and text.lstrip("-").isdigit() else text
        value = json.loads(members["json"][2])[label]
    except (UnicodeDecodeError, ValueError, KeyError, TypeError, IndexError) as error:
        kind = "cls" if "cls" in members else "json"
        raise refuse(
            f"{where}.{kind} has no label {label!r}" if kind == "json" else f"{where}.cls: {error}",
            rule=LABELS,
            fix="data.images.label = the key of the labels",
        ) from error
    return value


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
        raise refuse(f"{files[0]} has no row", rule=PARQUET_RULE, fix="another data.path")
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
                rule=PARQUET_RULE,
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
                        got,
                        rule=PARQUET_RULE,
                        fix="embed the pictures: dataset.cast_column(..., Image()) and to_parquet",
                    )
                if not label.is_valid:
                    raise refuse(f"{where}: {config.label} is null", rule=LABELS, fix="without that row")
                yield content, label.as_py(), where


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {item!r:.40}" for key, item in value.items()) + "}"
    return f"{value!r:.60}"
