"""Measures that are built in.

accuracy         hits and how many count, beside the loss: `MEASURES`
perplexity       exp(loss), of the mean over all examples, not a mean of exponentials: `DERIVED`
bits_per_byte    loss / ln 2, where a token is a byte
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.step.losses import counted


def accuracy(model: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns how many targets have the highest logit of their row, and how many targets count; makes all logits.

    Args:
      model: Inputs [batch, ...] to logits [batch, ..., classes]; of packed rows also of `segments` and `positions`.
      batch: `inputs`; `targets` or `labels` [batch, ...], int32; optionally `mask` of the same shape.
    """
    apart = {name: batch[name] for name in ("segments", "positions") if name in batch}
    targets = batch["targets"] if "targets" in batch else batch["labels"]
    hits = jnp.argmax(model(batch["inputs"], **apart), axis=-1) == targets
    return counted(hits.astype(jnp.float32), batch)


def perplexity(loss: float) -> float:
    """Returns the perplexity of a mean loss in nats; infinity where float64 has no such number."""
    return math.exp(loss) if loss < 709 else loss * math.inf


def bits_per_byte(loss: float) -> float:
    """Returns the bits per byte of a mean loss in nats per byte."""
    return loss / math.log(2)


MEASURES: Mapping[str, Callable] = {"accuracy": accuracy}
DERIVED: Mapping[str, Callable[[float], float]] = {"perplexity": perplexity, "bits_per_byte": bits_per_byte}


def evaluated(names: Iterable[str], of: str = "") -> list[str]:
    """Returns the names of metrics of an evaluation: of an evaluation set with its name, of held-out examples without.

    >>> evaluated(["loss", "accuracy"]), evaluated(["loss"], "wiki")
    (['eval_loss', 'eval_accuracy'], ['eval_wiki_loss'])
    """
    return [f"eval_{of}_{name}" if of else f"eval_{name}" for name in names]


def derived(names: Iterable[str], means: Mapping[str, float]) -> dict[str, float]:
    """Returns what follows from mean losses, by name: of `loss`, and of each `loss/0` of a population's members."""
    losses = {name.removeprefix("loss"): mean for name, mean in means.items() if name.split("/")[0] == "loss"}
    return {f"{name}{which}": DERIVED[name](mean) for name in names for which, mean in losses.items()}
