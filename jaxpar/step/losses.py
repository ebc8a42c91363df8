"""Losses as sums and counts, which the step divides once.

A loss function takes (model, batch) and returns {name: (sum, count)}; the entry `loss` is minimized. A mean of means
would depend on masks, accumulation and layout; sums and counts do not.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.models.auxiliary import ModelSums, collect_sums
from jaxpar.models.output_dtype import keep_output_dtype
from jaxpar.models.settings.computing import LARGEST, Logits, add_logits
from jaxpar.step.head.chunks import Chunks, sum_of_losses
from jaxpar.step.head.head_protocol import Head, has_head, read_head, vocab_size
from jaxpar.step.head.token_sharding import (
    TokenSharding,
    num_vocab_shards,
    sharded_logsumexp,
    token_sharding,
)

Sums = dict[str, tuple[jax.Array, jax.Array]]


def next_token_loss(model: Callable[..., jax.Array], batch: Mapping[str, jax.Array], *, largest: int = LARGEST) -> Sums:
    """Cross entropy of the next token, in nats.

    If a model exposes its hidden state and head (`jaxpar.step.head.head_protocol`), as `jp.Decoder` does, this loss
    computes large logits and their gradients one chunk of tokens at a time. Sums and counts are the same; the chunked
    loss has a gradient, but no second derivative and no forward mode. After tracing, `explain` of the step's layout,
    `jaxpar check` and `inspect` name the implementation that runs.

    Args:
      model: Maps tokens [batch, seq] to logits [batch, seq, vocab]; for packed rows it also takes `segments` and
        `positions`.
      batch: `inputs` and `targets` [batch, seq], int32; optionally `mask` [batch, seq], 1 if the target counts; and
        `segments` (a token's document in its row) with `positions` (its place in the document) [batch, seq], int32.
      largest: Maximum bytes of float32 logits per device that are computed without chunks, if the model allows chunks.
    """
    tokens, targets = batch["inputs"], batch["targets"]
    documents = {name: batch[name] for name in ("segments", "positions") if name in batch}
    cut = token_sharding(*tokens.shape) if tokens.ndim == 2 else None  # inputs may be embeddings, or one token per row
    if has_head(model) and cut is not None:
        logits = cut.logits(tokens.size, vocab_size(model), largest=largest)
        add_logits(logits)
        if logits.is_chunked:
            with collect_sums() as sums:
                head = read_head(model, tokens, **documents)
            return _with_model_sums(_chunked_loss(head, cut, logits, batch), sums, batch)
    with keep_output_dtype(), collect_sums() as sums:  # cross entropy casts to float32 where it sums
        logits = model(tokens, **documents)
    if logits.ndim == 3 and cut is not None and cut.vocab and cut.num_shards[1] == 1:
        targets = _integer_labels(targets, logits.shape)
        # flat rows, the matmul's output shape: on CPU XLA writes the gradient in place only in this shape
        losses = cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)).reshape(targets.shape)
        return _with_model_sums(masked_sum(losses, batch), sums, batch)
    return _with_model_sums(masked_sum(cross_entropy(logits, targets), batch), sums, batch)


def _with_model_sums(
    loss: tuple[jax.Array, jax.Array], sums: ModelSums, batch: Mapping[str, jax.Array]
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Adds the losses of the model, that of a row to each of its tokens' losses; cross entropy becomes a measure."""
    if not sums.loss:
        return {"loss": loss, **sums.measures}
    shape = batch["targets"].shape
    weights = _weights(batch, shape)
    tokens = jnp.float32(shape[1]) if weights is None else jnp.sum(weights, axis=1)
    total, count = loss
    return {"loss": (total + jnp.sum(sum(sums.loss) * tokens), count), "cross_entropy": loss, **sums.measures}


def _chunked_loss(
    head: Head, cut: TokenSharding, logits: Logits, batch: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the losses that count, and their number, like `masked_sum`."""
    labels = _integer_labels(batch["targets"], (*head.hidden.shape[:2], head.vocab))
    how = Chunks(cut, logits.chunks, head.table, head.vocab)
    weights = _weights(batch, labels.shape)
    count = jnp.float32(labels.size) if weights is None else jnp.sum(weights)
    ones = jnp.ones(labels.shape, jnp.float32) if weights is None else weights
    return sum_of_losses(how, head.hidden, head.weight, labels, ones), count


def classification_loss(model: Callable[..., jax.Array], batch: Mapping[str, jax.Array]) -> Sums:
    """Cross entropy in nats, and accuracy, of a classifier.

    Args:
      model: Maps inputs [batch, ...] to logits [batch, classes].
      batch: `inputs` [batch, ...] and `labels` [batch], int32; optionally `mask` [batch].
    """
    logits = model(batch["inputs"])
    losses = cross_entropy(logits, batch["labels"])
    hits = (jnp.argmax(logits, axis=-1) == batch["labels"]).astype(losses.dtype)
    return {"loss": masked_sum(losses, batch), "accuracy": masked_sum(hits, batch)}


def masked_sum(values: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the values that count, and their number."""
    mask = _weights(batch, values.shape)
    if mask is None:
        return jnp.sum(values), jnp.float32(values.size)
    return jnp.sum(jnp.where(mask == 0, 0.0, values * mask)), jnp.sum(mask)  # a masked label may be invalid


def _weights(batch: Mapping[str, jax.Array], shape: tuple[int, ...]) -> jax.Array | None:
    """Returns the mask in float32, or None if all losses count."""
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

    It selects the label's logit by a masked sum instead of a gather, so that logits stay sharded over the vocabulary
    (Megatron-LM's vocab-parallel loss, arXiv:1909.08053 section 3). The residuals are the logits, and per row their
    maximum and the sum of exponentials. Both modes of differentiation, and second derivatives, work.

    Args:
      logits: Shape [..., vocab].
      labels: Shape [...], integers. The loss of a label outside of the vocabulary is `nan`.

    Raises:
      JaxparError: If the shapes do not match.
    """
    return _cross_entropy(logits, _integer_labels(labels, logits.shape))


def _integer_labels(labels: jax.Array, logits: tuple[int, ...]) -> jax.Array:
    """Casts labels to int32, because 8-bit labels (bytes) cannot be compared with numbers from 256 on."""
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
    """Returns the losses and their tangents, for both modes of differentiation.

    JAX alone would save the float32 exponentials of the forward pass in addition to the logits. Here the backward pass
    recomputes them from the logits in their dtype and two numbers per row. The sums are those of JAX, in the same
    order.
    """
    (logits, labels), (slopes, _) = primals, tangents
    losses, highest, total = _losses(logits, labels)

    # the gradient of the logits is computed once, in place of them: otherwise XLA recomputes it for each matmul
    slopes = jax.lax.optimization_barrier(slopes)

    @partial(jax.checkpoint, prevent_cse=False)
    def logits_tangent(logits: jax.Array, highest: jax.Array, total: jax.Array, slopes: jax.Array) -> jax.Array:
        slopes = slopes.astype(jnp.float32)
        # bit for bit the exponentials of the forward pass, but written differently: otherwise XLA would compute them
        # only once, and keep them in float32 in addition to the logits
        powers = jnp.exp(-(highest - logits.astype(jnp.float32)))
        at_label = jnp.sum(jnp.where(_label_mask(labels, logits), slopes, 0.0), axis=-1)
        return jnp.sum(powers * slopes, axis=-1) / total - at_label

    return losses, jnp.where(_is_in_vocab(labels, logits), logits_tangent(logits, highest, total, slopes), 0.0)


def _label_mask(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns a one-hot bool mask. Not `jax.nn.one_hot`, which would be a function of its own in the program."""
    return jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]


def _losses(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the losses, and per row an offset and the sum of exp(logits - offset).

    The offset is the maximum, or the logsumexp if the vocabulary is sharded: then devices exchange two numbers per row
    once, while a maximum would need another exchange before the sums.
    """
    wide = logits.astype(jnp.float32)
    if (ways := num_vocab_shards(logits.shape[-1])) > 1:
        total, at_label = sharded_logsumexp(wide, labels, ways)
        losses = jnp.where(_is_in_vocab(labels, logits), total - at_label, jnp.nan)
        return losses, total[..., None], jnp.ones_like(total)
    highest = jax.lax.stop_gradient(jnp.max(wide, axis=-1, keepdims=True))
    total = jnp.sum(jnp.exp(wide - highest), axis=-1)
    at_label = jnp.sum(jnp.where(_label_mask(labels, logits), wide, 0.0), axis=-1, keepdims=True)
    losses = jnp.log(total) - jnp.squeeze(at_label - highest, axis=-1)
    return jnp.where(_is_in_vocab(labels, logits), losses, jnp.nan), highest, total


def _is_in_vocab(labels: jax.Array, logits: jax.Array) -> jax.Array:
    return (labels >= 0) & (labels < logits.shape[-1])


RESERVED = frozenset(
    ("step", "tokens", "grad_norm", "seconds", "input_wait_seconds", "tokens_per_second", "learning_rate",
     "global_batch", "part_grad_norm", "noise_signal", "noise_trace", "noise_scale", "noise_temperature")
)  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (
        getattr(value, "shape", None) == () and not jnp.issubdtype(value.dtype, jnp.complexfloating)
    )


def _suggest_return(value: Any) -> str:
    """Suggests a correct return value for a loss function that does not return sums and counts."""
    has_aux = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)  # (loss, metrics)
    entries = value[1] if has_aux else value if isinstance(value, dict) and "loss" in value else {}
    extras = [f', "{name}": (sum, count)' for name in entries if name != "loss"]
    pair = "jnp.sum(losses), losses.size"
    return f'{{"loss": ({pair}){"".join(extras)}}}' if entries else pair


def nonzero_count(count: jax.Array) -> jax.Array:
    """Returns the count, or 1 if it is 0, so that gradients are 0 instead of nan."""
    return jnp.where(count == 0, 1.0, count)


def as_sums(value: Any, *, accumulate: int) -> Sums:
    """Converts the return value of a user's loss function to sums and counts.

    Raises:
      JaxparError: If it is not (sum, count), a dict of them with `loss`, or a scalar; or if it is a scalar and
        microbatches are accumulated.
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
    is_valid = isinstance(returned, dict) and "loss" in returned and all(isinstance(key, str) for key in returned)
    if not is_valid or any(
        not isinstance(v, tuple) or len(v) != 2 or not all(map(_is_number, v)) for v in returned.values()
    ):
        shown = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else repr(x), returned)
        raise refuse(
            f"the loss function returned {shown}",
            rule='a loss function returns (sum, count), or {"loss": (sum, count), ...}, all scalars',
            fix=_suggest_return(value),
        )
    if reserved := RESERVED & returned.keys():
        raise refuse(
            f"the loss function returned {', '.join(sorted(reserved))}",
            rule=f"a step reports metrics of its own under {', '.join(sorted(RESERVED))}",
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
        for role, value in zip(("sum", "count"), pair, strict=True):
            if hasattr(value, "dtype") and value.dtype in (jnp.bfloat16, jnp.float16):
                raise refuse(
                    f"the {role} of {name} is {value.dtype}",
                    rule="sums and counts are float32: bfloat16 counts 3001 tokens as 3008",
                    fix="logits.astype(jnp.float32) before the loss, jnp.float32 for the mask",
                )
    return {
        name: (jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32))
        for name, (total, count) in returned.items()
    }
