"""Gradients in two bits per element (-1, 0 or 1 times a scale, at random), or in one (the sign)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.exchange.compressed.base import CodeArray, Compressed, pack_bits, unpack_bits

if TYPE_CHECKING:
    import jax
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class Ternary(Compressed):
    """TernGrad (Wen et al. 2017, arXiv:1705.07878, equations 1 to 4), with a scale for each block.

    An element becomes its sign times the block's largest magnitude m, with probability |element| / m, else 0: the
    expectation is the gradient. Three differences from the paper: its server sends the sum of the workers' codes
    in more bits, while here the mean is encoded again; for normal gradients on 8 replicas its variance is 1.8 times its
    square, not 0.22 times (`pytest tests/exchange/test_definitions.py -k ternary`). The paper clips gradients at
    2.5 standard deviations before it encodes them; this class does not. The paper's workers share the largest of their
    scales; here each replica has its own.

    Attributes:
      name: ternary (gradients are sent as -1, 0 or 1 times a scale, drawn at random).
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      block: Number of elements that share a scale.
      feedback: Whether the error of a code is added to the next step's gradient.
    """

    name: str = "ternary"
    feedback: bool = False

    def encode(self, rows: "jax.Array", key: "jax.Array") -> dict[str, "jax.Array"]:
        """Returns digits [rows, elements / 4] and scales [rows, blocks]."""
        import jax
        import jax.numpy as jnp

        blocks = rows.reshape(len(rows), -1, self.block)
        scale = jnp.max(jnp.abs(blocks), axis=-1)
        nonzero = jax.random.uniform(key, blocks.shape) * scale[..., None] < jnp.abs(blocks)
        return {"digits": pack_bits((jnp.sign(blocks) * nonzero + 1).reshape(rows.shape), 2), "scale": scale}

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements]."""
        import jax.numpy as jnp

        digit = unpack_bits(code["digits"], 2).astype(jnp.float32) - 1
        return (digit.reshape(*code["scale"].shape, self.block) * code["scale"][..., None]).reshape(len(digit), -1)

    def code_arrays(self, elements: int) -> tuple[CodeArray, ...]:
        """One array of bytes, with four digits each, and one array with a scale per block."""
        return CodeArray(elements // 4, "u8", 1), CodeArray(elements // self.block, "f32", 4)


# One bit an element: its sign, with a scale for each block.


@dataclass(frozen=True, kw_only=True)
class Sign(Compressed):
    """1-bit gradients with error feedback (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847, algorithm 1).

    An element becomes its sign times the mean magnitude of its block. Without feedback small elements are lost.

    Attributes:
      name: sign (gradients are sent as one bit an element, with error feedback).
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      block: Number of elements that share a scale.
      feedback: Whether the error of a code is added to the next step's gradient.
    """

    name: str = "sign"

    def encode(self, rows: "jax.Array", key: "jax.Array") -> dict[str, "jax.Array"]:
        """Returns bits [rows, elements / 8] and scales [rows, blocks]."""
        import jax.numpy as jnp

        scale = jnp.mean(jnp.abs(rows.reshape(len(rows), -1, self.block)), axis=-1)
        return {"bits": pack_bits(rows >= 0, 1), "scale": scale}

    def without_padding(self, code: dict[str, "jax.Array"], counts: "np.ndarray") -> dict[str, "jax.Array"]:
        """Corrects the mean magnitudes, for which `encode` also counts the padding of a block."""
        return code | {"scale": code["scale"] * (self.block / counts).astype("float32")}

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements]."""
        import jax.numpy as jnp

        signs = unpack_bits(code["bits"], 1).astype(jnp.float32) * 2 - 1
        return (signs.reshape(*code["scale"].shape, self.block) * code["scale"][..., None]).reshape(len(signs), -1)

    def code_arrays(self, elements: int) -> tuple[CodeArray, ...]:
        """One array of bytes, with eight signs each, and one array with a scale per block."""
        return CodeArray(elements // 8, "u8", 1), CodeArray(elements // self.block, "f32", 4)
