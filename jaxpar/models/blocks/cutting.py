"""Sequences cut in chunks and blocks, the blocks in front, and joined again.

[batch, chunks * tokens, heads, head_dim]  ──►  [chunks * blocks, batch, g, r, tokens of a block, head_dim]

Blocks stand in front because a walk over pairs takes one at a time. What fills up a last block has no position.
"""

import jax
import jax.numpy as jnp

from jaxpar.models.blocks.pairs import Blocks
from jaxpar.models.blocks.rule import NOWHERE


def cut_heads(x_bshk: jax.Array, blocks: Blocks, groups: int) -> jax.Array:
    """Returns queries, keys or values in blocks. Shape [n, b, g, r, tokens of a block, k]."""
    batch, _, heads, head_dim = x_bshk.shape
    x = _filled(x_bshk.reshape(batch, -1, blocks.tokens, heads, head_dim), blocks, 0)
    x = x.reshape(batch, -1, blocks.size, groups, heads // groups, head_dim)
    return x.transpose(1, 0, 3, 4, 2, 5)


def cut_keys(k_btgk: jax.Array, v_btgk: jax.Array, blocks: Blocks) -> jax.Array:
    """Returns keys and values in blocks, as one array. Shape [n, 2, b, g, tokens of a block, k]."""
    return jnp.stack([cut_heads(x, blocks, x.shape[2])[:, :, :, 0] for x in (k_btgk, v_btgk)], axis=1)


def joined_keys(kv: jax.Array, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    """Returns what `cut_keys` cut. Shapes [b, t, g, k]."""
    k, v = (joined_heads(x[:, :, :, None], blocks) for x in kv.swapaxes(0, 1))
    return k, v


def joined_heads(x_nbgrqk: jax.Array, blocks: Blocks) -> jax.Array:
    """Returns what `cut_heads` cut. Shape [b, s, h, k]."""
    count, batch, groups, shared, _, head_dim = x_nbgrqk.shape
    x = x_nbgrqk.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count // blocks.count, -1, groups * shared, head_dim)
    return x[:, :, : blocks.tokens].reshape(batch, -1, groups * shared, head_dim)


def cut_positions(at_s: jax.Array, blocks: Blocks) -> jax.Array:
    """Returns positions in blocks. Shape [n, tokens of a block]; what fills up a block is `NOWHERE`."""
    return _filled(at_s.reshape(1, -1, blocks.tokens), blocks, NOWHERE).reshape(-1, blocks.size)


def cut_segments(segments_bs: jax.Array, blocks: Blocks) -> jax.Array:
    """Returns segments in blocks. Shape [n, b, tokens of a block]."""
    batch = segments_bs.shape[0]
    x = _filled(segments_bs.reshape(batch, -1, blocks.tokens), blocks, 0)
    return x.reshape(batch, -1, blocks.size).swapaxes(0, 1)


def _filled(x: jax.Array, blocks: Blocks, value: int) -> jax.Array:
    """Returns [batch, chunks, tokens, ...] filled up to whole blocks along the tokens of each chunk."""
    more = blocks.count * blocks.size - blocks.tokens
    if not more:
        return x
    return jnp.pad(x, [(0, 0), (0, 0), (0, more)] + [(0, 0)] * (x.ndim - 3), constant_values=value)
