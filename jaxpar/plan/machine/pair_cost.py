"""Cost of blockwise attention per pair of blocks: memory traffic, and the time of small kernels."""

from dataclasses import dataclass
from typing import Any

from jaxpar.errors import refuse

Both = tuple[float, float]  # forward and backward


@dataclass(frozen=True, kw_only=True, slots=True)
class PairCost:
    """The cost of a pair of blocks besides its matmuls; tuples are (forward, backward).

    Attributes:
      scores: Memory traffic in bytes per score of a pair, beyond what its matmuls hide.
      queries: Bytes per element of a pair's queries [queries, heads, head_dim]: each block of keys reads them again,
        and reads, scales and writes as many elements of sums.
      keys: Bytes per element of its keys [keys, kv_heads, head_dim]; backward also of the sums of their gradients.
      pair: Seconds of the small kernels of a pair, independent of its size.
      least: Fewest seconds of a pair: all its kernels, each at least as long as a small kernel.
    """

    scores: Both = (0.0, 0.0)
    queries: Both = (0.0, 0.0)
    keys: Both = (0.0, 0.0)
    pair: float = 0.0
    least: Both = (0.0, 0.0)

    def __post_init__(self):
        for key, bound in dict.fromkeys(("scores", "queries", "keys"), 1e4).items() | {("least", 1.0)}:
            pair = getattr(self, key)
            if not (len(pair) == 2 and all(0 <= number <= bound for number in pair)):
                raise refuse(f"pair_cost.{key}={pair}", rule=f"two numbers within 0..{bound}", fix=f"{key}=(0.0, 0.0)")
        if not 0 <= self.pair <= 1:
            raise refuse(f"walk.pair={self.pair}", rule="seconds within 0..1", fix="pair=1e-5")

    def traffic(self, way: int, scores: Any, queries: Any, keys: Any) -> Any:
        """Returns the memory traffic of a pair, from its numbers of elements; way is 0 forward, 1 backward."""
        return self.scores[way] * scores + self.queries[way] * queries + self.keys[way] * keys
