"""Methods of Flax's classes and of models that jaxpar replaces while a model is traced: afterwards they are as before.

The classes of a model and of its variables stay what they are, so that code which asks for exact types finds them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_lock = threading.RLock()
_traces = 0  # that run now, in all threads: the last one to end puts the methods back
_before: dict[tuple[type, str], Callable] = {}
_replaced: set[tuple[type, str, Callable]] = set()


@contextmanager
def replaced_methods() -> Iterator[None]:
    """Lets methods be replaced while the context lasts."""
    global _traces
    with _lock:
        _traces += 1
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if not _traces:
                for (kind, name), method in _before.items():
                    setattr(kind, name, method)
                _before.clear()
                _replaced.clear()


def replace_method(kind: type, name: str, how: Callable[[Callable], Callable]) -> None:
    """Replaces a method where its class defines it, once; outside of `replaced_methods`, nothing.

    Args:
      kind: The class, which may inherit the method.
      name: The method.
      how: Of the method, returns what stands for it.
    """
    owner = next((each for each in kind.__mro__ if name in vars(each)), None)
    with _lock:
        if not _traces or owner is None or (owner, name, how) in _replaced:
            return
        method = vars(owner)[name]
        _before.setdefault((owner, name), method)
        _replaced.add((owner, name, how))
        setattr(owner, name, how(method))


def bound(method: Callable, instance: object) -> Callable:
    """Returns a method, as the dict of a class has it, of an instance."""
    return method.__get__(instance, type(instance)) if hasattr(method, "__get__") else method
