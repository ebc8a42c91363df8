"""A cache of keys and values, so that a further token costs as much after 2,000 tokens as after 100.

    prefill   tokens [batch, seq] of all prompts at once, from position 0
    step      one token of each row, at a position of its own

Its size is fixed, [layers, batch, positions, kv_heads, head_dim], so each step is the same program. It is cut as
activations are: `batch` over the axes that see other examples, `kv_heads` over `tensor`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpar.models.islands import KEYS, attention
from jaxpar.models.named import constrain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of all layers.

    Attributes:
      keys: Shape [layers, batch, positions, kv_heads, head_dim].
      values: Likewise.
      length: Tokens of each row so far, which is the position of its next one. Shape [batch], int32.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array

    @classmethod
    def empty(cls, *, layers: int, shape: tuple[int, int, int, int], dtype) -> "Cache":
        """Returns a cache of zeros; `shape` is [batch, positions, kv_heads, head_dim]."""
        none = jnp.zeros((layers, *shape), dtype)
        return cls(none, none, jnp.zeros(shape[:1], jnp.int32))


@dataclass(frozen=True)
class Layer:
    """One layer's keys and values while tokens go through it.

    Attributes:
      keys: Shape [batch, positions, kv_heads, head_dim].
      values: Likewise.
      positions: Of the tokens. Shape [batch, seq], int32.
    """

    keys: jax.Array
    values: jax.Array
    positions: jax.Array

    def attend(self, q_bshk: jax.Array, k_bsgk: jax.Array, v_bsgk: jax.Array) -> tuple[jax.Array, "Layer"]:
        """Returns attention of tokens to all before them and to themselves, and the layer that knows them too.

        Several tokens are those of a prompt, from position 0; one is at any position.
        """
        keys, values = self._with(self.keys, k_bsgk), self._with(self.values, v_bsgk)
        after = Layer(keys, values, self.positions)
        if q_bshk.shape[1] > 1:
            return attention(q_bshk, k_bsgk, v_bsgk, causal=True), after
        seen = jnp.arange(keys.shape[1])[None, None, None, :] <= self.positions[:, None, :, None]
        return jax.nn.dot_product_attention(q_bshk, keys, values, mask=seen), after

    def _with(self, held: jax.Array, new: jax.Array) -> jax.Array:
        if new.shape[1] > 1:
            return constrain(jax.lax.dynamic_update_slice_in_dim(held, new.astype(held.dtype), 0, axis=1), *KEYS_KEPT)
        # a comparison, not a scatter: each device writes the rows that it has
        here = jnp.arange(held.shape[1])[None, :, None, None] == self.positions[:, :, None, None]
        return constrain(jnp.where(here, new.astype(held.dtype), held), *KEYS_KEPT)


KEYS_KEPT = (KEYS[0], None, *KEYS[2:])  # positions are whole: a query meets all of them
