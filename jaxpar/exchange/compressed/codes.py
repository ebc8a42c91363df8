"""Packs several small integers into each byte, the first in the lowest bits."""

import jax
import jax.numpy as jnp


def pack_bits(values: jax.Array, bits: int) -> jax.Array:
    """Packs integers below 2^bits into bytes. Shape [..., n] to [..., n * bits / 8], uint8.

    Args:
      values: Integers; n * bits is a multiple of 8.
      bits: Bits per integer: 1, 2, 4 or 8.
    """
    per_byte = 8 // bits
    values = values.astype(jnp.uint8).reshape(*values.shape[:-1], -1, per_byte)
    shifts = jnp.arange(per_byte, dtype=jnp.uint8) * jnp.uint8(bits)
    return jnp.sum(values << shifts, axis=-1, dtype=jnp.uint8)


def unpack_bits(data: jax.Array, bits: int) -> jax.Array:
    """Unpacks integers from bytes. Shape [..., n] to [..., n * 8 / bits], uint8."""
    per_byte = 8 // bits
    shifts = jnp.arange(per_byte, dtype=jnp.uint8) * jnp.uint8(bits)
    values = (data[..., None] >> shifts) & jnp.uint8((1 << bits) - 1)
    return values.reshape(*data.shape[:-1], -1)
