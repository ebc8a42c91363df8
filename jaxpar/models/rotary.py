"""Rotary position embeddings.

Suffixes of arrays: b batch, s seq, h heads, k head_dim.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings (Su et al. 2021, arXiv:2104.09864).

    Attributes:
      base: Pair i of n rotates by base ** (-i / n) radians per position.
      stretch: (factor, low, high, seq): pairs that turn less than `low` times within seq positions rotate `factor`
        times slower, those that turn more than `high` times are unchanged, the others are interpolated. () changes
        nothing. Llama 3.1 (arXiv:2407.21783) has (8, 1, 4, 8192).
    """

    base: float
    stretch: tuple[float, ...] = ()

    def frequencies(self, pairs: int) -> jax.Array:
        """Radians per position. Shape [pairs], float32."""
        frequency = self.base ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
        if not self.stretch:
            return frequency
        factor, low, high, seq = self.stretch
        unscaled_share = jnp.clip((seq * frequency / (2 * math.pi) - low) / (high - low), 0, 1)
        return frequency * (unscaled_share + (1 - unscaled_share) / factor)


def rotate(x_bshk: jax.Array, rope: Rope, positions_bs: jax.Array | None = None) -> jax.Array:
    """Rotates queries or keys by their position.

    Pairs are (i, i + head_dim / 2), as in the released Llama weights.

    Args:
      x_bshk: Queries or keys.
      rope: The frequencies.
      positions_bs: Positions of the tokens; 0, 1, 2, ... along a row by default.
    """
    frequency = rope.frequencies(x_bshk.shape[-1] // 2)
    pos = jnp.arange(x_bshk.shape[1], dtype=jnp.float32) if positions_bs is None else positions_bs.astype(jnp.float32)
    angle = pos[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_bshk.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_bshk.dtype)
