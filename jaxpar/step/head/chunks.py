"""The sum of the losses of all tokens, chunk by chunk, with a backward pass of its own.

    forward     per chunk: logits, losses, and at once the gradients of the hidden state and of the head
    backward    both times the gradient of the sum, a number; then the head's is summed over the devices, once

A sum has one number for a gradient, so that the gradients of what it is made of are known but for a factor as soon as
the logits are there: they are made where those are, by the three matmuls that a loss on whole logits takes, and no
logits are computed twice or kept. What is kept has the sizes of the hidden state and of the head, the latter in
float32. Without a gradient, in an evaluation, there is one matmul.

Suffixes of arrays: b batch, x and t pieces of the sequence (see `cut`), n tokens of a chunk, d embed, v vocab.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.models.named import constrain
from jaxpar.step.head.cut import Cut
from jaxpar.step.head.parts import at, of_parts, parts


@dataclass(frozen=True)
class Chunks:
    """How the sum is taken.

    Attributes:
      cut: How tokens and vocabulary are cut.
      count: Chunks.
      table: Whether the head is [vocab, dim].
    """

    cut: Cut
    count: int
    table: bool

    @property
    def head(self) -> str:
        """Dims of the head."""
        return "vd" if self.table else "dv"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_of_losses(how: Chunks, hidden: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the sum of weight x -log softmax(hidden head)[label] over all tokens, in float32. Shape [].

    Args:
      how: How the sum is taken.
      hidden: Shape [batch, seq, dim].
      head: Shape [dim, vocab] or [vocab, dim], in the dtype of `hidden`, which the matmuls run in.
      labels: Shape [batch, seq], integers. One that is no entry of the vocabulary, and whose weight is not 0, makes
        the sum `nan`; it has no gradient.
      weights: Shape [batch, seq], float32.
    """
    given = _dealt(how, hidden, labels, weights)

    def one(_, chunk: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        x, labels, _ = chunk
        return None, _losses(_logits(how, x, head), labels)[0]

    losses = jax.lax.scan(one, None, given)[1]
    return _summed(losses, given[2])


def _forward(how: Chunks, hidden: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array):
    given, cut = _dealt(how, hidden, labels, weights), how.cut

    def one(sums: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x, labels, weights = chunk
        x = cut.whole(x)
        logits = _logits(how, x, head)
        losses, powers, total = _losses(logits, labels)
        counts = (weights != 0) & _known(labels, logits)
        slope = jnp.where(at(labels, logits), powers / total - 1, powers / total)
        slope = jnp.where(counts[..., None], slope * weights[..., None], 0.0).astype(x.dtype)
        # computed once, over the logits: else XLA computes it for each of the two matmuls that read it
        slope = cut.over_vocab(jax.lax.optimization_barrier(slope))
        to_x = cut.own(jnp.einsum(f"bxtnv,{how.head}->bxtnd", slope, head))
        to_head = _products(how, x, slope)
        return cut.of_head(sums + to_head, table=how.table), (losses, to_x)

    b, x, _ = cut.ways
    zeros = cut.of_head(jnp.zeros((b, x, *head.shape), jnp.float32), table=how.table)
    to_head, (losses, to_x) = jax.lax.scan(one, zeros, given)
    kept = cut.taken_back(to_x, hidden.shape), to_head, cut.taken_back(losses, labels.shape), weights
    return _summed(losses, given[2]), kept


def _backward(how: Chunks, kept: tuple[jax.Array, ...], slope: jax.Array):
    to_x, to_head, losses, weights = kept
    head = (slope * to_head).astype(to_x.dtype)
    # XLA sums the devices' own here, once, in the dtype that the head travels in. A matmul with ones, each device's a
    # single one, and no `reduce`: of that XLA makes one all-reduce over all axes, whatever the head is then cut over
    head = jnp.einsum("bxij,bx->ij", head, jnp.ones(how.cut.ways[:2], head.dtype))
    return (slope * to_x).astype(to_x.dtype), head, None, jnp.where(weights == 0, 0.0, slope * losses)


sum_of_losses.defvjp(_forward, _backward)


def _dealt(how: Chunks, hidden: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
    """Returns hidden state, labels and weights in chunks; tokens that fill up the last one weigh nothing."""
    x = how.cut.own(how.cut.dealt(hidden, how.count), ahead=1)
    return x, *(how.cut.whole(how.cut.dealt(each, how.count), ahead=1) for each in (labels, weights))


def _logits(how: Chunks, x: jax.Array, head: jax.Array) -> jax.Array:
    made = jnp.einsum(f"bxtnd,{how.head}->bxtnv", how.cut.whole(x), head)
    return constrain(made, "batch", "seq", None, None, "vocab")


def _products(how: Chunks, x: jax.Array, slope: jax.Array) -> jax.Array:
    """Returns the gradient of the head by the tokens of a chunk, a sum of each piece's own, in float32."""
    dims = "bxvd" if how.table else "bxdv"
    return jnp.einsum(f"bxtnd,bxtnv->{dims}", x, slope, preferred_element_type=jnp.float32)


def _losses(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the losses, exponentials of logits below the highest, and their sum in each row. In float32.

    The label's logit is summed out rather than gathered, as in `step.losses.cross_entropy`, so that logits which are
    cut over the vocabulary stay cut.
    """
    wide = logits.astype(jnp.float32)
    if (ways := parts(logits.shape[-1])) > 1:
        total, at_label = of_parts(wide, labels, ways)
        losses = jnp.where(_known(labels, logits), total - at_label, jnp.nan)
        return losses, jnp.exp(wide - total[..., None]), jnp.ones_like(total)[..., None]
    highest = jnp.max(wide, axis=-1, keepdims=True)
    powers = jnp.exp(wide - highest)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    at_label = jnp.sum(jnp.where(at(labels, logits), wide, 0.0), axis=-1, keepdims=True)
    losses = jnp.squeeze(jnp.log(total) - (at_label - highest), axis=-1)
    return jnp.where(_known(labels, logits), losses, jnp.nan), powers, total


def _summed(losses: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(weights == 0, 0.0, losses * weights))


def _known(labels: jax.Array, logits: jax.Array) -> jax.Array:
    return (labels >= 0) & (labels < logits.shape[-1])
