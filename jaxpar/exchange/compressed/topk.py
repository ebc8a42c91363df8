"""The largest elements of each block, with their places."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.errors import check_ranges
from jaxpar.exchange.compressed.base import Bytes, Compressed
from jaxpar.exchange.settings import SECTION

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class Largest(Compressed):
    """Settings of codes of some elements of each block.

    Attributes:
      share: Of the elements of a block, how many travel; at least one does.
    """

    share: float = 0.01

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, SECTION, {"share": (2**-16, 1.0), "block": (8, 2**16)})

    @property
    def kept(self) -> int:
        """Elements of a block that travel."""
        return max(round(self.share * self.block), 1)


@dataclass(frozen=True, kw_only=True)
class TopK(Largest):
    """Top-k sparsification with error feedback (Stich, Cordonnier, Jaggi 2018, arXiv:1809.07599), block by block.

    Attributes:
      name: topk (of each block of gradients the largest elements travel, what that loses is remembered).
      share: Of the elements of a block, how many travel; at least one does.
      smallest: Parameters of fewer elements are not compressed.
      whole: Patterns of paths that are not compressed either: norms and biases.
      block: Elements of which the largest travel, with their places in two bytes.
      feedback: Whether what a code loses is added to the next step's gradient.
    """

    name: str = "topk"

    def encode(self, rows: "jax.Array", key: "jax.Array") -> dict[str, "jax.Array"]:
        """Returns values and places [rows, blocks, kept]."""
        return largest(rows.reshape(len(rows), -1, self.block), self.kept)

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements], zero where none travelled."""
        return placed(code, self.block)

    def coded(self, elements: int) -> tuple[Bytes, ...]:
        """Returns the values and their places."""
        count = elements // self.block * self.kept
        return Bytes(count, "f32", 4), Bytes(count, "u16", 2)


def largest(blocks: "jax.Array", count: int) -> dict[str, "jax.Array"]:
    """Returns the largest elements of blocks [..., block], with their places. Shape [..., count]."""
    import jax
    import jax.numpy as jnp

    _, places = jax.lax.top_k(jnp.abs(blocks), count)
    return {"values": jnp.take_along_axis(blocks, places, axis=-1), "places": places.astype(jnp.uint16)}


def placed(code: dict[str, "jax.Array"], block: int) -> "jax.Array":
    """Returns elements by their places. Shape [rows, blocks, count] to [rows, blocks * block]."""
    import jax.numpy as jnp

    values, places = code["values"], code["places"].astype(jnp.int32)
    zeros = jnp.zeros((*values.shape[:-1], block), values.dtype)
    return jnp.put_along_axis(zeros, places, values, axis=-1, inplace=False).reshape(len(values), -1)
