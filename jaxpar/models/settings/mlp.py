"""The settings of a multilayer perceptron."""

from dataclasses import dataclass

from jaxpar.errors import check_ranges


@dataclass(frozen=True, kw_only=True)
class MLPSettings:
    """Shape of a multilayer perceptron.

    Attributes:
      inputs: Numbers per example, after flattening.
      classes: Outputs.
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
        most = 2**31 - 1
        check_ranges(
            self,
            "model",
            {"inputs": (1, most), "classes": (1, most), "layers": (0, most), "dim": (1, most), "hidden": (1, most)},
        )
