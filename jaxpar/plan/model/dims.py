"""A model as techniques see it: the names of its dims, and how many parameters have them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class Named(Protocol):
    """A model by the names of its dims: a decoder has them by its shape, any other model by its parameters."""

    @property
    def dims(self) -> Mapping[str, int]:
        """Names of dims to what divides all dims of that name: what an axis that splits them has to divide."""
        ...

    @property
    def holding(self) -> Mapping[str, int]:
        """Names of dims to the parameters in all arrays that have such a dim."""
        ...


class Counted(Named, Protocol):
    """A model whose parameters are counted."""

    @property
    def parameters(self) -> int:
        """Parameters, all of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The dims of a model that is not a decoder of ours.

    Attributes:
      dims: As in `Named`.
      holding: As in `Named`.
    """

    dims: Mapping[str, int]
    holding: Mapping[str, int]
