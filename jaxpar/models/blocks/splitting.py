"""Splits sequences into chunks and blocks, block index first, and joins them again.

[batch, chunks * tokens, heads, head_dim]  ──►  [chunks * blocks, batch, g, r, tokens of a block, head_dim]

Blocks are the first dim because a scan over pairs takes one at a time. Padding of a last block has no position.
"""

import jax
import jax.numpy as jnp

from jaxpar.models.blocks.attention_mask import NOWHERE
from jaxpar.models.blocks.pairs import Blocks


def split_heads(x_bshk: jax.Array, blocks: Blocks, groups: int) -> jax.Array:
    """Splits queries, keys or values into blocks. Shape [n, b, g, r, tokens of a block, k]."""
    batch, _, heads, head_dim = x_bshk.shape
    x = _pad(x_bshk.reshape(batch, -1, blocks.tokens, heads, head_dim), blocks, 0)
    x = x.reshape(batch, -1, blocks.size, groups, heads // groups, head_dim)
    return x.transpose(1, 0, 3, 4, 2, 5)


def split_keys(k_btgk: jax.Array, v_btgk: jax.Array, blocks: Blocks) -> jax.Array:
    """Splits keys and values into blocks, as one array. Shape [n, 2, b, g, tokens of a block, k]."""
    return jnp.stack([split_heads(x, blocks, x.shape[2])[:, :, :, 0] for x in (k_btgk, v_btgk)], axis=1)


def join_keys(kv: jax.Array, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    """Inverse of `split_keys`. Shapes [b, t, g, k]."""
    k, v = (join_heads(x[:, :, :, None], blocks) for x in kv.swapaxes(0, 1))
    return k, v


def join_heads(x_nbgrqk: jax.Array, blocks: Blocks) -> jax.Array:
    """Inverse of `split_heads`. Shape [b, s, h, k]."""
    count, batch, groups, shared, _, head_dim = x_nbgrqk.shape
    x = x_nbgrqk.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count // blocks.count, -1, groups * shared, head_dim)
    return x[:, :, : blocks.tokens].reshape(batch, -1, groups * shared, head_dim)


def split_positions(positions_s: jax.Array, blocks: Blocks) -> jax.Array:
    """Splits positions into blocks. Shape [n, tokens of a block]; padding is `NOWHERE`."""
    return _pad(positions_s.reshape(1, -1, blocks.tokens), blocks, NOWHERE).reshape(-1, blocks.size)


def split_segments(segments_bs: jax.Array, blocks: Blocks) -> jax.Array:
    """Splits segments into blocks. Shape [n, b, tokens of a block]."""
    batch = segments_bs.shape[0]
    x = _pad(segments_bs.reshape(batch, -1, blocks.tokens), blocks, 0)
    return x.reshape(batch, -1, blocks.size).swapaxes(0, 1)


def _pad(x: jax.Array, blocks: Blocks, value: int) -> jax.Array:
    """Pads [batch, chunks, tokens, ...] to whole blocks along the tokens of each chunk."""
    padding = blocks.count * blocks.size - blocks.tokens
    if not padding:
        return x
    return jnp.pad(x, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 3), constant_values=value)
