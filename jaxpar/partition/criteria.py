"""Costs that the dynamic program can minimise: the seconds of a minibatch, or the largest memory of any device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from jaxpar.partition.chain import Chain
from jaxpar.partition.objective import Objective, sends
from jaxpar.partition.topology import Level, devices


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
