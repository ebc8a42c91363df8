"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864): queries and keys are rotated by their positions."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpar.models.settings.rope import LongRopeConfig, YarnConfig


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings.

    Attributes:
      base: Pair i of n rotates by base ** (-i / n) radians per position.
      stretch: (factor, low, high, seq): pairs that turn less than `low` times within seq positions rotate `factor`
        times slower, pairs that turn more than `high` times are unchanged, other pairs are interpolated. () changes
        nothing. Llama 3.1 (arXiv:2407.21783) has (8, 1, 4, 8192).
      factor: Positions are divided by it, as for the global layers of Gemma 3 (arXiv:2306.15595).
      share: Share of a head's dims that rotate, the first ones; 0.25 in GPT-NeoX.
      yarn: YaRN's scaling, or None.
      longrope: LongRoPE's scaling, or None.
    """

    base: float
    stretch: tuple[float, ...] = ()
    factor: float = 1.0
    share: float = 1.0
    yarn: YarnConfig | None = None
    longrope: LongRopeConfig | None = None

    @property
    def magnitude(self) -> float:
        """Factor of the rotated dims."""
        return self.yarn.magnitude if self.yarn else self.longrope.attention_factor if self.longrope else 1.0

    def frequencies(self, pairs: int, seq: int = 0) -> jax.Array:
        """Radians per position of sequences of `seq` tokens. Shape [pairs], float32."""
        frequency = self.base ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs) / self.factor
        if self.yarn:
            first, last = self.yarn.ramp(2 * pairs, self.base)
            slow_share = jnp.clip((jnp.arange(pairs, dtype=jnp.float32) - first) / (last - first), 0, 1)
            return frequency * (1 - slow_share + slow_share / self.yarn.factor)
        if self.longrope:
            factors = self.longrope.long_factors if seq > self.longrope.seq else self.longrope.short_factors
            return frequency / jnp.asarray(factors, jnp.float32)
        if not self.stretch:
            return frequency
        factor, low, high, original = self.stretch
        unscaled_share = jnp.clip((original * frequency / (2 * math.pi) - low) / (high - low), 0, 1)
        return frequency * (unscaled_share + (1 - unscaled_share) / factor)


def rotate(x_bshk: jax.Array, rope: Rope, positions_bs: jax.Array | None = None, *, seq: int = 0) -> jax.Array:
    """Rotates queries or keys by their position.

    Pairs are (i, i + n) of the 2 n dims that rotate, as in the released Llama weights.

    Args:
      x_bshk: Queries or keys.
      rope: The rotary embedding.
      positions_bs: Positions of the tokens; 0, 1, 2, ... along a row by default.
      seq: Longest sequence, by which LongRoPE chooses its factors; 0 means that of `x_bshk`.
    """
    pairs = rotary_dims(x_bshk.shape[-1], rope.share) // 2
    frequency = rope.frequencies(pairs, seq or x_bshk.shape[1])
    pos = jnp.arange(x_bshk.shape[1], dtype=jnp.float32) if positions_bs is None else positions_bs.astype(jnp.float32)
    angle = pos[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if rope.magnitude != 1:
        cos, sin = cos * rope.magnitude, sin * rope.magnitude
    a, b, rest = jnp.split(x_bshk, [pairs, 2 * pairs], axis=-1)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    rotated = [a * cos - b * sin, b * cos + a * sin]
    if not rest.shape[-1]:
        return jnp.concatenate(rotated, axis=-1).astype(x_bshk.dtype)
    return jnp.concatenate([*(part.astype(x_bshk.dtype) for part in rotated), rest], axis=-1)


def rotary_dims(head_dim: int, share: float) -> int:
    """Returns the number of a head's dims that rotate."""
    return int(head_dim * share)
