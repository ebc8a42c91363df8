"""From scores to shares: how large a score can be, and which keys a query sees by positions and segments alone."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

NOWHERE = -1  # the position of what only fills up a block: no query sees it


@dataclass(frozen=True)
class Rule:
    """Which keys a query sees, and how large its scores can be.

    Attributes:
      causal: The query at position i sees no key after i.
      window: It sees only keys less than `window` positions away: i - window + 1 to i where causal. None is no bound.
      softcap: A score x becomes softcap * tanh(x / softcap) before the mask (arXiv:2408.00118). None is no cap.
    """

    causal: bool = False
    window: int | None = None
    softcap: float | None = None

    def capped(self, scores: jax.Array) -> jax.Array:
        """Returns scores between -softcap and softcap."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def uncapped(self, gradient: jax.Array, scores: jax.Array) -> jax.Array:
        """Returns the gradient of scores, from that of capped scores.

        Args:
          gradient: Of the loss by capped scores; zero where a key is not seen.
          scores: Capped scores, or the lowest number where a key is not seen.
        """
        if self.softcap is None:
            return gradient
        tanh = jnp.clip(scores / self.softcap, -1, 1)
        return gradient * (1 - jnp.square(tanh))

    def seen(
        self,
        at_q: jax.Array,
        at_c: jax.Array,
        segments_bq: jax.Array | None,
        segments_bc: jax.Array | None,
    ) -> jax.Array:
        """Returns which of a block's keys each query of another block sees.

        Args:
          at_q: Positions of the queries. Shape [q].
          at_c: Positions of the keys; `NOWHERE` is none. Shape [c].
          segments_bq: Segments of the queries: a query sees only keys of its own. None is one for all.
          segments_bc: Segments of the keys.

        Returns:
          Booleans [b or 1, 1, 1, q, c], as scores are [b, g, r, q, c].
        """
        away = at_q[:, None] - at_c
        found = jnp.broadcast_to(at_c > NOWHERE, away.shape)
        if self.causal:
            found &= away >= 0
        if self.window is not None:
            found &= jnp.abs(away) < self.window
        found = found[None]
        if segments_bq is not None and segments_bc is not None:
            found = found & (segments_bq[:, :, None] == segments_bc[:, None, :])
        return found[:, None, None]

    def reaches(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
        """Returns whether any query in a range of positions [first, last] sees any key in another, in one segment."""
        (first_q, last_q), (first_c, last_c) = queries, keys
        if self.causal and first_c > last_q:
            return False
        nearest = max(first_q - last_c, first_c - last_q, 0)
        return self.window is None or nearest < self.window
