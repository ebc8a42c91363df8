"""Selects the gradients that are compressed, by path and size."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from jaxpar.errors import Problem, check_ranges
from jaxpar.exchange.base import SECTION, STEPS, Exchange
from jaxpar.exchange.traffic import ShardShape, Traffic

CAUSE = "gradients"  # cause of the traffic of compressed gradients


@dataclass(frozen=True, kw_only=True)
class SelectiveExchange(Exchange):
    """An exchange that compresses the gradients of some parameters and sums the others uncompressed.

    Attributes:
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      feedback: Whether the compression error is added to the next step's gradient.
    """

    smallest: int = 4096
    whole: tuple[str, ...] = ("*bias*", "*scale*", "*norm*")
    feedback: bool = True

    def __post_init__(self):
        check_ranges(self, SECTION, {"smallest": (1, STEPS)})

    def compresses(self, path: str, size: int) -> bool:
        """Returns whether a parameter's gradient is compressed.

        Args:
          path: Path of the parameter.
          size: Number of its elements, on all devices together.
        """
        return size >= self.smallest and not any(fnmatchcase(path.lower(), pattern) for pattern in self.whole)

    def idle(self, parts: Mapping[str, ShardShape], replicas: int) -> list[Problem]:
        """Returns a problem if no parameter of a model is compressed."""
        if any(self.compresses(path, part.total_size) for path, part in parts.items()):
            return []
        largest = max((part.total_size for part in parts.values()), default=0)
        return [
            Problem(
                f"exchange {self} compresses nothing: the largest parameter has {largest:,} elements",
                f"parameters of {self.smallest:,} elements and more are compressed, except paths that match `whole`",
                f"smallest = {max(largest // 2, 1)}, or leave the exchange out",
            )
        ]

    def explain(self, sent: Iterable[Traffic]) -> str:
        """Describes in a sentence how replicas synchronize, the traffic, and which parameters are compressed."""
        sent = tuple(sent)
        coded = {path for item in sent if item.collective.cause == CAUSE for path in item.collective.parameters}
        plain = {path for item in sent if item.collective.cause != CAUSE for path in item.collective.parameters}
        uncompressed = f"; whole: {', '.join(sorted(plain))}" if plain else ""
        return f"{super().explain(sent)}; compressed: {', '.join(sorted(coded)) or 'nothing'}{uncompressed}"
