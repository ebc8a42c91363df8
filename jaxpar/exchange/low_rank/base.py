"""The base class of low-rank gradients: selects parameters, adds error feedback, and enters `shard_map`."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import Problem, check_ranges
from jaxpar.exchange.base import SECTION, Tree, flatten_by_path
from jaxpar.exchange.compressed.base import CAUSE, SelectiveExchange
from jaxpar.exchange.traffic import ShardShape, Traffic

if TYPE_CHECKING:
    import jax

    from jaxpar.exchange.low_rank.matrices import Matrix
    from jaxpar.exchange.replica_mesh import ReplicaMesh


@dataclass(frozen=True, kw_only=True)
class LowRank(SelectiveExchange):
    """Gradients sent as products of two thin matrices.

    Attributes:
      rank: Number of columns of the first matrix, and of rows of the second.
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      feedback: Whether the compression error is added to the next step's gradient.
    """

    rank: int = 4
    depends_on_shapes = True

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, SECTION, {"rank": (1, 2**16)})

    @abstractmethod
    def low_rank_mean(
        self, given: "Mapping[str, jax.Array]", last: "Mapping[str, jax.Array]"
    ) -> "tuple[dict[str, jax.Array], dict[str, jax.Array]]":
        """Returns the low-rank mean over replicas, and this replica's compression error.

        Called inside `shard_map`. All arrays are [layers, rows, columns] in float32.

        Args:
          given: This replica's gradient matrices, by path.
          last: The last step's mean, at first zeros; empty unless `warm`.
        """

    @abstractmethod
    def payloads(self, matrix: "Matrix", replicas: int) -> dict[str, int]:
        """Maps each kind of collective that a gradient needs to its payload, in float32 elements."""

    warm_start = False  # whether the last mean is kept

    def pays_off(self, matrix: "Matrix", replicas: int) -> bool:
        """Whether a gradient of this shape is compressed."""
        return True

    def idle(self, parts: Mapping[str, ShardShape], replicas: int) -> list[Problem]:
        """Returns a problem if no parameter is compressed."""
        if self._matrices(parts, replicas):
            return []
        return super().idle(parts, replicas) or [
            Problem(
                f"exchange {self} compresses nothing between {replicas} replicas",
                "products of rank columns and rows are sent where they are smaller than the matrices of a model",
                f"rank = {max(self.rank // 4, 1)}, or leave the exchange out",
            )
        ]

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns zero compression errors of each replica, and a zero last mean."""
        import jax.numpy as jnp

        flat = {
            path: x for path, x in flatten_by_path(params)[0].items() if self.compresses(path, x.size) and x.ndim > 1
        }
        state = {}
        if self.feedback:
            state["lost"] = {path: jnp.zeros((replicas, *x.shape), jnp.float32) for path, x in flat.items()}
        if self.warm_start:
            state["last"] = {path: jnp.zeros(x.shape, jnp.float32) for path, x in flat.items()}
        return state

    def gradients(self, local: Tree, own: Tree, between: "ReplicaMesh") -> tuple[Tree, Tree]:
        """Returns the low-rank mean gradient, and the new state."""
        import jax
        from jax.sharding import PartitionSpec

        from jaxpar.exchange.low_rank.matrices import to_matrices
        from jaxpar.exchange.replica_mesh import AXIS

        flat, structure = flatten_by_path(local)
        specs = dict(zip(flat, structure.flatten_up_to(between.specs), strict=True))
        shapes = self._matrices(between.parts, between.replicas)
        shared_specs = {path: specs[path] for path in shapes}
        replica_specs = {path: PartitionSpec(AXIS, *spec) for path, spec in shared_specs.items()}
        errors = {path: own["lost"][path] for path in shapes} if self.feedback else {}
        last_means = {path: own["last"][path] for path in shapes} if self.warm_start else {}

        def inside(local, errors, last_means):
            corrected = {path: x + errors[path] if errors else x for path, x in local.items()}
            mean, residuals = self.low_rank_mean(to_matrices(corrected, shapes), to_matrices(last_means, shapes))
            means = {path: x.reshape(local[path].shape[1:]) for path, x in mean.items()}
            return means, {path: residuals[path].reshape(errors[path].shape) for path in errors}

        means = {}
        if shapes:
            program = jax.shard_map(
                inside, mesh=between.mesh, check_vma=False,
                in_specs=(replica_specs, replica_specs if errors else {}, shared_specs if last_means else {}),
                out_specs=(shared_specs, replica_specs if errors else {}),
            )  # fmt: skip
            means, errors = program({path: flat[path] for path in shapes}, errors, last_means)
        uncompressed = {path: x for path, x in flat.items() if path not in shapes}
        mean = means | between.with_specs({path: specs[path] for path in uncompressed}).mean(uncompressed)
        state = {"lost": own["lost"] | errors} if self.feedback else {}
        if self.warm_start:
            state["last"] = own["last"] | means
        return structure.unflatten([mean[path].astype(flat[path].dtype) for path in flat]), state

    def traffic(self, shards: Mapping[str, Any], replicas: int) -> tuple[Traffic, ...]:
        """Returns the collectives of the low-rank factors, and an all-reduce per uncompressed gradient."""
        from jaxpar.exchange.replica_mesh import AXIS, mean_traffic
        from jaxpar.mesh.collective import Collective

        shapes = self._matrices(shards, replicas)
        sizes: dict[str, int] = {}
        for item in shapes.values():
            for name, elements in self.payloads(item, replicas).items():
                sizes[name] = sizes.get(name, 0) + item.layers * elements
        collectives = [
            Collective(
                kind=name.partition(" ")[0], axes=(AXIS,), dtype="f32", group=replicas, times=1, payload=4 * size,
                cause=CAUSE, parameters=tuple(shapes),
            )
            for name, size in sizes.items()
        ]  # fmt: skip
        uncompressed = {path: part for path, part in shards.items() if path not in shapes}
        return (*(Traffic(collective=item) for item in collectives), *mean_traffic(uncompressed, replicas))

    def _matrices(self, parts: Mapping[str, ShardShape], replicas: int) -> "dict[str, Matrix]":
        """Returns, for each compressed parameter, a device's part of it as matrices."""
        from jaxpar.exchange.low_rank.matrices import matrix

        shapes = {path: matrix(part) for path, part in parts.items() if self.compresses(path, part.total_size)}
        return {path: shape for path, shape in shapes.items() if shape is not None and self.pays_off(shape, replicas)}
