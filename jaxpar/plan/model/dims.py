"""Protocols of a model's named dims, and of the parameters that have them, for techniques."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class NamedDims(Protocol):
    """A model with named dims: a decoder's follow from its shape, those of other models from their parameters."""

    @property
    def dims(self) -> Mapping[str, int]:
        """Names of dims to a number that divides all dims of that name; an axis that splits them must divide it."""
        ...

    @property
    def parameters_by_dim(self) -> Mapping[str, int]:
        """Names of dims to the parameters in all arrays that have such a dim."""
        ...


class CountedModel(NamedDims, Protocol):
    """A model with named dims and a number of parameters."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        ...


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The dims of a model other than jaxpar's decoder.

    Attributes:
      dims: As in `Named`.
      parameters_by_dim: As in `Named`.
    """

    dims: Mapping[str, int]
    parameters_by_dim: Mapping[str, int]
