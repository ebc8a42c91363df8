"""Sums of gradients as shards: what a tick makes is scattered over an axis at once, and never added up whole.

    whole     sum += gradient                               reduced once, after the last tick
    shards    sum += this device's piece of the gradients   scattered in every tick that makes some, in float32

Memory for traffic: a sum takes 1 / ways of the bytes, and all its gradients travel as often as the table makes them. A
table that mixes kinds scatters in every tick, outside of what its stages choose, so that none waits for another.
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
    """The cut of the sums of gradients.

    Attributes:
      axis: A mesh axis that is manual inside the table, and whose devices have other rows of the batch.
      ways: Its size.
      dims: Path of a parameter to the dim that is cut. What is not in it stays whole, to be reduced after the table.
      others: Axes that are XLA's inside the table and split gradients too.
      specs: Path of a parameter to what these split, but for those that they split on the dim that is cut.
    """

    axis: str
    ways: int
    dims: Mapping[str, int]
    others: tuple[str, ...]
    specs: Mapping[str, PartitionSpec]

    def sums_of(self, params: Mapping[str, Any], *, ahead: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the sums of gradients, with so many dims ahead of the parameters' own."""
        found = {}
        for path, leaf in sums_of(params).items():
            cut = self.dims[path] + ahead if path in self.dims else None
            shape = [size // self.ways if dim == cut else size for dim, size in enumerate(leaf.shape)]
            found[path] = jax.ShapeDtypeStruct(shape, leaf.dtype)
        return found

    @jax.named_scope(GRADIENT)
    def of(self, gradients: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns this device's pieces of gradients that are summed over the axis."""
        return {path: self._one(path, gradient) for path, gradient in gradients.items()}

    @jax.named_scope(GRADIENT)
    def added(
        self, sums: Mapping[str, jax.Array], gradients: Mapping[str, jax.Array], reads: Sequence[Mapping[str, bool]]
    ) -> dict[str, jax.Array]:
        """Returns the sums with pieces of new gradients, of those parameters that one of some functions reads."""
        more = self.of({path: gradients[path] for path in sums if any(read[path] for read in reads)})
        return {path: x + more[path].astype(x.dtype) if path in more else x for path, x in sums.items()}

    def _one(self, path: str, gradient: jax.Array) -> jax.Array:
        if path not in self.dims:
            return gradient
        scatter = partial(scattered, axis=self.axis, dim=self.dims[path])
        # where another axis splits that very dim, a piece of its piece is not the piece of the whole: XLA sees to it
        return beside(scatter, self.others, self.specs[path])(gradient) if path in self.specs else scatter(gradient)


def scattered(whole: jax.Array, *, axis: str, dim: int) -> jax.Array:
    """Returns this device's piece of what is summed over a manual axis, in float32 at least."""
    exact = whole.astype(jnp.promote_types(whole.dtype, jnp.float32))
    return jax.lax.psum_scatter(exact, axis, scatter_dimension=dim, tiled=True)


def beside(function: Callable, others: Sequence[str], spec: PartitionSpec) -> Callable:
    """Returns a function of one array that runs where axes of XLA's are manual too, and split the array by a spec.

    Else XLA gathers over them what the function moves over another axis.
    """
    if not others:
        return function
    return jax.shard_map(function, in_specs=(spec,), out_specs=spec, axis_names=set(others), check_vma=False)


def sums_of(params: Any) -> Any:
    """Returns the shapes of sums of gradients, which are never shorter than float32."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)


def zeros_of(shapes: Any) -> Any:
    """Returns zeros of these shapes and dtypes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
