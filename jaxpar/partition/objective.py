"""The objective of PipeDream's partitioner, as parameters, because published versions differ, and so do their plans.

    coefficient   c(m) x weights / bandwidth          source                                      16 GPUs
    ring          2 (m-1) / m   one link per replica   ring all-reduce                             1.875
    shared        2 (m-1)       all over one link      Narayanan et al. (2019), SOSP, section 3.1  30
    released      4 (m-1) / m                          msr-fiddle/pipedream, optimizer             3.75
    ftpipe        8 (m-1)                              FTPipe's correction of the released code    120

For VGG-16 on 16 GPUs at 10 Gb/s, `ring` gives the published plan 15-1 (15 replicas of the convolutions, and one of the
dense layers). With `shared` and full overlap the cut is between convolutions, and at 1 GB/s the plan is 7-8-1.

Devices are a topology, a symmetric tree of levels, such as GPUs in a server and servers in a cluster:

    ((8, 12e9), (4, Link(latency=2e-5, bandwidth=1.25e9)))      4 servers, each of 8 GPUs
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, prod

import numpy as np

from jaxpar.errors import JaxparError, Problem, check_ranges, refuse, suggest
from jaxpar.mesh.chips import Link
from jaxpar.partition.chain import Chain
from jaxpar.units import parse_rate

Topology = Sequence[tuple[int, Link | float]]
EXAMPLE = "((8, 12e9), (4, 1.25e9)): 4 servers of 8 GPUs, 1.25e9 bytes/s (10 Gb/s) between servers"
COEFFICIENTS = {
    "ring": lambda m: 2 * (m - 1) / m,
    "shared": lambda m: 2.0 * (m - 1),
    "released": lambda m: 4 * (m - 1) / m,
    "ftpipe": lambda m: 8.0 * (m - 1),
}


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the tree.

    Attributes:
      size: Number of parts: GPUs per server, servers per cluster.
      link: The link between any two parts, in one direction; each part has its own.
    """

    size: int
    link: Link


def levels(topology: Topology) -> tuple[Level, ...]:
    """Converts a topology to levels, innermost first; a plain number is the bandwidth of a link without latency.

    Raises:
      JaxparError: If parts of a level differ, or a bandwidth is not a positive number; the message lists all faults.
    """
    if not isinstance(topology, tuple | list) or not topology:
        raise refuse(f"topology {topology!r}", rule="a level is (size, bandwidth), one at least", fix=EXAMPLE)
    result, problems = [], []
    for number, level in enumerate(topology, 1):
        if not isinstance(level, tuple | list) or len(level) != 2:
            problems.append(Problem(f"level {number} is {level!r}", "a level is (size, bandwidth or Link)", EXAMPLE))
            continue
        size, link = level
        faults = _size_problems(number, size) + _link_problems(number, link)
        problems += faults
        if not faults:
            result.append(Level(size, link if isinstance(link, Link) else Link(latency=0.0, bandwidth=float(link))))
    if problems:
        raise JaxparError(*problems)
    return tuple(result)


def parse(words: Iterable[str]) -> Topology:
    """Parses words such as `4@12GB/s`, innermost level first, to a topology.

    Raises:
      JaxparError: If a word is invalid; the message lists all of them.

    >>> parse(["8@12GB/s", "4@10Gb/s"])
    ((8, 12000000000.0), (4, 1250000000.0))
    """
    result, problems = [], []
    for word in words:
        size, _, rate = word.partition("@")
        try:
            if not size.isdecimal() or not rate:
                rule = "a level is SIZE@BANDWIDTH: its parts, and bytes or bits per second of each, one way"
                raise refuse(f"level {word!r}", rule=rule, fix="8@12GB/s 4@10Gb/s: 4 servers of 8 GPUs")
            result.append((int(size), parse_rate(rate)))
        except JaxparError as error:
            problems += error.problems
    if problems:
        raise JaxparError(*problems)
    return tuple(result)


def devices(tree: Sequence[Level]) -> int:
    """Returns the number of devices of the tree.

    >>> devices(levels(((8, 12e9), (4, 1.25e9))))
    32
    """
    return prod(level.size for level in tree)


def _size_problems(number: int, size: object) -> list[Problem]:
    if isinstance(size, tuple | list):
        rule = "a topology is symmetric: at each level all groups have the same number of parts"
        least = min((part for part in size if type(part) is int and part > 0), default=1)
        return [Problem(f"level {number} has parts of sizes {size!r}", rule, f"({least}, ...): what all of them have")]
    if type(size) is not int or size < 1:
        return [Problem(f"level {number} has size {size!r}", "a size is a whole number, 1 at least", EXAMPLE)]
    return []


def _link_problems(number: int, link: object) -> list[Problem]:
    if isinstance(link, Link):
        return []
    if isinstance(link, bool) or not isinstance(link, int | float) or not isfinite(link) or not 1 <= link <= 1e18:
        rule = "a bandwidth is bytes per second of one part, one way, at least 1"
        return [Problem(f"level {number} has bandwidth {link!r}", rule, "1.25e9 for 10 Gb/s; or a Link")]
    return []


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective of a partition.

    Attributes:
      coefficient: Formula of the all-reduce's traffic: with m replicas, c(m) times the bytes of a stage's weights
        cross a link. ring, shared, released or ftpipe.
      overlap: Share of the all-reduce that overlaps with computing: 1 takes the longer of both (max form), 0 their sum
        (additive form). The papers use the max form, the published code the additive form. With 0.5 and any margin from
        0 to 0.05, jaxpar finds every published plan: tests/partition/test_partition.py.
      margin: Relative speedup that a plan with more stages must have to be preferred: 0.05 for 5 %.
      memory: Bytes of a device for the weights and activations of all minibatches in flight.

    Raises:
      JaxparError: If a number is out of range or the coefficient is unknown.
    """

    coefficient: str = "ring"
    overlap: float = 0.5
    margin: float = 0.05
    memory: float = inf

    def __post_init__(self):
        if self.coefficient not in list(COEFFICIENTS):
            raise refuse(
                f"coefficient = {self.coefficient!r}",
                rule=f"a coefficient is one of {', '.join(COEFFICIENTS)}",
                fix=suggest(self.coefficient, COEFFICIENTS),
            )
        check_ranges(self, "", {"overlap": (0.0, 1.0), "margin": (0.0, 10.0), "memory": (1.0, inf)})

    def crossings(self, replicas: int) -> float:
        """Returns c(m).

        >>> Objective().crossings(16), Objective(coefficient="shared").crossings(16)
        (1.875, 30.0)
        """
        return COEFFICIENTS[self.coefficient](replicas)

    def all_reduce_seconds(self, weights: np.ndarray | float, replicas: int, link: Link) -> np.ndarray:
        """Returns the seconds of an all-reduce of a stage's weights between its replicas.

        Latency and additions are those of a ring for any coefficient: 2 (m-1) messages, (m-1)/m additions.
        """
        steps = 2 * (replicas - 1) * link.latency * (np.asarray(weights) > 0)
        adds = (replicas - 1) / replicas * link.combine
        return steps + np.asarray(weights) * (self.crossings(replicas) / link.bandwidth + adds)

    def overlapped_seconds(self, compute: np.ndarray | float, agree: np.ndarray | float) -> np.ndarray:
        """Returns the seconds of computing and an all-reduce that partly overlap."""
        return np.maximum(compute, agree) + (1 - self.overlap) * np.minimum(compute, agree)


def sends(size: np.ndarray | float, link: Link) -> np.ndarray:
    """Returns the seconds to send activations to the next stage, and gradients of the same size back."""
    return 2 * (link.latency * (np.asarray(size) > 0) + np.asarray(size) / link.bandwidth)


@dataclass(frozen=True)
class CostSums:
    """Sums over layers that all costs need."""

    chain: Chain
    tree: Sequence[Level]
    objective: Objective

    def spans(self, numbers: Sequence[float] | np.ndarray) -> np.ndarray:
        """Returns sums over layers i to j, for all i and j. Shape [layers, layers]; 0 if j < i."""
        return np.cumsum(np.triu(np.tile(numbers, (len(numbers), 1))), axis=1) * self.mask

    @cached_property
    def mask(self) -> np.ndarray:
        """Mask of i <= j."""
        return np.triu(np.ones((len(self.chain.names),) * 2, bool))

    @cached_property
    def version_bytes(self) -> np.ndarray:
        """Bytes of one version of layers i to j."""
        return self.spans(np.add(self.chain.parameters, self.chain.activations))

    @cached_property
    def weights(self) -> np.ndarray:
        """Bytes of weights of layers i to j."""
        return self.spans(self.chain.parameters)


class Seconds(CostSums):
    """The seconds of a minibatch; infinite if memory does not suffice."""

    @property
    def behind_matters(self) -> bool:
        """Whether a stage could exceed the memory limit: its versions depend on the devices of later stages."""
        return devices(self.tree) * self.version_bytes[0, -1] > self.objective.memory

    def device(self, behind: int) -> np.ndarray:
        """Returns the seconds of layers i to j on one device; inf if their versions do not fit in memory."""
        fits = (1 + behind) * self.version_bytes <= self.objective.memory
        return np.where(self.mask & fits, self.spans(self.chain.seconds), inf)

    def replicated(self, inner: np.ndarray, level: int, replicas: int) -> np.ndarray:
        """Returns the seconds per minibatch, including the all-reduce of the weights."""
        agree = self.objective.all_reduce_seconds(self.weights, replicas, self.tree[level - 1].link)
        return self.objective.overlapped_seconds(inner, agree) / replicas

    def sent(self, level: int) -> np.ndarray:
        """Returns the seconds to send activations forward and gradients back."""
        return sends(np.array(self.chain.crossing), self.tree[level - 1].link)


class Bytes(CostSums):
    """The memory of the fullest device."""

    @property
    def behind_matters(self) -> bool:
        """True: the more devices the later stages have, the more weight versions a device stores."""
        return True

    def device(self, behind: int) -> np.ndarray:
        """Returns the bytes of layers i to j on one device."""
        return np.where(self.mask, (1 + behind) * self.version_bytes, inf)

    def replicated(self, inner: np.ndarray, level: int, replicas: int) -> np.ndarray:
        """Returns `inner`, because each replica needs this memory."""
        return inner

    def sent(self, level: int) -> np.ndarray:
        """Returns 0 for each cut, because sending needs no memory."""
        return np.zeros(len(self.chain.names))
