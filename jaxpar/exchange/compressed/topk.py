"""Sends the largest elements of each block, with their places."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.errors import check_ranges
from jaxpar.exchange.base import SECTION
from jaxpar.exchange.compressed.base import CodeArray, Compressed

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class SparseCode(Compressed):
    """The base of codes that send some elements of each block.

    Attributes:
      share: Share of each block's elements that is sent, at least one element.
    """

    share: float = 0.01

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, SECTION, {"share": (2**-16, 1.0), "block": (8, 2**16)})

    @property
    def sent_per_block(self) -> int:
        """Number of elements of a block that are sent."""
        return max(round(self.share * self.block), 1)


@dataclass(frozen=True, kw_only=True)
class TopK(SparseCode):
    """Top-k sparsification with error feedback (Stich, Cordonnier, Jaggi 2018, arXiv:1809.07599), block by block.

    Attributes:
      name: topk (of each block of gradients the largest elements are sent, with error feedback).
      share: Share of each block's elements that is sent, at least one element.
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      block: Elements of which the largest are sent, with their places in two bytes.
      feedback: Whether the error of a code is added to the next step's gradient.
    """

    name: str = "topk"

    def encode(self, rows: "jax.Array", key: "jax.Array") -> dict[str, "jax.Array"]:
        """Returns values and places, [rows, blocks, kept] each."""
        return largest_elements(rows.reshape(len(rows), -1, self.block), self.sent_per_block)

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements], with zeros at the places that were not sent."""
        return scatter_elements(code, self.block)

    def code_arrays(self, elements: int) -> tuple[CodeArray, ...]:
        """One array of values, and one of their places."""
        count = elements // self.block * self.sent_per_block
        return CodeArray(count, "f32", 4), CodeArray(count, "u16", 2)


def largest_elements(blocks: "jax.Array", count: int) -> dict[str, "jax.Array"]:
    """Returns the `count` largest elements of each block [..., block], and their places. Shape [..., count]."""
    import jax
    import jax.numpy as jnp

    _, places = jax.lax.top_k(jnp.abs(blocks), count)
    return {"values": jnp.take_along_axis(blocks, places, axis=-1), "places": places.astype(jnp.uint16)}


def scatter_elements(code: dict[str, "jax.Array"], block: int) -> "jax.Array":
    """Puts elements at their places in zeros. Shape [rows, blocks, count] to [rows, blocks * block]."""
    import jax.numpy as jnp

    values, places = code["values"], code["places"].astype(jnp.int32)
    zeros = jnp.zeros((*values.shape[:-1], block), values.dtype)
    return jnp.put_along_axis(zeros, places, values, axis=-1, inplace=False).reshape(len(values), -1)
