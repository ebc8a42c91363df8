"""Losses and measures that a model adds to its loss, such as the balance of a mixture of experts.

with collect_sums() as sums:            in a loss function
    logits = model(tokens)              the model calls add_sums(...) where its layers have ended
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import jax

_collected: ContextVar["ModelSums | None"] = ContextVar("collected", default=None)


@dataclass
class ModelSums:
    """Losses and measures of a model.

    Attributes:
      loss: Losses of each row, which the loss adds to that of each of the row's tokens. Shape of each [batch].
      measures: Name to (sum, count).
    """

    loss: list[jax.Array] = field(default_factory=list)
    measures: dict[str, tuple[jax.Array, jax.Array]] = field(default_factory=dict)


def add_sums(loss: jax.Array, measures: Mapping[str, tuple[jax.Array, jax.Array]]) -> None:
    """Adds a loss of each row [batch], and measures; dropped if no loss collects them."""
    sums = _collected.get()
    if sums is not None:
        sums.loss.append(loss)
        sums.measures.update(measures)


@contextmanager
def collect_sums() -> Iterator[ModelSums]:
    """Context that collects what the models called in it add."""
    sums = ModelSums()
    token = _collected.set(sums)
    try:
        yield sums
    finally:
        _collected.reset(token)
