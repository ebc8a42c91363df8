"""Losses are sums and counts, divided once.

A loss function takes (model, batch) and returns name -> (sum, count); the entry `loss` is
what is minimized. Means of means would depend on masks, accumulation and layout; a sum and
a count do not.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse

Sums = dict[str, tuple[jax.Array, jax.Array]]


def next_token(model: Any, batch: Mapping[str, jax.Array]) -> Sums:
    """Cross entropy of the next token, in nats.

    Args:
      model: Tokens [batch, seq] to logits [batch, seq, vocab].
      batch: `inputs` and `targets` [batch, seq], int32; optionally `mask` [batch, seq], 1 where
        the target counts.
    """
    losses = cross_entropy(model(batch["inputs"]), batch["targets"])
    mask = batch.get("mask")
    mask = jnp.ones_like(losses) if mask is None else mask.astype(losses.dtype)
    return {"loss": (jnp.sum(losses * mask), jnp.sum(mask))}


def classify(model: Any, batch: Mapping[str, jax.Array]) -> Sums:
    """Cross entropy in nats, and accuracy, of a classifier.

    Args:
      model: Inputs [batch, ...] to logits [batch, classes].
      batch: `inputs` [batch, ...] and `labels` [batch], int32; optionally `mask` [batch].
    """
    logits = model(batch["inputs"])
    losses = cross_entropy(logits, batch["labels"])
    hits = (jnp.argmax(logits, axis=-1) == batch["labels"]).astype(losses.dtype)
    mask = batch.get("mask")
    mask = jnp.ones_like(losses) if mask is None else mask.astype(losses.dtype)
    count = jnp.sum(mask)
    return {"loss": (jnp.sum(losses * mask), count), "accuracy": (jnp.sum(hits * mask), count)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns -log softmax(logits)[label], in float32.

    The label's logit is summed out rather than gathered, so that logits split over their
    last dim stay split (Megatron-LM's vocab-parallel loss, arXiv:1909.08053 section 3).

    Args:
      logits: Shape [..., vocab].
      labels: Shape [...], integers.
    """
    logits = logits.astype(jnp.float32)
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - highest
    at_label = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
    return jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)) - jnp.sum(jnp.where(at_label, shifted, 0.0), axis=-1)


def as_sums(value: Any, *, accumulate: int) -> Sums:
    """Returns what a user's loss function returned as sums and counts.

    Raises:
      JaxparError: If it is neither (sum, count), a dict of them with `loss`, nor a scalar; or a
        scalar where microbatches are summed.
    """
    returned: Any = {"loss": value} if isinstance(value, tuple) and len(value) == 2 else value
    if hasattr(returned, "shape") and returned.shape == ():
        if accumulate > 1:
            raise refuse(
                f"a scalar loss with accumulate={accumulate}",
                rule="microbatches are summed and divided once; a mean of means would weigh masked tokens wrongly",
                fix="return (sum, count) from the loss function",
            )
        returned = {"loss": (returned, jnp.ones((), returned.dtype))}
    good = isinstance(returned, dict) and "loss" in returned
    if not good or any(
        not isinstance(v, tuple) or len(v) != 2 or any(jnp.ndim(x) for x in v) for v in returned.values()
    ):
        shown = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else repr(x), returned)
        raise refuse(
            f"the loss function returned {shown}",
            rule='a loss function returns (sum, count), or {"loss": (sum, count), ...}, all scalars',
            fix="jnp.sum(losses), losses.size",
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
