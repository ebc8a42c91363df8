"""The choices of a search: what may vary besides the sizes that a model allows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxpar.parallel.declare import DECLARED


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of a search.

    Attributes:
      schedules: Of pipelines.
      chunks: Parts of the model on each stage, where a schedule interleaves.
      uneven: Whether the chunks of a pipeline may differ in their layers, or have none, as Llama 3's do; jaxpar's own
        may not, while stages of one chunk may.
      remats: What may be computed again.
      context: The most devices that share a sequence; 16 are what Llama 3 was trained with at 131,072 tokens; 0 means
        as many as divide it.
      tensor: The most devices that share a matrix; 0 means as many as divide it.
      pipe: The most stages; 0 means as many as there are layers.
      axes: The largest sizes of further axes, of techniques that are added to jaxpar's own: {"expert": 4}.
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
        """Returns the largest size that an axis may have; 0 where it has no bound."""
        return getattr(self, axis, 0) if axis in DECLARED else self.axes.get(axis, 0)

    def without_bound(self, axis: str) -> "Choices":
        """Returns the choices with an axis as large as a model allows."""
        return replace(self, **{axis: 0}) if axis in DECLARED else replace(self, axes={**self.axes, axis: 0})
