"""Factors: a dense layer's gradient is a sum of outer products over examples; replicas send the vectors of these."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.exchange.low_rank.base import LowRank

if TYPE_CHECKING:
    import jax

    from jaxpar.exchange.low_rank.matrices import Matrix


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

        from jaxpar.exchange.low_rank.matrices import as_one_vector, orthonormal
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
