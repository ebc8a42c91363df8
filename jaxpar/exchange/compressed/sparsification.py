"""Sparsification: some elements of each block are sent, the largest ones or random ones.

topk       the largest elements, with their places
randomk    elements drawn at random by a seed, which is sent instead of their places
sparse     as topk; the sum over replicas is sent sparse too, unless dense is smaller
"""

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


@dataclass(frozen=True, kw_only=True)
class RandomK(SparseCode):
    """Random-k sparsification (Stich, Cordonnier, Jaggi 2018, arXiv:1809.07599): new elements in every step.

    Without feedback the values are scaled up by block / kept, so that the expectation is the gradient. All replicas
    draw the same places, so the code of the mean has these places too, and is exact. With a share of 0.1 the variance
    of the mean is 9 times its square; if each replica drew other places, and again for the mean, it would be
    9 + 90 / replicas times.

    Attributes:
      name: randomk (of each block of gradients some elements are sent, new ones in every step).
      share: Share of each block's elements that is sent, at least one element.
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      block: Elements from which the sent ones are drawn.
      feedback: Whether the error of a code is added to the next step's gradient.
    """

    name: str = "randomk"
    shared_key = True

    def encode_mean(
        self, rows: "jax.Array", key: "jax.Array", replicas: int, codes: "dict[str, jax.Array] | None" = None
    ) -> dict[str, "jax.Array"]:
        """Returns the elements of the mean at the places that all replicas draw."""
        import jax.numpy as jnp

        if codes is None:
            return self.encode(rows, key)
        seeds, blocks = codes["seed"][:1], rows.reshape(len(rows), -1, self.block)
        return {"values": jnp.take_along_axis(blocks, self._places(seeds, blocks.shape[1]), axis=-1), "seed": seeds}

    def encode(self, rows: "jax.Array", key: "jax.Array") -> dict[str, "jax.Array"]:
        """Returns values [rows, blocks, kept], and a seed per row."""
        import jax
        import jax.numpy as jnp

        seeds = jax.random.bits(key, (len(rows), 1), jnp.uint32)
        blocks = rows.reshape(len(rows), -1, self.block)
        values = jnp.take_along_axis(blocks, self._places(seeds, blocks.shape[1]), axis=-1)
        return {"values": values if self.feedback else values * (self.block / self.sent_per_block), "seed": seeds}

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements], with zeros at the places that were not sent."""
        places = self._places(code["seed"], code["values"].shape[1])
        return scatter_elements({"values": code["values"], "places": places}, self.block)

    def code_arrays(self, elements: int) -> tuple[CodeArray, ...]:
        """One array of values, and one with the seed."""
        return CodeArray(elements // self.block * self.sent_per_block, "f32", 4), CodeArray(1, "u32", 4)

    def _places(self, seeds: "jax.Array", blocks: int) -> "jax.Array":
        """Draws places from seeds. Shape [rows, 1] to [rows, blocks, kept]."""
        import jax

        def one(seed: "jax.Array") -> "jax.Array":
            priorities = jax.random.uniform(jax.random.key(seed[0]), (blocks, self.block))
            return jax.lax.top_k(priorities, self.sent_per_block)[1]

        return jax.vmap(one)(seeds)


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
