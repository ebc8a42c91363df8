"""Sparse sums: each replica sends its largest elements; their sum is sent sparse, unless dense is smaller."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.exchange.compressed.base import CodeArray
from jaxpar.exchange.compressed.topk import TopK, largest_elements

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class Sparse(TopK):
    """A sparse all-reduce (SparCML: Renggli et al. 2019, arXiv:1802.08021).

    Replicas send the same as with `topk`. Their sum may have `replicas` times as many nonzero elements. It is sent as
    values and places if these take fewer bytes than all values, else dense. The sum is exact.

    Attributes:
      name: sparse (as topk, and the sum of the sent elements is exact).
      share: Share of each block's elements that is sent, at least one element.
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      block: Elements of which the largest are sent, with their places in two bytes.
      feedback: Whether the error of a code is added to the next step's gradient.
    """

    name: str = "sparse"

    def encode_mean(
        self, rows: "jax.Array", key: "jax.Array", replicas: int, codes: "dict[str, jax.Array] | None" = None
    ) -> dict[str, "jax.Array"]:
        """Encodes a sum over replicas without loss: by its largest elements, or whole if that takes fewer bytes."""
        if self._dense(replicas):
            return {"all": rows}
        return largest_elements(rows.reshape(len(rows), -1, self.block), self.sent_per_block * replicas)

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements]."""
        return code["all"] if "all" in code else super().decode(code)

    def mean_code_arrays(self, elements: int, replicas: int) -> tuple[CodeArray, ...]:
        """The arrays that encode a sum: its nonzero values and their indices, or all values."""
        if self._dense(replicas):
            return (CodeArray(elements, "f32", 4),)
        count = elements // self.block * self.sent_per_block * replicas
        return CodeArray(count, "f32", 4), CodeArray(count, "u16", 2)

    def _dense(self, replicas: int) -> bool:
        return self.sent_per_block * replicas * (4 + 2) >= self.block * 4
