"""Sparse sums: the largest elements travel, and all of their sum, sparse for as long as that is smaller."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.exchange.compressed.base import Bytes
from jaxpar.exchange.compressed.topk import TopK, largest

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class Sparse(TopK):
    """A sparse all-reduce (SparCML: Renggli et al. 2019, arXiv:1802.08021).

    What replicas send is as of `topk`. Their sum has up to as many times more elements as there are replicas: it goes
    with places while these and the values take fewer bytes than all values, and whole beyond. Nothing of it is lost.

    Attributes:
      name: sparse (as topk, and nothing of the sum of what travels is lost).
      share: Of the elements of a block, how many travel; at least one does.
      smallest: Parameters of fewer elements are not compressed.
      whole: Patterns of paths that are not compressed either: norms and biases.
      block: Elements of which the largest travel, with their places in two bytes.
      feedback: Whether what a code loses is added to the next step's gradient.
    """

    name: str = "sparse"

    def encode_mean(
        self, rows: "jax.Array", key: "jax.Array", replicas: int, came: "dict[str, jax.Array] | None" = None
    ) -> dict[str, "jax.Array"]:
        """Returns all elements of a sum that may be other than zero."""
        if self._dense(replicas):
            return {"all": rows}
        return largest(rows.reshape(len(rows), -1, self.block), self.kept * replicas)

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements]."""
        return code["all"] if "all" in code else super().decode(code)

    def coded_mean(self, elements: int, replicas: int) -> tuple[Bytes, ...]:
        """Returns the values of a sum and their places, or all values."""
        if self._dense(replicas):
            return (Bytes(elements, "f32", 4),)
        count = elements // self.block * self.kept * replicas
        return Bytes(count, "f32", 4), Bytes(count, "u16", 2)

    def _dense(self, replicas: int) -> bool:
        return self.kept * replicas * (4 + 2) >= self.block * 4
