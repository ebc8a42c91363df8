"""Synchronous SGD on R workers: what more of them are worth.

    one worker    [compute T]
    R workers     [compute T][synchronise S]     an R-th of the steps in an epoch

With an overlap w, the share w of what could run beside the computing does. All times are seconds
of one step, and modelled.

Source: the usual two-parameter model; for overlap, the longer of the two where it is perfect.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxpar.errors import check_ranges, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """One step of one worker, and of several.

    Attributes:
      workers: How many, R; every one computes a batch of its own.
      compute: Seconds in which a worker computes its gradients and update.
      sync: Seconds in which the workers come to agree; 0 for one.
      overlap: Share of what can run beside the computing that does, in 0..1.
      backward: Share of the computing that can run beside: gradients travel while others are computed.
    """

    workers: int
    compute: float
    sync: float
    overlap: float = 0.0
    backward: float = 1.0

    def __post_init__(self):
        if isinstance(self.workers, bool) or not isinstance(self.workers, int):
            raise refuse(f"workers={self.workers!r}", rule="a whole number of workers", fix="workers=8")
        check_ranges(
            self,
            "",
            {"workers": (1, 2**31 - 1), "compute": (1e-12, 1e12), "sync": (0.0, 1e12)}
            | {"overlap": (0.0, 1.0), "backward": (0.0, 1.0)},
        )

    @property
    def exposed(self) -> float:
        """Seconds of a step in which nothing is computed."""
        return self.sync - self.overlap * min(self.sync, self.backward * self.compute)

    @property
    def step(self) -> float:
        """Seconds of a step: computing and synchronising one after the other, but for what overlaps."""
        return self.compute + self.exposed

    @property
    def efficiency(self) -> float:
        """Share of its time that a worker computes: 1 / (1 + exposed / compute)."""
        return self.compute / self.step

    @property
    def speedup(self) -> float:
        """The speedup of an epoch over one worker: R compute / step."""
        return self.workers * self.efficiency

    @property
    def pays(self) -> bool:
        """Whether an epoch is shorter than with one worker: exposed < (R - 1) compute."""
        return self.exposed < (self.workers - 1) * self.compute

    def epoch(self, examples: int, *, batch: int) -> float:
        """Returns the seconds of an epoch: examples / (R batch) steps.

        Args:
          examples: In the data set.
          batch: Of one worker in one step.
        """
        return examples / (self.workers * batch) * self.step


def most_sync(workers: int, *, compute: float) -> float:
    """Returns the exposed seconds from which on so many workers are no faster than one."""
    return (workers - 1) * compute


def best(
    sizes: Iterable[int], sync: Callable[[int], float], *, compute: float, overlap: float = 0.0, least: float = 0.0
) -> Sync | None:
    """Returns the fastest of several numbers of workers, each at the same batch per worker.

    Args:
      sizes: Numbers of workers.
      sync: Number of workers to seconds, such as `lambda r: cheapest(link, size, r)[1]` of `exchange.price`.
      compute: Seconds of one worker's step.
      overlap: Share of what can run beside the computing that does.
      least: Efficiency below which a number of workers is not considered.

    Returns:
      The one with the highest speed-up, the smallest of equals; None if none is efficient enough.
    """
    found = [Sync(workers=count, compute=compute, sync=sync(count), overlap=overlap) for count in sorted(sizes)]
    return max((one for one in found if one.efficiency >= least), key=lambda one: one.speedup, default=None)


def fit(measured: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Returns (compute, sync per unit) of measured steps, by least squares.

    Args:
      measured: Pairs of a synchronisation's modelled seconds, in any unit, and the measured seconds of its step.

    Raises:
      JaxparError: Unless there are two steps that synchronise differently.
    """
    rows = list(measured)
    count = len(rows)
    mean_x = math.fsum(x for x, _ in rows) / max(1, count)
    mean_y = math.fsum(y for _, y in rows) / max(1, count)
    spread = math.fsum((x - mean_x) ** 2 for x, _ in rows)
    if not spread:
        raise refuse(
            f"{count} measured steps, all with one synchronisation",
            rule="the fit of two unknowns takes steps with at least two different synchronisations",
            fix="measure steps on 1 and on 8 workers",
        )
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in rows) / spread
    return mean_y - slope * mean_x, slope
