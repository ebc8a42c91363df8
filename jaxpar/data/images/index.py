"""The index of a job's pictures: in which file each lies, at which byte, and its label; and the file that caches it.

RUN/data/pictures-0f3a....npz     the index of tar files, or of Parquet
RUN/data/pictures-0f3a....bin     the encoded pictures of Parquet, one after the other
RUN/data/classes.json             the names of the classes, in the order of their labels
"""

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from jaxpar.data.images.image_config import ImageConfig
from jaxpar.errors import refuse
from jaxpar.files import partial_path

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pnm")
LABELS = "a label is the name of a class, or its number from 0"


@dataclass(frozen=True)
class Entries:
    """The pictures of one split, in order.

    Attributes:
      files: The files.
      names: Name of each picture, for errors.
      places: File number, offset and size in bytes of each picture. Shape [n, 3], int64.
      labels: The label of each picture: a class's name, or its number.
    """

    files: Sequence[str | Path]
    names: Sequence[str]
    places: np.ndarray
    labels: Sequence[str] | np.ndarray


@dataclass(frozen=True)
class Index:
    """The pictures of a job.

    Attributes:
      files: The files.
      names: Name of each picture, for errors.
      places: File number, offset and size in bytes of each picture. Shape [n, 3], int64.
      labels: Number of each picture's class. Shape [n], int32.
      classes: Names of the classes.
      train: Number of training pictures, which come first; all others are of `val`. All, without such a split.
      notes: Messages to the user.
    """

    files: Sequence[str | Path]
    names: Sequence[str]
    places: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    train: int
    notes: tuple[str, ...] = field(default=(), compare=False)

    def read(self, number: int) -> bytes:
        """Returns the encoded bytes of a picture.

        Raises:
          OSError: If its file cannot be read.
        """
        file, offset, size = self.places[number].tolist()
        with open(self.files[file], "rb", buffering=0) as stream:
            stream.seek(offset)
            return stream.read(size)

    @property
    def fingerprint(self) -> str:
        """Hash of the names, sizes and labels of all pictures; their pixels are not read for it."""
        digest = hashlib.sha256("\0".join([*self.classes, "", *self.names]).encode("utf-8", "surrogateescape"))
        digest.update(self.places[:, 2].astype("<i8").tobytes() + self.labels.astype("<i4").tobytes())
        digest.update(f"{self.train}".encode())
        return digest.hexdigest()[:16]

    def describe(self) -> str:
        """Describes the pictures and their classes in one line."""
        shown = ", ".join(self.classes[:8]) + ", ..." * (len(self.classes) > 8)
        val = f", {len(self.labels) - self.train:,} of them in val" if self.train < len(self.labels) else ""
        return f"{len(self.labels):,} pictures in {len(self.classes)} classes{val}: {shown}"


def join(train: Entries, val: Entries | None, config: ImageConfig, names: Sequence[str], where: str) -> Index:
    """Numbers the classes of training pictures and of a validation split, and joins both to one index.

    Args:
      train: The training pictures.
      val: The validation pictures, if they are separate.
      config: The `[data.images]` table.
      names: Names of the classes that the files themselves give, e.g. those of the folders; may be empty.
      where: The path in errors.

    Raises:
      JaxparError: If a label is of no class, a class has no picture, or there are fewer than two classes.
    """
    classes = config.classes or tuple(names) or _class_names(train.labels, where)
    numbers = {name: number for number, name in enumerate(classes)}
    labels = _class_numbers(train, numbers, where)
    counts = np.bincount(labels, minlength=len(classes))
    if not config.classes and not counts.all():
        empty = classes[int(np.argmin(counts))]
        raise refuse(
            f"data.path = '{where}': class {empty} has no picture",
            rule="every class has a training picture",
            fix="without that class; or, if it is meant, data.images.classes = the names of all classes",
        )
    if len(classes) < 2:
        raise refuse(
            f"data.path = '{where}' has one class: {', '.join(classes)}",
            rule="pictures are of at least two classes",
            fix="the folder above it, with a folder for each class",
        )
    index = Index(train.files, train.names, train.places, labels, classes, len(labels))
    if val is None:
        return index
    places = val.places + np.array([len(train.files), 0, 0])
    return replace(
        index,
        files=(*train.files, *val.files),
        names=[*train.names, *val.names],
        places=np.concatenate([train.places, places]),
        labels=np.concatenate([labels, _class_numbers(val, numbers, f"{where}, val")]),
    )


def _class_names(labels: Sequence[str] | np.ndarray, where: str) -> tuple[str, ...]:
    """Returns the names of the classes that labels have: those of names sorted, "0", "1", ... up to the largest."""
    if isinstance(labels, np.ndarray):
        if labels.size and labels.max() >= 2**20:
            raise refuse(
                f"data.path = '{where}': label {labels.max()}", rule=LABELS, fix="labels from 0 on, without gaps"
            )
        return tuple(map(str, range(int(labels.max()) + 1))) if labels.size else ()
    return tuple(sorted({*labels}))


def _class_numbers(entries: Entries, numbers: dict[str, int], where: str) -> np.ndarray:
    """Returns the number of each picture's class. Shape [n], int32."""
    labels = entries.labels
    if isinstance(labels, np.ndarray):
        wrong = (labels < 0) | (labels >= len(numbers))
    else:
        wrong = np.array([label not in numbers for label in labels], bool)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise refuse(
            f"data.path = '{where}': label {labels[first]!r:.60} of {entries.names[first]}",
            rule=f"{LABELS}; the classes are {', '.join([*numbers][:8])}{', ...' * (len(numbers) > 8)}",
            fix="without these pictures, or data.images.classes = the names of all classes",
        )
    return np.asarray(labels if isinstance(labels, np.ndarray) else [numbers[label] for label in labels], np.int32)


def mark(files: Sequence[Path], settings: str) -> str:
    """Hash of the names, sizes and modification times of files, and of the settings that determine their index."""
    digest = hashlib.sha256(settings.encode())
    for file in files:
        status = file.stat()
        digest.update(f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def cached_entries(cache: Path, files: Sequence[Path], build: Callable[[], Entries]) -> Entries:
    """Returns the entries that a file caches; builds and writes them if there is no such file, or a damaged one.

    Args:
      cache: The .npz file, whose name has the `mark` of the files.
      files: The files that entries lie in.
      build: Reads the files.
    """
    try:
        with np.load(cache, allow_pickle=False) as saved:
            names, labels = (_split_texts(saved[key]) for key in ("names", "labels"))
            numbers = saved["numbers"]
            return Entries(tuple(files), names, saved["places"], numbers if len(numbers) else labels)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        entries = build()
    numbers, texts = (
        (entries.labels, []) if isinstance(entries.labels, np.ndarray) else (np.zeros(0, np.int64), entries.labels)
    )
    arrays = {
        "names": _join_texts(entries.names),
        "places": entries.places,
        "numbers": numbers,
        "labels": _join_texts(texts),
    }
    part = partial_path(cache)
    try:
        with part.open("wb") as stream:
            np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]
        part.replace(cache)
    except OSError as error:
        raise refuse(
            f"{cache}: {error.strerror}", rule="a run caches the index of its pictures", fix="free disk space"
        ) from error
    return entries


def _join_texts(texts: Sequence[str]) -> np.ndarray:
    return np.frombuffer("\0".join(texts).encode("utf-8", "surrogateescape"), np.uint8)


def _split_texts(joined: np.ndarray) -> list[str]:
    text = joined.tobytes().decode("utf-8", "surrogateescape")
    return text.split("\0") if text else []
