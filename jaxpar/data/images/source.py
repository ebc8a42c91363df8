"""Batches of pictures: threads read and decode those of a step, and the batch depends on seed and step alone.

position of an example ─► number of a picture ─► bytes ─► image     the random box is drawn from (seed, position)
"""

import hashlib
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxpar.data.images.index import Index
from jaxpar.data.images.listing import open_index
from jaxpar.data.images.pixels import augment, pillow, pixels
from jaxpar.data.packing import print_to_stderr
from jaxpar.data.spec import Batch, Data, Rows
from jaxpar.data.text import Examples, TrainIndices
from jaxpar.data.validate import CorruptBatch
from jaxpar.errors import refuse
from jaxpar.files import make_folder, write_json

CLASSES = "classes.json"  # names of the classes, in the order of their labels


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
