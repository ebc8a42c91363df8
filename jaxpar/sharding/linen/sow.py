"""Values that a Linen module sows, separate from its state: told by the call of `sow`, whatever container holds either.

self.sow("seen", "h", h)                                    a tuple that each call would lengthen: made anew
self.sow("seen", "total", h, add, lambda: 0.0)              of constant shape: state, as any other variable
self.variable("seen", "carry", lambda: (zeros, zeros))      state
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax
from flax import linen as nn

from jaxpar.sharding.calls.methods import replace_method, replaced_methods

Path = tuple[str, ...]  # collection, modules, name
_record: ContextVar[Callable[[Path, bool], None] | None] = ContextVar("record", default=None)


@contextmanager
def recording_sows(record: Callable[[Path, bool], None]) -> Iterator[None]:
    """Calls `record` with the path of each value that is sown, and whether sowing again keeps its shapes."""
    token = _record.set(record)
    try:
        with replaced_methods():
            replace_method(nn.Module, "sow", _sow)
            yield
    finally:
        _record.reset(token)


def split_sown(tree: Any, sown: Collection[Path], prefix: Path) -> tuple[dict, dict]:
    """Splits a nested dict of variables into (state, sown values).

    Args:
      tree: The nested dict.
      sown: Paths of the sown values.
      prefix: The path of the tree itself.
    """
    state, sown_values = {}, {}
    for name, value in tree.items():
        path = (*prefix, name)
        if path in sown:
            sown_values[name] = value
        elif isinstance(value, dict) and value:
            child_state, child_sown = split_sown(value, sown, path)
            state |= {name: child_state} if child_state else {}
            sown_values |= {name: child_sown} if child_sown else {}
        else:
            state[name] = value
    return state, sown_values


def _sow(before: Callable) -> Callable:
    @wraps(before)
    def sow(self, col, name, value, reduce_fn=nn.module.tuple_reduce, init_fn=nn.module.tuple_init):
        stored, record = before(self, col, name, value, reduce_fn, init_fn), _record.get()
        if stored and record is not None:
            variable = self.get_variable(col, name)
            record((col, *self.path, name), _form(reduce_fn(variable, value)) == _form(variable))
        return stored

    return sow


def _form(tree: Any) -> tuple:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [getattr(leaf, "shape", ()) for leaf in leaves]
