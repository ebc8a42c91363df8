"""The objective of PipeDream's partitioner, as parameters, because published versions differ, and so do their plans.

    coefficient   c(m) x weights / bandwidth          source                                      16 GPUs
    ring          2 (m-1) / m   one link per replica   ring all-reduce                             1.875
    shared        2 (m-1)       all over one link      Narayanan et al. (2019), SOSP, section 3.1  30
    released      4 (m-1) / m                          msr-fiddle/pipedream, optimizer             3.75
    ftpipe        8 (m-1)                              FTPipe's correction of the released code    120

For VGG-16 on 16 GPUs at 10 Gb/s, `ring` gives the published plan 15-1 (15 replicas of the convolutions, and one of the
dense layers). With `shared` and full overlap the cut is between convolutions, and at 1 GB/s the plan is 7-8-1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from jaxpar.errors import check_ranges, refuse, suggest
from jaxpar.mesh.chips import Link
from jaxpar.partition.chain import Chain
from jaxpar.partition.topology import Level, devices

COEFFICIENTS = {
    "ring": lambda m: 2 * (m - 1) / m,
    "shared": lambda m: 2.0 * (m - 1),
    "released": lambda m: 4 * (m - 1) / m,
    "ftpipe": lambda m: 8.0 * (m - 1),
}


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
