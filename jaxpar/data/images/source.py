"""Batches of pictures: finds the pictures that `data.path` names, and those of a validation split; threads decode them.

    pictures/train/CLASS/*.jpg, pictures/val/CLASS/*.jpg      a split into training and validation
    pictures/CLASS/*.jpg                                      a share is held out
    shards/train-000.tar, shards/val-000.tar                  likewise; also .parquet, and folders train/ and val/

Threads read and decode the pictures of a step, and the batch depends on seed and step alone:

    position of an example ─► number of a picture ─► bytes ─► image     the random box is drawn from (seed, position)
"""

import hashlib
import json
import os
import re
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxpar.buckets import fetch
from jaxpar.data.images.formats import check_columns, class_folders, class_names, copy_pictures, list_folders, list_tars
from jaxpar.data.images.index import Entries, Index, cached_entries, join, mark
from jaxpar.data.images.pixels import augment, pillow, pixels
from jaxpar.data.packing import folder_lock, print_to_stderr
from jaxpar.data.spec import Batch, Data, Rows
from jaxpar.data.text import Examples, TrainIndices, text_files
from jaxpar.data.validate import CorruptBatch
from jaxpar.errors import refuse
from jaxpar.files import make_folder, write_json

VAL = ("val", "valid", "validation")
SPLITS = ("train", *VAL, "test")
_PREFIX = re.compile(rf"({'|'.join(SPLITS)})\b")
CLASSES = "classes.json"  # names of the classes, in the order of their labels


def open_index(spec: Data, folder: Path | None) -> Index:
    """Returns the index of a job's pictures.

    Args:
      spec: The `[data]` table.
      folder: Folder of cached indices; None reads the first tar or Parquet file alone, and writes nothing.

    Raises:
      JaxparError: If there are no pictures, or they cannot be listed.
    """
    where = spec.path if isinstance(spec.path, str) else ", ".join(spec.path)
    path = _folder(spec)
    if path is None:
        return _join_archives(spec, *_by_prefix(text_files(spec, print_to_stderr)), folder, where)
    train, val, notes = split_folders(path)
    if archives := _archives(train):
        if val is not None:
            return _join_archives(spec, archives, _archives(val), notes, folder, where)
        return _join_archives(spec, *_by_prefix(archives), folder, where)
    entries, names, more = list_folders(train)
    val_entries, _, val_notes = (None, (), ()) if val is None else list_folders(val)
    index = join(entries, val_entries, spec.images, names, where)
    return replace(index, notes=(*notes, *more, *val_notes))


def has_val(spec: Data) -> bool:
    """Whether `data.path` names a validation split."""
    path = _folder(spec)
    if path is None:
        return bool(_by_prefix(text_files(spec))[1])
    train, val, _ = split_folders(path)
    return val is not None or bool(_by_prefix(_archives(train))[1])


def split_folders(path: Path) -> tuple[Path, Path | None, tuple[str, ...]]:
    """Returns the folder of training pictures, that of validation, and messages to the user.

    Raises:
      JaxparError: If there is a folder train/, and none for validation.
    """
    folders = {folder.name: folder for folder in class_folders(path)}
    val = next((folders[name] for name in VAL if name in folders), None)
    if "train" in folders and val is not None:
        rest = sorted(folders.keys() - {"train", val.name})
        return folders["train"], val, (f"{path}: not read: {', '.join(rest)}",) if rest else ()
    if "train" in folders and folders.keys() <= {*SPLITS}:
        raise refuse(
            f"data.path = '{path}' has the folders {', '.join(folders)}",
            rule="a folder with train/ also has val/, whose pictures are held out for evaluation",
            fix=f"data.path = '{path}/train', of which a share is held out",
        )
    return path, None, ()


def _folder(spec: Data) -> Path | None:
    """Returns `data.path` if it is one folder.

    Raises:
      JaxparError: If it cannot be read.
    """
    if not isinstance(spec.path, str):
        return None
    try:
        path = Path(fetch(spec.path)).expanduser()
        return path if path.is_dir() else None
    except (OSError, ValueError, RuntimeError) as error:
        raise refuse(
            f"data.path = {spec.path!r}: {error}", rule="a path is a file, a folder or a glob", fix='path = "pictures"'
        ) from error


def _archives(folder: Path) -> list[Path]:
    """Returns the tar files or Parquet files in a folder, sorted; [] if it has none."""
    return sorted(path for path in folder.iterdir() if _kind(path) and path.is_file() and path.name[0] != ".")


def _kind(path: Path) -> str:
    name = path.name.lower()
    return "parquet" if name.endswith(".parquet") else "tar" if re.search(r"\.(tar|tgz|tar\.\w+)$", name) else ""


def _by_prefix(files: Sequence[Path]) -> tuple[list[Path], list[Path], tuple[str, ...]]:
    """Splits files by the beginnings of their names into training and validation, and describes the others.

    Only if some are named train-..., as Hugging Face's are; else all are of training.
    """
    prefixes = {file: match[1] if (match := _PREFIX.match(file.name)) else "" for file in files}
    if "train" not in prefixes.values():
        return list(files), [], ()
    train = [file for file, prefix in prefixes.items() if prefix == "train"]
    val = [file for file, prefix in prefixes.items() if prefix in VAL]
    rest = [file for file in files if file not in {*train, *val}]
    return (
        train,
        val,
        (f"{len(rest)} files of data.path are of no split train or val and not read: {rest[0]}",) if rest else (),
    )


def _join_archives(
    spec: Data, train: Sequence[Path], val: Sequence[Path], notes: tuple[str, ...], folder: Path | None, where: str
) -> Index:
    kinds = {_kind(file) for file in (*train, *val)}
    if len(kinds) != 1 or kinds == {""} or not train:
        raise refuse(
            f"data.path = '{where}' names {', '.join(file.name for file in (*train, *val)[:3])}",
            rule="pictures come in folders of classes, in .tar files or in .parquet files",
            fix='path = "pictures", or path = "shards/*.tar"',
        )
    is_parquet = kinds == {"parquet"}
    if folder is None:  # a check reads the beginning
        train, val = train[:1], []
    names = class_names(train[0], spec.images.label) if is_parquet else ()
    entries = _entries(train, spec, folder, is_parquet=is_parquet)
    val_entries = _entries(val, spec, folder, is_parquet=is_parquet) if val else None
    return replace(join(entries, val_entries, spec.images, names, where), notes=notes)


def _entries(files: Sequence[Path], spec: Data, folder: Path | None, *, is_parquet: bool) -> Entries:
    """Returns the pictures of tar or Parquet files, from the cache of a folder if there is one."""
    config = spec.images
    if folder is None:
        return list_tars(files, config.label)
    settings = json.dumps([is_parquet, config.label, config.image if is_parquet else ""])
    cache = folder / f"pictures-{mark(files, settings)}.npz"
    target = cache.with_suffix(".bin")
    with folder_lock(folder, print_to_stderr):
        if not is_parquet:
            return cached_entries(cache, files, lambda: list_tars(files, config.label))
        if not target.exists():
            cache.unlink(missing_ok=True)
        return cached_entries(cache, [target], lambda: copy_pictures(files, config, target))


def peek(spec: Data) -> tuple[Index | None, str]:
    """Reads the beginning of a job's pictures, and writes nothing.

    Returns:
      The index of all folders, or of the first tar file; None for Parquet. A line that describes it.

    Raises:
      JaxparError: If there are none, or Parquet has no such columns.
    """
    path = _folder(spec)
    files = text_files(spec) if path is None else _archives(split_folders(path)[0])
    if files and all(_kind(file) == "parquet" for file in files):
        for file in files:
            check_columns(file, spec.images)
        return None, f"{len(files)} Parquet file{'s' * (len(files) > 1)} of pictures"
    index = open_index(spec, None)
    return index, index.describe() + f" (in the first of {len(files)} tar files)" * (len(files) > 1)


class Images(Examples):
    """Pictures as `inputs` [batch, height, width, channels], float32, and `labels` [batch], int32.

    Args:
      index: The pictures.
      spec: The `[data]` table.
      seed: Seed of the shuffle and of random boxes.
    """

    def __init__(self, index: Index, spec: Data, seed: int):
        super().__init__(index.train, replace(spec, held_out=0.0), seed)
        self.index, self.spec, self.fingerprint = index, spec, index.fingerprint
        if index.train < len(index.labels):
            self.held_out_indices = np.arange(index.train, len(index.labels))
        else:
            self.train_indices, self.held_out_indices = split_by_name(index.names, spec.held_out)
        self._pool: ThreadPoolExecutor | None = None

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step, its images cropped and changed as the `[data]` table says."""
        selection = slice(None) if rows is None else rows
        positions = np.arange(step * size, (step + 1) * size)[selection]
        batch = self._decode(self._batch_indices(step, size)[selection], positions)
        return augment(batch, positions, self.spec.augment, self.seed) if self.spec.augment else batch

    def where(self, step: int, size: int, row: int) -> str:
        """Returns the name of the picture in a row of a training batch."""
        return self.index.names[int(self._batch_indices(step, size)[row])]

    def _rows(self, chosen: np.ndarray) -> Batch:
        numbers, inverse = np.unique(chosen, return_inverse=True)  # a padded batch repeats its first examples
        return {name: value[inverse] for name, value in self._decode(numbers, None).items()}

    def _decode(self, chosen: np.ndarray, positions: np.ndarray | None) -> Batch:
        images = np.empty((len(chosen), *self.spec.images.shape), np.float32)
        places = [None] * len(chosen) if positions is None else positions.tolist()
        for row, image in enumerate(self._threads.map(self._image, chosen.tolist(), places)):
            images[row] = image
        return {"inputs": images, "labels": self.index.labels[chosen]}

    def _image(self, number: int, position: int | None) -> np.ndarray:
        name = self.index.names[number]
        try:
            content = self.index.read(number)
        except OSError as error:
            problem = refuse(
                f"{name}: {error.strerror}", rule="pictures stay while a run reads them", fix="the same pictures again"
            )
            raise CorruptBatch(*problem.problems) from error
        # `augment` draws from the same key: the stream is another one
        numbers = (
            None if position is None else np.random.Generator(np.random.Philox(key=[self.seed, position]).jumped())
        )
        return pixels(content, self.spec.images, name, numbers)

    @property
    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.spec.images.threads or os.cpu_count() or 1, "pictures")
            weakref.finalize(self, self._pool.shutdown, wait=False)
        return self._pool


def split_by_name(names: Sequence[str], fraction: float) -> tuple[TrainIndices | np.ndarray, np.ndarray]:
    """Splits pictures into (training, held-out): held out are those whose names have the smallest hashes.

    So a picture that is added changes the split of hardly any other.
    """
    count = round(fraction * len(names))
    if not count:
        return TrainIndices(len(names), 0), np.arange(0)
    hashes = [hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest() for name in names]
    held_out = np.array(sorted(range(len(names)), key=hashes.__getitem__)[:count])
    return np.setdiff1d(np.arange(len(names)), held_out), np.sort(held_out)


def open_images(spec: Data, folder: Path, seed: int) -> Images:
    """Opens the pictures of a job, and writes the names of its classes into the folder.

    Args:
      spec: The `[data]` table.
      folder: Folder of the run's data.
      seed: Seed of the shuffle and of random boxes.

    Raises:
      JaxparError: If there are none, or an index cannot be built.
    """
    pillow()
    make_folder(folder)
    index = open_index(spec, folder)
    for note in index.notes:
        print_to_stderr(note)
    write_json(folder / CLASSES, list(index.classes))
    return Images(index, spec, seed)
