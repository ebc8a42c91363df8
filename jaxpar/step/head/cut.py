"""How a step cuts the tokens and the vocabulary of a loss, and the chunks of tokens that follow from it.

    hidden [batch, seq, dim]  ─►  [chunks, b, x, t, tokens, dim]   nothing moves: each device deals out its own tokens
                                           b  pieces of the batch, over data and fsdp
                                           x  pieces of the sequence, over context
                                           t  pieces of those, over tensor, under sequence parallelism: gathered
                                              chunk by chunk, as all logits of a token are made together

Every dim that a mesh axis cuts is a dim of its own here, so that what a device sums up is its own until the end:
gradients of the head are [b, x, dim, vocab], and travel once.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.models.named import axes_of, constrain_to, spec_of
from jaxpar.models.settings.logits import Logits

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """How tokens and vocabulary are cut; mesh axes and the number of pieces of each dim.

    Attributes:
      batch: Axes of `b`.
      seq: Axes of `x`.
      inner: Axes of `t`.
      vocab: Axes of the vocabulary.
      ways: Pieces b, x, t.
      inside: Whether it is in a step, where constraints mean something.
    """

    batch: Axes = ()
    seq: Axes = ()
    inner: Axes = ()
    vocab: Axes = ()
    ways: tuple[int, int, int] = (1, 1, 1)
    inside: bool = False

    def logits(self, tokens: int, vocab: int, *, largest: int) -> Logits:
        """Returns how many logits a device has, of so many tokens over all devices."""
        ways = _pieces(self.vocab)
        return Logits(tokens // (self.ways[0] * self.ways[1]), -(-vocab // ways), largest)

    def dealt(self, x: jax.Array, chunks: int) -> jax.Array:
        """Returns [batch, seq, ...] as [chunks, b, x, t, tokens, ...]; zeros fill up the last chunk.

        Each piece is where it was, or on the devices that `whole` says: that is the caller's to say.
        """
        (b, x_, t), rest = self.ways, x.shape[2:]
        x = x.reshape(b, x.shape[0] // b, x_, t, x.shape[1] // (x_ * t), *rest)
        x = jnp.moveaxis(x, 1, 3)
        x = x.reshape(b, x_, t, -1, *rest)
        missing = -x.shape[3] % chunks
        if missing:
            x = jnp.pad(x, [(0, 0)] * 3 + [(0, missing)] + [(0, 0)] * len(rest))
        x = x.reshape(b, x_, t, chunks, -1, *rest)
        return jnp.moveaxis(x, 3, 0)

    def taken_back(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns [chunks, b, x, t, tokens, ...] as [batch, seq, ...] of this shape: the inverse of `dealt`."""
        (b, x_, t), rest = self.ways, shape[2:]
        rows, seq = shape[0] // b, shape[1] // (x_ * t)
        x = jnp.moveaxis(x, 0, 3)
        x = x.reshape(b, x_, t, -1, *rest)[:, :, :, : rows * seq]
        x = jnp.moveaxis(x.reshape(b, x_, t, rows, seq, *rest), 3, 1)
        return x.reshape(shape)

    def own(self, x: jax.Array, *, ahead: int = 0) -> jax.Array:
        """Returns an array [b, x, t, ...] each of whose pieces is on the device that it came from."""
        return self._on(x, (None,) * ahead + (self.batch, self.seq, self.inner))

    def whole(self, x: jax.Array, *, ahead: int = 0) -> jax.Array:
        """Returns an array [b, x, t, ...] whose pieces `t` are on all devices that share the vocabulary."""
        return self._on(x, (None,) * ahead + (self.batch, self.seq, None))

    def over_vocab(self, x: jax.Array) -> jax.Array:
        """Returns logits [b, x, t, tokens, vocab] cut over the vocabulary."""
        return self._on(x, (self.batch, self.seq, None, None, self.vocab))

    def of_head(self, x: jax.Array, *, table: bool) -> jax.Array:
        """Returns sums [b, x, dim, vocab], of a table [b, x, vocab, dim], cut as the head is over the vocabulary."""
        dims = (self.vocab, None) if table else (None, self.vocab)
        return self._on(x, (self.batch, self.seq, *dims))

    def _on(self, x: jax.Array, dims: tuple[Axes | None, ...]) -> jax.Array:
        if not self.inside:
            return x
        entries = [axes or None for axes in (*dims, *(None,) * (x.ndim - len(dims)))]
        return constrain_to(x, PartitionSpec(*entries))


def cut_of(rows: int, seq: int) -> Cut | None:
    """Returns how the step that is traced cuts a batch of so many rows, each of so many tokens.

    None where its pieces are not equal; outside of a step nothing is cut.
    """
    found, stream = spec_of(("batch", "seq", "vocab")), spec_of(("batch", "seq", "embed"))
    if found is None or stream is None:
        return Cut()
    batch, whole, vocab = (axes_of(entry) for entry in found)
    pieces = axes_of(stream[1])
    inner = pieces[len(whole) :] if pieces[: len(whole)] == whole else ()
    ways = (_pieces(batch), _pieces(whole), _pieces(inner))
    if rows % ways[0] or seq % (ways[1] * ways[2]):
        return None
    return Cut(batch, whole, inner, vocab, ways, inside=True)


def _pieces(axes: Axes) -> int:
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in axes)
