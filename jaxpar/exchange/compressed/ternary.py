"""Two bits an element: -1, 0 or 1 times a scale, at random."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.exchange.compressed.base import Bytes, Compressed

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class Ternary(Compressed):
    """TernGrad (Wen et al. 2017, arXiv:1705.07878, equations 1 to 4), with a scale for each block.

    An element is its sign times the block's largest magnitude with the probability that it is as large, else 0, so that
    the expectation is the gradient. Three things are not as in the paper. Its server sends the sum of what workers sent
    with more bits; here the mean is coded once more: of normal gradients on 8 replicas its noise is 1.8 times its
    square, not 0.22 times (`pytest tests/test_definitions_of_exchanges.py -k ternary`). The paper clips gradients at
    2.5 standard deviations before they are coded; here nothing does. And its workers share the largest of their scales;
    here each has its own.

    Attributes:
      name: ternary (gradients travel as -1, 0 or 1 times a scale, drawn at random).
      smallest: Parameters of fewer elements are not compressed.
      whole: Patterns of paths that are not compressed either: norms and biases.
      block: Elements that have a scale in common.
      feedback: Whether what a code loses is added to the next step's gradient.
    """

    name: str = "ternary"
    feedback: bool = False

    def encode(self, rows: "jax.Array", key: "jax.Array") -> dict[str, "jax.Array"]:
        """Returns digits [rows, elements / 4] and scales [rows, blocks]."""
        import jax
        import jax.numpy as jnp

        from jaxpar.exchange.compressed.codes import packed

        blocks = rows.reshape(len(rows), -1, self.block)
        scale = jnp.max(jnp.abs(blocks), axis=-1)
        drawn = jax.random.uniform(key, blocks.shape) * scale[..., None] < jnp.abs(blocks)
        return {"digits": packed((jnp.sign(blocks) * drawn + 1).reshape(rows.shape), 2), "scale": scale}

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements]."""
        import jax.numpy as jnp

        from jaxpar.exchange.compressed.codes import unpacked

        digit = unpacked(code["digits"], 2).astype(jnp.float32) - 1
        return (digit.reshape(*code["scale"].shape, self.block) * code["scale"][..., None]).reshape(len(digit), -1)

    def coded(self, elements: int) -> tuple[Bytes, ...]:
        """Returns bytes of four digits, and a scale of each block."""
        return Bytes(elements // 4, "u8", 1), Bytes(elements // self.block, "f32", 4)
