"""Replaces methods of Flax's classes and of models while a model is traced, and restores them afterwards.

Models and variables keep their classes, so that code that checks for exact types works.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_lock = threading.RLock()
_traces = 0  # running traces, in all threads: the last one to end restores the methods
_before: dict[tuple[type, str], Callable] = {}
_replaced: set[tuple[type, str, Callable]] = set()


@contextmanager
def method_overrides() -> Iterator[None]:
    """Context in which `replace_method` works; restores all replaced methods at its end."""
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


def replace_method(kind: type, name: str, replacement: Callable[[Callable], Callable]) -> None:
    """Replaces a method in the class that defines it, at most once; does nothing outside of `method_overrides`.

    Args:
      kind: A class that defines or inherits the method.
      name: Name of the method.
      replacement: Maps the original method to the one that replaces it.
    """
    owner = next((ancestor for ancestor in kind.__mro__ if name in vars(ancestor)), None)
    with _lock:
        if not _traces or owner is None or (owner, name, replacement) in _replaced:
            return
        method = vars(owner)[name]
        _before.setdefault((owner, name), method)
        _replaced.add((owner, name, replacement))
        setattr(owner, name, replacement(method))


def bind_method(method: Callable, instance: object) -> Callable:
    """Binds a method from the `__dict__` of a class to an instance."""
    return method.__get__(instance, type(instance)) if hasattr(method, "__get__") else method
