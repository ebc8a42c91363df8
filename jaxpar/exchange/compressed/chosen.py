"""Which gradients are compressed: a rule over paths and sizes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from jaxpar.errors import Problem, check_ranges
from jaxpar.exchange.base import Exchange
from jaxpar.exchange.part import Part
from jaxpar.exchange.sent import Sent
from jaxpar.exchange.settings import SECTION, STEPS

CAUSE = "gradients"  # of what is sent of those that are compressed


@dataclass(frozen=True, kw_only=True)
class Chosen(Exchange):
    """An exchange that compresses the gradients of some parameters, and sums those of the others.

    Attributes:
      smallest: Parameters of fewer elements are not compressed.
      whole: Patterns of paths that are not compressed either: norms and biases.
      feedback: Whether what is lost is added to the next step's gradient.
    """

    smallest: int = 4096
    whole: tuple[str, ...] = ("*bias*", "*scale*", "*norm*")
    feedback: bool = True

    def __post_init__(self):
        check_ranges(self, SECTION, {"smallest": (1, STEPS)})

    def compresses(self, path: str, size: int) -> bool:
        """Returns whether a parameter's gradient is compressed.

        Args:
          path: Of the parameter.
          size: Its elements, on all devices.
        """
        return size >= self.smallest and not any(fnmatchcase(path.lower(), pattern) for pattern in self.whole)

    def idle(self, parts: Mapping[str, Part], replicas: int) -> list[Problem]:
        """Returns whether no parameter of a model is compressed."""
        if any(self.compresses(path, part.whole) for path, part in parts.items()):
            return []
        largest = max((part.whole for part in parts.values()), default=0)
        return [
            Problem(
                f"exchange {self} compresses nothing: the largest parameter has {largest:,} elements",
                f"parameters of {self.smallest:,} elements and more are compressed, but those that `whole` names",
                f"smallest = {max(largest // 2, 1)}, or leave the exchange out",
            )
        ]

    def explain(self, sent: Iterable[Sent]) -> str:
        """Returns in a sentence how replicas agree, what that sends, and which parameters are compressed."""
        sent = tuple(sent)
        coded = {path for each in sent if each.collective.cause == CAUSE for path in each.collective.parameters}
        plain = {path for each in sent if each.collective.cause != CAUSE for path in each.collective.parameters}
        kept = f"; whole: {', '.join(sorted(plain))}" if plain else ""
        return f"{super().explain(sent)}; compressed: {', '.join(sorted(coded)) or 'nothing'}{kept}"
