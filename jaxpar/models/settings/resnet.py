"""The settings of a residual network."""

from dataclasses import dataclass
from typing import Literal

from jaxpar.errors import check_ranges, refuse


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Shape of a residual network.

    Attributes:
      channels: Channels of an image; 1 also for images without a channel dim.
      classes: Number of outputs.
      blocks: Residual blocks in each stage; every stage after the first halves the image.
      width: Channels of the first stage; each stage doubles them.
      bottleneck: Blocks of 1x1, 3x3 and 1x1 convolutions with four times the channels outside, as in ResNet-50, instead
        of two 3x3 convolutions.
      stem: "small", a 3x3 convolution, or "large", a 7x7 convolution of stride 2 and a pool of stride 2, for ImageNet.
    """

    channels: int = 1
    classes: int = 10
    blocks: tuple[int, ...] = (1, 1, 1)
    width: int = 16
    bottleneck: bool = False
    stem: Literal["small", "large"] = "small"

    def __post_init__(self):
        high = 2**31 - 1
        check_ranges(self, "model", {"channels": (1, high), "classes": (1, high), "width": (1, high)})
        if not self.blocks or min(self.blocks) < 1:
            raise refuse(
                f"model.blocks = {list(self.blocks)}", rule="every stage has a block", fix="blocks = [1, 1, 1]"
            )
