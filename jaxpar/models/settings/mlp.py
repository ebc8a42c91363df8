"""The settings of a multilayer perceptron."""

from dataclasses import dataclass

from jaxpar.errors import check_ranges


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
