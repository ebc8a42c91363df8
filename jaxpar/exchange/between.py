"""Where replicas meet: trees [replica, ...] are averaged over the mesh axis `data`, and spread again.

x [replica, ...] over data ─► mean ─► [...] on every replica ─► spread ─► [replica, ...], all entries equal
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.exchange.sent import Sent
from jaxpar.mesh.collective import Collective
from jaxpar.sharding.names import Tree
from jaxpar.sharding.shard_bytes import short_dtype

AXIS = "data"


@dataclass(frozen=True, kw_only=True, eq=False)
class Between:
    """The devices of replicas, and where arrays are on those of one.

    Attributes:
      mesh: With an axis `data`, whose devices are the replicas.
      specs: Spec of every array of a tree of one replica.
    """

    mesh: Mesh
    specs: Tree

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return self.mesh.shape[AXIS]

    def mean(self, tree: Tree) -> Tree:
        """Returns the mean over replicas of a tree [replica, ...], without that dim, on every replica."""
        return jax.tree.map(lambda x, spec: self._on(jnp.mean(x, axis=0), spec), tree, self.specs)

    def spread(self, tree: Tree) -> Tree:
        """Returns a tree as [replica, ...] with equal entries: nothing travels, as every replica has it."""

        def one(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            return self._on(jnp.broadcast_to(x, (self.replicas, *x.shape)), PartitionSpec(AXIS, *spec))

        return jax.tree.map(one, tree, self.specs)

    def _on(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def averaged(shards: Mapping[str, Any], replicas: int, *, every: int = 1) -> tuple[Sent, ...]:
    """Returns what `Between.mean` sends of these parts of arrays: an all-reduce of each."""
    return tuple(
        Sent(
            every=every,
            collective=Collective(
                kind="all-reduce", axes=(AXIS,), dtype=short_dtype(shard.dtype), group=replicas, times=1,
                payload=shard.size * jnp.dtype(shard.dtype).itemsize, cause=path, parameters=(path,),
            ),
        )
        for path, shard in shards.items()
    )  # fmt: skip
