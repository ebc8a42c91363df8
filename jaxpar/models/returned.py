"""What a model returns to its loss: float32, whatever it computes in.

A loss is a sum over many tokens, and 16 bits count 3001 of them as 3008. A loss that casts to float32 itself, where it
sums, asks for what was computed: cast before, the gradient of all logits would be there in float32 and in 16 bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

_WRITTEN: dict[type, type] = {}
_as_computed: ContextVar[bool] = ContextVar("as_computed", default=False)


def returned(out: Any) -> Any:
    """Returns what a model returned, as its loss computes with it: floating-point arrays of 16 bits as float32."""
    return out if _as_computed.get() else jax.tree.map(lambda x: x.astype(jnp.float32) if _is_short(x) else x, out)


@contextmanager
def as_computed() -> Iterator[None]:
    """Leaves what models return while the context lasts in the dtype that they compute in."""
    token = _as_computed.set(True)
    try:
        yield
    finally:
        _as_computed.reset(token)


@cache
def called_by_losses(kind: type[nnx.Module]) -> type[nnx.Module]:
    """Returns the type of an NNX model whose loss gets what it returns in float32."""
    known = {} if getattr(kind, "_pytree__is_pytree", True) else {"pytree": False}  # else it would be one to NNX

    class Model(kind, **known):
        def __call__(self, *args, **kwargs):
            return returned(super().__call__(*args, **kwargs))

    Model.__name__ = kind.__name__
    _WRITTEN[Model] = kind
    return Model


def goes_with_call(kind: type, *members: str) -> bool:
    """Returns whether what a model offers besides its `__call__` goes with that.

    Not in a subclass that inherits these members and has a `__call__` of its own, which may compute something else.
    """
    for each in _WRITTEN.get(kind, kind).__mro__:
        if {*members} & vars(each).keys():
            return True
        if "__call__" in vars(each):
            return False
    return True


def _is_short(value: Any) -> bool:
    return getattr(value, "dtype", None) in (jnp.bfloat16, jnp.float16)
