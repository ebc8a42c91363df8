"""Small integers packed in bytes: several in one, the first in its lowest bits."""

import jax
import jax.numpy as jnp


def pack_bits(values: jax.Array, bits: int) -> jax.Array:
    """Packs integers below 2^bits in bytes. Shape [..., n] to [..., n * bits / 8], uint8.

    Args:
      values: Integers, a whole number of bytes of them.
      bits: Of each integer: 1, 2, 4 or 8.
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
