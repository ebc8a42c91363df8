"""Casts a model's output to float32 for the loss, also if the model computes in 16 bits.

A loss is a sum over many tokens, and bfloat16 rounds 3001 to 3008. A loss that itself casts to float32 before its sums
requests the uncast output; else the gradient of all logits would exist both in float32 and in 16 bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

_as_computed: ContextVar[bool] = ContextVar("as_computed", default=False)


def cast_output(out: object) -> Any:
    """Casts 16-bit floating-point arrays of a model's output to float32, for its loss."""
    return out if _as_computed.get() else jax.tree.map(lambda x: x.astype(jnp.float32) if _is_short(x) else x, out)


@contextmanager
def keep_output_dtype() -> Iterator[None]:
    """Context in which outputs of models are not cast."""
    token = _as_computed.set(True)
    try:
        yield
    finally:
        _as_computed.reset(token)


def call_in_float32(call: Callable, is_loss_model: Callable[[Any], bool]) -> Callable:
    """Wraps the `__call__` of a module class so that a loss receives its output in float32, see `cast_output`.

    Args:
      call: The `__call__` of the class.
      is_loss_model: Returns whether a module is the model that a loss calls, not a submodule.
    """

    @wraps(call)
    def __call__(self: object, *args: Any, **kwargs: Any) -> Any:
        out = call.__get__(self, type(self))(*args, **kwargs)
        return cast_output(out) if is_loss_model(self) else out

    return __call__


def belongs_to_call(kind: type, *members: str) -> bool:
    """Whether these attributes of a model describe the computation of its `__call__`.

    False if a subclass inherits them but overrides `__call__`, which may compute something else.
    """
    for base in kind.__mro__:
        if {*members} & vars(base).keys():
            return True
        if "__call__" in vars(base):
            return False
    return True


def _is_short(value: object) -> bool:
    return getattr(value, "dtype", None) in (jnp.bfloat16, jnp.float16)
