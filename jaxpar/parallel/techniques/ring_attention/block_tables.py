"""Tables of the block pairs to compute in each turn of a ring; they have the same length on all devices.

    causal, zigzag      own shard               a shard of a group before      a shard of a group after
    keys                early  late             early  late                    early  late
    early queries       half                    all
    late queries        all    half             all                            all    all

Late queries always attend to early keys. In addition, early queries attend to early keys, or late queries to late keys.
Each device selects the rows of its table by index, because JAX would differentiate a conditional on the device wrongly,
and devices would wait for each other. So in a turn every device computes half of the square; for its own shard, 3/4.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.blocks.kernel import Table
from jaxpar.models.blocks.pairs import Blocks, all_pairs, pairs, split_positions, split_segments
from jaxpar.parallel.techniques.ring_attention.ring import zigzag_chunks


@dataclass(frozen=True)
class BlockTables:
    """The chunks of a ring, and the block tables of its turns.

    Attributes:
      rule: The mask: the keys that a query sees.
      ring: Number of groups.
      queries: Blocks of a chunk of queries.
      keys: Blocks of a chunk of keys.
    """

    rule: AttentionMask
    ring: int
    queries: Blocks
    keys: Blocks

    @property
    def zigzag(self) -> bool:
        """Whether a shard is an early and a late chunk; else it is one chunk."""
        return self.rule.causal and self.ring > 1

    def positions(self, group: jax.Array, segments_bs: jax.Array | None, blocks: Blocks) -> tuple:
        """Returns the positions [n, q] and segments [n, b, q] of a group's tokens, in blocks."""
        chunks = zigzag_chunks(group, self.ring) if self.zigzag else (group,)
        size = blocks.tokens
        positions = jnp.concatenate([chunk * size + jnp.arange(size) for chunk in chunks])
        if segments_bs is None:
            return split_positions(positions, blocks), None
        parts = [jax.lax.dynamic_slice_in_dim(segments_bs, chunk * size, size, axis=1) for chunk in chunks]
        return split_positions(positions, blocks), split_segments(jnp.concatenate(parts, axis=1), blocks)

    def local_table(self) -> Table:
        """Returns the block pairs of a group's own queries and keys."""
        if not self.zigzag:
            return pairs(self.rule, self.queries, self.keys)  # of one chunk, or of all tokens
        half, late_queries, late = pairs(self.rule, self.queries, self.keys), *self._late()
        return np.concatenate([half, self._full() + late_queries, half + late])

    def remote_table(self, group: jax.Array, other: jax.Array) -> Table:
        """Returns the block pairs of a group's queries and the keys of another."""
        full, (late_queries, late) = self._full(), self._late()
        if not self.zigzag:
            return full
        early_or_late = full + jnp.where(other < group, 0, late)
        return jnp.concatenate([full + late_queries, early_or_late])

    def _late(self) -> tuple[np.ndarray, np.ndarray]:
        """Index offsets from early blocks to pairs with late queries, and to pairs with late queries and late keys."""
        return np.array([self.queries.count, 0], np.int32), np.array([self.queries.count, self.keys.count], np.int32)

    def _full(self) -> np.ndarray:
        return all_pairs(self.queries, self.keys)
