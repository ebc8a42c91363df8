"""PowerSGD: a step of the power method finds the columns and rows that say most of the mean gradient."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.errors import Problem
from jaxpar.exchange.low_rank.base import LowRank
from jaxpar.exchange.part import Part

if TYPE_CHECKING:
    import jax

    from jaxpar.exchange.low_rank.matrices import Matrix


@dataclass(frozen=True, kw_only=True)
class PowerSgd(LowRank):
    """PowerSGD (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727, Algorithm 1), with error feedback and a warm start.

    M is a gradient as a matrix and Q begins with the rows of the last step's: P = mean(M Q), made orthonormal, then
    Q = mean(M^T P); the gradient is P Q^T. At the rank of the matrix that is all of it. A replica remembers what it
    could not send of its own, M - P (M^T P)^T. To be restored in any layout the warm start is kept as the last mean.

    Attributes:
      name: powersgd (gradients travel as products of two thin matrices, found by the power method).
      rank: Columns of P and Q.
      smallest: Parameters of fewer elements are not compressed.
      whole: Patterns of paths that are not compressed either: norms and biases.
      feedback: Whether what is lost is added to the next step's gradient.
    """

    name: str = "powersgd"
    warm = True

    def idle(self, parts: Mapping[str, Part], replicas: int) -> list[Problem]:
        """Returns whether no parameter is compressed, or one has a lower rank than is asked for."""
        shapes = self._matrices(parts, replicas)
        path = min(shapes, key=lambda path: shapes[path].rank, default="")
        if not path or self.rank <= shapes[path].rank:
            return super().idle(parts, replicas)
        each = shapes[path]
        return [
            Problem(
                f"rank = {self.rank} and {path}, of which a device has a matrix of {each.rows} x {each.columns}",
                "a rank is not above the rows and columns of a matrix",
                f"rank = {each.rank}, or whole = [{', '.join(map(repr, (*self.whole, path)))}]".replace("'", '"'),
            )
        ]

    def agreed(
        self, given: "Mapping[str, jax.Array]", last: "Mapping[str, jax.Array]"
    ) -> "tuple[dict[str, jax.Array], dict[str, jax.Array]]":
        """Returns P Q^T, and what each replica lost of its own."""
        import jax
        import jax.numpy as jnp

        from jaxpar.exchange.between import AXIS
        from jaxpar.exchange.low_rank.matrices import orthonormal, together

        mean = lambda arrays: together(arrays, lambda vector: jax.lax.pmean(vector, AXIS))  # noqa: E731
        keys = dict(zip(given, jax.random.split(jax.random.key(0), len(given)), strict=True))  # all draw alike
        start = {path: self._start(last[path], keys[path]) for path in given}
        p = mean({path: x @ start[path] for path, x in given.items()})
        p = {path: orthonormal(x) for path, x in p.items()}
        own = {path: jnp.swapaxes(x, -1, -2) @ p[path] for path, x in given.items()}
        q = mean(own)
        product = lambda q: {path: p[path] @ jnp.swapaxes(x, -1, -2) for path, x in q.items()}  # noqa: E731
        kept = product(own)
        return product(q), {path: x - kept[path] for path, x in given.items()}

    def travels(self, matrix: "Matrix", replicas: int) -> dict[str, int]:
        """Returns the all-reduces of P and of Q."""
        return {"all-reduce P": self.rank * matrix.rows, "all-reduce Q": self.rank * matrix.columns}

    def _start(self, last: "jax.Array", key: "jax.Array") -> "jax.Array":
        """Returns an orthonormal Q [layers, columns, rank] whose span has the rows of the last mean; drawn at first.

        The last mean times a drawn matrix spans its rows, as they are no more than the rank.
        """
        import jax
        import jax.numpy as jnp

        from jaxpar.exchange.low_rank.matrices import orthonormal

        layers, rows, columns = last.shape
        left, first = jax.random.split(key)
        rows_of_last = jnp.swapaxes(last, -1, -2) @ jax.random.normal(left, (rows, self.rank))
        drawn = jax.random.normal(first, (layers, columns, self.rank))
        return orthonormal(jnp.where(jnp.any(last != 0, axis=(-1, -2), keepdims=True), rows_of_last, drawn))
