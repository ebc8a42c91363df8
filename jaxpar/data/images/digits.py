"""Writes scikit-learn's handwritten digits as pictures, a folder for each class: data for `configs/files/images.toml`.

$ python -m jaxpar.data.images.digits pictures
1,797 pictures of 8 x 8 pixels in pictures/0 to pictures/9
"""

import sys
from pathlib import Path

import numpy as np

from jaxpar.data.arrays import load_digits
from jaxpar.data.images.pixels import pillow
from jaxpar.errors import JaxparError


def write_digits(folder: Path, count: int | None = None) -> int:
    """Writes the digits as PNG files `CLASS/NUMBER.png`, and returns their number.

    Args:
      folder: The folder of the classes.
      count: Number of the first digits to write; None means all.

    Raises:
      JaxparError: If scikit-learn or Pillow is not installed.
    """
    image_module, digits = pillow(), load_digits()
    for number, (image, label) in enumerate(zip(digits["inputs"][:count], digits["labels"], strict=False)):
        path = folder / str(label) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image_module.fromarray(np.round(image * 255).astype(np.uint8)).save(path)
    return len(digits["inputs"][:count])


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "pictures")
    try:
        print(f"{write_digits(target):,} pictures of 8 x 8 pixels in {target}/0 to {target}/9")
    except JaxparError as error:
        sys.exit(f"error: {error}")
