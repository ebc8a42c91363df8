"""What a job says of its checkpoints: when they are written and which stay."""

from dataclasses import dataclass

from jaxpar.errors import within


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When checkpoints are written and which are kept.

    Attributes:
      every: Steps between two; 0 writes one at the end only.
      keep_last: How many of the latest stay.
      keep_best: How many of those with the lowest eval_loss stay besides.
    """

    every: int = 0
    keep_last: int = 2
    keep_best: int = 0

    def __post_init__(self):
        within(self, "checkpoint", {"every": (0, 2**31 - 1), "keep_last": (1, 2**31 - 1), "keep_best": (0, 2**31 - 1)})
