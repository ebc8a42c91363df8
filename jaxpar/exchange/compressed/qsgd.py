"""Gradients in 8 or 4 bits per element, rounded at random without bias."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxpar.errors import refuse
from jaxpar.exchange.base import SECTION
from jaxpar.exchange.compressed.base import CodeArray, Compressed, pack_bits, unpack_bits

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class Qsgd(Compressed):
    """QSGD (Alistarh et al. 2017, arXiv:1610.02132), with blocks scaled by their largest element, as in its section 5.

    Rounds up or down at random, so that the expectation of the decoded value is the gradient.

    Attributes:
      name: qsgd (gradients are sent in 8 or 4 bits an element, rounded at random).
      bits: Bits per element: 8 or 4.
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      block: Number of elements that share a scale.
      feedback: Whether the error of a code is added to the next step's gradient.
    """

    name: str = "qsgd"
    bits: Literal[8, 4] = 8
    feedback: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.bits not in (8, 4):
            raise refuse(f"{SECTION}.bits = {self.bits!r}", rule="8 or 4 bits an element", fix="bits = 8")

    def encode(self, rows: "jax.Array", key: "jax.Array") -> dict[str, "jax.Array"]:
        """Returns levels [rows, elements * bits / 8] and scales [rows, blocks]."""
        import jax
        import jax.numpy as jnp

        largest = 2 ** (self.bits - 1) - 1
        blocks = rows.reshape(len(rows), -1, self.block)
        scale = jnp.max(jnp.abs(blocks), axis=-1) / largest
        level = jnp.floor(blocks / jnp.where(scale > 0, scale, 1)[..., None] + jax.random.uniform(key, blocks.shape))
        levels = (jnp.clip(level, -largest, largest) + largest).reshape(rows.shape)
        return {"levels": pack_bits(levels, self.bits), "scale": scale}

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements]."""
        import jax.numpy as jnp

        largest = 2 ** (self.bits - 1) - 1
        level = unpack_bits(code["levels"], self.bits).astype(jnp.float32) - largest
        return (level.reshape(*code["scale"].shape, self.block) * code["scale"][..., None]).reshape(len(level), -1)

    def code_arrays(self, elements: int) -> tuple[CodeArray, ...]:
        """One array of bytes, with one or two levels each, and one array with a scale per block."""
        return CodeArray(elements * self.bits // 8, "u8", 1), CodeArray(elements // self.block, "f32", 4)
