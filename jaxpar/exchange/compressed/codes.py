"""Small numbers packed in bytes: several of them in one, the first in its lowest bits."""

import jax
import jax.numpy as jnp


def packed(values: jax.Array, bits: int) -> jax.Array:
    """Returns numbers below 2^bits as bytes. Shape [..., n] to [..., n * bits / 8], uint8.

    Args:
      values: Whole numbers, as many as fill bytes.
      bits: Of each: 1, 2, 4 or 8.
    """
    each = 8 // bits
    values = values.astype(jnp.uint8).reshape(*values.shape[:-1], -1, each)
    places = jnp.arange(each, dtype=jnp.uint8) * jnp.uint8(bits)
    return jnp.sum(values << places, axis=-1, dtype=jnp.uint8)


def unpacked(found: jax.Array, bits: int) -> jax.Array:
    """Returns the numbers that are packed in bytes. Shape [..., n] to [..., n * 8 / bits], uint8."""
    each = 8 // bits
    places = jnp.arange(each, dtype=jnp.uint8) * jnp.uint8(bits)
    values = (found[..., None] >> places) & jnp.uint8((1 << bits) - 1)
    return values.reshape(*found.shape[:-1], -1)
