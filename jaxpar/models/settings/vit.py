"""The settings of a vision transformer."""

from dataclasses import dataclass

from jaxpar.errors import Keywords, check_ranges, nearest_divisor, refuse
from jaxpar.models.settings.decoder import check_heads


@dataclass(frozen=True, kw_only=True, repr=False)
class ViTConfig(Keywords):
    """Shape of a vision transformer.

    Attributes:
      size: Height and width of an image, in pixels.
      channels: Channels of an image; 1 also for images without a channel dim.
      patch: Height and width of a patch, in pixels.
      classes: Number of outputs.
      layers: Number of blocks.
      dim: Width of the stream between blocks.
      heads: Attention heads.
      hidden: Width of the feed-forward; 0 means 4 dim.
      dropout: Dropout rate, in training only.
      scan: Run one compiled block over stacked layers, instead of compiling one copy per layer.
    """

    size: int = 8
    channels: int = 1
    patch: int = 2
    classes: int = 10
    layers: int = 4
    dim: int = 64
    heads: int = 4
    hidden: int = 0
    dropout: float = 0.0
    scan: bool = True

    def __post_init__(self):
        high = 2**31 - 1
        check_ranges(
            self,
            "model",
            {name: (1, high) for name in ("size", "channels", "patch", "classes", "layers", "dim", "heads")}
            | {"hidden": (0, high), "dropout": (0, 1)},
            below=["dropout"],
        )
        if self.size % self.patch:
            raise refuse(
                f"size = {self.size}, patch = {self.patch}",
                rule="patch divides size: patches cover the image",
                fix=f"patch = {nearest_divisor(self.size, self.patch) or self.size}",
            )
        check_heads(self.dim, self.heads)
