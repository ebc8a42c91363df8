"""Which blocks meet in each turn of a ring: tables whose rows are chosen by the device, and which all are as long.

    causal, zigzag      own piece               a piece of a group before      a piece of a group after
    keys                early  late             early  late                    early  late
    early queries       half                    all
    late queries        all    half             all                            all    all

Always late queries meet early keys. Besides, early queries meet early keys, or late ones late keys: which of the two is
chosen by selecting the rows of the table, for a conditional that depends on the device would be differentiated wrongly,
and devices would wait for each other. So a turn is half of the square for everyone, and own pieces 3 of its 4 parts.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models.blocks.cutting import cut_positions, cut_segments
from jaxpar.models.blocks.kernel import Table
from jaxpar.models.blocks.pairs import Blocks, all_pairs, pairs
from jaxpar.models.blocks.rule import Rule
from jaxpar.parallel.techniques.exchanged.zigzag import chunks_of


@dataclass(frozen=True)
class Walks:
    """The pieces of a ring, and the tables of its turns.

    Attributes:
      rule: Which keys a query sees.
      ring: Groups.
      queries: Blocks of a chunk of queries.
      keys: Blocks of a chunk of keys.
    """

    rule: Rule
    ring: int
    queries: Blocks
    keys: Blocks

    @property
    def zigzag(self) -> bool:
        """Whether a piece is an early and a late chunk; else it is one chunk."""
        return self.rule.causal and self.ring > 1

    def stand(self, group: jax.Array, segments_bs: jax.Array | None, blocks: Blocks) -> tuple:
        """Returns the positions [n, q] and segments [n, b, q] of a group's tokens, in blocks."""
        chunks = chunks_of(group, self.ring) if self.zigzag else (group,)
        size = blocks.tokens
        at = jnp.concatenate([chunk * size + jnp.arange(size) for chunk in chunks])
        if segments_bs is None:
            return cut_positions(at, blocks), None
        each = [jax.lax.dynamic_slice_in_dim(segments_bs, chunk * size, size, axis=1) for chunk in chunks]
        return cut_positions(at, blocks), cut_segments(jnp.concatenate(each, axis=1), blocks)

    def own(self) -> Table:
        """Returns the pairs of blocks of a group's own queries and keys."""
        if not self.zigzag:
            return pairs(self.rule, self.queries, self.keys)  # of one chunk, or of all tokens
        half, late_queries, late = pairs(self.rule, self.queries, self.keys), *self._late()
        return np.concatenate([half, self._full() + late_queries, half + late])

    def met(self, group: jax.Array, other: jax.Array) -> Table:
        """Returns the pairs of blocks of a group's queries and the keys of another."""
        full, (late_queries, late) = self._full(), self._late()
        if not self.zigzag:
            return full
        early_or_late = full + jnp.where(other < group, 0, late)
        return jnp.concatenate([full + late_queries, early_or_late])

    def _late(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns what leads from pairs of early blocks to those of late queries, and of late queries and keys."""
        return np.array([self.queries.count, 0], np.int32), np.array([self.queries.count, self.keys.count], np.int32)

    def _full(self) -> np.ndarray:
        return all_pairs(self.queries, self.keys)
