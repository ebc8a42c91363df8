"""The softcap of attention scores, and the mask: the keys that a query attends to, by positions and segments."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

NOWHERE = -1  # the position of padding, to which no query attends


@dataclass(frozen=True)
class AttentionMask:
    """The mask and the softcap of attention.

    Attributes:
      causal: Whether the query at position i attends to no key after i.
      window: A query attends only to keys less than `window` positions away, if causal to i - window + 1 ... i. None is
        no bound.
      softcap: A score x becomes softcap * tanh(x / softcap) before the mask (arXiv:2408.00118). None is no cap.
    """

    causal: bool = False
    window: int | None = None
    softcap: float | None = None

    def cap(self, scores: jax.Array) -> jax.Array:
        """Caps scores to between -softcap and softcap."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def cap_gradient(self, gradient: jax.Array, scores: jax.Array) -> jax.Array:
        """Computes the gradient of the scores from the gradient of the capped scores.

        Args:
          gradient: Gradient of the loss by capped scores; zero where a key is masked.
          scores: Capped scores, or the lowest number where a key is masked.
        """
        if self.softcap is None:
            return gradient
        tanh = jnp.clip(scores / self.softcap, -1, 1)
        return gradient * (1 - jnp.square(tanh))

    def mask(
        self,
        positions_q: jax.Array,
        positions_c: jax.Array,
        segments_bq: jax.Array | None,
        segments_bc: jax.Array | None,
    ) -> jax.Array:
        """Computes the mask of a block of queries and a block of keys.

        Args:
          positions_q: Positions of the queries. Shape [q].
          positions_c: Positions of the keys; `NOWHERE` for padding. Shape [c].
          segments_bq: Segments of the queries; a query attends only to keys of its segment. None is one segment.
          segments_bc: Segments of the keys.

        Returns:
          Booleans [b or 1, 1, 1, q, c], to broadcast with scores [b, g, r, q, c].
        """
        distance = positions_q[:, None] - positions_c
        mask = jnp.broadcast_to(positions_c > NOWHERE, distance.shape)
        if self.causal:
            mask &= distance >= 0
        if self.window is not None:
            mask &= jnp.abs(distance) < self.window
        mask = mask[None]
        if segments_bq is not None and segments_bc is not None:
            mask = mask & (segments_bq[:, :, None] == segments_bc[:, None, :])
        return mask[:, None, None]

    def reaches(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
        """Whether any query in a range of positions [first, last] attends to any key in another, in one segment."""
        (first_q, last_q), (first_c, last_c) = queries, keys
        if self.causal and first_c > last_q:
            return False
        nearest = max(first_q - last_c, first_c - last_q, 0)
        return self.window is None or nearest < self.window
