"""The softcap of attention scores, and the mask: the keys that a query attends to, by positions and segments.

The window, segments and softcap of a call of `jp.attention` are checked here too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpar.errors import refuse

NOWHERE = -1  # the position of padding, to which no query attends


@dataclass(frozen=True)
class AttentionMask:
    """The mask and the softcap of attention.

    Attributes:
      causal: Whether the query at position i attends to no key after i.
      window: A query attends only to keys less than `window` positions away, if causal to i - window + 1 ... i. None is
        no bound.
      softcap: A score x becomes softcap * tanh(x / softcap) before the mask (arXiv:2408.00118). None is no cap.
    """

    causal: bool = False
    window: int | None = None
    softcap: float | None = None

    def cap(self, scores: jax.Array) -> jax.Array:
        """Caps scores to between -softcap and softcap."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def cap_gradient(self, gradient: jax.Array, scores: jax.Array) -> jax.Array:
        """Computes the gradient of the scores from the gradient of the capped scores.

        Args:
          gradient: Gradient of the loss by capped scores; zero where a key is masked.
          scores: Capped scores, or the lowest number where a key is masked.
        """
        if self.softcap is None:
            return gradient
        tanh = jnp.clip(scores / self.softcap, -1, 1)
        return gradient * (1 - jnp.square(tanh))

    def mask(
        self,
        positions_q: jax.Array,
        positions_c: jax.Array,
        segments_bq: jax.Array | None,
        segments_bc: jax.Array | None,
    ) -> jax.Array:
        """Computes the mask of a block of queries and a block of keys.

        Args:
          positions_q: Positions of the queries. Shape [q].
          positions_c: Positions of the keys; `NOWHERE` for padding. Shape [c].
          segments_bq: Segments of the queries; a query attends only to keys of its segment. None is one segment.
          segments_bc: Segments of the keys.

        Returns:
          Booleans [b or 1, 1, 1, q, c], to broadcast with scores [b, g, r, q, c].
        """
        distance = positions_q[:, None] - positions_c
        mask = jnp.broadcast_to(positions_c > NOWHERE, distance.shape)
        if self.causal:
            mask &= distance >= 0
        if self.window is not None:
            mask &= jnp.abs(distance) < self.window
        mask = mask[None]
        if segments_bq is not None and segments_bc is not None:
            mask = mask & (segments_bq[:, :, None] == segments_bc[:, None, :])
        return mask[:, None, None]

    def reaches(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
        """Whether any query in a range of positions [first, last] attends to any key in another, in one segment."""
        (first_q, last_q), (first_c, last_c) = queries, keys
        if self.causal and first_c > last_q:
            return False
        nearest = max(first_q - last_c, first_c - last_q, 0)
        return self.window is None or nearest < self.window


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
