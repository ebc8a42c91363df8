"""The examples of each step's batch: a pure function, the same on every layout.

step, batch ─► positions step * batch ... ─► epoch, place ─► permutation(seed, epoch)[place]
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=2)  # a batch may span two epochs
def permutation(examples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of one epoch. Shape [examples], uint32 where that is enough: text has many windows."""
    order = np.arange(examples, dtype=np.uint32 if examples <= 2**32 else np.int64)
    np.random.Generator(np.random.Philox(key=[seed, epoch])).shuffle(order)  # the order does not depend on the dtype
    return order


def rows(step: int, batch: int, examples: int, *, seed: int, shuffle: bool = True) -> np.ndarray:
    """Returns the examples of one step. Shape [batch], int64.

    Every example comes once per epoch; a batch may span two epochs.
    """
    positions = np.arange(step * batch, (step + 1) * batch)
    epochs, places = positions // examples, positions % examples
    if not shuffle:
        return places
    return np.concatenate(
        [permutation(examples, seed, int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)]
    ).astype(np.int64)


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
