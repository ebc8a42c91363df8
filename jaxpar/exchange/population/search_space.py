"""The space that a search moves in: positions of settings in their ranges, from 0 to 1."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class SearchSpace:
    """Converts settings to coordinates in [0, 1] and back.

    Attributes:
      within: Lowest and highest value of each setting.
      logarithmic: Settings whose coordinate is the position of their logarithm.
    """

    within: Mapping[str, tuple[float, float]]
    logarithmic: tuple[str, ...]

    def coordinates(self, settings: "Mapping[str, jax.Array]") -> "jax.Array":
        """Returns the positions of values, [member] each, in their ranges. Shape [member, setting]."""
        import jax.numpy as jnp

        columns = []
        for name, values in settings.items():
            scale = jnp.log if name in self.logarithmic else jnp.asarray
            low, high = (scale(jnp.float32(edge)) for edge in self.within[name])
            columns.append((scale(values.astype(jnp.float32)) - low) / (high - low))
        return jnp.stack(columns, axis=1)

    def settings(self, places: "jax.Array", previous: "Mapping[str, jax.Array]") -> "dict[str, jax.Array]":
        """Returns the values of settings at coordinates, [member] each.

        Args:
          places: Coordinates. Shape [member, setting].
          previous: The previous values, by name; the new values get their dtypes.
        """
        import jax.numpy as jnp

        result = {}
        for (name, values), column in zip(previous.items(), places.T, strict=True):
            low, high = self.within[name]
            if name in self.logarithmic:
                value = low * (high / low) ** column
            else:
                value = low + column * (high - low)
            result[name] = jnp.clip(value, low, high).astype(values.dtype)
        return result
