"""Factors: the gradient of a dense layer is a sum over examples of outer products, whose vectors are sent instead."""

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

    The gradient of a dense layer is X^T Y, of the B examples of a replica: B (M + N) numbers say all of M x N. Here it
    is factored where it is exchanged, so that any model will do: by an orthonormal basis of its columns, which are no
    more than B. Nothing is lost while `rank` is not below the examples (tokens) of a replica. Where the factors of all
    replicas are more than an all-reduce sends, the gradient goes whole.

    Attributes:
      name: factors (gradients of dense layers travel as factors, as many as a replica has examples).
      rank: Examples of a replica.
      smallest: Parameters of fewer elements are not compressed.
      whole: Patterns of paths that are not compressed either: norms and biases.
      feedback: Whether what is lost is added to the next step's gradient.
    """

    name: str = "factors"
    rank: int = 32
    feedback: bool = False

    def worth(self, matrix: "Matrix", replicas: int) -> bool:
        """Returns whether the factors of all replicas are fewer than what an all-reduce sends."""
        return self.rank < matrix.rank and replicas * self.rank * (matrix.rows + matrix.columns) < 2 * (
            matrix.rows * matrix.columns
        )

    def agreed(
        self, given: "Mapping[str, jax.Array]", last: "Mapping[str, jax.Array]"
    ) -> "tuple[dict[str, jax.Array], dict[str, jax.Array]]":
        """Returns the mean of all products, and what each replica lost of its own."""
        import jax
        import jax.numpy as jnp

        from jaxpar.exchange.between import AXIS
        from jaxpar.exchange.low_rank.matrices import orthonormal, together

        left = {}
        for path, x in given.items():
            drawn = jax.random.normal(jax.random.key(0), (x.shape[-1], self.rank))
            left[path] = orthonormal(x @ drawn)  # spans all columns of x, as long as its rank is not above
        right = {path: jnp.swapaxes(left[path], -1, -2) @ x for path, x in given.items()}
        gather = lambda arrays: together(arrays, lambda vector: jax.lax.all_gather(vector, AXIS))  # noqa: E731
        every_left, every_right = gather(left), gather(right)
        mean = {path: jnp.mean(every_left[path] @ every_right[path], axis=0) for path in given}
        return mean, {path: x - left[path] @ right[path] for path, x in given.items()}

    def travels(self, matrix: "Matrix", replicas: int) -> dict[str, int]:
        """Returns the all-gathers of both factors."""
        each = replicas * self.rank
        return {"all-gather left": each * matrix.rows, "all-gather right": each * matrix.columns}
