"""Losses are sums and counts, divided once.

A loss function takes (model, batch) and returns name -> (sum, count); the entry `loss` is
what is minimized. Means of means would depend on masks, accumulation and layout; a sum and
a count do not.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.models.returned import as_computed
from jaxpar.models.settings.logits import LARGEST, Logits, note
from jaxpar.step.head.chunks import Chunks, sum_of_losses
from jaxpar.step.head.cut import Cut, cut_of
from jaxpar.step.head.offered import Head, offered, offers, vocab_of
from jaxpar.step.head.parts import of_parts, parts

Sums = dict[str, tuple[jax.Array, jax.Array]]


def next_token(model: Any, batch: Mapping[str, jax.Array], *, largest: int = LARGEST) -> Sums:
    """Cross entropy of the next token, in nats.

    A model that offers its hidden state and its head (`jaxpar.step.head.offered`), as `jp.Decoder` does, never makes
    all logits where those of a device would be large: they are made, and their gradients, a chunk of tokens at a time.
    The sums and counts are the same; the loss has a gradient then, but no second derivative and no forward mode.
    `explain` of the layout of a step that was traced says which form runs, as do `jaxpar check` and `inspect`.

    Args:
      model: Tokens [batch, seq] to logits [batch, seq, vocab]; of rows that hold several documents also of keywords
        `segments` and `positions`.
      batch: `inputs` and `targets` [batch, seq], int32; optionally `mask` [batch, seq], 1 where
        the target counts; and `segments` (which document of its row a token is of) with `positions` (its
        place in it) [batch, seq], int32.
      largest: Bytes of logits in float32 that a device makes whole, where a model leaves the choice.
    """
    tokens, targets = batch["inputs"], batch["targets"]
    apart = {name: batch[name] for name in ("segments", "positions") if name in batch}
    cut = cut_of(*tokens.shape) if tokens.ndim == 2 else None  # what a model reads may be embeddings, or a token a row
    if offers(model) and cut is not None:
        logits = cut.logits(tokens.size, vocab_of(model), largest=largest)
        note(logits)
        if logits.in_chunks:
            return {"loss": _in_chunks(offered(model, tokens, **apart), cut, logits, batch)}
    with as_computed():  # cross entropy casts to float32 where it sums
        logits = model(tokens, **apart)
    if logits.ndim == 3 and cut is not None and cut.vocab and cut.ways[1] == 1:
        targets = _whole_numbers(targets, logits.shape)
        # rows of tokens, as the matmul makes them: for processors XLA writes their gradient over them in no other shape
        losses = cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)).reshape(targets.shape)
        return {"loss": counted(losses, batch)}
    return {"loss": counted(cross_entropy(logits, targets), batch)}


def _in_chunks(head: Head, cut: Cut, logits: Logits, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the losses that count, and how many they are, as `counted` does of losses."""
    labels = _whole_numbers(batch["targets"], (*head.hidden.shape[:2], head.vocab))
    how = Chunks(cut, logits.chunks, head.table)
    weights = _weights(batch, labels.shape)
    count = jnp.float32(labels.size) if weights is None else jnp.sum(weights)
    ones = jnp.ones(labels.shape, jnp.float32) if weights is None else weights
    return sum_of_losses(how, head.hidden, head.weight, labels, ones), count


def classify(model: Any, batch: Mapping[str, jax.Array]) -> Sums:
    """Cross entropy in nats, and accuracy, of a classifier.

    Args:
      model: Inputs [batch, ...] to logits [batch, classes].
      batch: `inputs` [batch, ...] and `labels` [batch], int32; optionally `mask` [batch].
    """
    logits = model(batch["inputs"])
    losses = cross_entropy(logits, batch["labels"])
    hits = (jnp.argmax(logits, axis=-1) == batch["labels"]).astype(losses.dtype)
    return {"loss": counted(losses, batch), "accuracy": counted(hits, batch)}


def counted(values: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the values that count, and how many they are."""
    mask = _weights(batch, values.shape)
    if mask is None:
        return jnp.sum(values), jnp.float32(values.size)
    return jnp.sum(jnp.where(mask == 0, 0.0, values * mask)), jnp.sum(mask)  # a label that does not count may be none


def _weights(batch: Mapping[str, jax.Array], shape: tuple[int, ...]) -> jax.Array | None:
    """Returns the mask in float32, or None where all losses count."""
    mask = batch.get("mask")
    if mask is not None and mask.shape != shape:
        raise refuse(
            f"mask of shape {list(mask.shape)}, losses of shape {list(shape)}",
            rule="the mask has an entry for every loss",
            fix=f"mask of shape {list(shape)}",
        )
    return None if mask is None else mask.astype(jnp.float32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns -log softmax(logits)[label], in float32.

    The label's logit is summed out rather than gathered, so that logits split over their
    last dim stay split (Megatron-LM's vocab-parallel loss, arXiv:1909.08053 section 3). The backward pass keeps the
    logits, and of each row the highest and the sum of exponentials. Both modes of differentiation, and second
    derivatives, work.

    Args:
      logits: Shape [..., vocab].
      labels: Shape [...], integers. One that is no label of `vocab` gives `nan`, not a number that looks like a loss.

    Raises:
      JaxparError: If the shapes do not belong together.
    """
    return _cross_entropy(logits, _whole_numbers(labels, logits.shape))


def _whole_numbers(labels: jax.Array, logits: tuple[int, ...]) -> jax.Array:
    """Returns labels as int32: in 8 bits, as bytes come, they could not be compared with 256 and more."""
    if labels.shape != logits[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise refuse(
            f"labels {labels.dtype}{list(labels.shape)} for logits {list(logits)}",
            rule="labels are whole numbers, one for every row of logits",
            fix=f"labels int32{list(logits[:-1])}: labels.squeeze(-1), or labels.argmax(-1) of one-hot rows",
        )
    return labels.astype(jnp.int32)


@jax.custom_jvp
def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return _losses(logits, labels)[0]


@_cross_entropy.defjvp
def _cross_entropy_slope(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """Returns the losses and their slope, for both modes of differentiation.

    Left to itself JAX keeps the exponentials of the forward pass, in float32, beside the logits. Here a checkpoint
    computes them again, so that the backward pass reads the logits, as they are, and two numbers per row. The sums are
    those that JAX would make, in their order.
    """
    (logits, labels), (slopes, _) = primals, tangents
    losses, highest, total = _losses(logits, labels)

    # the gradient of the logits is computed once, over them: else XLA computes it for each matmul that reads it
    slopes = jax.lax.optimization_barrier(slopes)

    @partial(jax.checkpoint, prevent_cse=False)
    def along(logits: jax.Array, highest: jax.Array, total: jax.Array, slopes: jax.Array) -> jax.Array:
        slopes = slopes.astype(jnp.float32)
        # the exponentials of the forward pass, to the bit, but in another form: of the same form XLA computes them
        # once, and keeps them in float32 beside the logits
        powers = jnp.exp(-(highest - logits.astype(jnp.float32)))
        at_label = jnp.sum(jnp.where(_at(labels, logits), slopes, 0.0), axis=-1)
        return jnp.sum(powers * slopes, axis=-1) / total - at_label

    return losses, jnp.where(_known(labels, logits), along(logits, highest, total, slopes), 0.0)


def _losses(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the losses, and of each row a number and the sum of exponentials of logits below it.

    The number is the highest logit, or where devices have parts of the vocabulary the logarithm of the sum: these send
    each other two numbers for each row, once, where a highest logit would have to be known before there are sums.
    """
    wide = logits.astype(jnp.float32)
    if (ways := parts(logits.shape[-1])) > 1:
        total, at_label = of_parts(wide, labels, ways)
        losses = jnp.where(_known(labels, logits), total - at_label, jnp.nan)
        return losses, total[..., None], jnp.ones_like(total)
    highest = jax.lax.stop_gradient(jnp.max(wide, axis=-1, keepdims=True))
    total = jnp.sum(jnp.exp(wide - highest), axis=-1)
    at_label = jnp.sum(jnp.where(_at(labels, logits), wide, 0.0), axis=-1, keepdims=True)
    losses = jnp.log(total) - jnp.squeeze(at_label - highest, axis=-1)
    return jnp.where(_known(labels, logits), losses, jnp.nan), highest, total


def _at(labels: jax.Array, logits: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]


def _known(labels: jax.Array, logits: jax.Array) -> jax.Array:
    return (labels >= 0) & (labels < logits.shape[-1])


RESERVED = frozenset(
    ("step", "tokens", "grad_norm", "seconds", "input_wait_seconds", "tokens_per_second", "learning_rate",
     "global_batch", "part_grad_norm", "noise_signal", "noise_trace", "noise_scale", "noise_temperature")
)  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (
        getattr(value, "shape", None) == () and not jnp.issubdtype(value.dtype, jnp.complexfloating)
    )


def _instead(value: Any) -> str:
    """Returns what a loss function is to return in place of a value that is no sums and counts."""
    of_mean = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)  # (loss, metrics)
    others = value[1] if of_mean else value if isinstance(value, dict) and "loss" in value else {}
    more = [f', "{name}": (sum, count)' for name in others if name != "loss"]
    pair = "jnp.sum(losses), losses.size"
    return f'{{"loss": ({pair}){"".join(more)}}}' if others else pair


def divisor(count: jax.Array) -> jax.Array:
    """Returns the count to divide gradients by: 1 where nothing counts, as gradients of nothing are 0 and not nan."""
    return jnp.where(count == 0, 1.0, count)


def as_sums(value: Any, *, accumulate: int) -> Sums:
    """Returns what a user's loss function returned as sums and counts.

    Raises:
      JaxparError: If it is neither (sum, count), a dict of them with `loss`, nor a scalar; or a
        scalar where microbatches are summed.
    """
    pair = isinstance(value, tuple) and len(value) == 2 and not any(isinstance(x, dict) for x in value)
    returned: Any = {"loss": value} if pair else value
    if hasattr(returned, "shape") and returned.shape == ():
        if accumulate > 1:
            raise refuse(
                f"a scalar loss with accumulate={accumulate}",
                rule="microbatches are summed and divided once; a mean of means would weigh masked tokens wrongly",
                fix="return (sum, count) from the loss function",
            )
        returned = {"loss": (returned, jnp.ones((), returned.dtype))}
    good = isinstance(returned, dict) and "loss" in returned and all(isinstance(key, str) for key in returned)
    if not good or any(
        not isinstance(v, tuple) or len(v) != 2 or not all(map(_is_number, v)) for v in returned.values()
    ):
        shown = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else repr(x), returned)
        raise refuse(
            f"the loss function returned {shown}",
            rule='a loss function returns (sum, count), or {"loss": (sum, count), ...}, all scalars',
            fix=_instead(value),
        )
    if taken := RESERVED & returned.keys():
        raise refuse(
            f"the loss function returned {', '.join(sorted(taken))}",
            rule=f"a step has its own {', '.join(sorted(RESERVED))}",
            fix="another name",
        )
    total = returned["loss"][0]
    if not jnp.issubdtype(jnp.result_type(total), jnp.floating):
        raise refuse(
            f"the sum of loss is {jnp.result_type(total)}",
            rule="a loss has a gradient, so it is a real floating-point number",
            fix="jnp.sum(losses.astype(jnp.float32))",
        )
    for name, pair in returned.items():
        for what, value in zip(("sum", "count"), pair, strict=True):
            if hasattr(value, "dtype") and value.dtype in (jnp.bfloat16, jnp.float16):
                raise refuse(
                    f"the {what} of {name} is {value.dtype}",
                    rule="sums and counts are float32: bfloat16 counts 3001 tokens as 3008",
                    fix="logits.astype(jnp.float32) before the loss, jnp.float32 for the mask",
                )
    return {
        name: (jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32))
        for name, (total, count) in returned.items()
    }
