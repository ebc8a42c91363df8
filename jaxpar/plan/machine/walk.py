"""What a program does with attention that goes pair by pair of blocks: bytes of memory, and kernels that are small."""

from dataclasses import dataclass
from typing import Any

from jaxpar.errors import refuse

Both = tuple[float, float]  # forward and backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """The kernels of a pair of blocks, as XLA makes them or as a kernel of its own.

    Attributes:
      scores: Bytes to and from memory per score of a pair, forward and backward, that its matmuls do not hide.
      queries: Per entry of a pair's queries [queries, heads, head_dim], which every block of keys meets anew: they are
        read, and sums of as many entries read, scaled and written.
      keys: Per entry of its keys [keys, kv_heads, head_dim]; backward, of the sums of their gradients too.
      pair: Seconds of the small kernels of a pair, as long whatever its size.
      least: Seconds of a pair at least: of all its kernels, none of which is shorter than a small one.
    """

    scores: Both = (0.0, 0.0)
    queries: Both = (0.0, 0.0)
    keys: Both = (0.0, 0.0)
    pair: float = 0.0
    least: Both = (0.0, 0.0)

    def __post_init__(self):
        for key, most in dict.fromkeys(("scores", "queries", "keys"), 1e4).items() | {("least", 1.0)}:
            both = getattr(self, key)
            if not (len(both) == 2 and all(0 <= number <= most for number in both)):
                raise refuse(f"walk.{key}={both}", rule=f"two numbers within 0..{most}", fix=f"{key}=(0.0, 0.0)")
        if not 0 <= self.pair <= 1:
            raise refuse(f"walk.pair={self.pair}", rule="seconds within 0..1", fix="pair=1e-5")

    def moved(self, way: int, scores: Any, queries: Any, keys: Any) -> Any:
        """Returns the bytes of a pair with so many scores, entries of queries and of keys; way is 0 going forward."""
        return self.scores[way] * scores + self.queries[way] * queries + self.keys[way] * keys
