"""The sum of the losses of all tokens, chunk by chunk, with a custom backward pass.

    forward     per chunk: logits, losses, and the gradients of the hidden state and the head
    backward    multiplies both by the gradient of the sum, a scalar; sums the head's gradient once over devices

The gradient of a sum is a scalar, so the gradients of its terms are known up to a factor when the logits exist. The
forward pass computes them at that point, by the same three matmuls as a loss on all logits, and neither saves nor
recomputes logits. The residuals have the shapes of the hidden state and of the head, the latter in float32. An
evaluation, without gradients, runs one matmul.

Dims in einsums: b batch, x and t shards of the sequence (see `token_sharding`), n tokens of a chunk, d embed, v vocab.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.models.custom_gradients import mask_padding
from jaxpar.models.dim_names import constrain
from jaxpar.step.head.token_sharding import TokenSharding, label_mask, num_vocab_shards, sharded_logsumexp


@dataclass(frozen=True)
class Chunks:
    """Settings of the sum of losses.

    Attributes:
      sharding: The sharding of tokens and vocabulary.
      count: Number of chunks.
      table: Whether the head is [vocab, dim].
      vocab: Tokens of the vocabulary; logits after them are masked.
    """

    sharding: TokenSharding
    count: int
    table: bool
    vocab: int

    @property
    def head(self) -> str:
        """Dims of the head in einsums."""
        return "vd" if self.table else "dv"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_of_losses(
    chunking: Chunks, hidden: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array
) -> jax.Array:
    """Returns the sum of weight x -log softmax(hidden head)[label] over all tokens, in float32. Shape [].

    Args:
      chunking: Sharding, number of chunks and order of the head's dims.
      hidden: Shape [batch, seq, dim].
      head: Shape [dim, vocab] or [vocab, dim], in the dtype of `hidden`, which is the matmul dtype.
      labels: Shape [batch, seq], integers. A label outside of the vocabulary with a weight other than 0 makes the sum
        `nan`, and has no gradient.
      weights: Shape [batch, seq], float32.
    """
    chunks = _split_tokens(chunking, hidden, labels, weights)

    def chunk_losses(_, chunk: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        x, labels, _ = chunk
        return None, _losses(chunking, _logits(chunking, x, head), labels)[0]

    losses = jax.lax.scan(chunk_losses, None, chunks)[1]
    return _weighted_sum(losses, chunks[2])


def _forward(chunking: Chunks, hidden: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array):
    chunks, sharding = _split_tokens(chunking, hidden, labels, weights), chunking.sharding

    def chunk_losses(sums: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x, labels, weights = chunk
        x = sharding.gather_inner(x)
        logits = _logits(chunking, x, head)
        losses, powers, total = _losses(chunking, logits, labels)
        is_counted = (weights != 0) & _is_in_vocab(chunking, labels)
        slope = jnp.where(label_mask(labels, logits), powers / total - 1, powers / total)
        slope = jnp.where(is_counted[..., None], slope * weights[..., None], 0.0).astype(x.dtype)
        # computed once, in place of the logits: otherwise XLA recomputes it for each of the two matmuls that read it
        slope = sharding.shard_vocab(jax.lax.optimization_barrier(slope))
        to_x = sharding.keep_local(jnp.einsum(f"bxtnv,{chunking.head}->bxtnd", slope, head))
        to_head = _head_gradient(chunking, x, slope)
        return sharding.shard_head(sums + to_head, table=chunking.table), (losses, to_x)

    b, x, _ = sharding.num_shards
    zeros = sharding.shard_head(jnp.zeros((b, x, *head.shape), jnp.float32), table=chunking.table)
    to_head, (losses, to_x) = jax.lax.scan(chunk_losses, zeros, chunks)
    residuals = sharding.merge_chunks(to_x, hidden.shape), to_head, sharding.merge_chunks(losses, labels.shape), weights
    return _weighted_sum(losses, chunks[2]), residuals


def _backward(chunking: Chunks, residuals: tuple[jax.Array, ...], slope: jax.Array):
    to_x, to_head, losses, weights = residuals
    head = (slope * to_head).astype(to_x.dtype)
    # XLA sums over devices here, once, in the dtype that the head is sent in. This is a matmul with ones (one per
    # device), not a `reduce`: XLA would turn that into one all-reduce over all axes, however the head is sharded
    # afterwards
    head = jnp.einsum("bxij,bx->ij", head, jnp.ones(chunking.sharding.num_shards[:2], head.dtype))
    return (slope * to_x).astype(to_x.dtype), head, None, jnp.where(weights == 0, 0.0, slope * losses)


sum_of_losses.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_losses(chunking: Chunks, hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns -log softmax(hidden head)[label] of each token, in float32. Shape [batch, seq].

    For a loss that is no weighted sum with known weights. The backward pass computes the logits again, chunk by chunk.

    Args:
      chunking: Sharding, number of chunks and order of the head's dims.
      hidden: Shape [batch, seq, dim].
      head: Shape [dim, vocab] or [vocab, dim], in the dtype of `hidden`, which is the matmul dtype.
      labels: Shape [batch, seq], integers.
    """
    chunks = _split_tokens(chunking, hidden, labels)

    def chunk_losses(_, chunk: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        x, labels = chunk
        return None, _losses(chunking, _logits(chunking, x, head), labels)[0]

    return chunking.sharding.merge_chunks(jax.lax.scan(chunk_losses, None, chunks)[1], labels.shape)


def _token_losses_forward(chunking: Chunks, hidden: jax.Array, head: jax.Array, labels: jax.Array):
    return token_losses(chunking, hidden, head, labels), (hidden, head, labels)


def _token_losses_backward(chunking: Chunks, saved: tuple[jax.Array, ...], slopes: jax.Array):
    hidden, head, labels = saved
    _, pullback = jax.vjp(lambda hidden, head: sum_of_losses(chunking, hidden, head, labels, slopes), hidden, head)
    return *pullback(jnp.ones((), jnp.float32)), None


token_losses.defvjp(_token_losses_forward, _token_losses_backward)


def _split_tokens(chunking: Chunks, hidden: jax.Array, *values: jax.Array) -> tuple[jax.Array, ...]:
    """Splits hidden state and values of tokens (labels, weights) into chunks; zeros pad the last one."""
    x = chunking.sharding.keep_local(chunking.sharding.split_chunks(hidden, chunking.count), ahead=1)
    return x, *(
        chunking.sharding.gather_inner(chunking.sharding.split_chunks(value, chunking.count), ahead=1)
        for value in values
    )


def _logits(chunking: Chunks, x: jax.Array, head: jax.Array) -> jax.Array:
    logits = jnp.einsum(f"bxtnd,{chunking.head}->bxtnv", chunking.sharding.gather_inner(x), head)
    return constrain(mask_padding(logits, chunking.vocab), "batch", "seq", None, None, "vocab")


def _head_gradient(chunking: Chunks, x: jax.Array, slope: jax.Array) -> jax.Array:
    """Returns the head's gradient for a chunk in float32, one partial sum per shard of tokens."""
    dims = "bxvd" if chunking.table else "bxdv"
    return jnp.einsum(f"bxtnd,bxtnv->{dims}", x, slope, preferred_element_type=jnp.float32)


def _losses(chunking: Chunks, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the losses, exp(logits - maximum), and the sum of the latter per row, in float32.

    It selects the label's logit by a masked sum instead of a gather, as in `step.losses.cross_entropy`, so that logits
    stay sharded over the vocabulary.
    """
    wide = logits.astype(jnp.float32)
    if (ways := num_vocab_shards(logits.shape[-1])) > 1:
        total, at_label = sharded_logsumexp(wide, labels, ways)
        losses = jnp.where(_is_in_vocab(chunking, labels), total - at_label, jnp.nan)
        return losses, jnp.exp(wide - total[..., None]), jnp.ones_like(total)[..., None]
    highest = jnp.max(wide, axis=-1, keepdims=True)
    powers = jnp.exp(wide - highest)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    at_label = jnp.sum(jnp.where(label_mask(labels, logits), wide, 0.0), axis=-1, keepdims=True)
    losses = jnp.squeeze(jnp.log(total) - (at_label - highest), axis=-1)
    return jnp.where(_is_in_vocab(chunking, labels), losses, jnp.nan), powers, total


def _weighted_sum(losses: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(weights == 0, 0.0, losses * weights))


def _is_in_vocab(chunking: Chunks, labels: jax.Array) -> jax.Array:
    return (labels >= 0) & (labels < chunking.vocab)
