"""The settings of a vision transformer."""

from dataclasses import dataclass

from jaxpar.errors import Keywords, check_ranges, nearest_divisor, refuse
from jaxpar.models.settings.heads import check_heads


@dataclass(frozen=True, kw_only=True)
class ViTSettings(Keywords):
    """Shape of a vision transformer.

    Attributes:
      size: Height and width of an image, in pixels.
      channels: Of an image; 1 also for images without a channel dim.
      patch: Height and width of a patch, in pixels.
      classes: Outputs.
      layers: Blocks.
      dim: Width of the stream between blocks.
      heads: Attention heads.
      hidden: Width of the feed-forward; 0 means 4 dim.
      dropout: Rate, in training only.
      scan: One compiled block run over stacked layers, instead of one copy per layer.
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
        most = 2**31 - 1
        check_ranges(
            self,
            "model",
            {name: (1, most) for name in ("size", "channels", "patch", "classes", "layers", "dim", "heads")}
            | {"hidden": (0, most), "dropout": (0, 1)},
            below=["dropout"],
        )
        if self.size % self.patch:
            raise refuse(
                f"size = {self.size}, patch = {self.patch}",
                rule="patch divides size: patches cover the image",
                fix=f"patch = {nearest_divisor(self.size, self.patch) or self.size}",
            )
        check_heads(self.dim, self.heads)
