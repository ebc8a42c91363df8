"""Numbers by cause that add up: the seconds of a step, or the bytes of a device.

    {"matmuls": 0.6, "tensor": 0.2, ...}    each a number, or an array with one for each of many layouts

Who prices a technique names its cause and how it is drawn, and pages show the causes that they meet: there is no list
of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

INK, PALE = "#10151b", "#ffffff"  # text on light colours, and on dark ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A cause as bars and pages draw it: work is cold, waiting for the network warm, idling pale.

    Attributes:
      letter: In the bars of a terminal, so that they say the same without colours.
      shade: One of the 256 colours of a terminal.
      ink: That of the letter on it.
      light: CSS colour on a light page.
      dark: The same on a dark page.
      on: CSS colour of text on either; or two, for a light page and a dark one.
    """

    letter: str
    shade: int
    ink: int = 16
    light: str
    dark: str
    on: str = INK


class Causes(Mapping[str, Any]):
    """Numbers by cause, in the order in which they are shown; `causes.tensor` is `causes["tensor"]`."""

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
        """All of it."""
        return sum(self.values())

    @property
    def plain(self) -> Self:
        """The same of one layout, as plain numbers."""
        return type(self)(**{cause: float(np.asarray(value)) for cause, value in self.items()})

    def times(self, factor: float) -> Self:
        """Returns as many times of every cause."""
        return self if factor == 1 else type(self)(**{cause: factor * value for cause, value in self.items()})

    def plus(self, more: Mapping[str, Any]) -> Self:
        """Returns it with more of some causes, and with further ones after its own."""
        return type(self)(**{cause: self.get(cause, 0.0) + more.get(cause, 0.0) for cause in {**self, **more}})

    @classmethod
    def largest(cls, several: Sequence[Self]) -> Self:
        """Returns, for each layout, the one of several that is most in all."""
        most = np.argmax(np.stack(np.broadcast_arrays(*[each.total for each in several])), axis=0)
        return cls(**{cause: np.choose(most, [each[cause] for each in several]) for cause in several[0]})
