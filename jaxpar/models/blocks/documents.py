"""Documents that share a row: which one each token is of, and its position there, on their way through the layers.

    x [batch, seq, embed]  ──►  {"x": x, "segments": [batch, seq], "positions": [batch, seq]}  ──►  layers

They ride along with the stream, so that a pipeline hands each stage those of its microbatch; as float32, for what flows
through the layers has a gradient (of these it is zero). Whole numbers below 2^24 are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Documents:
    """The documents of rows; both None where a row is one.

    Attributes:
      segments: Number of each token's document in its row, ascending. Shape [batch, seq].
      positions: Position of each token in its document. Shape [batch, seq]. None counts along the row.
    """

    segments: jax.Array | None = None
    positions: jax.Array | None = None

    def beside(self, x: jax.Array) -> Any:
        """Returns the stream with them beside it; `x` itself where there are none."""
        riders = {name: value for name, value in vars(self).items() if value is not None}
        return {"x": x, **{name: value.astype(jnp.float32) for name, value in riders.items()}} if riders else x


ONE = Documents()  # a row that is one document


def stream_of(given: Any) -> jax.Array:
    """Returns the stream itself."""
    return given["x"] if isinstance(given, dict) else given


def through(layer: Callable[[jax.Array, Documents], jax.Array], given: Any) -> Any:
    """Returns a stream after a layer, with what rides beside it."""
    if not isinstance(given, dict):
        return layer(given, ONE)
    riders = {name: value.astype(jnp.int32) for name, value in given.items() if name != "x"}
    return {**given, "x": layer(given["x"], Documents(**riders))}
