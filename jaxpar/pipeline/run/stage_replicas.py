"""Replicas of stages: several devices of the axis `pipe` run one stage, each for other microbatches.

    replicas 3-1     devices 0 1 2 run stage 0, device 3 runs stage 1
    a tick           handles a group of lcm(3, 1) = 3 microbatches: 1 on each of the devices 0 to 2, 3 on device 3

Microbatch i of a group runs on replica i % R of a stage of R replicas, as its microbatch i // R. So stages of R devices
take R times as long for a microbatch as a stage of one device, at even load (Narayanan et al. 2019, section 3.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import numpy as np


@dataclass(frozen=True)
class StageReplicas:
    """The devices of each stage.

    Attributes:
      counts: Number of devices of each stage.
    """

    counts: tuple[int, ...]

    @cached_property
    def group(self) -> int:
        """Number of microbatches that a tick handles."""
        return lcm(*self.counts)

    @cached_property
    def stages(self) -> np.ndarray:
        """The stage of each device. Shape [devices], int32."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)

    @cached_property
    def replica_numbers(self) -> np.ndarray:
        """The number of each device among the replicas of its stage. Shape [devices], int32."""
        return np.concatenate([np.arange(count, dtype=np.int32) for count in self.counts])

    def device(self, stage: int, replica: int) -> int:
        """Returns the device of a replica."""
        return sum(self.counts[:stage]) + replica

    def _locate(self, stage: int, microbatch: int) -> tuple[int, int]:
        number, replica = divmod(microbatch, self.counts[stage])
        return self.device(stage, replica), number

    def share(self, stage: int) -> int:
        """Returns the number of microbatches of a group that each replica of a stage runs."""
        return self.group // self.counts[stage]

    def rounds(self, source: int, target: int) -> Iterator[list[tuple[int, int, int, int]]]:
        """Yields the messages of a group from one stage to another, in rounds in which each device has one at most.

        Each message is (sending device, its number there, receiving device, its number there), where a number counts
        the microbatches of the group on that device. Greedy: as many rounds as the busiest device has messages, because
        both ends take the microbatches in the same order.
        """
        remaining = [(*self._locate(source, i), *self._locate(target, i)) for i in range(self.group)]
        while remaining:
            messages: list[tuple[int, int, int, int]] = []
            for message in remaining:
                if all(message[0] != other[0] and message[2] != other[2] for other in messages):
                    messages.append(message)
            yield messages
            remaining = [message for message in remaining if message not in messages]
