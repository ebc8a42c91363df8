"""The protocol of models that let the loss compute the logits.

    class Net(nnx.Module):
        head_name = "lm_head/kernel"                  # the path of a parameter [dim, vocab], or [vocab, dim]

        def hidden(self, tokens): ...                 # [batch, seq] to [batch, seq, dim]

        def __call__(self, tokens):
            return self.hidden(tokens) @ self.lm_head.kernel[...]

A tied model names its embedding. The logits must be a plain matmul, without a bias or another function after it. A head
may be padded, so that `tensor` divides its entries. Then the model's attribute `vocab` is the number of tokens, and its
`__call__` masks the logits of the padding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from jaxpar.errors import refuse
from jaxpar.models.output_dtype import belongs_to_call
from jaxpar.sharding.adapters import AdaptedMatrix


@dataclass(frozen=True)
class Head:
    """The head of a model, and the hidden state that it multiplies.

    Attributes:
      hidden: Shape [batch, seq, dim].
      weight: Shape [dim, vocab], or [vocab, dim] if it is a table.
      table: Whether the weight is [vocab, dim], like an embedding.
      vocab: Tokens of the vocabulary; entries of the weight after them are padding.
    """

    hidden: jax.Array
    weight: jax.Array
    table: bool
    vocab: int


def has_head(model: object) -> bool:
    """Whether the class that defines the model's `__call__` also has a method `hidden` and a `head_name`."""
    module = _module(model)
    if not callable(getattr(module, "hidden", None)) or not isinstance(getattr(module, "head_name", None), str):
        return False
    return belongs_to_call(type(module), "hidden", "head_name")


def _module(model: object) -> Any:
    """Returns the module of a bound model; unwraps Linen's."""
    return model if isinstance(model, nnx.Module) else getattr(model, "module", model)


def vocab_size(model: object) -> int:
    """Returns the vocabulary size of a model with this protocol, without reading the head.

    It is the size of the head's dim named `vocab`, otherwise of the larger dim.
    """
    param = _find_head(model)
    shape, names = _stored_array(param.value).shape, _dim_names(param.value)
    return int(shape[names.index("vocab")] if "vocab" in names else max(shape))


def read_head(model: Any, tokens: jax.Array, **documents: jax.Array) -> Head:
    """Runs a model on tokens [batch, seq]; returns its head and hidden state.

    It reads the head only once, also if the head is tied to the embedding that `hidden` reads, because each read of a
    parameter gathers it. `documents` are `segments` and `positions` of packed rows, passed to `hidden`.

    Raises:
      JaxparError: If there is no such parameter, it has a bias, or its shape does not determine the vocabulary's dim.
    """
    param = _find_head(model)
    weight = param.read()
    if isinstance(param.value, nnx.Variable):
        with _cache_reads(param.value, weight):
            hidden = model.hidden(tokens, **documents)
    else:
        hidden = model(tokens, **documents, method="hidden")
    table = _is_table(weight, hidden, param)
    # a 16-bit model may return float32; the head's dtype is the matmul dtype
    entries = weight.shape[0 if table else 1]
    vocab = getattr(_module(model), "vocab", entries)
    return Head(
        hidden.astype(weight.dtype), weight, table, vocab if type(vocab) is int and vocab < entries else entries
    )


@dataclass(frozen=True)
class _HeadParameter:
    """The parameter that a model names as its head: its description, its stored value, and a function that reads it."""

    description: str
    value: Any
    read: Callable[[], jax.Array]


def _find_head(model: Any) -> _HeadParameter:
    """Finds the parameter that a model names as its head.

    Raises:
      JaxparError: If the model has no such parameter, if it is not 2-D, or if it has a bias.
    """
    module = _module(model)
    text = f'{type(module).__name__}.head_name = "{module.head_name}"'
    holder: Any = model if isinstance(model, nnx.Module) else model.params
    get = getattr if isinstance(model, nnx.Module) else dict.__getitem__
    *parents, last = module.head_name.split("/")
    try:
        for word in parents:
            holder = get(holder, word)
        value = get(holder, last)
        shape = _stored_array(value).shape
    except (AttributeError, KeyError, TypeError) as error:
        raise refuse(
            f"{text}, and there is no such parameter",
            rule="head_name is the path of the parameter that makes logits of the hidden state",
            fix='head_name = "lm_head/kernel", say: a path of layout.placements',
        ) from error
    bias = parents and (holder.bias if hasattr(holder, "bias") else isinstance(holder, dict) and "bias" in holder)
    if bias or len(shape) != 2:
        raise refuse(
            f"{text}, {'beside a bias' if bias else f'of shape {list(shape)}'}",
            rule="logits are the hidden state times a matrix, and nothing else",
            fix="use_bias=False, or no head_name: the loss then takes the logits as the model returns them",
        )
    return _HeadParameter(text, value, (lambda: value[...]) if get is getattr else lambda: holder[last])


def _stored_array(value: object) -> Any:
    """Returns the stored array of a parameter; with an adapter, the base matrix."""
    raw = value.get_raw_value() if isinstance(value, nnx.Variable) else value
    return raw.base if isinstance(raw, AdaptedMatrix) else raw


def _dim_names(value: object) -> tuple:
    return tuple(value.get_metadata().get("out_sharding") or ()) if isinstance(value, nnx.Variable) else ()


def _is_table(weight: jax.Array, hidden: jax.Array, parameter: _HeadParameter) -> bool:
    """Whether the head is [vocab, dim], judging by its dim names or the shape of the hidden state."""
    shape, names, dim = weight.shape, _dim_names(parameter.value), hidden.shape[-1]
    if hidden.ndim != 3 or dim not in shape:
        raise refuse(
            f"hidden returns {list(hidden.shape)}, and {parameter.description} has shape {list(shape)}",
            rule="the hidden state is [batch, seq, dim], and the head [dim, vocab] or [vocab, dim]",
            fix="hidden() without the head's matmul, and head_name its kernel or the embedding",
        )
    if "vocab" not in names and shape == (dim, dim):
        raise refuse(
            f"{parameter.description} of shape {list(shape)}",
            rule="the shape of a head tells which of its dims is the vocabulary, or a name does",
            fix='out_sharding=("embed", "vocab"), or no head_name',
        )
    return names.index("vocab") == 0 if "vocab" in names else shape[1] == dim


@contextmanager
def _cache_reads(variable: nnx.Variable, value: jax.Array) -> Iterator[None]:
    """Context in which reads of a variable return a cached value."""
    metadata = variable.get_metadata()
    if "at_use" not in metadata:  # outside of a step, reading the variable twice gathers nothing
        yield
        return
    use = metadata["at_use"]
    variable.set_metadata(at_use=partial(_cached_value, use.args[0], value))
    try:
        yield
    finally:
        variable.set_metadata(at_use=use)


def _cached_value(path: str, known: jax.Array, _: object) -> jax.Array:
    """Returns the cached value; takes a path as `at_use` in `nnx_hooks.attach_use` does."""
    return known
