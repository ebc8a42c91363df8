"""What a model offers to a loss that makes its logits itself.

    class Net(nnx.Module):
        head_name = "lm_head/kernel"                  # the path of a parameter [dim, vocab], or [vocab, dim]

        def hidden(self, tokens): ...                 # [batch, seq] to [batch, seq, dim]

        def __call__(self, tokens):
            return self.hidden(tokens) @ self.lm_head.kernel[...]

A tied model names its embedding. Only a matmul is understood: no bias, and no function of the logits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from jaxpar.errors import refuse
from jaxpar.models.returned import goes_with_call
from jaxpar.sharding.adapters import Adapted


@dataclass(frozen=True)
class Head:
    """The head of a model, and what it is multiplied with.

    Attributes:
      hidden: Shape [batch, seq, dim].
      weight: Shape [dim, vocab], or [vocab, dim] where it is a table.
      table: Whether it is [vocab, dim], as an embedding is.
    """

    hidden: jax.Array
    weight: jax.Array
    table: bool

    @property
    def vocab(self) -> int:
        """Entries of the vocabulary."""
        return self.weight.shape[0 if self.table else 1]


def offers(model: Any) -> bool:
    """Returns whether a model has a method `hidden` and names its head, both of its own `__call__`."""
    module = _module(model)
    if not callable(getattr(module, "hidden", None)) or not isinstance(getattr(module, "head_name", None), str):
        return False
    return goes_with_call(type(module), "hidden", "head_name")


def _module(model: Any) -> Any:
    """Returns the module of what a loss is given: of Linen it holds the module."""
    return model if isinstance(model, nnx.Module) else getattr(model, "module", model)


def vocab_of(model: Any) -> int:
    """Returns the entries of the vocabulary of a model that offers its head, of which nothing is read.

    By the dim that the head names `vocab`, else by the larger one.
    """
    held = _find(model)
    shape, names = _stored(held.value).shape, _names(held.value)
    return int(shape[names.index("vocab")] if "vocab" in names else max(shape))


def offered(model: Any, tokens: jax.Array, **documents: jax.Array) -> Head:
    """Returns the head of a model that offers it, and its hidden state for tokens [batch, seq].

    The head is read once, also where it is tied to the embedding that `hidden` reads: a parameter that is read twice
    is gathered twice. `documents` are `segments` and `positions` of rows that hold several, which `hidden` takes too.

    Raises:
      JaxparError: If there is no such parameter, it has a bias beside it, or its shape does not tell which dim is the
        vocabulary.
    """
    held = _find(model)
    weight = held.read()
    if isinstance(held.value, nnx.Variable):
        with _held(held.value, weight):
            hidden = model.hidden(tokens, **documents)
    else:
        hidden = model(tokens, **documents, method="hidden")
    table = _is_table(weight, hidden, held)
    # a model that computes in 16 bits may return float32, and its head says what the matmul runs in
    return Head(hidden.astype(weight.dtype), weight, table)


@dataclass(frozen=True)
class _Found:
    """The parameter that a model names: what it is called, what it is as stored, and how it is read."""

    said: str
    value: Any
    read: Callable[[], jax.Array]


def _find(model: Any) -> _Found:
    """Returns the parameter that a model names as its head.

    Raises:
      JaxparError: If there is none, it is no matrix, or it has a bias beside it.
    """
    module = _module(model)
    said = f'{type(module).__name__}.head_name = "{module.head_name}"'
    holder: Any = model if isinstance(model, nnx.Module) else model.params
    get = getattr if isinstance(model, nnx.Module) else dict.__getitem__
    *inside, last = module.head_name.split("/")
    try:
        for word in inside:
            holder = get(holder, word)
        value = get(holder, last)
        shape = _stored(value).shape
    except (AttributeError, KeyError, TypeError) as error:
        raise refuse(
            f"{said}, and there is no such parameter",
            rule="head_name is the path of the parameter that makes logits of the hidden state",
            fix='head_name = "lm_head/kernel", say: a path of layout.placements',
        ) from error
    bias = inside and (holder.bias if hasattr(holder, "bias") else isinstance(holder, dict) and "bias" in holder)
    if bias or len(shape) != 2:
        raise refuse(
            f"{said}, {'beside a bias' if bias else f'of shape {list(shape)}'}",
            rule="logits are the hidden state times a matrix, and nothing else",
            fix="use_bias=False, or no head_name: the loss then takes the logits as the model returns them",
        )
    return _Found(said, value, (lambda: value[...]) if get is getattr else lambda: holder[last])


def _stored(value: Any) -> Any:
    """Returns what is stored of a parameter; of one that has an adapter the matrix itself."""
    raw = value.get_raw_value() if isinstance(value, nnx.Variable) else value
    return raw.base if isinstance(raw, Adapted) else raw


def _names(value: Any) -> tuple:
    return tuple(value.get_metadata().get("out_sharding") or ()) if isinstance(value, nnx.Variable) else ()


def _is_table(weight: jax.Array, hidden: jax.Array, held: _Found) -> bool:
    """Returns whether the head is [vocab, dim], by its names or by the hidden state that it is multiplied with."""
    shape, names, dim = weight.shape, _names(held.value), hidden.shape[-1]
    if hidden.ndim != 3 or dim not in shape:
        raise refuse(
            f"hidden returns {list(hidden.shape)}, and {held.said} has shape {list(shape)}",
            rule="the hidden state is [batch, seq, dim], and the head [dim, vocab] or [vocab, dim]",
            fix="hidden() without the head's matmul, and head_name its kernel or the embedding",
        )
    if "vocab" not in names and shape == (dim, dim):
        raise refuse(
            f"{held.said} of shape {list(shape)}",
            rule="the shape of a head tells which of its dims is the vocabulary, or a name does",
            fix='out_sharding=("embed", "vocab"), or no head_name',
        )
    return names.index("vocab") == 0 if "vocab" in names else shape[1] == dim


@contextmanager
def _held(variable: Any, value: jax.Array) -> Iterator[None]:
    """Gives a value that has been read to whoever reads the variable again, while the context lasts."""
    metadata = variable.get_metadata()
    if "at_use" not in metadata:  # outside of a step: reading it again moves nothing
        yield
        return
    use = metadata["at_use"]
    variable.set_metadata(at_use=partial(_read, use.args[0], value))
    try:
        yield
    finally:
        variable.set_metadata(at_use=use)


def _read(path: str, known: jax.Array, _: Any) -> jax.Array:
    """Returns what was read before; `path` is there for messages, see `nnx.hooks.used`."""
    return known
