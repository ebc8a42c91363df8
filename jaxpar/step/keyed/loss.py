"""Which losses want a random key, and how they are called with one."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax


def key_of(loss: Callable) -> inspect.Parameter | None:
    """Returns the parameter of a loss that takes a random key, if there is one.

    It is called `key`, or it is the third that the loss cannot be called without.

    >>> key_of(lambda model, batch: 0), str(key_of(lambda model, batch, z_rng: 0))
    (None, 'z_rng')
    """
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):  # written in C, and without a signature
        return None
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if "key" in parameters and parameters["key"].kind not in several:
        return parameters["key"]
    needed = [each for each in parameters.values() if each.default is each.empty and each.kind not in several]
    return needed[2] if len(needed) == 3 else None


def with_key(loss: Callable, key: jax.Array) -> Callable[[Any, Any], Any]:
    """Returns a loss of (model, batch), to which a key is given if it wants one."""
    wanted = key_of(loss)
    if wanted is None:
        return loss
    if wanted.kind is wanted.POSITIONAL_ONLY:
        return lambda model, batch: loss(model, batch, key)
    return partial(loss, **{wanted.name: key})


@dataclass(frozen=True)
class Drawing:
    """A loss of (model, batch) that takes its key from what binds the model.

    Attributes:
      loss: (model, batch, key) to sums and counts.
    """

    loss: Callable

    def __call__(self, bound: Any, batch: Mapping[str, Any]) -> Any:
        """Returns what the loss returns of the model that is bound with a key."""
        return with_key(self.loss, bound.key)(bound.model, batch)


def shaped(loss: Callable) -> Callable[[Any, Any], Any]:
    """Returns a loss of (model, batch) for tracing alone, where any key will do."""
    return with_key(loss, jax.random.key(0))
