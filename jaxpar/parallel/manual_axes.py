"""The axes of a traced step that an operation of it may enter in `jax.shard_map`."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jax.sharding import get_abstract_mesh

from jaxpar.mesh.axes import batch_axes
from jaxpar.models.dim_names import get_spec, spec_axes

_merging: ContextVar[bool] = ContextVar("merging", default=False)


@contextmanager
def merging_replicas() -> Iterator[None]:
    """In this context a `vmap` turns an operation of each replica into one of all of them."""
    token = _merging.set(True)
    try:
        yield
    finally:
        _merging.reset(token)


def automatic_axes(*names: str) -> tuple[tuple[str, ...], ...]:
    """Returns, for each name of a dim, the axes that the traced step splits it over and that are not manual here."""
    spec, manual = get_spec(names), get_abstract_mesh().manual_axes
    entries = (None,) * len(names) if spec is None else spec
    return tuple(tuple(axis for axis in spec_axes(entry) if axis not in manual) for entry in entries)


def example_axes(examples: int, *, groups: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Returns the axes that split this many examples in `jax.shard_map`, except for those that split channel groups."""
    mesh = get_abstract_mesh()
    ways = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in (*mesh.manual_axes, *groups)}
    batch = tuple(axis for axis in batch_axes(ways) if axis in ways)
    inside = _maps_replicas() and not _merging.get()  # of a `vmap`, where no `jax.shard_map` may name its axis
    return () if inside or examples % math.prod(ways[axis] for axis in batch) else batch


def group_axes(count: int) -> tuple[str, ...]:
    """Returns the axes that split this many groups of channels in `jax.shard_map`.

    Where replicas step apart, a `vmap` over `data` makes each convolution one of as many groups: `data` then splits it.
    """
    mesh = get_abstract_mesh()
    if _maps_replicas():
        return ("data",) if _merging.get() and count % mesh.shape["data"] == 0 else ()
    ways = mesh.shape.get("tensor", 1)
    return ("tensor",) if ways > 1 and "tensor" not in mesh.manual_axes and count % ways == 0 else ()


def _maps_replicas() -> bool:
    """Whether the step of one replica is traced, which a `vmap` maps over `data`."""
    mesh, (batch,) = get_abstract_mesh(), automatic_axes("batch")
    return mesh.shape.get("data", 1) > 1 and "data" not in (*mesh.manual_axes, *batch)
