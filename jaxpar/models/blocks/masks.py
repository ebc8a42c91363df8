"""Checks the window, segments and softcap of `jp.attention`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpar.errors import refuse


def check_masks(q: jax.Array, k: jax.Array, window: object, segments: object) -> None:
    """Checks the masks of `jp.attention` other than `causal`.

    Raises:
      JaxparError: If the window is not a positive integer; if there is a window or segments but not as many keys as
        queries; if segments are not integers of [batch, seq]; or if they descend along a row (outside of `jax.jit`).
    """
    if window is not None and (type(window) is not int or window < 1):
        raise refuse(
            f"jp.attention(window={window!r})",
            rule="a window is a whole number of tokens, at least 1: a query and the window - 1 before it",
            fix="window=1024, or window=None for all",
        )
    if (window is not None or segments is not None) and q.shape[1] != k.shape[1]:
        raise refuse(
            f"jp.attention of {q.shape[1]} queries and {k.shape[1]} keys with a window or segments",
            rule="both compare the positions of queries with those of keys: there are as many of each",
            fix="q, k and v of one sequence, or neither window nor segments",
        )
    if segments is None:
        return
    shape, dtype = getattr(segments, "shape", None), getattr(segments, "dtype", None)
    if shape != q.shape[:2] or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        got = f"{dtype}{list(shape)}" if shape is not None else type(segments).__name__
        raise refuse(
            f"jp.attention(segments={got}) for q of {list(q.shape)}",
            rule="segments are whole numbers, one for every token",
            fix=f"segments int32{list(q.shape[:2])}",
        )
    if isinstance(segments, Tracer):
        return
    values = np.asarray(segments)
    descends = np.argwhere(values[:, 1:] < values[:, :-1])
    if descends.size:
        row, token = descends[0]
        raise refuse(
            f"jp.attention(segments=...) whose row {row} goes from {values[row, token]} to {values[row, token + 1]}",
            rule="segments ascend along a row: the tokens of a document stand together",
            fix="number the documents of a row 0, 1, 2, ... in their order",
        )


def check_softcap(softcap: object) -> float | None:
    """Checks and returns the cap of scores.

    Raises:
      JaxparError: If it is not a finite Python number above 0.
    """
    if softcap is None:
        return None
    if not isinstance(softcap, int | float | np.floating) or isinstance(softcap, bool) or not 0 < softcap < math.inf:
        raise refuse(
            f"jp.attention(softcap={softcap!r:.60})",
            rule="a softcap is a Python number above 0: a score x becomes softcap * tanh(x / softcap)",
            fix="softcap=50.0, or softcap=None for scores as they are",
        )
    return float(softcap)


# Documents packed into one row: the document and position of each token, carried through the layers.
#
#     x [batch, seq, embed]  ──►  {"x": x, "segments": [batch, seq], "positions": [batch, seq]}  ──►  layers
#
# They are part of the stream, so that a pipeline passes each stage those of its microbatch. They are float32, because
# every array that passes through the layers has a gradient (theirs is zero). Whole numbers below 2^24 are exact.


@dataclass(frozen=True)
class Documents:
    """The documents in each row; both None if a row is one document.

    Attributes:
      segments: Index of each token's document in its row, ascending. Shape [batch, seq].
      positions: Position of each token in its document. Shape [batch, seq]. None counts from the start of the row.
    """

    segments: jax.Array | None = None
    positions: jax.Array | None = None

    def attach(self, x: jax.Array) -> Any:
        """Attaches these arrays to the activations `x`, as one stream; returns `x` itself if there are none."""
        arrays = {name: value for name, value in vars(self).items() if value is not None}
        return {"x": x, **{name: value.astype(jnp.float32) for name, value in arrays.items()}} if arrays else x


ONE = Documents()  # a row that is one document


def get_activations(stream: jax.Array | dict[str, jax.Array]) -> jax.Array:
    return stream["x"] if isinstance(stream, dict) else stream


def apply_layer(layer: Callable[[jax.Array, Documents], jax.Array], stream: jax.Array | dict[str, jax.Array]) -> Any:
    """Applies a layer to a stream and carries its documents along."""
    if not isinstance(stream, dict):
        return layer(stream, ONE)
    arrays = {name: value.astype(jnp.int32) for name, value in stream.items() if name != "x"}
    return {**stream, "x": layer(stream["x"], Documents(**arrays))}
