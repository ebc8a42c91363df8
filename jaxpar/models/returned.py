"""What a model returns to its loss: float32, whatever it computes in.

A loss is a sum over many tokens, and 16 bits count 3001 of them as 3008. A loss that casts to float32 itself, where it
sums, asks for what was computed: cast before, the gradient of all logits would be there in float32 and in 16 bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

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


def call_in_float32(call: Callable, of_loss: Callable[[Any], bool]) -> Callable:
    """Returns a `__call__` of a class of modules that gives `returned` to a loss.

    Args:
      call: The method, as the class has it.
      of_loss: Whether a module is the model that a loss calls.
    """

    @wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = call.__get__(self, type(self))(*args, **kwargs)
        return returned(out) if of_loss(self) else out

    return __call__


def goes_with_call(kind: type, *members: str) -> bool:
    """Returns whether what a model offers besides its `__call__` goes with that.

    Not in a subclass that inherits these members and has a `__call__` of its own, which may compute something else.
    """
    for each in kind.__mro__:
        if {*members} & vars(each).keys():
            return True
        if "__call__" in vars(each):
            return False
    return True


def _is_short(value: Any) -> bool:
    return getattr(value, "dtype", None) in (jnp.bfloat16, jnp.float16)
