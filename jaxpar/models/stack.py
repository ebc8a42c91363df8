"""Equal layers, which a model stacks and runs in sequence, and a pipeline splits into stages.

embed ──► layers 0 1 2 ... ──► head and loss
          `pipelined(layers, x)` marks the middle: a pipeline runs the three on different devices
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

Layers = Callable[..., Any]  # (x, *per_layer) to a result with the structure and shapes of x
_at_cut: ContextVar[Callable | None] = ContextVar("at_cut", default=None)


@dataclass(frozen=True)
class SequentialLayers:
    """Equal layers in sequence, each called with (x, *per_layer)."""

    layers: tuple[Callable[..., Any], ...]

    def __call__(self, x: object, *per_layer: Any) -> Any:
        """Applies all layers to x."""
        for i, layer in enumerate(self.layers):
            x = layer(x, *jax.tree.map(lambda leaf, i=i: leaf[i], per_layer))
        return x


def pipelined(layers: Layers | Sequence[Callable[..., Any]], x: object, *per_layer: Any) -> Any:
    """Applies all layers to x; a pipeline splits this call into stages.

    A model makes this call once, around its equal layers. Operations before it run on the first stage, operations after
    it on the last. In a pipeline, `layers` reads the parameters of one stage.

    Args:
      layers: Equal layers: a function that runs all layers of a stack on x (a scan over them, not a module that
        `nnx.vmap` stacked), or a list of layers that are called with x one after the other. Their result has the
        structure, shapes and dtypes of x. Layers of several kinds that alternate, such as local and global attention,
        are equal group by group: a list of callables, one per group. With `Pipeline(stages=...)`, a list of any
        callables, whose results may have any structure and shapes.
      x: Input of the layers: an array, or any tree of floating-point arrays, e.g. with an auxiliary loss.
      *per_layer: Inputs of each layer other than parameters, such as a dropout key. Leading dim: layers.
    """
    at_cut = _at_cut.get()
    run_layers = layers if callable(layers) else SequentialLayers(tuple(layers))
    return run_layers(x, *per_layer) if at_cut is None else at_cut(run_layers, x, per_layer)


@contextmanager
def intercept_layers(handler: Callable[[Layers, Any, tuple], Any]) -> Iterator[None]:
    """Context in which a call of `pipelined` runs `handler(layers, x, per_layer)` instead."""
    token = _at_cut.set(handler)
    try:
        yield
    finally:
        _at_cut.reset(token)


def is_intercepted() -> bool:
    """Whether the model is being traced in parts, as a pipeline does."""
    return _at_cut.get() is not None


class _StopTrace(BaseException):  # not an error: stops the trace of the model at its layers
    def __init__(self, value: object):
        self.value = value


def call_at_layers(run: Callable[[], Any], handler: Callable[[Layers, Any, tuple], Any]) -> Any:
    """Runs `run()` until it calls `pipelined`; returns `handler(layers, x, per_layer)`, or None without such a call."""

    def stop(layers, x, per_layer):
        raise _StopTrace(handler(layers, x, per_layer))

    try:
        with intercept_layers(stop):
            run()
    except _StopTrace as signal:
        return signal.value
    return None
