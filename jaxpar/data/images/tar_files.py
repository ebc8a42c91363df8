"""Pictures in tar files of webdataset: KEY.jpg with KEY.cls, or with a label in KEY.json.

The headers are read once, and the pictures are skipped: a picture is then read at its offset, in any order.
"""

import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.images.index import LABELS, SUFFIXES, Entries
from jaxpar.errors import refuse

RULE = "a .tar has members KEY.jpg (or another picture) and KEY.cls or KEY.json, one after the other"
LARGEST = 2**20  # maximum bytes of a .cls or .json member


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
                raise refuse(got, rule=RULE, fix="one picture for each key")
            if "cls" not in members and "json" not in members:
                got = f"{where} has no label, only {', '.join(members)}"
                raise refuse(got, rule=RULE, fix=f"{key}.cls with the number or the name of its class")
            labels.append(_label(members, label, where))
            places.append((number, *pictures[0][:2]))
            names.append(where)
    if not names:
        raise refuse(f"{', '.join(map(str, files[:3]))} without a picture", rule=RULE, fix="another data.path")
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
