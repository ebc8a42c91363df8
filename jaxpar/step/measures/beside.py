"""A loss with measures beside it, for evaluations: a training step never computes them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.parallel.layout import Layout
from jaxpar.step.keyed.loss import key_of, with_key
from jaxpar.step.losses import Sums, as_sums


def beside(loss: Callable, measures: Mapping[str, Callable]) -> Callable:
    """Returns a loss whose sums and counts have those of measures beside its own.

    Args:
      loss: (model, batch), or (model, batch, key), to (sum, count), or to a dict of them.
      measures: Name to a function of (model, batch) to (sum, count).
    """
    if not measures:
        return loss

    def both(model: Any, batch: Mapping[str, jax.Array], value: Any) -> Sums:
        sums, more = as_sums(value, accumulate=1), measured(measures, model, batch)
        check_names(sums, more)
        return sums | more

    if key_of(loss) is None:
        return lambda model, batch: both(model, batch, loss(model, batch))
    return lambda model, batch, key: both(model, batch, with_key(loss, key)(model, batch))


def measured(measures: Mapping[str, Callable], model: Any, batch: Mapping[str, jax.Array]) -> Sums:
    """Returns the sums and counts of measures.

    Raises:
      JaxparError: If one returns something else.
    """
    found: Sums = {}
    for name, measure in measures.items():
        value = measure(model, batch)
        if not isinstance(value, tuple) or len(value) != 2 or any(jax.numpy.shape(each) for each in value):
            raise refuse(
                f"the measure {name} returned {jax.tree.map(jax.numpy.shape, value)!s:.200}",
                rule="a measure returns (sum, count), both scalars",
                fix="jnp.sum(values), values.size",
            )
        found |= {name: as_sums((value[0] * 1.0, value[1]), accumulate=1)["loss"]}
    return found


def check_names(sums: Iterable[str], measures: Iterable[str]) -> None:
    """Refuses measures whose names are those of entries of the loss.

    Raises:
      JaxparError: If one is.
    """
    if taken := set(sums) & set(measures):
        raise refuse(
            f"a measure {', '.join(sorted(taken))}",
            rule="the loss returns an entry of that name",
            fix="leave the measure out, or give it another name",
        )


def check_measures(layout: Layout, measures: Mapping[str, Callable]) -> None:
    """Refuses measures that call the model where it is spread over stages.

    Raises:
      JaxparError: If there are any, and a pipeline.
    """
    if measures and layout.sizes["pipe"] > 1:
        raise refuse(
            f"the measure {next(iter(measures))} with pipe={layout.sizes['pipe']}",
            rule="a pipeline runs its model once for each microbatch, for the loss",
            fix="perplexity and bits_per_byte, or an entry of that name in what the loss returns",
        )
