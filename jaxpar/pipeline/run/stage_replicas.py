"""Replicas of stages: several devices of the axis `pipe` run one stage, each for other microbatches.

    replicas 3-1     devices 0 1 2 run stage 0, device 3 runs stage 1
    a tick           handles a group of lcm(3, 1) = 3 microbatches: 1 on each of the devices 0 to 2, 3 on device 3

Microbatch i of a group runs on replica i % R of a stage of R replicas, as its microbatch i // R. So stages of R devices
take R times as long for a microbatch as a stage of one device, at even load (Narayanan et al. 2019, section 3.2).

Gradients are summed over the replicas in the ticks after which stages update their weights:

    replicas 3-1     ticks after which stage 0 updates     all-reduce of its parameters' gradients over devices 0 1 2
                     all other ticks                       nothing, also where stage 1 updates: it is one device
    with `data`      ticks after which any stage updates   all-reduce over `data` as well

All devices take the same branch of the conditional, because its predicate is a column of the table. A stage that does
not update in such a tick takes part and drops the result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.pipeline.run.stage_buffers import StageBuffers
from jaxpar.sharding.names import GRADIENT, UPDATES

Reduce = Callable[[list[jax.Array]], list[jax.Array]]


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


class ReplicaSums:
    """Sums over the replicas of stages, and over axes of the batch.

    Attributes:
      columns: Of each tick, whether a stage with replicas updates, and whether any stage updates. Shape [ticks, 2],
        int32.
    """

    def __init__(self, buffers: StageBuffers, replicas: StageReplicas, updates: np.ndarray):
        """Finds the ticks that need a sum.

        Args:
          buffers: The layout of the gradients.
          replicas: The devices of the stages.
          updates: Whether a stage updates after a tick. Shape [ticks, stages].
        """
        self._buffers, self._replicas = buffers, replicas
        self._replicated = [stage for stage, count in enumerate(replicas.counts) if count > 1]
        columns = [updates[:, self._replicated].any(axis=1), updates.any(axis=1)]
        self.columns = np.stack(columns, axis=1).astype(np.int32)

    def add(
        self, gradients: list[jax.Array], columns: jax.Array, active: jax.Array, batch_axes: Sequence[str]
    ) -> list[jax.Array]:
        """Returns the sums on devices that update now, and on others their own gradients.

        Args:
          gradients: The buffers of this device.
          columns: The columns of this tick.
          active: Whether this device updates now.
          batch_axes: Axes of the mesh whose devices run the same stage for other rows.
        """
        if self._replicated:
            groups = [
                [self._replicas.device(stage, number) for number in range(count)]
                for stage, count in enumerate(self._replicas.counts)
            ]
            sum_replicas = lambda arrays: lax.psum(arrays, "pipe", axis_index_groups=groups)  # noqa: E731
            gradients = self._reduce_stages(sum_replicas, self._replicated, gradients, 0, columns, active)
        if batch_axes:
            sum_batch = lambda arrays: lax.psum(arrays, tuple(batch_axes))  # noqa: E731
            every_stage = range(len(self._replicas.counts))
            gradients = self._reduce_stages(sum_batch, every_stage, gradients, 1, columns, active)
        return gradients

    def _reduce_stages(
        self, reduce: Reduce, stages: Sequence[int], gradients: list[jax.Array], column: int, columns: jax.Array,
        active: jax.Array,
    ) -> list[jax.Array]:  # fmt: skip
        sizes = [max(self._buffers.used_sizes(stage)[i] for stage in stages) for i in range(len(gradients))]

        def reduce_buffers(gradients):
            heads = [buffer[:size] for buffer, size in zip(gradients, sizes, strict=True) if size]
            sums, result = iter(reduce(heads)), []
            for buffer, size in zip(gradients, sizes, strict=True):
                total = next(sums) if size else buffer
                if 0 < size < buffer.size:
                    total = lax.dynamic_update_slice(buffer, total, (0,))
                result.append(jnp.where(active, total, buffer))
            return result

        runs = int(self.columns[:, column].sum())
        with jax.named_scope(GRADIENT), jax.named_scope(f"{UPDATES}{runs}"):
            return lax.cond(columns[column] == 1, reduce_buffers, lambda gradients: gradients, gradients)
