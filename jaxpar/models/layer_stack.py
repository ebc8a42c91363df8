"""Stacks of equal layers: their parameters have a leading dim, and a loop runs them.

layers 0 1 2 3 4 5 of kinds a b     ──►     loop over (0 1) (2 3) (4 5), whose body has a layer of each kind
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.errors import refuse
from jaxpar.models.cache import KVCache, LayerCache
from jaxpar.models.remat import remat
from jaxpar.models.stack import is_intercepted, pipelined


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """Stacks `count` modules into one; every parameter gets a leading dim named `layers`."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def build(rngs):
        return make(rngs)

    return build(rngs)


def run_cached(
    blocks: nnx.Module, x: jax.Array, cache: KVCache, positions: jax.Array, *, kinds: Sequence[object]
) -> tuple[jax.Array, KVCache]:
    """Applies all blocks of a stack with a KV cache. Returns the output and the updated cache.

    Args:
      blocks: The result of `stack`; a block has a method `run_cached(x, layer, kind)`.
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
    x, updated = block.run_cached(x, LayerCache(k, v, positions), kind)
    keys, values = (
        jax.lax.dynamic_update_index_in_dim(array, new, i, axis=0)
        for array, new in ((keys, updated.keys), (values, updated.values))
    )
    return x, keys, values


def run_stack(
    blocks: nnx.Module,
    stream: object,
    inputs: object,
    *,
    policy: str,
    scan: bool,
    kinds: Sequence[object],
) -> Any:
    """Applies all blocks of a stack to a stream.

    Args:
      blocks: The result of `stack`; a block has a method `run_stream(stream, inputs, kind)`.
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
        params, block_inputs = params_and_inputs
        block: Any = nnx.merge(graph, params)
        return block.run_stream(stream, block_inputs, kind)

    def layers(stream, inputs):
        stacked = (params, inputs)
        count = _count(stacked)
        check_stage(count, len(kinds))
        # around a layer, inside the scan: around the scan, the backward pass would hold all layers' activations at once
        prevent_cse = not scan or count % len(kinds) > 0
        runs = [remat(partial(layer, kind=kind), policy, prevent_cse=prevent_cse) for kind in kinds]
        if scan:
            return _scan_by_kind(runs, stream, stacked)
        return _run_unrolled(runs, stream, stacked, range(count))

    return pipelined(layers, stream, inputs)


def _scan_by_kind(runs: Sequence[Callable[..., Any]], carry: object, stacked: object) -> Any:
    """Runs one function of `runs` after the other on the leading dim of `stacked`, by a loop over groups of them.

    Layers that are left over, as the last 2 of Gemma 3's 26, follow the loop.
    """
    count, period = _count(stacked), len(runs)
    looped = count - count % period
    groups = jax.tree.map(lambda leaf: _group_leaf(leaf, looped, period), stacked)

    def group(carry, parts):
        return (runs[0](carry, parts) if period == 1 else _run_unrolled(runs, carry, parts, range(period))), None

    carry, _ = jax.lax.scan(group, carry, groups)
    return _run_unrolled(runs, carry, stacked, range(looped, count))


def _group_leaf(leaf: jax.Array, looped: int, period: int) -> jax.Array:
    if period == 1:
        return leaf
    first = leaf if looped == leaf.shape[0] else leaf[:looped]
    return first.reshape(looped // period, period, *leaf.shape[1:])


def _run_unrolled(runs: Sequence[Callable[..., Any]], carry: object, stacked: object, numbers: range) -> Any:
    for i in numbers:
        carry = runs[i % len(runs)](carry, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
    return carry


def _count(stacked: object) -> int:
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
