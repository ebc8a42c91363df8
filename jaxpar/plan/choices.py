"""Options of a search: schedules, chunks, remat policies and bounds on axis sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxpar.parallel.declaration import DECLARED


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Schedules, chunks and remat policies that a search tries, and the largest size of each axis.

    Attributes:
      schedules: Pipeline schedules.
      chunks: Numbers of chunks per stage that interleaved schedules try.
      uneven: Whether chunks may have different numbers of layers, or none, as in Llama 3. jaxpar's own chunks may not;
        stages of one chunk may.
      remats: Remat policies.
      context: Largest size of `context`; 0 means any that divides a sequence. Llama 3 was trained with 16 at 131,072
        tokens.
      tensor: Largest size of `tensor`; 0 means any that divides the matrices.
      pipe: Most pipeline stages; 0 means up to the number of layers.
      axes: Largest sizes of the axes of added techniques: {"expert": 4}.
    """

    schedules: tuple[str, ...] = ("1f1b_phased", "interleaved_phased", "gpipe")
    chunks: tuple[int, ...] = (2, 4)
    uneven: bool = False
    remats: tuple[str, ...] = ("none", "all_dots", "dots", "full")
    context: int = 16
    tensor: int = 0
    pipe: int = 0
    axes: Mapping[str, int] = field(default_factory=dict)

    def most(self, axis: str) -> int:
        """Returns the largest size of an axis; 0 means unbounded."""
        return getattr(self, axis, 0) if axis in DECLARED else self.axes.get(axis, 0)

    def without_bound(self, axis: str) -> "Choices":
        """Removes the bound on an axis."""
        return replace(self, **{axis: 0}) if axis in DECLARED else replace(self, axes={**self.axes, axis: 0})
