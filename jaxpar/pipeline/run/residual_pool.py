"""Residuals of parts of different programs, from a forward to its backward, in one pool of bytes on every device.

    stage 0   | part 0, group 0 | part 0, group 1 | part 0, group 2 |     as many places as forwards that wait
    stage 1   | part 1, group 0      | part 1, group 1      |              of other sizes, in the same bytes

A part writes each residual in its place, inside of its branch, so a tick moves the bytes of its own part alone.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.pipeline.run.edges import assign_places, decode, encode, tree_bytes
from jaxpar.pipeline.run.stage_replicas import StageReplicas


class ResidualPool:
    """Places of residuals.

    Attributes:
      size: Bytes of the pool: those of the stage that needs most.
    """

    def __init__(
        self,
        residuals: Mapping[int, Sequence[jax.ShapeDtypeStruct]],
        stages: Sequence[int],
        replicas: StageReplicas,
        lifetimes: Mapping[int, Sequence[tuple[int, int]]],
    ):
        """Assigns places.

        Args:
          residuals: Of each part that keeps some, the shapes of what a microbatch leaves.
          stages: Of each part, the stage that runs it.
          replicas: The devices of the stages.
          lifetimes: Of each of these parts and each group, the tick of the forward, and the last that reads it.
        """
        self._residuals, self._starts = {part: list(shapes) for part, shapes in residuals.items()}, {}
        self._sizes = {part: tree_bytes(shapes) for part, shapes in residuals.items()}
        ends = [0] * len(replicas.counts)
        for part, size in self._sizes.items():
            count, places = assign_places(lifetimes[part])
            stage = stages[part]
            group_bytes = replicas.share(stage) * size
            self._starts[part] = (ends[stage] + places * group_bytes).astype(np.int32)
            ends[stage] += count * group_bytes
        self.size = max([1, *ends])

    def write(
        self, pool: jax.Array, part: int, group: jax.Array, number: jax.Array | int, values: Sequence[jax.Array]
    ) -> jax.Array:
        """Writes the residuals of a microbatch, of which `number` says the how many-th of its group on this device."""
        start = self._find_start(part, group, number)
        for value in values:
            data = encode(value, tree_bytes(value))
            pool = lax.dynamic_update_slice(pool, data, (start,))
            start = start + data.size
        return pool

    def read(self, pool: jax.Array, part: int, group: jax.Array, number: jax.Array | int) -> list[jax.Array]:
        """Returns the residuals of a microbatch."""
        start, values = self._find_start(part, group, number), []
        for shape in self._residuals[part]:
            values.append(decode(lax.dynamic_slice(pool, (start,), (tree_bytes(shape),)), shape))
            start = start + tree_bytes(shape)
        return values

    def _find_start(self, part: int, group: jax.Array, number: jax.Array | int) -> jax.Array:
        return jnp.asarray(self._starts[part])[group] + number * self._sizes[part]
