"""Equal layers, which a model stacks and runs in sequence, and a pipeline splits into stages.

embed ──► layers 0 1 2 ... ──► head and loss
          `pipelined(layers, x)` marks the middle: a pipeline runs the three on different devices
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.errors import refuse
from jaxpar.models.cache import KVCache, LayerCache
from jaxpar.models.remat import remat

Layers = Callable[..., Any]  # (x, *per_layer) to a result with the structure and shapes of x
_at_cut: ContextVar[Callable | None] = ContextVar("at_cut", default=None)


@dataclass(frozen=True)
class SequentialLayers:
    """Equal layers in sequence, each called with (x, *per_layer)."""

    layers: tuple[Callable[..., Any], ...]

    def __call__(self, x: Any, *per_layer: Any) -> Any:
        """Applies all layers to x."""
        for i, layer in enumerate(self.layers):
            x = layer(x, *jax.tree.map(lambda leaf, i=i: leaf[i], per_layer))
        return x


def pipelined(layers: Layers | Sequence[Callable[..., Any]], x: Any, *per_layer: Any) -> Any:
    """Applies all layers to x; a pipeline splits this call into stages.

    A model makes this call once, around its equal layers. Operations before it run on the first stage, operations after
    it on the last. In a pipeline, `layers` reads the parameters of one stage.

    Args:
      layers: Equal layers: a function that runs all layers of a stack on x, or a list of layers that are called with x
        one after the other. Their result has the structure, shapes and dtypes of x. Layers of several kinds that
        alternate, such as local and global attention, are equal group by group: a list of callables, one per group.
        With `Pipeline(stages=...)`, a list of any callables, whose results may have any structure and shapes.
      x: Input of the layers: an array, or any tree of floating-point arrays, e.g. with an auxiliary loss.
      *per_layer: Inputs of each layer other than parameters, such as a dropout key. Leading dim: layers.
    """
    at_cut = _at_cut.get()
    run_layers = layers if callable(layers) else SequentialLayers(tuple(layers))
    return run_layers(x, *per_layer) if at_cut is None else at_cut(run_layers, x, per_layer)


@contextmanager
def intercept_layers(handler: Callable[[Layers, Any, tuple], Any]) -> Iterator[None]:
    """Context in which a call of `pipelined` runs `at_cut(layers, x, per_layer)` instead."""
    token = _at_cut.set(handler)
    try:
        yield
    finally:
        _at_cut.reset(token)


def is_intercepted() -> bool:
    """Whether the model is being traced in parts, as a pipeline does."""
    return _at_cut.get() is not None


class _StopTrace(BaseException):  # not an error: stops the trace of the model at its layers
    def __init__(self, value: Any):
        self.value = value


def call_at_layers(run: Callable[[], Any], handler: Callable[[Layers, Any, tuple], Any]) -> Any:
    """Runs `run()` until it calls `pipelined`; returns `take(layers, x, per_layer)`, or None without such a call."""

    def stop(layers, x, per_layer):
        raise _StopTrace(handler(layers, x, per_layer))

    try:
        with intercept_layers(stop):
            run()
    except _StopTrace as signal:
        return signal.value
    return None


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """Stacks `count` modules into one; every parameter gets a leading dim named `layers`."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def build(rngs):
        return make(rngs)

    return build(rngs)


def run_cached(
    blocks: nnx.Module, x: jax.Array, cache: KVCache, positions: jax.Array, *, kinds: Sequence[Any]
) -> tuple[jax.Array, KVCache]:
    """Applies all blocks of a stack with a KV cache. Returns the output and the updated cache.

    Args:
      blocks: The result of `stack`; a block has a method `cached(x, layer, kind)`.
      x: Shape [batch, seq, embed].
      cache: Cache with as many layers.
      positions: Positions of the tokens. Shape [batch, seq], int32.
      kinds: Kinds of the layers, repeated; each compiles a copy of the block.
    """
    graph, params = nnx.split(blocks)
    numbers = jnp.arange(cache.keys.shape[0])
    runs = [partial(cached_layer, graph, positions, kind) for kind in kinds]
    x, keys, values = _scan_by_kind(runs, (x, cache.keys, cache.values), (params, numbers))
    return x, KVCache(keys, values, cache.length)


# the cache is carried, not stacked: a loop updates its carry in place
def cached_layer(
    graph: Any, positions: jax.Array, kind: Any, carry: tuple[jax.Array, ...], params_and_number: tuple[Any, Any]
) -> tuple[jax.Array, ...]:
    """Applies one block to (x, keys, values), the keys and values of all layers; its number selects its own."""
    x, keys, values = carry
    params, i = params_and_number
    k, v = (jax.lax.dynamic_index_in_dim(array, i, keepdims=False) for array in (keys, values))
    block: Any = nnx.merge(graph, params)
    x, updated = block.cached(x, LayerCache(k, v, positions), kind)
    keys, values = (
        jax.lax.dynamic_update_index_in_dim(array, new, i, axis=0)
        for array, new in ((keys, updated.keys), (values, updated.values))
    )
    return x, keys, values


def run_stack(
    blocks: nnx.Module,
    stream: Any,
    inputs: Any,
    *,
    policy: str,
    scan: bool,
    kinds: Sequence[Any],
) -> Any:
    """Applies all blocks of a stack to a stream.

    Args:
      blocks: The result of `stack`; a block has a method `on_stream(stream, inputs, kind)`.
      stream: Activations, or a dict of arrays that are carried along.
      inputs: Inputs of each block, such as its dropout key, or None. Leading dim: layers.
      policy: Remat policy, which selects the residuals of each block.
      scan: Compile one body for all blocks; or one copy per block, which compiles longer and lets XLA fuse across them.
      kinds: Kinds of the layers, repeated, such as a window and none; the body has a block for each.

    Raises:
      JaxparError: If a stage of a pipeline would begin with another kind than the first.
    """
    graph, params = nnx.split(blocks)

    def layer(stream, params_and_inputs, kind):
        params, of_block = params_and_inputs
        block: Any = nnx.merge(graph, params)
        return block.on_stream(stream, of_block, kind)

    def layers(stream, inputs):
        stacked = (params, inputs)
        count = _count(stacked)
        check_stage(count, len(kinds))
        # around a layer, inside the scan: around the scan, the backward pass would hold all layers' activations at once
        prevent_cse = not scan or count % len(kinds) > 0
        runs = [remat(partial(layer, kind=kind), policy, prevent_cse=prevent_cse) for kind in kinds]
        if scan:
            return _scan_by_kind(runs, stream, stacked)
        return _unrolled(runs, stream, stacked, range(count))

    return pipelined(layers, stream, inputs)


def _scan_by_kind(runs: Sequence[Callable[..., Any]], carry: Any, stacked: Any) -> Any:
    """Runs one function of `runs` after the other on the leading dim of `stacked`, by a loop over groups of them.

    Layers that are left over, as the last 2 of Gemma 3's 26, follow the loop.
    """
    count, period = _count(stacked), len(runs)
    looped = count - count % period
    groups = jax.tree.map(lambda leaf: _group(leaf, looped, period), stacked)

    def group(carry, parts):
        return (runs[0](carry, parts) if period == 1 else _unrolled(runs, carry, parts, range(period))), None

    carry, _ = jax.lax.scan(group, carry, groups)
    return _unrolled(runs, carry, stacked, range(looped, count))


def _group(leaf: jax.Array, looped: int, period: int) -> jax.Array:
    if period == 1:
        return leaf
    first = leaf if looped == leaf.shape[0] else leaf[:looped]
    return first.reshape(looped // period, period, *leaf.shape[1:])


def _unrolled(runs: Sequence[Callable[..., Any]], carry: Any, stacked: Any, numbers: range) -> Any:
    for i in numbers:
        carry = runs[i % len(runs)](carry, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
    return carry


def _count(stacked: Any) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]


def check_stage(layers: int, period: int) -> None:
    """Checks that a stage of a pipeline begins with the first kind of layers.

    Raises:
      JaxparError: If its layers are no multiple of the period of their kinds.
    """
    if is_intercepted() and layers % period:
        raise refuse(
            f"a stage of {layers} layers whose kinds repeat every {period} layers",
            rule="every stage of a pipeline has the same kinds of layers in the same order",
            fix=f'stages of a multiple of {period} layers, or parallel.pipeline.stages = "found", which cuts anywhere',
        )
