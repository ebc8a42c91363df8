"""Elements of each block drawn at random: their places are a seed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.exchange.compressed.base import Bytes
from jaxpar.exchange.compressed.topk import Largest, placed

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class RandomK(Largest):
    """Random-k sparsification (Stich, Cordonnier, Jaggi 2018, arXiv:1809.07599): others in every step.

    Without feedback values are scaled up by what does not travel, so that the expectation is the gradient. All replicas
    draw the same places, so that the mean of their codes has these too, and loses nothing more: with a share of 0.1 the
    noise of the mean is 9 times its square; of places that each draws, and once more for the mean, it would be
    9 + 90 / replicas times.

    Attributes:
      name: randomk (of each block of gradients some elements travel, others in every step).
      share: Of the elements of a block, how many travel; at least one does.
      smallest: Parameters of fewer elements are not compressed.
      whole: Patterns of paths that are not compressed either: norms and biases.
      block: Elements of which some travel.
      feedback: Whether what a code loses is added to the next step's gradient.
    """

    name: str = "randomk"
    common = True

    def encode_mean(
        self, rows: "jax.Array", key: "jax.Array", replicas: int, came: "dict[str, jax.Array] | None" = None
    ) -> dict[str, "jax.Array"]:
        """Returns the mean at the places that all have drawn."""
        import jax.numpy as jnp

        if came is None:
            return self.encode(rows, key)
        seeds, blocks = came["seed"][:1], rows.reshape(len(rows), -1, self.block)
        return {"values": jnp.take_along_axis(blocks, self._places(seeds, blocks.shape[1]), axis=-1), "seed": seeds}

    def encode(self, rows: "jax.Array", key: "jax.Array") -> dict[str, "jax.Array"]:
        """Returns values [rows, blocks, kept], and a seed of each row."""
        import jax
        import jax.numpy as jnp

        seeds = jax.random.bits(key, (len(rows), 1), jnp.uint32)
        blocks = rows.reshape(len(rows), -1, self.block)
        values = jnp.take_along_axis(blocks, self._places(seeds, blocks.shape[1]), axis=-1)
        return {"values": values if self.feedback else values * (self.block / self.kept), "seed": seeds}

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements], zero where none travelled."""
        places = self._places(code["seed"], code["values"].shape[1])
        return placed({"values": code["values"], "places": places}, self.block)

    def coded(self, elements: int) -> tuple[Bytes, ...]:
        """Returns the values, and a seed."""
        return Bytes(elements // self.block * self.kept, "f32", 4), Bytes(1, "u32", 4)

    def _places(self, seeds: "jax.Array", blocks: int) -> "jax.Array":
        """Returns the places that a seed stands for. Shape [rows, 1] to [rows, blocks, kept]."""
        import jax

        def one(seed: "jax.Array") -> "jax.Array":
            drawn = jax.random.uniform(jax.random.key(seed[0]), (blocks, self.block))
            return jax.lax.top_k(drawn, self.kept)[1]

        return jax.vmap(one)(seeds)
