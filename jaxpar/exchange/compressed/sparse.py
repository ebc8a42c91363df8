"""Sparse sums: each replica sends its largest elements, and their sum stays sparse while that is smaller."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.exchange.compressed.base import CodeArray
from jaxpar.exchange.compressed.topk import TopK, largest_elements

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class Sparse(TopK):
    """A sparse all-reduce (SparCML: Renggli et al. 2019, arXiv:1802.08021).

    Replicas send the same as with `topk`. Their sum may have as many times more elements as there are replicas: it is
    sent with places while places and values take fewer bytes than all values, and dense beyond. The sum is exact.

    Attributes:
      name: sparse (as topk, and the sum of the sent elements is exact).
      share: Share of a block's elements that is sent; at least one is.
      smallest: Parameters of fewer elements are not compressed.
      whole: Patterns of paths that are not compressed either: norms and biases.
      block: Elements of which the largest are sent, with their places in two bytes.
      feedback: Whether the error of a code is added to the next step's gradient.
    """

    name: str = "sparse"

    def encode_mean(
        self, rows: "jax.Array", key: "jax.Array", replicas: int, codes: "dict[str, jax.Array] | None" = None
    ) -> dict[str, "jax.Array"]:
        """Returns all elements of a sum that may be nonzero."""
        if self._dense(replicas):
            return {"all": rows}
        return largest_elements(rows.reshape(len(rows), -1, self.block), self.sent_per_block * replicas)

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements]."""
        return code["all"] if "all" in code else super().decode(code)

    def mean_code_arrays(self, elements: int, replicas: int) -> tuple[CodeArray, ...]:
        """The values of a sum and their places, or all values."""
        if self._dense(replicas):
            return (CodeArray(elements, "f32", 4),)
        count = elements // self.block * self.sent_per_block * replicas
        return CodeArray(count, "f32", 4), CodeArray(count, "u16", 2)

    def _dense(self, replicas: int) -> bool:
        return self.sent_per_block * replicas * (4 + 2) >= self.block * 4
