"""Gradients sent in bfloat16 and summed in float32."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.exchange.compressed.base import CodeArray, Compressed

if TYPE_CHECKING:
    import jax


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
