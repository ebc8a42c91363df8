"""Sharded sums of gradients: the gradients of a tick are reduce-scattered at once, and never added up whole.

    whole     sum += gradient                               reduced once, after the last tick
    shards    sum += this device's shard of the gradients   scattered in every tick that makes some, in float32

It trades traffic for memory: a sum takes 1 / ways of the bytes, but gradients are sent in every tick that computes
some, not once per step. A table that mixes ops scatters in every tick, outside of `lax.switch`, so that all devices
reach the collective.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.sharding.names import GRADIENT


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The sharding of sums of gradients.

    Attributes:
      axis: A mesh axis that is manual inside the table, and whose devices have different examples.
      ways: Its size.
      dims: Path of a parameter to the dim that is sharded. A path that is not in it stays whole until after the table.
      others: Axes that XLA handles inside the table and that split gradients too.
      specs: Path of a parameter to its spec over `others`. A path whose sharded dim `others` split too is not in it.
    """

    axis: str
    ways: int
    dims: Mapping[str, int]
    others: tuple[str, ...]
    specs: Mapping[str, PartitionSpec]

    def sums_of(self, params: Mapping[str, Any], *, ahead: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the sums of gradients, which have `ahead` more leading dims than the parameters."""
        found = {}
        for path, leaf in sums_of(params).items():
            cut = self.dims[path] + ahead if path in self.dims else None
            shape = [size // self.ways if dim == cut else size for dim, size in enumerate(leaf.shape)]
            found[path] = jax.ShapeDtypeStruct(shape, leaf.dtype)
        return found

    @jax.named_scope(GRADIENT)
    def of(self, gradients: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns this device's shards of the gradients, summed over the axis."""
        return {path: self.one(path, gradient) for path, gradient in gradients.items()}

    @jax.named_scope(GRADIENT)
    def added(
        self, sums: Mapping[str, jax.Array], gradients: Mapping[str, jax.Array], reads: Sequence[Mapping[str, bool]]
    ) -> dict[str, jax.Array]:
        """Returns the sums plus shards of new gradients, for parameters that one of the functions reads (`reads`)."""
        # the others have gradients of zero: leaving them out saves a reduce-scatter of the vocabulary in most ticks
        more = self.of({path: gradients[path] for path in sums if any(read[path] for read in reads)})
        return {path: x + more[path].astype(x.dtype) if path in more else x for path, x in sums.items()}

    def one(self, path: str, gradient: jax.Array, *, gone: int = 0) -> jax.Array:
        """Returns this device's shard of one gradient, which lacks so many of its parameter's leading dims."""
        if path not in self.dims:
            return gradient
        scatter = partial(scattered, axis=self.axis, dim=self.dims[path] - gone)
        if path not in self.specs:
            # where another axis splits the same dim, a shard of its shard is not a shard of the whole: XLA places it
            return scatter(gradient)
        return beside(scatter, self.others, PartitionSpec(*self.specs[path][gone:]))(gradient)


def scattered(whole: jax.Array, *, axis: str, dim: int) -> jax.Array:
    """Returns this device's shard of the sum over a manual axis, added in float32 or more."""
    # cast before, not after: the additions happen inside of the collective, in the dtype that it is given
    exact = whole.astype(jnp.promote_types(whole.dtype, jnp.float32))
    return jax.lax.psum_scatter(exact, axis, scatter_dimension=dim, tiled=True)


def beside(function: Callable, others: Sequence[str], spec: PartitionSpec) -> Callable:
    """Returns a function of one array that runs with further axes manual, which split the array by a spec.

    With these axes left to XLA, it would first gather the array over them: XLA replicates the operands of a manual
    collective over all axes that are automatic.
    """
    if not others:
        return function
    return jax.shard_map(function, in_specs=(spec,), out_specs=spec, axis_names=set(others), check_vma=False)


def sums_of(params: Any) -> Any:
    """Returns the shapes of sums of gradients, in float32 or more."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)


def zeros_of(shapes: Any) -> Any:
    """Returns zeros of these shapes and dtypes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
