"""Recognizes losses that take a random key, and calls them with one."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax


def key_parameter(loss: Callable) -> inspect.Parameter | None:
    """Returns the parameter of a loss that takes a random key, or None.

    It is the parameter named `key`, or the third and last required one.

    >>> key_parameter(lambda model, batch: 0), str(key_parameter(lambda model, batch, z_rng: 0))
    (None, 'z_rng')
    """
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a C function without a signature
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if "key" in parameters and parameters["key"].kind not in variadic:
        return parameters["key"]
    required = [p for p in parameters.values() if p.default is p.empty and p.kind not in variadic]
    return required[2] if len(required) == 3 else None


def with_key(loss: Callable, key: jax.Array) -> Callable[[Any, Any], Any]:
    """Returns a loss of (model, batch): the key is bound if the loss takes one."""
    parameter = key_parameter(loss)
    if parameter is None:
        return loss
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return lambda model, batch: loss(model, batch, key)
    return partial(loss, **{parameter.name: key})


@dataclass(frozen=True)
class StochasticLoss:
    """A loss of (model, batch) that takes its key from the bound model.

    Attributes:
      loss: (model, batch, key) to sums and counts.
    """

    loss: Callable

    def __call__(self, bound: Any, batch: Mapping[str, Any]) -> Any:
        """Calls the loss with the model and the key of `bound`."""
        return with_key(self.loss, bound.key)(bound.model, batch)


def traceable_loss(loss: Callable) -> Callable[[Any, Any], Any]:
    """Returns a loss of (model, batch) for tracing only, with an arbitrary key."""
    return with_key(loss, jax.random.key(0))
