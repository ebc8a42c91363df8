"""Documents packed into one row: the document and position of each token, carried through the layers.

    x [batch, seq, embed]  ──►  {"x": x, "segments": [batch, seq], "positions": [batch, seq]}  ──►  layers

They travel with the stream, so that a pipeline hands each stage those of its microbatch; as float32, because whatever
flows through the layers has a gradient (theirs is zero). Whole numbers below 2^24 are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Documents:
    """The documents in each row; both None if a row is one document.

    Attributes:
      segments: Index of each token's document in its row, ascending. Shape [batch, seq].
      positions: Position of each token in its document. Shape [batch, seq]. None counts along the row.
    """

    segments: jax.Array | None = None
    positions: jax.Array | None = None

    def attach(self, x: jax.Array) -> Any:
        """The stream with these arrays attached; `x` itself if there are none."""
        arrays = {name: value for name, value in vars(self).items() if value is not None}
        return {"x": x, **{name: value.astype(jnp.float32) for name, value in arrays.items()}} if arrays else x


ONE = Documents()  # a row that is one document


def stream_of(stream: Any) -> jax.Array:
    return stream["x"] if isinstance(stream, dict) else stream


def apply_layer(layer: Callable[[jax.Array, Documents], jax.Array], stream: Any) -> Any:
    """Applies a layer to a stream and carries its documents along."""
    if not isinstance(stream, dict):
        return layer(stream, ONE)
    arrays = {name: value.astype(jnp.int32) for name, value in stream.items() if name != "x"}
    return {**stream, "x": layer(stream["x"], Documents(**arrays))}
