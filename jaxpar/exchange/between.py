"""Where replicas meet: trees [replica, ...] are averaged over the mesh axis `data`, and spread again.

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

from jaxpar.exchange.collectives.algorithms import table
from jaxpar.exchange.collectives.messages import padded
from jaxpar.exchange.collectives.replay import check_all_reduce
from jaxpar.exchange.collectives.run import permutes, run
from jaxpar.exchange.part import Part
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
      optimizer: Likewise of an optimizer's state.
      meeting: Which of the exchange's meetings it is, from 1.
      parts: Path of each parameter to what a device holds of it.
    """

    mesh: Mesh
    specs: Tree
    optimizer: Tree = ()
    meeting: int = 1
    parts: Mapping[str, Part] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return self.mesh.shape[AXIS]

    def mean(self, tree: Tree, algorithm: str = "") -> Tree:
        """Returns the mean over replicas of a tree [replica, ...], without that dim, on every replica.

        Args:
          tree: Arrays with `specs`.
          algorithm: One of `algorithms.ALL_REDUCE`, by whose messages it is taken; without it XLA's all-reduce.

        Raises:
          JaxparError: If there is no such algorithm.
        """
        if not algorithm:
            return jax.tree.map(lambda x, spec: self._on(jnp.mean(x, axis=0), spec), tree, self.specs)
        fewest = table(algorithm, self.replicas, padded(1, self.replicas))  # of as many rounds as any
        check_all_reduce(fewest, self.replicas, algorithm)
        leaves, structure = jax.tree.flatten(tree)
        specs = structure.flatten_up_to(self.specs)
        summed = jax.shard_map(
            lambda *parts: [x[0] for x in self._summed([*parts], algorithm)],
            mesh=self.mesh,
            in_specs=tuple(PartitionSpec(AXIS, *spec) for spec in specs),
            out_specs=specs,
            check_vma=False,
        )(*leaves)
        return jax.tree.unflatten(structure, [x / self.replicas for x in summed])

    @property
    def held(self) -> "Between":
        """The same replicas, for trees that are optimizer states."""
        return self.of(self.optimizer)

    def of(self, specs: Tree) -> "Between":
        """Returns the same replicas, for trees with other specs."""
        return replace(self, specs=specs)

    def averaged(self, tree: Tree) -> Tree:
        """Returns a tree [replica, ...] whose entries are their mean; counts, which are whole numbers, as they are."""

        def one(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            return self._spread(self._on(jnp.mean(x, axis=0), spec), spec)

        return jax.tree.map(one, tree, self.specs)

    def mixed(self, tree: Tree, weights: np.ndarray) -> Tree:
        """Returns a tree [replica, ...] with the entry sum_j weights[i, j] x[j] on replica i.

        A replica sends its entry to those that hear it, and to no other.

        Args:
          tree: Arrays with `specs`.
          weights: Shape [replicas, replicas].
        """
        leaves, structure = jax.tree.flatten(tree)
        specs = tuple(PartitionSpec(AXIS, *spec) for spec in structure.flatten_up_to(self.specs))

        def inside(*parts: jax.Array) -> list[jax.Array]:
            device = jax.lax.axis_index(AXIS)
            own = [jnp.asarray(weights.diagonal(), x.dtype)[device] * x for x in parts]
            for pairs in shifts(weights):
                heard = np.zeros(len(weights))
                for source, target in pairs:
                    heard[target] = weights[target, source]
                came = [jax.lax.ppermute(x, AXIS, pairs) for x in parts]
                own = [x + jnp.asarray(heard, x.dtype)[device] * y for x, y in zip(own, came, strict=True)]
            return own

        made = jax.shard_map(inside, mesh=self.mesh, in_specs=specs, out_specs=list(specs), check_vma=False)(*leaves)
        return jax.tree.unflatten(structure, made)

    def _summed(self, parts: list[jax.Array], algorithm: str) -> list[jax.Array]:
        """Returns this device's parts, summed over replicas: those of a dtype travel as one vector."""
        for dtype in dict.fromkeys(part.dtype for part in parts):
            places = [i for i, part in enumerate(parts) if part.dtype == dtype]
            flat = jnp.concatenate([parts[i].reshape(-1) for i in places])
            count = padded(flat.size, self.replicas)
            flat = run(table(algorithm, self.replicas, count), jnp.pad(flat, (0, count - flat.size)), AXIS)
            at = 0
            for i in places:
                parts[i] = flat[at : at + parts[i].size].reshape(parts[i].shape)
                at += parts[i].size
        return parts

    def spread(self, tree: Tree) -> Tree:
        """Returns a tree as [replica, ...] with equal entries: nothing travels, as every replica has it."""
        return jax.tree.map(self._spread, tree, self.specs)

    def _spread(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return self._on(jnp.broadcast_to(x, (self.replicas, *x.shape)), PartitionSpec(AXIS, *spec))

    def _on(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def averaged(shards: Mapping[str, Any], replicas: int, *, every: int = 1, algorithm: str = "") -> tuple[Sent, ...]:
    """Returns what `Between.mean` sends of these parts of arrays: an all-reduce of each, or permutes of all at once."""
    if algorithm:
        return tuple(Sent(collective=each, every=every) for each in _permuted(shards, replicas, algorithm))
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


def in_pieces(spec: PartitionSpec, dim: int, dims: int) -> PartitionSpec:
    """Returns a spec of so many dims, in one of which each replica has a piece of what a device holds."""
    entries = [*spec, *(None,) * (dims - len(spec))]
    held = entries[dim]
    entries[dim] = (*((held,) if isinstance(held, str) else held or ()), AXIS)
    return PartitionSpec(*entries)


def shifts(weights: np.ndarray) -> list[list[tuple[int, int]]]:
    """Returns who sends to whom, as few permutes: in the k-th each sends to the one k after it, if that hears it."""
    count = len(weights)
    each = ([(i, (i + k) % count) for i in range(count) if weights[(i + k) % count, i]] for k in range(1, count))
    return [pairs for pairs in each if pairs]


def mixing(shards: Mapping[str, Any], weights: np.ndarray, *, every: int = 1) -> tuple[Sent, ...]:
    """Returns what `Between.mixed` sends of these parts of arrays: a permute of each for every shift."""
    return tuple(
        Sent(
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


def _permuted(shards: Mapping[str, Any], replicas: int, algorithm: str) -> list[Collective]:
    """Returns the permutes of an algorithm's table, equal ones as one."""
    sizes: Counter = Counter()
    for shard in shards.values():
        sizes[jnp.dtype(shard.dtype)] += shard.size
    found: Counter = Counter()
    for dtype, elements in sizes.items():
        for messages in table(algorithm, replicas, padded(elements, replicas)):
            found.update((dtype, each[0].size, len(each)) for each in permutes(messages))
    return [
        Collective(
            kind="collective-permute", axes=(AXIS,), dtype=short_dtype(dtype), group=replicas, times=times,
            payload=size * dtype.itemsize, senders=senders / replicas, cause="parameters", parameters=tuple(shards),
        )
        for (dtype, size, senders), times in found.items()
    ]  # fmt: skip
