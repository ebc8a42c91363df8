"""Examples in memory, and the split that holds some out.

    step, batch ─► positions step * batch ... ─► epoch, place ─► permutation(seed, epoch)[place]

Every k-th example is held out, spread over the whole set.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxpar.data.spec import Batch, Data, Rows, WeightedBatch

# Batches held-out examples at a fixed size, and counts each example once under any additive loss function.
#
#     80 examples, batches of 48      1     x loss sums of [0 .. 47]
#                                     1     x loss sums of [48 .. 79, 48 x 16]     32 examples, padded with 16 copies
#                                   - 16/48 x loss sums of [48 x 48]               subtracts the copies
#
# A smaller last batch would be another program to compile, and the mesh may not divide it. A mask would have to be read
# by the loss function. Sums and counts, as nearly every loss function returns them, add up over examples: so a batch of
# copies of one example measures its sums, which are subtracted. The evaluation loop checks that sums add up
# (`jaxpar.train.incomplete_batches`).


def weighted_batches(count: int, size: int, rows: Rows, read: Callable[[np.ndarray], Batch]) -> list[WeightedBatch]:
    """Returns batches of `size` rows whose weighted loss sums count each of `count` examples once.

    If the examples fit several times, all are repeated as often, so fewer than half of the rows are padding: the
    subtracted sum is smaller than the other, and float32 sums keep their digits.

    Args:
      count: Number of examples, at most `size`; 0 gives no batch.
      size: Rows of a batch.
      rows: The rows of the batches to return, in order; None means all.
      read: Maps indices of examples, below `count`, to their arrays.
    """
    if not count:
        return []
    copies, padding = divmod(size, count)
    indices = np.concatenate([np.tile(np.arange(count), copies), np.zeros((padding,), np.int64)])
    selection = slice(None) if rows is None else rows
    batches = [WeightedBatch(1 / copies, read(indices[selection]), count if count < size else 0)]
    if padding:
        batches.append(WeightedBatch(-padding / (size * copies), read(np.zeros_like(indices)[selection])))
    return batches


class Examples(ABC):
    """Indexed examples, a share of them held out.

    Args:
      count: Number of examples, held-out ones included.
      spec: The `[data]` table.
      seed: Seed of the shuffle.
    """

    def __init__(self, count: int, spec: Data, seed: int):
        self.spec, self.seed = spec, seed
        self.train_indices, self.held_out_indices = split_held_out(count, spec.held_out)

    @property
    def examples(self) -> int:
        """Number of training examples."""
        return len(self.train_indices)

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        return self._rows(self._chosen(step, size)[slice(None) if rows is None else rows])

    def where(self, step: int, size: int, row: int) -> str:
        """Describes where a row of a training batch comes from."""
        return f"example {self._chosen(step, size)[row]} of {self.spec.path or self.spec.source}"

    def at_positions(self, positions: np.ndarray) -> Batch:
        """Returns the examples at positions of the endless sequence of epochs, as a mixture draws them."""
        return self._rows(
            self.train_indices[
                _shuffled_indices(positions, len(self.train_indices), seed=self.seed, shuffle=self.spec.shuffle)
            ]
        )

    def by_index(self, chosen: np.ndarray) -> Batch:
        """Returns training examples by index, in the order of the data."""
        return self._rows(self.train_indices[chosen])

    def held_out_examples(self, places: np.ndarray) -> Batch:
        """Returns held-out examples by index among the held-out ones."""
        return self._rows(self.held_out_indices[places])

    def _chosen(self, step: int, size: int) -> np.ndarray:
        return self.train_indices[order(step, size, len(self.train_indices), seed=self.seed, shuffle=self.spec.shuffle)]

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Returns the index-th group of `size` held-out examples; none after the last."""
        chosen = self.held_out_indices[index * size : (index + 1) * size]
        return weighted_batches(len(chosen), size, rows, lambda indices: self._rows(chosen[indices]))

    @abstractmethod
    def _rows(self, chosen: np.ndarray) -> Batch:
        """Returns the examples with these indices, stacked."""


@lru_cache(maxsize=2)  # a batch may span two epochs
def permutation(examples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of one epoch. Shape [examples], uint32 if it suffices: text has many windows."""
    places = np.arange(examples, dtype=np.uint32 if examples <= 2**32 else np.int64)
    np.random.Generator(np.random.Philox(key=[seed, epoch])).shuffle(places)  # the order does not depend on the dtype
    return places


def order(step: int, batch: int, examples: int, *, seed: int, shuffle: bool = True) -> np.ndarray:
    """Returns the indices of a step's batch among the training examples. Shape [batch], int64.

    Every example comes once per epoch; a batch may span two epochs.
    """
    return _shuffled_indices(np.arange(step * batch, (step + 1) * batch), examples, seed=seed, shuffle=shuffle)


def _shuffled_indices(positions: np.ndarray, examples: int, *, seed: int, shuffle: bool) -> np.ndarray:
    epochs, places = positions // examples, positions % examples
    if shuffle:
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            places[in_epoch] = permutation(examples, seed, int(epoch))[places[in_epoch]]
    return places.astype(np.int64)


@dataclass(frozen=True)
class TrainIndices:
    """Indices of the training examples, computed rather than stored: the windows of a text would fill memory.

    Attributes:
      examples: Number of all examples.
      stride: The held-out ones are `every - 1`, `2 every - 1`, ...; 0 holds out none.
    """

    examples: int
    stride: int

    def __len__(self) -> int:
        return self.examples - (self.examples // self.stride if self.stride else 0)

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """Returns the indices among all examples of these indices among the training examples."""
        return places + places // (self.stride - 1) if self.stride else places


def split_held_out(examples: int, fraction: float) -> tuple[TrainIndices, np.ndarray]:
    """Splits indices into (training, held-out): every k-th is held out, spread over the whole set."""
    if fraction * examples < 0.5:
        return TrainIndices(examples, 0), np.arange(0)
    every = max(2, round(1 / fraction))
    return TrainIndices(examples, every), np.arange(every - 1, examples, every)
