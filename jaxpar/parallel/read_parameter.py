"""Casts parameters when the model reads them, and gathers them over the axes of ZeRO.

stored shards ─► cast to the compute dtype ─► gathered ─► read by a layer
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.errors import JaxparError, refuse
from jaxpar.models.dim_names import spec_axes
from jaxpar.parallel.layout import MEMBERS, Layout
from jaxpar.sharding.adapters import is_scales
from jaxpar.sharding.names import SCOPE, Tree, format_path, shard_counts
from jaxpar.sharding.rules import SMALL, count_layer_dims

constrained = jax.lax.with_sharding_constraint
# of each stack of matrices: what it was read from (value, dtype, trace), and what the model got
_stacks: ContextVar[dict[str, tuple[tuple, jax.Array]] | None] = ContextVar("stacks", default=None)


def reshard_padded(value: jax.Array, used: NamedSharding, whole: NamedSharding) -> jax.Array:
    """Reshards an array to the spec that the model reads, padded inside of the program if its shards are not equal.

    XLA would pad such shards itself, but if `fsdp` also splits the array, every device would first gather the whole
    array. If the array is padded first, XLA uses an all-to-all, and the slice that removes the padding sends nothing.

    Args:
      value: The stored array.
      used: Sharding in which the model reads it.
      whole: The stored sharding without `fsdp`.
    """
    pad_widths = padding(value.shape, used)
    if not any(pad_widths):
        return constrained(value, used)
    padded = constrained(jnp.pad(constrained(value, whole), [(0, n) for n in pad_widths]), whole)
    return constrained(jax.lax.slice(constrained(padded, used), (0,) * value.ndim, value.shape), used)


def padding(shape: tuple[int, ...], used: NamedSharding) -> tuple[int, ...]:
    """Returns the number of entries to add to each dim, so that its shards are equal."""
    ways = shard_counts(used.spec, len(shape), used.mesh.shape)
    return tuple(-size % n for size, n in zip(shape, ways, strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(value: jax.Array, used: NamedSharding, stored: NamedSharding) -> jax.Array:
    """Gathers a stored parameter for use; the gradient is constrained to the stored sharding directly.

    This matters for HSDP and with `context`. By default JAX constrains the gradient to `used` first, so XLA all-reduces
    it over all axes together, instead of a reduce-scatter over `fsdp` and an all-reduce of the shard over the other
    axes. With `fsdp` alone XLA uses a reduce-scatter in both cases. The gradient of a table that is looked up by rows
    is not constrained, because XLA would replicate the activations for it (`models/blocks/lookup.py` looks up by
    columns).

    A matrix is first constrained to its stored sharding. Otherwise XLA gathers a slice of a stack with a dim of length
    one, for which it copies the whole stack to another dim order and holds the copy. Small vectors may already be
    gathered.
    """
    return _gather_value(value, used, stored)


def _gather_value(value: jax.Array, used: NamedSharding, stored: NamedSharding) -> jax.Array:
    return constrained(constrained(value, stored) if value.ndim > 1 else value, used)


def _gather_forward(value, used, stored):
    return _gather_value(value, used, stored), None


def _gather_backward(used, stored, _, gradient):
    return (constrained(gradient, stored),)


gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_combined(value: jax.Array, used: NamedSharding, stored: NamedSharding, axis: str) -> jax.Array:
    """Gathers an array that `axis` does not split so that XLA combines it with gathers of arrays that `axis` splits.

    XLA combines only gathers with the same device groups, and orders the groups by the axes that split the array. This
    order differs between a matrix over `fsdp` and `tensor` and a vector over `fsdp`. So this function makes a copy for
    each device along the axis, as a shard of an additional dim that the axis splits.
    """
    copies = jnp.broadcast_to(value[..., None], (*value.shape, used.mesh.shape[axis]))
    for sharding in (stored, used):
        dims = (*sharding.spec, *(None,) * (value.ndim - len(sharding.spec)))
        copies = constrained(copies, NamedSharding(sharding.mesh, PartitionSpec(*dims, axis)))
    local_copy = jax.shard_map(
        lambda copy: copy[..., 0],
        in_specs=PartitionSpec(*(None,) * value.ndim, axis),
        out_specs=PartitionSpec(),
        axis_names={axis},
        check_vma=False,
    )(copies)
    return constrained(local_copy, used)


def _gather_combined_forward(value, used, stored, axis):
    return gather_combined(value, used, stored, axis), None


def _gather_combined_backward(used, stored, axis, _, gradient):
    return (constrained(gradient, stored),)


gather_combined.defvjp(_gather_combined_forward, _gather_combined_backward)


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
        place = layout.placements[path := format_path(keys)]
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
    raise _sliced_stack_error(layout, path, sliced)


def _sliced_stack_error(layout: Layout, path: str, sliced: Sequence[int]) -> JaxparError:
    """Makes the error; it has a rule for each large parameter of the module with this problem.

    Args:
      layout: The layout.
      path: Path of a parameter.
      sliced: The dims that the model slices.
    """
    places = {**layout.other_state, **layout.placements}
    count = [places[path].leaf.shape[dim] for dim in sliced]
    stack = path.split("/")[0] + "/"  # one scan or vmap slices the parameters of one module: refuse all at once
    matches = [
        param
        for param, place in places.items()
        if param == path or (param.startswith(stack) and place.leaf.bytes >= SMALL and place.is_split(sliced)
                            and [place.leaf.shape[dim] for dim in sliced] == count)
    ]  # fmt: skip
    rules = {
        param: tuple("layers" if dim in sliced else name for dim, name in enumerate(places[param].names))
        for param in matches
    }
    return refuse(
        f"{path} {layout.describe(path)}: the model takes dim {sliced[0]} apart, by a scan or a vmap, and "
        f"{places[path].stored[sliced[0]]} splits it",
        rule="a dim of stacked layers stays whole, so that each layer is gathered when it runs",
        fix=f"paths={rules} in Parallel, or names in the model",
    )
