"""A KV cache of fixed size, so that the next token costs as much after 2,000 tokens as after 100.

    prefill   tokens [batch, seq] of all prompts at once, from position 0
    step      one token per row, each at its own position

Its shape is [layers, batch, positions, kv_heads, head_dim], so each step is the same program. It is sharded like
activations: `batch` over the axes that split examples, `kv_heads` over `tensor`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpar.models.blocks.attention import softmax_attention
from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.dim_names import constrain
from jaxpar.models.islands import KEYS, attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """KV cache of all layers.

    Attributes:
      keys: Shape [layers, batch, positions, kv_heads, head_dim].
      values: Likewise.
      length: Number of tokens in each row so far, which is the position of its next token. Shape [batch], int32.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array

    @classmethod
    def empty(cls, *, layers: int, shape: tuple[int, int, int, int], dtype) -> "KVCache":
        """A cache of zeros; `shape` is [batch, positions, kv_heads, head_dim]."""
        zeros = jnp.zeros((layers, *shape), dtype)
        return cls(zeros, zeros, jnp.zeros(shape[:1], jnp.int32))


@dataclass(frozen=True)
class LayerCache:
    """The keys and values of one layer during a call.

    Attributes:
      keys: Shape [batch, positions, kv_heads, head_dim].
      values: Likewise.
      positions: Positions of the tokens. Shape [batch, seq], int32.
    """

    keys: jax.Array
    values: jax.Array
    positions: jax.Array

    def attend(
        self,
        q_bshk: jax.Array,
        k_bsgk: jax.Array,
        v_bsgk: jax.Array,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> tuple[jax.Array, "LayerCache"]:
        """Attention of tokens to earlier tokens and themselves. Returns the output and the updated layer.

        Several tokens are a prompt, from position 0; a single token has any position.
        """
        keys, values = self._write(self.keys, k_bsgk), self._write(self.values, v_bsgk)
        after = LayerCache(keys, values, self.positions)
        if q_bshk.shape[1] > 1:
            return attention(q_bshk, k_bsgk, v_bsgk, causal=True, window=window, softcap=softcap), after
        distance = self.positions[:, None, :, None] - jnp.arange(keys.shape[1])
        mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        if softcap is None:
            return jax.nn.dot_product_attention(q_bshk, keys, values, mask=mask), after
        return softmax_attention(q_bshk, keys, values, mask=mask, rule=AttentionMask(softcap=softcap)), after

    def _write(self, cached: jax.Array, new: jax.Array) -> jax.Array:
        if new.shape[1] > 1:
            return constrain(
                jax.lax.dynamic_update_slice_in_dim(cached, new.astype(cached.dtype), 0, axis=1), *CACHE_NAMES
            )
        # a comparison, not a scatter: each device writes the rows it holds
        position_mask = jnp.arange(cached.shape[1])[None, :, None, None] == self.positions[:, :, None, None]
        return constrain(jnp.where(position_mask, new.astype(cached.dtype), cached), *CACHE_NAMES)


CACHE_NAMES = (KEYS[0], None, *KEYS[2:])  # positions are not sharded, because a query attends to all of them
