"""Draws the next token of each row from logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpar.errors import Keywords, check_ranges


@dataclass(frozen=True, kw_only=True)
class Sampling(Keywords):
    """Settings of sampling.

    Attributes:
      temperature: Divides the logits; 0 takes the most likely token.
      top_k: Draw among the k most likely tokens; 0 among all (Fan et al. 2018, arXiv:1805.04833).
      top_p: Draw among the smallest set of most likely tokens with this total probability (Holtzman et al. 2019,
        arXiv:1904.09751), after top_k.
      seed: Seed of the draws. A row's tokens depend on the seed and the row's number, not on other rows.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        ranges = {"temperature": (0.0, 1e6), "top_k": (0, 2**31 - 1), "top_p": (0.0, 1.0), "seed": (0, 2**32 - 1)}
        check_ranges(self, "", ranges)

    def draw(self, logits: jax.Array, rows: jax.Array, count: jax.Array) -> jax.Array:
        """Draws the next token of each row. Shape [batch], int32.

        Args:
          logits: Shape [batch, vocab].
          rows: The number of each row. Shape [batch], int32.
          count: Number of tokens drawn so far in each row. Shape [batch], int32.
        """
        logits = logits.astype(jnp.float32)
        if not self.temperature:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        order, likeliest = self.candidates(logits)
        row_key = lambda row, index: jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), row), index)  # noqa: E731
        ranks = jax.vmap(jax.random.categorical)(jax.vmap(row_key)(rows, count), likeliest)
        return jnp.take_along_axis(order, ranks[:, None], axis=-1)[:, 0].astype(jnp.int32)

    def candidates(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns tokens, most likely first, and their scaled logits, -inf for tokens that cannot be drawn.

        Args:
          logits: Shape [batch, vocab], float32.

        Returns:
          Both [batch, vocab].
        """
        order = jnp.argsort(-logits, axis=-1, stable=True)
        scaled = jnp.take_along_axis(logits, order, axis=-1) / self.temperature
        if self.top_k:
            scaled = jnp.where(jnp.arange(scaled.shape[-1]) < self.top_k, scaled, -jnp.inf)
        if self.top_p < 1:
            probs = jax.nn.softmax(scaled, axis=-1)
            cumulative = jnp.cumsum(probs, axis=-1) - probs  # probability of the more likely tokens
            is_first = jnp.arange(scaled.shape[-1]) == 0
            scaled = jnp.where((cumulative < self.top_p) | is_first, scaled, -jnp.inf)
        return order, scaled
