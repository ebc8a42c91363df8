"""The objective of PipeDream's partitioner, stated: published versions differ, and so do the plans that they give.

    coefficient   c(m) x weights / bandwidth          source                                      16 GPUs
    ring          2 (m-1) / m   each one's own link    ring all-reduce                             1.875
    shared        2 (m-1)       all over one link      Narayanan et al. (2019), SOSP, section 3.1  30
    released      4 (m-1) / m                          msr-fiddle/pipedream, optimizer             3.75
    ftpipe        8 (m-1)                              FTPipe's correction of the released one     120

VGG-16 on 16 GPUs becomes 15-1 with `ring` at 10 Gb/s, cut before its dense layers, as published; with `shared`, where
the longer of computing and agreeing counts, it is cut amid the convolutions, and at 1 GB/s becomes 7-8-1.
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from jaxpar.errors import check_ranges, nearest, refuse
from jaxpar.mesh.links import Link

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
      coefficient: How often the weights of a stage cross a link when m replicas agree on them: ring, shared, released
        or ftpipe.
      overlap: How much of that hides behind computing: 1 all, the longer of both counts (max form); 0 none, their sum
        counts (additive form). Published texts have the one, published code the other. Halfway every published split
        comes out, at any margin from 0 to 0.05: tests/test_partition.py.
      margin: How much faster a plan with more stages must be to be preferred: 0.05 for 5 %.
      memory: Bytes of a device for the weights and activations of all minibatches in flight.

    Raises:
      JaxparError: With the numbers that are out of range, or how the coefficient was probably meant.
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
                fix=nearest(self.coefficient, COEFFICIENTS),
            )
        check_ranges(self, "", {"overlap": (0.0, 1.0), "margin": (0.0, 10.0), "memory": (1.0, inf)})

    def times(self, replicas: int) -> float:
        """Returns c(m).

        >>> Objective().times(16), Objective(coefficient="shared").times(16)
        (1.875, 30.0)
        """
        return COEFFICIENTS[self.coefficient](replicas)

    def agree(self, weights: np.ndarray | float, replicas: int, link: Link) -> np.ndarray:
        """Returns the seconds in which replicas agree on so many bytes of weights.

        Latency and adding are those of a ring whatever the coefficient: 2 (m-1) messages, (m-1)/m additions.
        """
        steps = 2 * (replicas - 1) * link.latency * (np.asarray(weights) > 0)
        adds = (replicas - 1) / replicas * link.combine
        return steps + np.asarray(weights) * (self.times(replicas) / link.bandwidth + adds)

    def together(self, compute: np.ndarray | float, agree: np.ndarray | float) -> np.ndarray:
        """Returns the seconds of computing and of agreeing together, as far as one overlaps the other."""
        return np.maximum(compute, agree) + (1 - self.overlap) * np.minimum(compute, agree)


def sends(size: np.ndarray | float, link: Link) -> np.ndarray:
    """Returns the seconds to send activations of so many bytes on, and their gradients back."""
    return 2 * (link.latency * (np.asarray(size) > 0) + np.asarray(size) / link.bandwidth)
