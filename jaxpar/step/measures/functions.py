"""Built-in measures.

accuracy         correct predictions and their count, a function of the model: `MEASURES`
perplexity       exp(mean loss over all examples), not a mean of exponentials: `DERIVED`
bits_per_byte    loss / ln 2, where a token is a byte
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.step.losses import masked_sum


def accuracy(model: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the number of correct argmax predictions, and the number of targets that count. Materializes all logits.

    Args:
      model: Inputs [batch, ...] to logits [batch, ..., classes]; of packed rows also of `segments` and `positions`.
      batch: `inputs`; `targets` or `labels` [batch, ...], int32; optionally `mask` of the same shape.
    """
    documents = {name: batch[name] for name in ("segments", "positions") if name in batch}
    targets = batch["targets"] if "targets" in batch else batch["labels"]
    hits = jnp.argmax(model(batch["inputs"], **documents), axis=-1) == targets
    return masked_sum(hits.astype(jnp.float32), batch)


def perplexity(loss: float) -> float:
    """Returns the perplexity of a mean loss in nats; infinity beyond float64."""
    return math.exp(loss) if loss < 709 else loss * math.inf


def bits_per_byte(loss: float) -> float:
    """Returns the bits per byte of a mean loss in nats per byte."""
    return loss / math.log(2)


MEASURES: Mapping[str, Callable] = {"accuracy": accuracy}
DERIVED: Mapping[str, Callable[[float], float]] = {"perplexity": perplexity, "bits_per_byte": bits_per_byte}


def evaluation_names(names: Iterable[str], evaluation_set: str = "") -> list[str]:
    """Returns the metric names of an evaluation, with the name of the evaluation set unless it is the held-out one.

    >>> evaluation_names(["loss", "accuracy"]), evaluation_names(["loss"], "wiki")
    (['eval_loss', 'eval_accuracy'], ['eval_wiki_loss'])
    """
    return [f"eval_{evaluation_set}_{name}" if evaluation_set else f"eval_{name}" for name in names]


def derive_measures(names: Iterable[str], means: Mapping[str, float]) -> dict[str, float]:
    """Computes the derived measures of the mean `loss`, and of `loss/0`, ... of population members."""
    losses = {name.removeprefix("loss"): mean for name, mean in means.items() if name.split("/")[0] == "loss"}
    return {f"{name}{suffix}": DERIVED[name](mean) for name in names for suffix, mean in losses.items()}
