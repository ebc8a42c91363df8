"""The settings of models whose output is logits of classes: of images, volumes and arrays."""

from dataclasses import dataclass
from typing import Literal

from jaxpar.errors import Keywords, check_ranges, nearest_divisor, refuse
from jaxpar.models.settings.decoder import check_heads

HIGH = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class AlexNetConfig:
    """Shape of an AlexNet; the defaults are those of Krizhevsky 2014, 61.1 M parameters.

    Attributes:
      size: Height and width of an image, in pixels.
      channels: Channels of an image.
      classes: Number of outputs.
      width: Channels of the first convolution; the others follow in the published ratios.
      hidden: Width of the two hidden dense layers.
      dropout: Dropout rate before each of them, in training only.
    """

    size: int = 224
    channels: int = 3
    classes: int = 1000
    width: int = 64
    hidden: int = 4096
    dropout: float = 0.5

    def __post_init__(self):
        numbers = {name: (1, HIGH) for name in ("channels", "classes", "width", "hidden")}
        check_ranges(self, "model", {"size": (63, HIGH), "dropout": (0, 1)} | numbers, below=["dropout"])


@dataclass(frozen=True, kw_only=True)
class VGGConfig:
    """Shape of a VGG network; the defaults are VGG-16, 138.4 M parameters.

    Attributes:
      size: Height and width of an image, in pixels.
      channels: Channels of an image.
      classes: Number of outputs.
      blocks: 3x3 convolutions in each stage; every stage ends by halving the image.
      width: Channels of the first stage; each stage doubles them, up to eight times as many.
      hidden: Width of the two hidden dense layers.
      dropout: Dropout rate after each hidden dense layer, in training only.
    """

    size: int = 224
    channels: int = 3
    classes: int = 1000
    blocks: tuple[int, ...] = (2, 2, 3, 3, 3)
    width: int = 64
    hidden: int = 4096
    dropout: float = 0.5

    def __post_init__(self):
        numbers = {name: (1, HIGH) for name in ("size", "channels", "classes", "width", "hidden")}
        check_ranges(self, "model", {"dropout": (0, 1)} | numbers, below=["dropout"])
        if not self.blocks or min(self.blocks) < 1:
            raise refuse(
                f"model.blocks = {list(self.blocks)}",
                rule="every stage has a convolution",
                fix="blocks = [2, 2, 3, 3, 3]",
            )
        if self.size % 2 ** len(self.blocks):
            raise refuse(
                f"model.size = {self.size} with {len(self.blocks)} stages",
                rule="every stage halves the image",
                fix=f"size = {max(1, round(self.size / 2 ** len(self.blocks))) * 2 ** len(self.blocks)}",
            )


@dataclass(frozen=True, kw_only=True)
class GoogLeNetConfig:
    """Shape of a GoogLeNet; the defaults are the published one, 22 layers, without its auxiliary classifiers.

    Attributes:
      channels: Channels of an image.
      classes: Number of outputs.
      width: Channels of the first convolution; the others follow in the published ratios.
      dropout: Dropout rate before the last layer, in training only.
    """

    channels: int = 3
    classes: int = 1000
    width: int = 64
    dropout: float = 0.4

    def __post_init__(self):
        numbers = {name: (1, HIGH) for name in ("channels", "classes")}
        check_ranges(self, "model", {"width": (4, HIGH), "dropout": (0, 1)} | numbers, below=["dropout"])


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
        check_ranges(self, "model", {"channels": (1, HIGH), "classes": (1, HIGH), "width": (1, HIGH)})
        if not self.blocks or min(self.blocks) < 1:
            raise refuse(
                f"model.blocks = {list(self.blocks)}", rule="every stage has a block", fix="blocks = [1, 1, 1]"
            )


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """Shape of a U-Net, for images or volumes.

    Attributes:
      channels: Channels of an image; 1 also for images without a channel dim.
      classes: Outputs of each pixel.
      dims: 2 for images, 3 for volumes.
      levels: Number of resolutions; each halves the one before, so 2 ** (levels - 1) divides the image.
      width: Channels at full resolution; each level doubles them.
      groups: Groups of GroupNorm; 0 means BatchNorm.
    """

    channels: int = 1
    classes: int = 2
    dims: int = 2
    levels: int = 3
    width: int = 16
    groups: int = 0

    def __post_init__(self):
        numbers = {name: (1, HIGH) for name in ("channels", "classes", "levels", "width")}
        check_ranges(self, "model", numbers | {"dims": (2, 3), "groups": (0, HIGH)})
        if self.groups and self.width % self.groups:
            raise refuse(
                f"model.groups = {self.groups}, width = {self.width}",
                rule="groups divide the channels",
                fix="groups = 1",
            )


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


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Shape of a multilayer perceptron.

    Attributes:
      inputs: Numbers per example, after flattening.
      classes: Number of outputs.
      layers: Pairs of matrices (dim to hidden, hidden to dim).
      dim: Width between pairs.
      hidden: Width inside a pair.
    """

    inputs: int = 64
    classes: int = 10
    layers: int = 2
    dim: int = 64
    hidden: int = 256

    def __post_init__(self):
        high = 2**31 - 1
        check_ranges(
            self,
            "model",
            {"inputs": (1, high), "classes": (1, high), "layers": (0, high), "dim": (1, high), "hidden": (1, high)},
        )
