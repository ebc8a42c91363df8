"""Gradients sent as products of two thin matrices: replicas stay equal.

    LowRank    the base class: selects parameters, adds error feedback, enters `shard_map`
    PowerSgd   the dominant columns and rows of the mean gradient, by a step of the power method
    Factors    one column and row per example of a replica, which determine a dense layer's gradient

To add one: a frozen dataclass that is a `LowRank`, with `low_rank_mean` and `payloads`, and a row of `exchange.table`.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import Problem, check_ranges
from jaxpar.exchange.base import SECTION, Tree, flatten_by_path
from jaxpar.exchange.compressed.base import CAUSE, SelectiveExchange
from jaxpar.mesh.collective import ShardShape, Traffic

if TYPE_CHECKING:
    import jax

    from jaxpar.exchange.low_rank_matrices import Matrix
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

    warm_start = False  # whether a step starts from the last mean gradient

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
            path: x
            for path, x in flatten_by_path(params)[0].items()
            if self.compresses(path, x.size, x.dtype) and x.ndim > 1
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

        from jaxpar.exchange.low_rank_matrices import to_matrices
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
        from jaxpar.exchange.low_rank_matrices import matrix

        shapes = {
            path: matrix(part) for path, part in parts.items() if self.compresses(path, part.total_size, part.dtype)
        }
        return {path: shape for path, shape in shapes.items() if shape is not None and self.pays_off(shape, replicas)}


@dataclass(frozen=True, kw_only=True)
class PowerSgd(LowRank):
    """PowerSGD (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727, Algorithm 1), with error feedback and a warm start.

    M is a gradient as a matrix, and Q starts as a basis of the rows of the last step's mean. A step computes
    P = mean(M Q), orthonormalizes it, and computes Q = mean(M^T P). The gradient is P Q^T, exact if M has at most rank
    `rank`. A replica's error is M - P (M^T P)^T. The state holds the last mean, which can be restored in any layout.

    Attributes:
      name: powersgd (gradients are sent as products of two thin matrices, found by the power method).
      rank: Number of columns of P and of Q.
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      feedback: Whether the compression error is added to the next step's gradient.
    """

    name: str = "powersgd"
    warm_start = True

    def idle(self, parts: Mapping[str, ShardShape], replicas: int) -> list[Problem]:
        """Returns a problem if no parameter is compressed, or a matrix is smaller than `rank`."""
        shapes = self._matrices(parts, replicas)
        path = min(shapes, key=lambda path: shapes[path].rank, default="")
        if not path or self.rank <= shapes[path].rank:
            return super().idle(parts, replicas)
        shape = shapes[path]
        return [
            Problem(
                f"rank = {self.rank} and {path}, of which a device has a matrix of {shape.rows} x {shape.columns}",
                "a rank is not above the rows and columns of a matrix",
                f"rank = {shape.rank}, or whole = [{', '.join(map(repr, (*self.whole, path)))}]".replace("'", '"'),
            )
        ]

    def low_rank_mean(
        self, given: "Mapping[str, jax.Array]", last: "Mapping[str, jax.Array]"
    ) -> "tuple[dict[str, jax.Array], dict[str, jax.Array]]":
        """Returns P Q^T, and this replica's error."""
        import jax
        import jax.numpy as jnp

        from jaxpar.exchange.low_rank_matrices import as_one_vector, orthonormal
        from jaxpar.exchange.replica_mesh import AXIS

        mean = lambda arrays: as_one_vector(arrays, lambda vector: jax.lax.pmean(vector, AXIS))  # noqa: E731
        keys = dict(zip(given, jax.random.split(jax.random.key(0), len(given)), strict=True))  # same everywhere
        start = {path: self._start(last[path], keys[path]) for path in given}
        p = mean({path: x @ start[path] for path, x in given.items()})
        p = {path: orthonormal(x) for path, x in p.items()}
        local_q = {path: jnp.swapaxes(x, -1, -2) @ p[path] for path, x in given.items()}
        q = mean(local_q)
        product = lambda q: {path: p[path] @ jnp.swapaxes(x, -1, -2) for path, x in q.items()}  # noqa: E731
        local_product = product(local_q)
        return product(q), {path: x - local_product[path] for path, x in given.items()}

    def payloads(self, matrix: "Matrix", replicas: int) -> dict[str, int]:
        """Returns the payload of the all-reduces of P and of Q."""
        return {"all-reduce P": self.rank * matrix.rows, "all-reduce Q": self.rank * matrix.columns}

    def _start(self, last: "jax.Array", key: "jax.Array") -> "jax.Array":
        """Returns an orthonormal Q [layers, columns, rank] that spans the rows of the last mean; at first a random one.

        The last mean has at most rank `rank`, so its transpose times a random matrix spans its row space.
        """
        import jax
        import jax.numpy as jnp

        from jaxpar.exchange.low_rank_matrices import orthonormal

        layers, rows, columns = last.shape
        left_key, first_key = jax.random.split(key)
        warm = jnp.swapaxes(last, -1, -2) @ jax.random.normal(left_key, (rows, self.rank))
        random = jax.random.normal(first_key, (layers, columns, self.rank))
        return orthonormal(jnp.where(jnp.any(last != 0, axis=(-1, -2), keepdims=True), warm, random))


@dataclass(frozen=True, kw_only=True)
class Factors(LowRank):
    """Factors of dense layers (sufficient factor broadcasting: Xie et al. 2014, arXiv:1409.5705).

    The gradient of a dense layer is X^T Y over a replica's B examples: B (M + N) numbers determine all M x N. The
    factors are computed from the gradient, so any model will do: by an orthonormal basis of its columns, of which there
    are at most B. It is exact while `rank` is at least the examples (tokens) of a replica. Where the factors of all
    replicas are larger than an all-reduce's traffic, the gradient is not compressed.

    Attributes:
      name: factors (gradients of dense layers are sent as factors, as many as a replica has examples).
      rank: Number of examples of a replica.
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      feedback: Whether the compression error is added to the next step's gradient.
    """

    name: str = "factors"
    rank: int = 32
    feedback: bool = False

    def pays_off(self, matrix: "Matrix", replicas: int) -> bool:
        """Whether the factors of all replicas are smaller than an all-reduce's traffic."""
        return self.rank < matrix.rank and replicas * self.rank * (matrix.rows + matrix.columns) < 2 * (
            matrix.rows * matrix.columns
        )

    def low_rank_mean(
        self, given: "Mapping[str, jax.Array]", last: "Mapping[str, jax.Array]"
    ) -> "tuple[dict[str, jax.Array], dict[str, jax.Array]]":
        """Returns the mean over replicas of the products of factors, and this replica's error."""
        import jax
        import jax.numpy as jnp

        from jaxpar.exchange.low_rank_matrices import as_one_vector, orthonormal
        from jaxpar.exchange.replica_mesh import AXIS

        left = {}
        for path, x in given.items():
            sketch = jax.random.normal(jax.random.key(0), (x.shape[-1], self.rank))
            left[path] = orthonormal(x @ sketch)  # spans all columns of x if the rank of x is at most self.rank
        right = {path: jnp.swapaxes(left[path], -1, -2) @ x for path, x in given.items()}
        gather = lambda arrays: as_one_vector(arrays, lambda vector: jax.lax.all_gather(vector, AXIS))  # noqa: E731
        all_left, all_right = gather(left), gather(right)
        mean = {path: jnp.mean(all_left[path] @ all_right[path], axis=0) for path in given}
        return mean, {path: x - left[path] @ right[path] for path, x in given.items()}

    def payloads(self, matrix: "Matrix", replicas: int) -> dict[str, int]:
        """Returns the payload of the all-gathers of both factors."""
        vectors = replicas * self.rank
        return {"all-gather left": vectors * matrix.rows, "all-gather right": vectors * matrix.columns}
