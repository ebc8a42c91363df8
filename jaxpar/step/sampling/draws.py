"""The next token of each row, drawn from logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpar.errors import Keywords, check_ranges


@dataclass(frozen=True, kw_only=True)
class Sampling(Keywords):
    """How tokens are drawn.

    Attributes:
      temperature: Divides the logits; 0 takes the likeliest token.
      top_k: Draw among so many of the likeliest tokens; 0 among all (Fan et al. 2018, arXiv:1805.04833).
      top_p: Draw among the fewest likeliest tokens that have this probability together (Holtzman et al. 2019,
        arXiv:1904.09751), of those that top_k left.
      seed: Of the draws. What a row draws depends on it and on the row's number, not on the other rows.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        ranges = {"temperature": (0.0, 1e6), "top_k": (0, 2**31 - 1), "top_p": (0.0, 1.0), "seed": (0, 2**32 - 1)}
        check_ranges(self, "", ranges)

    def draw(self, logits: jax.Array, rows: jax.Array, count: jax.Array) -> jax.Array:
        """Returns the next token of each row. Shape [batch], int32.

        Args:
          logits: Shape [batch, vocab].
          rows: The number of each row. Shape [batch], int32.
          count: Tokens that each row has drawn before. Shape [batch], int32.
        """
        logits = logits.astype(jnp.float32)
        if not self.temperature:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        order, likeliest = self.kept(logits)
        one = lambda row, index: jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), row), index)  # noqa: E731
        drawn = jax.vmap(jax.random.categorical)(jax.vmap(one)(rows, count), likeliest)
        return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)

    def kept(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns tokens, likeliest first, and their scaled logits, -inf for those that are not drawn.

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
            share = jax.nn.softmax(scaled, axis=-1)
            before = jnp.cumsum(share, axis=-1) - share  # of the tokens that are likelier
            first = jnp.arange(scaled.shape[-1]) == 0
            scaled = jnp.where((before < self.top_p) | first, scaled, -jnp.inf)
        return order, scaled
