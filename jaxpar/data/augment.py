"""Random changes of images that depend on nothing but the seed and the position of an example in the run.

    flip    half of the images are mirrored along their second dim (the width)
    crop    each image is shifted by up to an eighth of its height and width; what is uncovered is mirrored

All arrays of an example that have rows and columns change alike: an image and the labels of its pixels. So a run that
resumes, on any number of processes, sees the same images to the bit.
"""

from collections.abc import Sequence

import numpy as np

from jaxpar.data.spec import AUGMENTATIONS, Batch
from jaxpar.errors import refuse


def augment(batch: Batch, positions: np.ndarray, kinds: Sequence[str], seed: int) -> Batch:
    """Returns a batch with its images changed.

    Args:
      batch: Arrays of examples; images are arrays [examples, height, width, ...].
      positions: Position of each example in the endless sequence of training examples. Shape [examples].
      kinds: Some of `AUGMENTATIONS`.
      seed: The seed of the run's data.

    Raises:
      JaxparError: If no array has rows and columns.
    """
    names = [name for name, value in batch.items() if value.ndim > 2]
    if not names:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
        raise refuse(
            f"data.augment = {list(kinds)} of {shapes}",
            rule="images have rows and columns: [examples, height, width, ...]",
            fix="leave data.augment out",
        )
    changed = {name: batch[name].copy() for name in names}
    for row, position in enumerate(positions):
        numbers = np.random.Generator(np.random.Philox(key=[seed, int(position)]))
        flipped, shifts = numbers.random() < 0.5, numbers.random(2) * 2 - 1
        for name in names:
            image = batch[name][row]
            if AUGMENTATIONS[0] in kinds and flipped:
                image = image[:, ::-1]
            if AUGMENTATIONS[1] in kinds:
                shift = [round(share * (size // 8)) for share, size in zip(shifts, image.shape, strict=False)]
                image = _shift(image, shift)
            changed[name][row] = image
    return {**batch, **changed}


def _shift(image: np.ndarray, shifts: Sequence[int]) -> np.ndarray:
    border = [(abs(shift), abs(shift)) for shift in shifts] + [(0, 0)] * (image.ndim - len(shifts))
    padded = np.pad(image, border, mode="symmetric")
    starts = [abs(shift) + shift for shift in shifts]
    return padded[tuple(slice(start, start + size) for start, size in zip(starts, image.shape, strict=False))]
