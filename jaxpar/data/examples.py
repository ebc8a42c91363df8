"""Examples told apart by a number: which of them a step takes is a pure function, the same on every layout.

    step, batch ─► positions step * batch ... ─► epoch, place ─► permutation(seed, epoch)[place]

Some are held out: every k-th, spread over the whole set.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxpar.data.held_out import weighted
from jaxpar.data.spec import Batch, Data, Rows, Weighted


class Examples(ABC):
    """Examples that are told apart by a number; some are held out.

    Args:
      count: How many there are.
      spec: The `[data]` table.
      seed: Of their order.
    """

    def __init__(self, count: int, spec: Data, seed: int):
        self.spec, self.seed = spec, seed
        self.train, self.out = held_out(count, spec.held_out)

    @property
    def examples(self) -> int:
        """How many there are to train on."""
        return len(self.train)

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        return self._rows(self._chosen(step, size)[slice(None) if rows is None else rows])

    def where(self, step: int, size: int, row: int) -> str:
        """Returns in words where a row of a training batch lies."""
        return f"example {self._chosen(step, size)[row]} of {self.spec.path or self.spec.source}"

    def at(self, positions: np.ndarray) -> Batch:
        """Returns the examples at positions of the endless order of epochs: a mixture takes them one by one."""
        return self._rows(self.train[_placed(positions, len(self.train), seed=self.seed, shuffle=self.spec.shuffle)])

    def numbered(self, chosen: np.ndarray) -> Batch:
        """Returns examples by their place among those to train on, in the order of the data."""
        return self._rows(self.train[chosen])

    def held(self, places: np.ndarray) -> Batch:
        """Returns held-out examples by their place among them."""
        return self._rows(self.out[places])

    def _chosen(self, step: int, size: int) -> np.ndarray:
        return self.train[order(step, size, len(self.train), seed=self.seed, shuffle=self.spec.shuffle)]

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns the index-th `size` held-out examples; none after the last."""
        chosen = self.out[index * size : (index + 1) * size]
        return weighted(len(chosen), size, rows, lambda at: self._rows(chosen[at]))

    @abstractmethod
    def _rows(self, chosen: np.ndarray) -> Batch:
        """Returns these examples, by their numbers."""


@lru_cache(maxsize=2)  # a batch may span two epochs
def permutation(examples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of one epoch. Shape [examples], uint32 where that is enough: text has many windows."""
    places = np.arange(examples, dtype=np.uint32 if examples <= 2**32 else np.int64)
    np.random.Generator(np.random.Philox(key=[seed, epoch])).shuffle(places)  # the order does not depend on the dtype
    return places


def order(step: int, batch: int, examples: int, *, seed: int, shuffle: bool = True) -> np.ndarray:
    """Returns the examples of one step, as places among those to train on. Shape [batch], int64.

    Every example comes once per epoch; a batch may span two epochs.
    """
    return _placed(np.arange(step * batch, (step + 1) * batch), examples, seed=seed, shuffle=shuffle)


def _placed(positions: np.ndarray, examples: int, *, seed: int, shuffle: bool) -> np.ndarray:
    epochs, places = positions // examples, positions % examples
    if shuffle:
        for epoch in np.unique(epochs):
            within = epochs == epoch
            places[within] = permutation(examples, seed, int(epoch))[places[within]]
    return places.astype(np.int64)


@dataclass(frozen=True)
class Kept:
    """All examples but every k-th, counted rather than listed: the windows of a text would fill memory.

    Attributes:
      examples: There are.
      every: Which are left out: `every - 1`, `2 every - 1`, ...; 0 leaves out none.
    """

    examples: int
    every: int

    def __len__(self) -> int:
        return self.examples - (self.examples // self.every if self.every else 0)

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """Returns the examples at these places among those that are kept."""
        return places + places // (self.every - 1) if self.every else places


def held_out(examples: int, fraction: float) -> tuple[Kept, np.ndarray]:
    """Returns (training, held-out) examples: every k-th is held out, spread over the whole set."""
    if fraction * examples < 0.5:
        return Kept(examples, 0), np.arange(0)
    every = max(2, round(1 / fraction))
    return Kept(examples, every), np.arange(every - 1, examples, every)
