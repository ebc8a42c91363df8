"""Adds measures to a loss for evaluation; a training step never computes them."""

import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.parallel.layout import Layout
from jaxpar.step.losses import Sums, as_sums, masked_sum
from jaxpar.step.stochastic_loss import key_parameter, with_key


def with_measures(loss: Callable, measures: Mapping[str, Callable]) -> Callable:
    """Returns a loss whose sums and counts include those of the measures.

    Args:
      loss: (model, batch), or (model, batch, key), to (sum, count), or to a dict of them.
      measures: Name to a function of (model, batch) to (sum, count).
    """
    if not measures:
        return loss

    def add_measures(model: object, batch: Mapping[str, jax.Array], value: object) -> Sums:
        sums, extras = as_sums(value, accumulate=1), compute_measures(measures, model, batch)
        check_names(sums, extras)
        return sums | extras

    if key_parameter(loss) is None:
        return lambda model, batch: add_measures(model, batch, loss(model, batch))
    return lambda model, batch, key: add_measures(model, batch, with_key(loss, key)(model, batch))


def compute_measures(measures: Mapping[str, Callable], model: object, batch: Mapping[str, jax.Array]) -> Sums:
    """Computes the sums and counts of measures.

    Raises:
      JaxparError: If a measure does not return (sum, count), both scalars.
    """
    sums: Sums = {}
    for name, measure in measures.items():
        value = measure(model, batch)
        if not isinstance(value, tuple) or len(value) != 2 or any(jax.numpy.shape(part) for part in value):
            raise refuse(
                f"the measure {name} returned {jax.tree.map(jax.numpy.shape, value)!s:.200}",
                rule="a measure returns (sum, count), both scalars",
                fix="jnp.sum(values), values.size",
            )
        sums |= {name: as_sums((value[0] * 1.0, value[1]), accumulate=1)["loss"]}
    return sums


def check_names(sums: Iterable[str], measures: Iterable[str]) -> None:
    """Refuses measures named like entries of the loss.

    Raises:
      JaxparError: If a name is taken.
    """
    if duplicates := set(sums) & set(measures):
        raise refuse(
            f"a measure {', '.join(sorted(duplicates))}",
            rule="the loss returns an entry of that name",
            fix="leave the measure out, or give it another name",
        )


def check_measures(layout: Layout, measures: Mapping[str, Callable]) -> None:
    """Refuses measures in a pipeline, whose stages run the model only for the loss.

    Raises:
      JaxparError: If there are measures and pipe > 1.
    """
    if measures and layout.sizes["pipe"] > 1:
        raise refuse(
            f"the measure {next(iter(measures))} with pipe={layout.sizes['pipe']}",
            rule="a pipeline runs its model once for each microbatch, for the loss",
            fix="perplexity and bits_per_byte, or an entry of that name in what the loss returns",
        )


# Built-in measures.
#
# accuracy         correct predictions and their count, a function of the model: `MEASURES`
# perplexity       exp(mean loss over all examples), not a mean of exponentials: `DERIVED`
# bits_per_byte    loss / ln 2, where a token is a byte


def accuracy(model: Callable[..., jax.Array], batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the number of correct argmax predictions, and the number of targets that count. Materializes all logits.

    Args:
      model: Maps inputs [batch, ...] to logits [batch, ..., classes]; for packed rows it also takes `segments` and
        `positions`.
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
