"""Means over replicas: averages trees [replica, ...] over the mesh axis `data`, and broadcasts the result.

x [replica, ...] over data ─► mean ─► [...] on every replica ─► spread ─► [replica, ...], all entries equal
                           └► mixed ─► [replica, ...], each a weighted mean of its own entry and some others
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.exchange.collectives.algorithms import all_reduce_rounds, padded_size
from jaxpar.exchange.collectives.executor import check_all_reduce, permutes, run_rounds
from jaxpar.mesh.collective import Collective, ShardShape, Traffic
from jaxpar.sharding.names import Tree, short_dtype

AXIS = "data"


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaMesh:
    """The mesh of the replicas, and the specs of one replica's arrays.

    Attributes:
      mesh: A mesh with an axis `data`, whose entries are the replicas.
      specs: Tree with the spec of every array of one replica.
      optimizer: Likewise for one replica's optimizer state.
      sync_round: Number of the exchange's sync round, from 1.
      parts: The part of each parameter that a device holds, by path.
    """

    mesh: Mesh
    specs: Tree
    optimizer: Tree = ()
    sync_round: int = 1
    parts: Mapping[str, ShardShape] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.mesh.shape[AXIS]

    def mean(self, tree: Tree, algorithm: str = "") -> Tree:
        """Returns the mean over replicas of a tree [replica, ...], without that dim, on every replica.

        Args:
          tree: Arrays sharded by `specs`.
          algorithm: Name of an all-reduce in `algorithms.ALL_REDUCE`; "" for XLA's all-reduce.

        Raises:
          JaxparError: If there is no such algorithm.
        """
        if not algorithm:
            return jax.tree.map(lambda x, spec: self._constrain(jnp.mean(x, axis=0), spec), tree, self.specs)
        fewest = all_reduce_rounds(
            algorithm, self.replicas, padded_size(1, self.replicas)
        )  # the number of rounds does not depend on the size of the array
        check_all_reduce(fewest, self.replicas, algorithm)
        leaves, structure = jax.tree.flatten(tree)
        specs = structure.flatten_up_to(self.specs)
        summed = jax.shard_map(
            lambda *parts: [x[0] for x in self._all_reduce([*parts], algorithm)],
            mesh=self.mesh,
            in_specs=tuple(PartitionSpec(AXIS, *spec) for spec in specs),
            out_specs=specs,
            check_vma=False,
        )(*leaves)
        return jax.tree.unflatten(structure, [x / self.replicas for x in summed])

    @property
    def for_optimizer(self) -> "ReplicaMesh":
        """Returns this mesh with the specs of optimizer states."""
        return self.with_specs(self.optimizer)

    def with_specs(self, specs: Tree) -> "ReplicaMesh":
        """Returns this mesh with other specs."""
        return replace(self, specs=specs)

    def average(self, tree: Tree) -> Tree:
        """Replaces the entries of a tree [replica, ...] by their mean; integers such as counts stay."""

        def one(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x
            return self._spread(self._constrain(jnp.mean(x, axis=0), spec), spec)

        return jax.tree.map(one, tree, self.specs)

    def mix(self, tree: Tree, weights: np.ndarray) -> Tree:
        """Returns a tree [replica, ...] with the entry sum_j weights[i, j] x[j] on replica i.

        A replica sends its entry only to replicas with a nonzero weight for it.

        Args:
          tree: Arrays sharded by `specs`.
          weights: Weights of the sums. Shape [replicas, replicas].
        """
        leaves, structure = jax.tree.flatten(tree)
        specs = tuple(PartitionSpec(AXIS, *spec) for spec in structure.flatten_up_to(self.specs))

        def inside(*parts: jax.Array) -> list[jax.Array]:
            device = jax.lax.axis_index(AXIS)
            sums = [jnp.asarray(weights.diagonal(), x.dtype)[device] * x for x in parts]
            for pairs in shifts(weights):
                gains = np.zeros(len(weights))
                for source, target in pairs:
                    gains[target] = weights[target, source]
                received = [jax.lax.ppermute(x, AXIS, pairs) for x in parts]
                sums = [x + jnp.asarray(gains, x.dtype)[device] * y for x, y in zip(sums, received, strict=True)]
            return sums

        outputs = jax.shard_map(inside, mesh=self.mesh, in_specs=specs, out_specs=list(specs), check_vma=False)(*leaves)
        return jax.tree.unflatten(structure, outputs)

    def _all_reduce(self, parts: list[jax.Array], algorithm: str) -> list[jax.Array]:
        """Returns this device's parts, summed over replicas; sends all parts of a dtype as one vector."""
        for dtype in dict.fromkeys(part.dtype for part in parts):
            places = [i for i, part in enumerate(parts) if part.dtype == dtype]
            flat = jnp.concatenate([parts[i].reshape(-1) for i in places])
            count = padded_size(flat.size, self.replicas)
            flat = run_rounds(
                all_reduce_rounds(algorithm, self.replicas, count), jnp.pad(flat, (0, count - flat.size)), AXIS
            )
            offset = 0
            for i in places:
                parts[i] = flat[offset : offset + parts[i].size].reshape(parts[i].shape)
                offset += parts[i].size
        return parts

    def spread(self, tree: Tree) -> Tree:
        """Returns a tree as [replica, ...] with equal entries; sends nothing, because every replica has the tree."""
        return jax.tree.map(self._spread, tree, self.specs)

    def _spread(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return self._constrain(jnp.broadcast_to(x, (self.replicas, *x.shape)), PartitionSpec(AXIS, *spec))

    def _constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def mean_traffic(
    shards: Mapping[str, Any], replicas: int, *, every: int = 1, algorithm: str = ""
) -> tuple[Traffic, ...]:
    """Returns the traffic of `ReplicaMesh.mean`: an all-reduce per shard, or an algorithm's permutes of all shards."""
    if algorithm:
        return tuple(
            Traffic(collective=collective, every=every) for collective in _permute_traffic(shards, replicas, algorithm)
        )
    return tuple(
        Traffic(
            every=every,
            collective=Collective(
                kind="all-reduce", axes=(AXIS,), dtype=short_dtype(shard.dtype), group=replicas, times=1,
                payload=shard.size * jnp.dtype(shard.dtype).itemsize, cause=path, parameters=(path,),
            ),
        )
        for path, shard in shards.items()
    )  # fmt: skip


def piece_spec(spec: PartitionSpec, dim: int, dims: int) -> PartitionSpec:
    """Returns a spec of `dims` dims in which dim `dim` is also split over the replicas."""
    entries = [*spec, *(None,) * (dims - len(spec))]
    names = entries[dim]
    entries[dim] = (*((names,) if isinstance(names, str) else names or ()), AXIS)
    return PartitionSpec(*entries)


def shifts(weights: np.ndarray) -> list[list[tuple[int, int]]]:
    """Returns the pairs (source, target) of each permute: in the k-th, i sends to i + k if the weight is nonzero."""
    count = len(weights)
    permutes = ([(i, (i + k) % count) for i in range(count) if weights[(i + k) % count, i]] for k in range(1, count))
    return [pairs for pairs in permutes if pairs]


def mix_traffic(shards: Mapping[str, Any], weights: np.ndarray, *, every: int = 1) -> tuple[Traffic, ...]:
    """Returns the traffic of `ReplicaMesh.mix`: a permute per shard and shift."""
    return tuple(
        Traffic(
            every=every,
            collective=Collective(
                kind="collective-permute", axes=(AXIS,), dtype=short_dtype(shard.dtype), group=len(weights), times=1,
                payload=shard.size * jnp.dtype(shard.dtype).itemsize, senders=len(pairs) / len(weights), cause=path,
                parameters=(path,),
            ),
        )
        for pairs in shifts(weights)
        for path, shard in shards.items()
    )  # fmt: skip


def _permute_traffic(shards: Mapping[str, Any], replicas: int, algorithm: str) -> list[Collective]:
    """Returns the permutes of an algorithm's table; `times` counts equal ones."""
    sizes: Counter = Counter()
    for shard in shards.values():
        sizes[jnp.dtype(shard.dtype)] += shard.size
    counts: Counter = Counter()
    for dtype, elements in sizes.items():
        for messages in all_reduce_rounds(algorithm, replicas, padded_size(elements, replicas)):
            counts.update((dtype, permute[0].size, len(permute)) for permute in permutes(messages))
    return [
        Collective(
            kind="collective-permute", axes=(AXIS,), dtype=short_dtype(dtype), group=replicas, times=times,
            payload=size * dtype.itemsize, senders=senders / replicas, cause="parameters", parameters=tuple(shards),
        )
        for (dtype, size, senders), times in counts.items()
    ]  # fmt: skip
