"""bfloat16 on the wire, sums in float32."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.exchange.compressed.base import Bytes, Compressed

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class BFloat16(Compressed):
    """Gradients that travel in bfloat16, and are summed in float32.

    Attributes:
      name: bf16 (gradients travel in bfloat16 and are summed in float32).
      smallest: Parameters of fewer elements are not compressed.
      whole: Patterns of paths that are not compressed either: norms and biases.
      block: Elements to a multiple of which a row is filled.
      feedback: Whether what a code loses is added to the next step's gradient.
    """

    name: str = "bf16"
    feedback: bool = False

    def encode(self, rows: "jax.Array", key: "jax.Array") -> dict[str, "jax.Array"]:
        """Returns the elements [rows, elements] in bfloat16."""
        return {"rounded": rows.astype("bfloat16")}

    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements [rows, elements]."""
        return code["rounded"].astype("float32")

    def coded(self, elements: int) -> tuple[Bytes, ...]:
        """Returns two bytes of each element."""
        return (Bytes(elements, "bf16", 2),)
