"""One bit an element: its sign, with a scale for each block."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.exchange.compressed.base import Bytes, Compressed

if TYPE_CHECKING:
    import jax
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class Sign(Compressed):
    """1-bit gradients with error feedback (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847, algorithm 1).

    An element becomes its sign times the mean magnitude of its block. Without feedback small elements are lost.

    Attributes:
      name: sign (gradients travel as one bit an element, what that loses is remembered).
      smallest: Parameters of fewer elements are not compressed.
      whole: Patterns of paths that are not compressed either: norms and biases.
      block: Elements that have a scale in common.
      feedback: Whether what a code loses is added to the next step's gradient.
    """

    name: str = "sign"

    def encode(self, rows: "jax.Array", key: "jax.Array") -> dict[str, "jax.Array"]:
        """Returns bits [rows, elements / 8] and scales [rows, blocks]."""
        import jax.numpy as jnp

        from jaxpar.exchange.compressed.codes import packed

        scale = jnp.mean(jnp.abs(rows.reshape(len(rows), -1, self.block)), axis=-1)
        return {"bits": packed(rows >= 0, 1), "scale": scale}

    def without_filling(self, code: dict[str, "jax.Array"], counts: "np.ndarray") -> dict[str, "jax.Array"]:
        """Returns the code with the mean magnitudes of the elements alone: `encode` took them over whole blocks."""
        return code | {"scale": code["scale"] * (self.block / counts).astype("float32")}

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements]."""
        import jax.numpy as jnp

        from jaxpar.exchange.compressed.codes import unpacked

        signs = unpacked(code["bits"], 1).astype(jnp.float32) * 2 - 1
        return (signs.reshape(*code["scale"].shape, self.block) * code["scale"][..., None]).reshape(len(signs), -1)

    def coded(self, elements: int) -> tuple[Bytes, ...]:
        """Returns bytes of eight signs, and a scale of each block."""
        return Bytes(elements // 8, "u8", 1), Bytes(elements // self.block, "f32", 4)
