"""Maps a function of one replica over all replicas, on their rows of a batch or on the whole batch."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from jaxpar.exchange.replica_mesh import AXIS
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.constrain import activation_names
from jaxpar.sharding.names import Tree
from jaxpar.step.gradients import Batch
from jaxpar.step.per_replica.ensemble import REPLICA


@dataclass(frozen=True)
class ReplicaMap:
    """Maps functions of (params, model state, batch); their results are stacked, [replica, ...].

    Attributes:
      layout: The sharding of all arrays.
      replica_layout: That of one replica.
    """

    layout: Layout
    replica_layout: Layout

    def on_rows(self, function: Callable, params: Tree, model_state: Tree, batch: Batch) -> Tree:
        """Runs each replica on its rows; no row moves to another device."""
        axes = PartitionSpec(AXIS, tuple(axis for axis in self.layout.parallel.batch_axes if axis != AXIS))

        def split(value: jax.Array) -> jax.Array:
            count = self.layout.sizes[AXIS]
            rows = value.reshape(count, value.shape[0] // count, *value.shape[1:])
            return jax.lax.with_sharding_constraint(rows, self.layout.sharding(axes))

        return self._map(function, 0)(params, model_state, {name: split(value) for name, value in batch.items()})

    def on_batch(self, function: Callable, params: Tree, model_state: Tree, batch: Batch) -> Tree:
        """Runs each replica on the whole batch."""
        return self._map(function, None)(params, model_state, batch)

    def _map(self, function: Callable, rows: int | None) -> Callable:
        params = 0 if self.layout.parallel.exchange.replicas_differ else None

        def run_replica(*args):
            with activation_names(self.replica_layout.names, self.replica_layout.sizes):
                return function(*args)

        return jax.vmap(run_replica, in_axes=(params, 0, rows), axis_name=REPLICA, spmd_axis_name=AXIS)
