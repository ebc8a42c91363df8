"""The `[data.images]` table of a job."""

from dataclasses import dataclass
from typing import Literal

from jaxpar.errors import JaxparError, Keywords, Problem, check_ranges

MODES = {1: "L", 3: "RGB"}  # channels to Pillow's mode
LARGEST = 2**14  # rows and columns of an image


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Keywords):
    """How pictures become arrays `inputs` [batch, height, width, channels], float32, and `labels` [batch], int32.

    Attributes:
      size: Height and width of an image in pixels, or one number for both.
      resize: center_crop resizes the largest box in the middle that has the shape of `size`; random_resized_crop takes
        a random box for training, of 8 % to 100 % of the area, and the middle for evaluation; exact refuses pictures of
        another size.
      crop_share: Share of that box's height and width that center_crop keeps; 0.875 is usual for ImageNet.
      channels: 3 for red, green and blue; 1 for brightness. Transparency is dropped.
      mean: Number of each channel to subtract, of values within 0..1; one number for all; none by default.
      std: Number of each channel to divide by, after `mean` is subtracted; one number for all; none by default.
      classes: Names of the classes, in the order of their labels; default: the sorted names of the folders.
      image: Column of Parquet with the pictures: bytes, or Hugging Face's {bytes, path}.
      label: Column of Parquet with the labels, and the key of a webdataset's .json.
      threads: Threads that decode; 0 means one for each core. More change no number.
    """

    size: int | tuple[int, int] = 224
    resize: Literal["center_crop", "random_resized_crop", "exact"] = "center_crop"
    crop_share: float = 1.0
    channels: int = 3
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    classes: tuple[str, ...] = ()
    image: str = "image"
    label: str = "label"
    threads: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        height, width = (self.size, self.size) if isinstance(self.size, int) else self.size
        return height, width, self.channels

    def __post_init__(self):
        problems: list[Problem] = []
        try:
            check_ranges(self, "data.images", {"crop_share": (0.01, 1.0), "threads": (0, 1024)})
        except JaxparError as error:
            problems += error.problems
        sides = (self.size,) if isinstance(self.size, int) else tuple(self.size)
        if len(sides) > 2 or not sides or not all(type(side) is int and 1 <= side <= LARGEST for side in sides):
            rule = f"an image has a height and a width within 1..{LARGEST}, or one number for both"
            problems.append(Problem(f"data.images.size = {self.size!r}", rule, "size = 224, or size = [192, 256]"))
        if self.channels not in MODES:
            rule = "an image has 3 channels (red, green, blue) or 1 (brightness)"
            problems.append(Problem(f"data.images.channels = {self.channels!r}", rule, "channels = 3"))
        problems += [problem for key in ("mean", "std") for problem in self._norm_problems(key)]
        if self.resize != "center_crop" and self.crop_share != 1 and self.resize == "exact":
            rule = "pictures of the exact size are not cropped"
            problems.append(Problem(f"data.images.crop_share = {self.crop_share} with exact", rule, "leave it out"))
        if len({*self.classes}) != len(self.classes):
            got = f"data.images.classes = {list(self.classes)}"
            problems.append(Problem(got, "each class has one label", "each name once"))
        if problems:
            raise JaxparError(*problems)

    def _norm_problems(self, key: str) -> list[Problem]:
        values = getattr(self, key)
        numbers = all(isinstance(value, int | float) and abs(value) < float("inf") for value in values)
        if numbers and len(values) in (0, 1, self.channels) and (key == "mean" or min(values, default=1.0) > 0):
            return []
        rule = f"{key} has a{' positive' * (key == 'std')} number for each channel ({self.channels}), or one for all"
        fix = "mean = [0.485, 0.456, 0.406]" if key == "mean" else "std = [0.229, 0.224, 0.225]"
        return [Problem(f"data.images.{key} = {list(values)}", rule, fix if self.channels == 3 else f"{key} = [0.5]")]
