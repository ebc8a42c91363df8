"""Casts parameters when the model reads them, and gathers them over the axes of ZeRO.

stored shards ─► cast to the compute dtype ─► gathered ─► read by a layer
"""

from collections.abc import Iterator, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from jaxpar.models.dim_names import spec_axes
from jaxpar.parallel.gather import constrained, gather, gather_combined, padding, reshard_padded
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import is_scales
from jaxpar.sharding.names import SCOPE, Tree, path_of
from jaxpar.sharding.rules import SMALL, count_layer_dims

MEMBERS = (None, "head_dim")  # names that jaxpar may infer for the dim of an ensemble's members

# of each stack of matrices: what it was read from (value, dtype, trace), and what the model got
_stacks: ContextVar[dict[str, tuple[tuple, jax.Array]] | None] = ContextVar("stacks", default=None)


@contextmanager
def gather_stacks_once() -> Iterator[None]:
    """Gathers a stack of matrices once in a trace, even if the model reads it several times.

    A Python loop over experts reads the stack of all of them for each: gathered at every read, it would be sent as
    often as there are experts. Remat and scans are traces of their own, and gather by themselves.
    """
    token = _stacks.set({})
    try:
        yield
    finally:
        _stacks.reset(token)


def read_parameter(layout: Layout, path: str, value: jax.Array, dtype=None) -> jax.Array:
    """Casts a parameter to `dtype` for the model, then gathers it over the axes of ZeRO.

    Casting first halves the bytes of a bfloat16 gather. Inside a scan over stacked layers the value is one layer's
    slice. Other state is gathered in every ZeRO stage, and never cast: it may be an average, or a table of angles.
    """
    if path in layout.other_state:
        return _gather_other_state(layout, path, value)
    stacks = _stacks.get()
    if stacks is None or value.ndim < 3:
        return _gather_parameter(layout, path, value, dtype)
    source, gathered = stacks.get(path, ((None, None, None), value))
    if source[0] is not value or source[1:] != (dtype, get_opaque_trace_state()):
        gathered = _gather_parameter(layout, path, value, dtype)
        stacks[path] = (value, dtype, get_opaque_trace_state()), gathered
    return gathered


def _gather_parameter(layout: Layout, path: str, value: jax.Array, dtype: Any) -> jax.Array:
    with jax.named_scope(SCOPE + path.replace("/", ".")):
        cast = dtype is not None and value.dtype != dtype and _is_cast(layout, path, value)
        if cast:
            value = value.astype(dtype)
        place = layout.placements[path]
        # stages 1 and 2 gather it at the beginning of the step
        if layout.parallel.stage in (1, 2) or place.stored == place.used or layout.mesh is None:
            return value
        _check_sliced(layout, path, value.shape)
        stored, whole, used = map(layout.sharding, place.slice_specs(value.shape))
        if cast:  # else XLA may gather float32 and cast afterwards
            value = jax.lax.with_sharding_constraint(value, stored)
        looked_up = place.names[:1] == ("vocab",) or (place.names[:1] == ("vocab_table",) and layout.sizes["pipe"] > 1)
        # a further axis that shards parameters moves them by its own technique
        further_axes = bool(layout.parallel.axes) and layout.sizes["data"] * layout.sizes["context"] == 1
        direct = looked_up or further_axes or any(padding(value.shape, used))
        return reshard_padded(value, used, whole) if direct else gather(value, used, stored)


def gather_small_stacks(layout: Layout, params: Tree, dtype=None, as_stored: Set[str] = frozenset()) -> Tree:
    """Gathers small vectors over `fsdp`, in a stack for all layers at once; returns all parameters.

    In a loop each iteration would gather its vector. With `data` or `tensor`, XLA would not combine that gather with
    gathers of matrices, because their device groups differ; with `tensor`, `gather_combined` makes the groups equal.
    Gradients are reduced as before. Paths in `as_stored` are skipped, because the model also reads them uncast.
    """
    if layout.parallel.stage != 3 or layout.sizes["pipe"] > 1 or layout.mesh is None:
        return params

    # JAX cannot nest a shard_map over `tensor` alone in a program mapped over replicas
    with_tensor = layout.sizes["tensor"] > 1 and layout.mesh.shape["data"] == layout.sizes["data"]

    def gather_if_small(keys, value: jax.Array) -> jax.Array:
        place = layout.placements[path := path_of(keys)]
        vector = value.ndim == (2 if place.names[:1] == ("layers",) else 1)
        # an extra leading dim may be that of a stack, which the model slices
        stack = place.is_split([0]) and count_layer_dims(path, place.leaf) < value.ndim and place.names[0] in MEMBERS
        small = place.leaf.bytes < SMALL and (vector or stack)
        if not small or place.stored == place.used or path in as_stored:
            return value
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            cast_value = value.astype(dtype) if dtype is not None and _is_cast(layout, path, value) else value
            used, stored = layout.sharding(place.used), layout.sharding(place.stored)
            if with_tensor and not any("tensor" in spec_axes(entry) for entry in place.stored):
                return gather_combined(cast_value, used, stored, "tensor")
            return gather(cast_value, used, stored)

    return jax.tree_util.tree_map_with_path(gather_if_small, params)


def _is_cast(layout: Layout, path: str, value: jax.Array) -> bool:
    """Whether the step's dtype applies to a parameter; not to 8-bit integers and their scales."""
    return jnp.issubdtype(value.dtype, jnp.floating) and not is_scales(layout.blueprint, path)


def _gather_other_state(layout: Layout, path: str, value: jax.Array) -> jax.Array:
    place = layout.other_state[path]
    if place.stored == place.used or layout.mesh is None:
        return value
    with jax.named_scope(SCOPE + path.replace("/", ".")):
        _check_sliced(layout, path, value.shape)
        *_, used = place.slice_specs(value.shape)
        return constrained(value, layout.sharding(used))


def _check_sliced(layout: Layout, path: str, shape: tuple[int, ...]) -> None:
    """Refuses a large stack whose sharded dim the model slices; a small stack is gathered before.

    Raises:
      JaxparError: If there is one; the message has a rule for each large parameter of the module with this problem.
    """
    places = {**layout.other_state, **layout.placements}
    sliced = places[path].sliced_dims(shape)
    if not places[path].is_split(sliced) or places[path].leaf.bytes < SMALL:
        return
    from jaxpar.parallel.sliced_stacks import sliced_stack_error  # only an error loads it

    raise sliced_stack_error(layout, path, sliced)
