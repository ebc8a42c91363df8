"""Costs by cause: the seconds of a step, or the bytes of a device.

    {"matmuls": 0.6, "tensor": 0.2, ...}    each a number, or an array with one number per layout

There is no list of causes: each technique names its own and their colours, and pages show all causes in a plan.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

INK, PALE = "#10151b", "#ffffff"  # text on light colours, and on dark ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """The letter and colours of a cause: work has cold colours, waiting for the network warm ones, idling pale ones.

    Attributes:
      letter: Letter in the bars of a terminal, so that they can be read without colours.
      shade: Background, one of the 256 colours of a terminal.
      ink: Colour of the letter, one of the 256 colours of a terminal.
      light: CSS colour on a light page.
      dark: CSS colour on a dark page.
      text: CSS colour of text on `light` and `dark`; or a `light-dark()` pair.
    """

    letter: str
    shade: int
    ink: int = 16
    light: str
    dark: str
    text: str = INK


class Causes(Mapping[str, Any]):
    """Numbers by cause, in display order; `causes.tensor` is `causes["tensor"]`."""

    def __init__(self, **parts: Any):
        self._parts = parts

    def __getitem__(self, cause: str) -> Any:
        return self._parts[cause]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getattr__(self, cause: str) -> Any:
        if cause.startswith("_") or cause not in self._parts:
            raise AttributeError(f"{type(self).__name__} has no cause {cause!r}, but {', '.join(self)}")
        return self._parts[cause]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{cause}={value!r}' for cause, value in self.items())})"

    @property
    def total(self) -> Any:
        """Sum over all causes."""
        return sum(self.values())

    @property
    def plain(self) -> Self:
        """The causes of one layout, as Python floats."""
        return type(self)(**{cause: float(np.asarray(value)) for cause, value in self.items()})

    def times(self, factor: float) -> Self:
        """Multiplies every cause by a factor."""
        return self if factor == 1 else type(self)(**{cause: factor * value for cause, value in self.items()})

    def plus(self, more: Mapping[str, object]) -> Self:
        """Returns the sum of both for each cause; causes that only `more` has come last."""
        return type(self)(**{cause: self.get(cause, 0.0) + more.get(cause, 0.0) for cause in {**self, **more}})
