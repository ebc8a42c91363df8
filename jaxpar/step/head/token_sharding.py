"""The sharding of a loss's tokens and vocabulary in a step, and the chunks of tokens under this sharding.

    hidden [batch, seq, dim]  ─►  [chunks, b, x, t, tokens, dim]   nothing moves: each device chunks its own tokens
                                           b  shards of the batch, over data and fsdp
                                           x  shards of the sequence, over context
                                           t  shards of x over tensor, under sequence parallelism: gathered
                                              chunk by chunk, as a token's logits are computed together

Each sharded dim is separate here, so that each device accumulates partial sums of the head's gradient,
[b, x, dim, vocab], and sends them once at the end.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jaxpar.models.dim_names import constrain_to, get_spec, spec_axes
from jaxpar.models.settings.computing import Logits

Axes = tuple[str, ...]


@dataclass(frozen=True)
class TokenSharding:
    """The sharding of tokens and vocabulary: mesh axes and number of shards of each dim.

    Attributes:
      batch: Axes of `b`.
      seq: Axes of `x`.
      inner: Axes of `t`.
      vocab: Axes of the vocabulary.
      num_shards: Numbers of shards along b, x and t.
      in_step: Whether a step is being traced, so that sharding constraints apply.
    """

    batch: Axes = ()
    seq: Axes = ()
    inner: Axes = ()
    vocab: Axes = ()
    num_shards: tuple[int, int, int] = (1, 1, 1)
    in_step: bool = False

    def logits(self, tokens: int, vocab: int, *, largest: int) -> Logits:
        """Returns the number of logits per device, from the number of tokens on all devices."""
        ways = _shard_count(self.vocab)
        return Logits(tokens // (self.num_shards[0] * self.num_shards[1]), -(-vocab // ways), largest)

    def split_chunks(self, x: jax.Array, chunks: int) -> jax.Array:
        """Reshapes [batch, seq, ...] to [chunks, b, x, t, tokens, ...]; zeros pad the last chunk.

        The caller constrains the result's sharding, with `keep_local` or `gather_inner`.
        """
        (b, x_, t), tail = self.num_shards, x.shape[2:]
        x = x.reshape(b, x.shape[0] // b, x_, t, x.shape[1] // (x_ * t), *tail)
        x = jnp.moveaxis(x, 1, 3)
        x = x.reshape(b, x_, t, -1, *tail)
        missing = -x.shape[3] % chunks
        if missing:
            x = jnp.pad(x, [(0, 0)] * 3 + [(0, missing)] + [(0, 0)] * len(tail))
        x = x.reshape(b, x_, t, chunks, -1, *tail)
        return jnp.moveaxis(x, 3, 0)

    def merge_chunks(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Reshapes [chunks, b, x, t, tokens, ...] to [batch, seq, ...]: the inverse of `split_chunks`."""
        (b, x_, t), tail = self.num_shards, shape[2:]
        rows, seq = shape[0] // b, shape[1] // (x_ * t)
        x = jnp.moveaxis(x, 0, 3)
        x = x.reshape(b, x_, t, -1, *tail)[:, :, :, : rows * seq]
        x = jnp.moveaxis(x.reshape(b, x_, t, rows, seq, *tail), 3, 1)
        return x.reshape(shape)

    def keep_local(self, x: jax.Array, *, ahead: int = 0) -> jax.Array:
        """Constrains [b, x, t, ...] so that no shard moves to another device."""
        return self._constrain_dims(x, (None,) * ahead + (self.batch, self.seq, self.inner))

    def gather_inner(self, x: jax.Array, *, ahead: int = 0) -> jax.Array:
        """Constrains [b, x, t, ...] so that dim `t` is gathered on all devices that share the vocabulary."""
        return self._constrain_dims(x, (None,) * ahead + (self.batch, self.seq, None))

    def shard_vocab(self, x: jax.Array) -> jax.Array:
        """Constrains logits [b, x, t, tokens, vocab] to shards of the vocabulary."""
        return self._constrain_dims(x, (self.batch, self.seq, None, None, self.vocab))

    def shard_head(self, x: jax.Array, *, table: bool) -> jax.Array:
        """Constrains sums [b, x, dim, vocab] (of a table [b, x, vocab, dim]) to the head's shards of the vocabulary."""
        dims = (self.vocab, None) if table else (None, self.vocab)
        return self._constrain_dims(x, (self.batch, self.seq, *dims))

    def _constrain_dims(self, x: jax.Array, dims: tuple[Axes | None, ...]) -> jax.Array:
        if not self.in_step:
            return x
        entries = [axes or None for axes in (*dims, *(None,) * (x.ndim - len(dims)))]
        return constrain_to(x, PartitionSpec(*entries))


def token_sharding(rows: int, seq: int) -> TokenSharding | None:
    """Returns the traced step's sharding of a batch of `rows` sequences of `seq` tokens.

    None if the shards would be unequal. Outside of a step nothing is sharded.
    """
    specs, stream = get_spec(("batch", "seq", "vocab")), get_spec(("batch", "seq", "embed"))
    if specs is None or stream is None:
        return TokenSharding()
    batch, seq_axes, vocab = (spec_axes(entry) for entry in specs)
    stream_axes = spec_axes(stream[1])
    inner = stream_axes[len(seq_axes) :] if stream_axes[: len(seq_axes)] == seq_axes else ()
    ways = (_shard_count(batch), _shard_count(seq_axes), _shard_count(inner))
    if rows % ways[0] or seq % (ways[1] * ways[2]):
        return None
    return TokenSharding(batch, seq_axes, inner, vocab, ways, in_step=True)


def _shard_count(axes: Axes) -> int:
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in axes)


# Cross entropy of logits whose vocabulary is split into equal shards: devices exchange two numbers per row.


def num_vocab_shards(vocab: int) -> int:
    """Returns the number of vocab shards in the traced step; 1 if they are unequal, or on manual axes."""
    (entry,) = get_spec(("vocab",)) or (None,)
    axes = spec_axes(entry)
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(kinds[axis] != AxisType.Auto for axis in axes):
        return 1
    ways = math.prod(mesh.shape[axis] for axis in axes)
    return 1 if vocab % ways else ways


def sharded_logsumexp(wide: jax.Array, labels: jax.Array, ways: int) -> tuple[jax.Array, jax.Array]:
    """Returns the logsumexp and the label's logit of each row of logits, which are in `ways` equal shards."""
    shape = (*wide.shape[:-1], ways, wide.shape[-1] // ways)
    shards = wide.reshape(shape)
    starts = jax.lax.broadcasted_iota(jnp.int32, shape[:-1], wide.ndim - 1) * shape[-1]
    offsets = labels[..., None].astype(jnp.int32) - starts
    local = jax.nn.logsumexp(shards, axis=-1), _label_entry(shards, offsets)
    free = (PartitionSpec.UNCONSTRAINED,) * (wide.ndim - 1)
    gathered = constrain_to(jnp.stack(local, axis=-1), PartitionSpec(*free, None, None))
    return jax.nn.logsumexp(gathered[..., 0], axis=-1), jnp.sum(gathered[..., 1], axis=-1)


def _label_entry(cut: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the entry at the label in each shard of a row, and 0 for shards without the label."""
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        # inside a pipeline the entry may be on another device: see `jaxpar.jaxprs.lookups`
        entries = jax.lax.broadcasted_iota(number.dtype, cut.shape, cut.ndim - 1)
        return jnp.sum(jnp.where(entries == number[..., None], cut, 0.0), axis=-1)
    # looked up, not summed out: on CPU XLA would materialize all summands
    values = jnp.take_along_axis(cut, number[..., None], axis=-1, mode="clip")[..., 0]
    return jnp.where((number >= 0) & (number < cut.shape[-1]), values, 0.0)


def label_mask(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns a one-hot bool mask of the labels. Shape of `logits`."""
    return jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
