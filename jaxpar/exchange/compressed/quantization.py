"""Quantization: every element is sent in fewer bits.

bf16       bfloat16, summed in float32
qsgd       8 or 4 bits, rounded at random without bias
ternary    two bits: -1, 0 or 1 times a scale, at random
sign       one bit
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxpar.errors import refuse
from jaxpar.exchange.base import SECTION
from jaxpar.exchange.compressed.base import CodeArray, Compressed, pack_bits, unpack_bits

if TYPE_CHECKING:
    import jax
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class BFloat16(Compressed):
    """Gradients sent in bfloat16 and summed in float32.

    Attributes:
      name: bf16 (gradients are sent in bfloat16 and summed in float32).
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      block: Rows are padded to a multiple of this number of elements.
      feedback: Whether the error of a code is added to the next step's gradient.
    """

    name: str = "bf16"
    feedback: bool = False

    def encode(self, rows: "jax.Array", key: "jax.Array") -> dict[str, "jax.Array"]:
        """Casts the elements [rows, elements] to bfloat16."""
        return {"rounded": rows.astype("bfloat16")}

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Casts the elements [rows, elements] to float32."""
        return code["rounded"].astype("float32")

    def code_arrays(self, elements: int) -> tuple[CodeArray, ...]:
        """One array of two bytes per element."""
        return (CodeArray(elements, "bf16", 2),)


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
