"""The axes of a traced step that an operation of it may enter in `jax.shard_map`."""

import math

from jax.sharding import get_abstract_mesh

from jaxpar.mesh.axes import batch_axes


def example_axes(examples: int) -> tuple[str, ...]:
    """Returns the axes that split a batch of so many examples in `jax.shard_map`."""
    mesh = get_abstract_mesh()
    ways = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in mesh.manual_axes}
    batch = tuple(axis for axis in batch_axes(ways) if axis in ways)
    return () if examples % math.prod(ways[axis] for axis in batch) else batch
