"""Numbers by cause that add up: the seconds of a step, or the bytes of a device.

    {"matmuls": 0.6, "tensor": 0.2, ...}    each a number, or an array with one for each of many layouts

Who prices a technique names its cause, and pages show the causes that they meet: there is no list of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np


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

    @classmethod
    def largest(cls, several: Sequence[Self]) -> Self:
        """Returns, for each layout, the one of several that is most in all."""
        most = np.argmax(np.stack(np.broadcast_arrays(*[each.total for each in several])), axis=0)
        return cls(**{cause: np.choose(most, [each[cause] for each in several]) for cause in several[0]})
