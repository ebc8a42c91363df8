"""Experts that share a buffer compute blocks of their sorted tokens, as in MegaBlocks (arXiv:2211.15841).

    slots of a buffer     b a . a b a a .          (. is empty)
    sorted, in blocks     a a a | a . . | b b . | . . .
    weights of blocks     a       a       b       b

A block has tokens of one expert. A buffer of n slots and s experts has blocks of B = ceil(n / 4s) tokens, of which
floor((n + s (B - 1)) / B) hold any load: 5 s or fewer. So the matmuls have 5/4 or less of the FLOP of n tokens. With a
bound `imbalance` that is at most 5/4 x imbalance x the FLOP of the choices; by a capacity of the same factor it is
imbalance x the same. `jax.lax.ragged_dot` takes no function of one expert, and as XLA compiles it for CPUs and for an
H100 (jax 0.12.0) every token has the FLOP of all s experts: s instead of 5/4.

The weights are copied for blocks, five times the size of a device's experts, and made again in the backward pass.

Both sorting and its inverse are gathers, see `dispatch`; gradients of weights are summed over blocks by a matmul.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpar.models.blocks.dispatch import dispatch
from jaxpar.models.experts import Expert, Tree

FINENESS = 4  # blocks of a mean load: more of them have fewer empty entries, and more copies of weights
WEIGHTS = "weights of blocks"


def in_blocks(expert: Expert, params: Tree, tokens: jax.Array, place: jax.Array) -> jax.Array:
    """Computes each token by its expert.

    Args:
      expert: See `jp.mixture`.
      params: Parameters of all experts. Leading dim: experts, those of a buffer one after another.
      tokens: Shape [buffers, shards..., rows, slots, dim].
      place: Place of each token's expert among those of its buffer; their number for none. Shape
        [buffers, shards..., rows, slots, 1], int32.

    Returns:
      What the experts return, 0 where there is no token. Shape [buffers, shards..., rows, slots, dim].
    """
    buffers, *shards, rows, slots, width = tokens.shape
    params = jax.tree.map(lambda leaf: leaf.reshape(buffers, -1, *leaf.shape[1:]), params)
    run = partial(_one_buffer, expert)
    for _ in shards:
        run = jax.vmap(run, in_axes=(None, 0, 0))
    leading = (buffers, *shards, rows * slots)
    y = jax.vmap(run)(params, tokens.reshape(*leading, width), place.reshape(leading))
    return y.reshape(*tokens.shape[:-1], -1)


def _one_buffer(expert: Expert, params: Tree, x_nd: jax.Array, place_n: jax.Array) -> jax.Array:
    count, sharing = len(x_nd), jax.tree.leaves(params)[0].shape[0]
    size = math.ceil(count / (FINENESS * sharing))
    blocks = (count + sharing * (size - 1)) // size
    entry, token, of_block = _sort(place_n, sharing, size, blocks)
    sorted_tokens = dispatch(x_nd, entry[:, None], token).reshape(blocks, size, -1)
    y = _expert_of_blocks(expert, params, of_block, sorted_tokens)
    return dispatch(y.reshape(blocks * size, -1), token[:, None], entry)


def _sort(place_n: jax.Array, sharing: int, size: int, blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the entry of each token in blocks [n], the token of each entry [blocks x size], and experts of blocks."""
    matches = place_n[:, None] == jnp.arange(sharing)
    counts = jnp.sum(matches, axis=0, dtype=jnp.int32)
    last_block = jnp.cumsum(-(-counts // size))
    first_entry = (last_block + counts // -size) * size
    rank = jnp.argsort(jnp.argsort(place_n, stable=True)).astype(jnp.int32)
    shift = jnp.sum(jnp.where(matches, first_entry - (jnp.cumsum(counts) - counts), 0), axis=1)
    entry = jnp.where(place_n < sharing, rank + shift, blocks * size)
    numbers = jnp.arange(len(place_n), dtype=jnp.int32)
    token = jnp.full((blocks * size,), len(place_n), jnp.int32).at[entry].set(numbers, mode="drop")
    of_block = jnp.sum(jnp.arange(blocks)[:, None] >= last_block, axis=1)
    return entry, token, jnp.minimum(of_block, sharing - 1)


@partial(jax.checkpoint, static_argnums=0, policy=jax.checkpoint_policies.save_anything_except_these_names(WEIGHTS))
def _expert_of_blocks(expert: Expert, params: Tree, of_block: jax.Array, tokens: jax.Array) -> jax.Array:
    weights = jax.tree.map(lambda leaf: checkpoint_name(_weights_of_blocks(leaf, of_block), WEIGHTS), params)
    return jax.vmap(expert)(weights, tokens)


@jax.custom_vjp
def _weights_of_blocks(leaf: jax.Array, of_block: jax.Array) -> jax.Array:
    return jnp.take(leaf, of_block, axis=0, mode="clip")


def _weights_of_blocks_backward(belongs: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tensordot(belongs.astype(g.dtype), g, 1), None


_weights_of_blocks.defvjp(
    lambda leaf, of_block: (_weights_of_blocks(leaf, of_block), of_block == jnp.arange(len(leaf))[:, None]),
    _weights_of_blocks_backward,
)
