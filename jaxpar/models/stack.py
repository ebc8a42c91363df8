"""Equal layers as one: stacked, run one after the other, and cut where a pipeline cuts them.

embed ──► layers 0 1 2 ... ──► head and loss
          `pipelined(layers, x)` marks the middle: a pipeline runs the three apart, on different devices
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.blocks.documents import ONE, Documents, stream_of, through
from jaxpar.models.cache import Cache, Layer
from jaxpar.models.remat import remat

Layers = Callable[..., Any]  # (x, *per_layer) to what has the structure and shapes of x
_at_cut: ContextVar[Callable | None] = ContextVar("at_cut", default=None)


@dataclass(frozen=True)
class InTurn:
    """Equal layers, one after the other: each is a function of (x, *its own)."""

    layers: tuple[Callable[..., Any], ...]

    def __call__(self, x: Any, *per_layer: Any) -> Any:
        """Returns x after all layers."""
        for i, layer in enumerate(self.layers):
            x = layer(x, *jax.tree.map(lambda leaf, i=i: leaf[i], per_layer))
        return x


def pipelined(layers: Layers | Sequence[Callable[..., Any]], x: Any, *per_layer: Any) -> Any:
    """Returns x after all layers: the call that a pipeline cuts in stages.

    A model makes it once, around its equal layers. Everything before it runs on the first stage, everything after it on
    the last. In a pipeline the parameters that `layers` reads are those of one stage.

    Args:
      layers: Equal layers: a function that runs all layers of a stack on x, or a list of layers that are called with x
        one after the other. What they return has the structure, shapes and dtypes of x. Layers of several kinds in
        turns, such as local and global attention, are equal turn by turn: a list of callables, one for each turn.
      x: What flows through the layers: an array, or any tree of floating-point arrays (an auxiliary loss rides along).
      *per_layer: What each layer has of its own and is no parameter, such as a dropout key. Leading dim: layers.
    """
    at_cut = _at_cut.get()
    every = layers if callable(layers) else InTurn(tuple(layers))
    return every(x, *per_layer) if at_cut is None else at_cut(every, x, per_layer)


@contextmanager
def cut(at_cut: Callable[[Layers, Any, tuple], Any]) -> Iterator[None]:
    """Gives the call of `pipelined` to `at_cut(layers, x, per_layer)` while the context lasts."""
    token = _at_cut.set(at_cut)
    try:
        yield
    finally:
        _at_cut.reset(token)


def is_cut() -> bool:
    """Returns whether a model is traced in pieces, for a pipeline."""
    return _at_cut.get() is not None


class _Reached(BaseException):  # no error: the model came to its layers, and is left there
    def __init__(self, value: Any):
        self.value = value


def reached(run: Callable[[], Any], take: Callable[[Layers, Any, tuple], Any]) -> Any:
    """Returns `take(layers, x, per_layer)` of the call of `pipelined` in `run()`, the rest of which is not run.

    None where there is no such call.
    """

    def stop(layers, x, per_layer):
        raise _Reached(take(layers, x, per_layer))

    try:
        with cut(stop):
            run()
    except _Reached as found:
        return found.value
    return None


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """Returns `count` modules as one, every parameter with a leading dim named `layers`."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def made(rngs):
        return make(rngs)

    return made(rngs)


def run_cached(blocks: nnx.Module, x: jax.Array, cache: Cache, positions: jax.Array) -> tuple[jax.Array, Cache]:
    """Returns `x` after all blocks of a stack, and the cache that knows its tokens too.

    Args:
      blocks: As made by `stack`; each has `cached(x, layer)`.
      x: Shape [batch, seq, embed].
      cache: Of as many layers.
      positions: Of the tokens. Shape [batch, seq], int32.
    """
    graph, params = nnx.split(blocks)

    # the cache is carried, not stacked: a loop changes what it carries in place
    def layer(carry, each):
        x, keys, values = carry
        params, i = each
        own, its = (jax.lax.dynamic_index_in_dim(held, i, keepdims=False) for held in (keys, values))
        block: Any = nnx.merge(graph, params)
        x, after = block.cached(x, Layer(own, its, positions))
        keys, values = (
            jax.lax.dynamic_update_index_in_dim(held, new, i, axis=0)
            for held, new in ((keys, after.keys), (values, after.values))
        )
        return (x, keys, values), None

    numbers = jnp.arange(cache.keys.shape[0])
    (x, keys, values), _ = jax.lax.scan(layer, (x, cache.keys, cache.values), (params, numbers))
    return x, Cache(keys, values, cache.length)


def run_stack(
    blocks: nnx.Module,
    x: jax.Array,
    keys: jax.Array | None,
    *,
    policy: str,
    scan: bool,
    documents: Documents = ONE,
) -> jax.Array:
    """Returns `x` after all blocks of a stack.

    Args:
      blocks: As made by `stack`.
      x: Shape [batch, seq, embed].
      keys: One dropout key per block, or None.
      policy: What the backward pass keeps of each block.
      scan: One compiled body for all blocks; or one copy per block, which compiles longer and
        lets XLA fuse across them.
      documents: Those that share a row.
    """
    graph, params = nnx.split(blocks)

    def layer(x, params_and_key):
        params, key = params_and_key
        return through(lambda x, documents: nnx.merge(graph, params)(x, key, documents), x), None

    # around a layer, inside of the scan: around the scan, the backward pass would hold all layers' activations at once
    layer = remat(layer, policy, prevent_cse=not scan)

    def layers(x, keys):
        if scan:
            return jax.lax.scan(layer, x, (params, keys))[0]
        for i in range(jax.tree.leaves(params)[0].shape[0]):
            x, _ = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], (params, keys)))
        return x

    return stream_of(pipelined(layers, documents.beside(x), keys))
