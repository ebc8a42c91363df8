"""The objective of PipeDream's partitioner, as parameters, because published versions differ, and so do their plans.

    coefficient   c(m) x weights / bandwidth          source                                      16 GPUs
    ring          2 (m-1) / m   one link per replica   ring all-reduce                             1.875
    shared        2 (m-1)       all over one link      Narayanan et al. (2019), SOSP, section 3.1  30
    released      4 (m-1) / m                          msr-fiddle/pipedream, optimizer             3.75
    ftpipe        8 (m-1)                              FTPipe's correction of the released code    120

For VGG-16 on 16 GPUs at 10 Gb/s, `ring` gives the published plan 15-1 (15 replicas of the convolutions, and one of the
dense layers). With `shared` and full overlap the cut is between convolutions, and at 1 GB/s the plan is 7-8-1.
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from jaxpar.errors import check_ranges, refuse, suggest
from jaxpar.mesh.chips import Link

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
