"""Which examples make the batch of a step: a pure function, the same on every layout.

step, batch ─► positions step * batch ... ─► epoch, place ─► permutation(seed, epoch)[place]
"""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def permutation(examples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of one epoch. Shape [examples], int64."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(examples)


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
    )


def held_out(examples: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns (training, held-out) examples: every k-th is held out, spread over the whole set."""
    if fraction * examples < 0.5:
        return np.arange(examples), np.arange(0)
    every = max(2, round(1 / fraction))
    out = np.arange(every - 1, examples, every)
    return np.setdiff1d(np.arange(examples), out, assume_unique=True), out
