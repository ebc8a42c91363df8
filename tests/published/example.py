"""An example: a model, its loss, the batch that it reads and its optimizer; and losses that many models share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxpar as jp

ROWS = 16
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """What a user would write of a model.

    Attributes:
      module: A Linen module, or a function of `rngs` that returns an NNX module.
      loss: (model, batch) or (model, batch, key), to (sum, count) or a dict of them.
      batch: Random numbers to a batch of `ROWS` examples.
      optimizer: As in the example that the model is after, or near it.
      inputs: A batch to what a Linen module is called with.
      options: What else it is called with, by name.
      rules: What its own names of axes mean, for `jp.Parallel`.
      plain: A function of `rngs` for a loop without jaxpar, where `module` wants a mesh.
      streams: What a Linen module draws from besides `dropout`.
    """

    module: Any
    loss: Callable[..., Any]
    batch: Callable[[np.random.Generator], Batch]
    optimizer: optax.GradientTransformation
    inputs: Callable[[Batch], tuple] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)
    plain: Any = None
    streams: tuple[str, ...] = ()

    @property
    def linen(self) -> bool:
        return isinstance(self.module, nn.Module)

    @property
    def model(self) -> Any:
        """What `jp.compose` takes."""
        if not self.linen:
            return self.module
        return jp.from_linen(self.module, *self.inputs(self.numbers()), **self.options)

    def numbers(self) -> Batch:
        """The batch, the same at each call."""
        return self.batch(np.random.default_rng(0))


def images(rng, size=8, channels=1):
    return {
        "image": rng.random([ROWS, size, size, channels], np.float32),
        "label": rng.integers(0, 10, ROWS).astype(np.int32),
    }


def tokens(rng, vocab=32, length=9):
    return {"tokens": rng.integers(1, vocab, [ROWS, length]).astype(np.int32)}


def image(batch):
    return (batch["image"],)


def context(batch):
    return (batch["tokens"][:, :-1],)


def hits(logits, labels):
    right = jnp.argmax(logits, axis=-1) == labels
    return right.sum(), right.size


def digit_loss(model, batch):
    logits = model(batch["image"])
    losses = cross_entropy(logits, batch["label"])
    return {"loss": (losses.sum(), losses.size), "accuracy": hits(logits, batch["label"])}


def image_loss(model, batch):
    logits = model(batch["image"], train=model.training)
    return cross_entropy(logits, batch["label"]).sum(), len(logits)


def language_loss(model, batch):
    losses = cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])
    return losses.sum(), losses.size
