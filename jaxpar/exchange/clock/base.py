"""The virtual clock: workers' compute times, and the gradients and updates of a simulated run.

A compute time is a draw from a distribution of mean 1, times the seconds of a step. A worker's times depend only on the
seed and its number, so methods are compared on the same stragglers. A gradient is computed at a version of the
parameters, and applied at a time.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxpar.errors import JaxparError, check_ranges, refuse, suggest
from jaxpar.exchange.collectives.algorithms import traffic_seconds
from jaxpar.mesh.chips import Link
from jaxpar.mesh.collective import Traffic

BLOCK = 1024  # random delays that are drawn per call


class Law(Protocol):
    """A distribution of times with a mean of 1."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draws `count` times."""
        ...


@dataclass(frozen=True)
class Constant:
    """Every time is 1."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draws `count` times."""
        return np.ones(count)


@dataclass(frozen=True)
class Exponential:
    """Exponentially distributed times."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draws `count` times."""
        return rng.exponential(size=count)


@dataclass(frozen=True)
class Lognormal:
    """Lognormal times: products of many small delays.

    Attributes:
      sigma: Standard deviation of the logarithm.
    """

    sigma: float = 0.5

    def __post_init__(self):
        check_ranges(self, "", {"sigma": (0.0, 10.0)})

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draws `count` times."""
        return rng.lognormal(-(self.sigma**2) / 2, self.sigma, count)


@dataclass(frozen=True)
class Pareto:
    """Pareto-distributed times, with a heavy tail: a few are very long.

    Attributes:
      shape: How fast the tail falls; the mean is finite above 1.
    """

    shape: float = 2.5

    def __post_init__(self):
        if not 1 < self.shape <= 1e6:
            raise refuse(
                f"pareto:{self.shape:g}",
                rule="the mean of a Pareto law is finite above 1",
                fix="pareto:2.5",
            )

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draws `count` times."""
        return (rng.pareto(self.shape, count) + 1) * (self.shape - 1) / self.shape


@dataclass(frozen=True)
class MeasuredDelays:
    """Measured times in a loop; each worker begins at a random position.

    Attributes:
      seconds: The measured times; they are scaled to a mean of 1.
    """

    seconds: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draws `count` times."""
        scaled = np.array(self.seconds) / np.mean(self.seconds)
        start = rng.integers(len(scaled))
        return np.resize(np.roll(scaled, -start), count)


LAWS = {"constant": Constant, "exponential": Exponential, "lognormal": Lognormal, "pareto": Pareto}


def parse(text: str) -> Law:
    """Parses a distribution: a name, a colon and a number; or the path of a file with a number of seconds per line.

    >>> parse("lognormal:0.3")
    Lognormal(sigma=0.3)

    Raises:
      JaxparError: If there is no such law or file.
    """
    name, _, number = text.partition(":")
    if text.endswith((".csv", ".txt")):
        return MeasuredDelays(_read(Path(text)))
    if name not in LAWS:
        raise refuse(
            f"delays {text!r:.60}", rule=f"one of {', '.join(LAWS)}, or a .csv of seconds", fix=suggest(name, LAWS)
        )
    try:
        return LAWS[name](float(number)) if number else LAWS[name]()
    except JaxparError:
        raise
    except (TypeError, ValueError) as error:
        raise refuse(f"delays {text!r:.60}", rule="lognormal and pareto take a number", fix=name) from error


def _read(path: Path) -> tuple[float, ...]:
    fix = "a file with the seconds of one step on each line"
    try:
        seconds = tuple(float(row[0]) for row in csv.reader(path.read_text().splitlines()) if row)
    except (OSError, ValueError) as error:
        raise refuse(f"delays {str(path)!r:.60}: {error}", rule="a trace has a number on each line", fix=fix) from error
    if not seconds or not all(0 < value < math.inf for value in seconds):
        raise refuse(f"delays {str(path)!r:.60}", rule="a trace has positive seconds, at least one", fix=fix)
    return seconds


@dataclass(frozen=True, kw_only=True)
class WorkerTimes:
    """The times of all workers.

    Attributes:
      law: Distribution of the time of a gradient.
      compute: Mean seconds of one gradient.
      travel: Seconds that parameters take from the server to a worker, and gradients back.
      seed: Seed of the random draws.
    """

    law: Law = Constant()
    compute: float = 1.0
    travel: float = 0.0
    seed: int = 0

    def __post_init__(self):
        check_ranges(self, "", {"compute": (1e-12, 1e9), "travel": (0.0, 1e9)})

    def stream(self, worker: int) -> Iterator[float]:
        """Yields the seconds of a worker's gradients, endlessly."""
        rng = np.random.default_rng((self.seed, worker))
        if isinstance(self.law, MeasuredDelays):
            return cycle((self.compute * self.law.draw(rng, len(self.law.seconds))).tolist())
        return chain.from_iterable((self.compute * self.law.draw(rng, count)).tolist() for count in repeat(BLOCK))

    def matrix(self, workers: int, steps: int) -> np.ndarray:
        """Returns the seconds of each step of each worker. Shape [steps, workers]."""
        streams = [self.stream(worker) for worker in range(workers)]
        return np.array([[next(stream) for stream in streams] for _ in range(steps)]).reshape(steps, workers)


# The virtual clock of real replicas: each has its own compute times, and a sync round waits for the last.
#
# replica 0  ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆      |
# replica 1  ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆| sync round ...


def seconds(sent: Sequence[Traffic], replicas: int, steps: int, times: WorkerTimes, link: Link) -> np.ndarray:
    """Computes the time at which the last replica ends each step. Shape [steps].

    Args:
      sent: The traffic between replicas; empty if they never synchronize.
      replicas: Number of replicas.
      steps: Number of steps of each replica.
      times: Times of the replicas' steps.
      link: The link between replicas.
    """
    kinds = len({row.sync_round for row in sent})
    every = min((row.every for row in sent), default=0) // max(kinds, 1)
    meeting = traffic_seconds(sent, link) / kinds if sent else 0.0
    clocks, ends = np.zeros(replicas), []
    for step, row in enumerate(times.matrix(replicas, steps), 1):
        clocks = clocks + row
        if every and step % every == 0:
            clocks = np.full(replicas, clocks.max() + meeting)
        ends.append(clocks.max())
    return np.array(ends)


def sent_bytes(sent: Sequence[Traffic]) -> float:
    """Returns the mean bytes that a device sends in a step."""
    return sum(item.collective.step_wire / item.every for item in sent)


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient that a worker pushes.

    Attributes:
      worker: The worker that computed it.
      share: Index of its examples in the stream of batches; each batch is divided into `SimulatedRun.shares` shares.
      versions: Version of each parameter shard that the worker read: the number of its updates until then.
    """

    worker: int
    share: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """An update of a shard of the parameters, by the mean of some gradients.

    Attributes:
      seconds: Time on the virtual clock.
      pushes: The gradients.
      version: Number of updates of the shard before this one.
      shard: Number of the shard of the parameters.
    """

    seconds: float
    pushes: tuple[Push, ...]
    version: int
    shard: int = 0

    @property
    def staleness(self) -> list[int]:
        """For each gradient, the number of updates since the version that it read."""
        return [self.version - push.versions[self.shard] for push in self.pushes]


class SimulatedRun(Protocol):
    """A training method that is simulated on the virtual clock.

    Attributes:
      name: Name of the method.
      shards: Number of parts into which the server divides the parameters.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def shards(self) -> int: ...  # noqa: D102

    def updates(self, workers: int, steps: int, times: WorkerTimes) -> list[Update]:
        """Returns all updates in the order of their times.

        Args:
          workers: Number of workers.
          steps: Number of batches, each divided into `shares` shares.
          times: Times of the workers.
        """
        ...

    def shares(self, workers: int) -> int:
        """Returns the number of shares of a batch."""
        ...


def mean_staleness(updates: Iterable[Update]) -> float:
    """Returns the mean staleness of all gradients."""
    values = [value for update in updates for value in update.staleness]
    return sum(values) / max(len(values), 1)
