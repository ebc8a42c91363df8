"""Values that a Linen module sows, apart from its state: by the call of `sow`, whatever container holds either.

self.sow("seen", "h", h)                                    a tuple that each call would make longer: made anew
self.sow("seen", "total", h, add, lambda: 0.0)              of one form: state, as any other variable
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
def recorded_sows(record: Callable[[Path, bool], None]) -> Iterator[None]:
    """Records, while the context lasts, the path of each value that is sown, and whether another would be as large."""
    token = _record.set(record)
    try:
        with replaced_methods():
            replace_method(nn.Module, "sow", _sow)
            yield
    finally:
        _record.reset(token)


def parted(tree: Any, sown: Collection[Path], inside: Path) -> tuple[dict, dict]:
    """Returns (the state, the sown values) in a nested dict of variables.

    Args:
      tree: The nested dict.
      sown: Paths of the sown values.
      inside: The path of the tree itself.
    """
    state, apart = {}, {}
    for name, value in tree.items():
        path = (*inside, name)
        if path in sown:
            apart[name] = value
        elif isinstance(value, dict) and value:
            one, other = parted(value, sown, path)
            state |= {name: one} if one else {}
            apart |= {name: other} if other else {}
        else:
            state[name] = value
    return state, apart


def _sow(before: Callable) -> Callable:
    @wraps(before)
    def sow(self, col, name, value, reduce_fn=nn.module.tuple_reduce, init_fn=nn.module.tuple_init):
        stored, record = before(self, col, name, value, reduce_fn, init_fn), _record.get()
        if stored and record is not None:
            held = self.get_variable(col, name)
            record((col, *self.path, name), _form(reduce_fn(held, value)) == _form(held))
        return stored

    return sow


def _form(tree: Any) -> tuple:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [getattr(leaf, "shape", ()) for leaf in leaves]
