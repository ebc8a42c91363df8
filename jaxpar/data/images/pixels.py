"""Decodes a picture, crops it and resizes it to the size of a job, by Pillow; and changes images at random.

    bytes ─► upright picture in RGB or L ─► crop box ─► bilinear, antialiased ─► [height, width, channels] float32

    flip    half of the images are mirrored along their second dim (the width)
    crop    each image is shifted by up to an eighth of its height and width; what is uncovered is mirrored

Random boxes: Szegedy et al. 2015, arXiv:1409.4842, section 6, in the form of torchvision's `RandomResizedCrop`. Random
changes depend on nothing but the seed and the position of an example in the run, and all arrays of an example that have
rows and columns change alike: an image and the labels of its pixels. So a run that resumes, on any number of processes,
sees the same images to the bit.
"""

import io
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpar.data.images.image_config import MODES, ImageConfig
from jaxpar.data.spec import AUGMENTATIONS, Batch
from jaxpar.data.validate import CorruptBatch
from jaxpar.errors import refuse

AREA = (0.08, 1.0)  # share of a picture's area that a random box has
LOG_ASPECT = (math.log(3 / 4), math.log(4 / 3))  # logarithm of width / height of a random box
ATTEMPTS = 10  # random boxes that are tried before the largest centered one is taken
DEEP = ("I", "I;16", "I;16B", "I;16L", "F")  # Pillow's modes of more than 8 bits, which it would clip to 255
# exceptions of Pillow on damaged pictures
DECODE_ERRORS = (
    OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error,
    zlib.error,
)  # fmt: skip


class Crop(NamedTuple):
    """A box of a picture, in pixels from its upper left corner."""

    left: float
    upper: float
    right: float
    lower: float


def pillow() -> Any:
    """Imports Pillow's module of images.

    Raises:
      JaxparError: If Pillow is not installed.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise refuse(
            "data.source = 'images' without Pillow",
            rule="pictures are decoded by Pillow",
            fix="pip install 'jaxpar[images]'",
        ) from error
    return Image


def decode(content: bytes, config: ImageConfig, where: str) -> Any:
    """Decodes a picture, upright as its EXIF orientation says, in the mode of the job's channels.

    Args:
      content: The encoded picture.
      config: The `[data.images]` table.
      where: Name of the picture in errors.

    Raises:
      CorruptBatch: If it is no picture, is damaged or truncated, or has more than 8 bits per channel.
    """
    image_module = pillow()
    from PIL import ImageOps

    try:
        with image_module.open(io.BytesIO(content)) as picture:
            if picture.mode in DEEP:
                raise ValueError(f"its mode {picture.mode} has more than 8 bits per channel")
            upright = ImageOps.exif_transpose(picture)
            if upright.mode == "P" and "transparency" in upright.info:  # else Pillow warns
                upright = upright.convert("RGBA")
            return upright.convert(MODES[config.channels])
    except (*DECODE_ERRORS, image_module.DecompressionBombError, image_module.DecompressionBombWarning) as error:
        problem = refuse(
            f"{where}: {_reason(error, content)}",
            rule="a picture is whole and has 8 bits per channel",
            fix="another copy of it, or without it",
        )
        raise CorruptBatch(*problem.problems) from error


def _reason(error: BaseException, content: bytes) -> str:
    """Describes an error of Pillow, whose message about unknown bytes names an object in memory."""
    if not content:
        return "it is empty"
    return "it is no picture" if "cannot identify" in str(error) else f"{error or type(error).__name__}"


def center_box(width: int, height: int, config: ImageConfig) -> Crop:
    """Returns the largest box in the middle of a picture that has the shape of an image, times `crop_share`."""
    rows, columns, _ = config.shape
    scale = min(width / columns, height / rows) * config.crop_share
    box_width, box_height = columns * scale, rows * scale
    left, upper = (width - box_width) / 2, (height - box_height) / 2
    return Crop(left, upper, min(left + box_width, width), min(upper + box_height, height))


def random_box(width: int, height: int, numbers: np.random.Generator) -> Crop:
    """Draws a random box of a picture, uniformly in area, in logarithm of aspect ratio, and in position.

    If none of `ATTEMPTS` drawn boxes fits into the picture, the result is the largest centered box with an allowed
    aspect ratio.
    """
    for _ in range(ATTEMPTS):
        area = width * height * numbers.uniform(*AREA)
        aspect = math.exp(numbers.uniform(*LOG_ASPECT))
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(numbers.integers(0, width - box_width + 1))
            upper = int(numbers.integers(0, height - box_height + 1))
            return Crop(left, upper, left + box_width, upper + box_height)
    low, high = (math.exp(bound) for bound in LOG_ASPECT)
    box_width = min(width, max(1, round(height * high))) if width / height > high else width
    box_height = min(height, max(1, round(width / low))) if width / height < low else height
    left, upper = (width - box_width) // 2, (height - box_height) // 2
    return Crop(left, upper, left + box_width, upper + box_height)


def pixels(content: bytes, config: ImageConfig, where: str, numbers: np.random.Generator | None) -> np.ndarray:
    """Returns the image of a picture. Shape [height, width, channels], float32, normalized.

    Args:
      content: The encoded picture.
      config: The `[data.images]` table.
      where: Name of the picture in errors.
      numbers: Random numbers of this example in training; None takes the middle.

    Raises:
      CorruptBatch: If it cannot be decoded, or has another size with `resize = "exact"`.
    """
    picture = decode(content, config, where)
    rows, columns, channels = config.shape
    if config.resize == "exact" and picture.size != (columns, rows):
        problem = refuse(
            f"{where} has {picture.height} x {picture.width} pixels, data.images.size = {[rows, columns]}",
            rule='with resize = "exact" every picture has the size of the images',
            fix='resize = "center_crop"',
        )
        raise CorruptBatch(*problem.problems)
    if config.resize == "random_resized_crop" and numbers is not None:
        box = random_box(picture.width, picture.height, numbers)
    else:
        box = center_box(picture.width, picture.height, config)
    if picture.size != (columns, rows) or box != (0, 0, columns, rows):
        picture = picture.resize((columns, rows), pillow().Resampling.BILINEAR, box=box)
    image = np.asarray(picture, np.float32).reshape(rows, columns, channels) / np.float32(255)
    if config.mean:
        image = image - np.asarray(config.mean, np.float32)
    return image / np.asarray(config.std, np.float32) if config.std else image


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
