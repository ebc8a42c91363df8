"""PowerSGD: a step of the power method finds the dominant columns and rows of the mean gradient."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.errors import Problem
from jaxpar.exchange.low_rank.base import LowRank
from jaxpar.exchange.traffic import ShardShape

if TYPE_CHECKING:
    import jax

    from jaxpar.exchange.low_rank.matrices import Matrix


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

        from jaxpar.exchange.low_rank.matrices import as_one_vector, orthonormal
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

        from jaxpar.exchange.low_rank.matrices import orthonormal

        layers, rows, columns = last.shape
        left_key, first_key = jax.random.split(key)
        warm = jnp.swapaxes(last, -1, -2) @ jax.random.normal(left_key, (rows, self.rank))
        random = jax.random.normal(first_key, (layers, columns, self.rank))
        return orthonormal(jnp.where(jnp.any(last != 0, axis=(-1, -2), keepdims=True), warm, random))
