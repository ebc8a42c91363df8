"""Sends some elements of each block, drawn at random by a seed, which is sent instead of their indices."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.exchange.compressed.base import CodeArray
from jaxpar.exchange.compressed.topk import SparseCode, scatter_elements

if TYPE_CHECKING:
    import jax


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
