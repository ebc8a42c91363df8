"""Shardings of the arrays of a pipelined step: between steps, outside of the table, and inside it.

    stored ─► cast ─► moved to the stages ─► gathered over fsdp ─► (the table) ─► summed ─► stored again
                                                                    sharded over the axes that are not manual

Inside the table `pipe`, `data` and `fsdp` are manual, and XLA partitions `tensor`. With gather="tick" layers are
sharded over `fsdp` there: a stage gathers each layer when it runs, and reduce-scatters its gradient immediately.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.mesh.axes import AXES
from jaxpar.models.dim_names import constrain_to
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.state_specs import update_specs
from jaxpar.pipeline.run.parameter_moves import Gather, gather_parameter, padded_layers, redistribute_layers
from jaxpar.pipeline.run.stage_gradients import Shards
from jaxpar.sharding.constrain import activation_names
from jaxpar.sharding.names import GRADIENT, SCOPE, Tree, leaves_by_path, nest, pick


@dataclass(frozen=True, eq=False)
class Shardings:
    """Shardings of the arrays of a pipelined step. Paths are those of parameters, such as `blocks/mlp/up`.

    Attributes:
      layout: A layout with an axis `pipe`.
      dtype: The dtype that parameters are cast to before they are sent, or None.
    """

    layout: Layout
    dtype: Any

    @property
    def per_tick(self) -> bool:
        """Whether a stage gathers each layer over `fsdp` when it runs, instead of all layers once per step."""
        return self.layout.parallel.pipeline.gather == "tick"

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """Mesh axes that are manual inside the table."""
        return tuple(axis for axis in self.layout.sizes if AXES[axis].manual)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Manual axes that split the batch."""
        return tuple(axis for axis in self.layout.parallel.batch_axes if axis in self.manual_axes)

    @cached_property
    def stacked_keys(self) -> dict[str, tuple[str, ...]]:
        """Path to keys, for each parameter that is split over the stages along dim 0, the layers."""
        return {path: tuple(path.split("/")) for path in self.layout.stacked_paths}

    @cached_property
    def shared_keys(self) -> dict[str, tuple[str, ...]]:
        """Path to keys, for each other parameter, which every stage may read."""
        return {path: tuple(path.split("/")) for path in self.layout.placements if path not in self.stacked_keys}

    @cached_property
    def dims(self) -> dict[str, int]:
        """Path to the dim that `fsdp` splits in sums of gradients inside the table; other sums are unsharded."""
        if self.layout.parallel.stage != 2 and not self.per_tick:
            return {}
        cut = {path: _axes_per_dim(_spec_in_table(self.layout, path, "updated")) for path in self.layout.placements}
        return {path: dim for path, entries in cut.items() for dim, axes in enumerate(entries) if "fsdp" in axes}

    @cached_property
    def shards(self) -> Shards | None:
        """Sharding of gradients that are computed unsharded: of all with zero=2, else of shared parameters."""
        if not self.dims:
            return None
        dims = {path: dim for path, dim in self.dims.items() if path in self.shared_keys or not self.per_tick}
        specs = {path: spec for path in dims if (spec := _automatic_spec(self, path)) is not None}
        count = self.layout.sizes["fsdp"]
        return Shards(axis="fsdp", num_shards=count, dims=dims, other_axes=_xla_axes(self.layout), specs=specs)

    def gradient_axes(self, path: str) -> tuple[str | None, ...]:
        """Returns the manual axis that splits each dim of a sum of gradients."""
        dim = self.dims.get(path, -1)
        return (*(None,) * dim, "fsdp") if dim >= 0 else ()

    @property
    def replicas(self) -> int:
        """Number of shards of the batch over manual axes."""
        return math.prod(self.layout.sizes[axis] for axis in self.batch_axes)

    def cast(self, value: jax.Array) -> jax.Array:
        """Casts a floating-point parameter to the matmul dtype."""
        floating = self.dtype is not None and jnp.issubdtype(value.dtype, jnp.floating)
        return value.astype(self.dtype) if floating else value


def table_spec(shardings: Shardings, path: str) -> PartitionSpec:
    """Returns the part of a layer parameter's spec inside the table that is over manual axes."""
    return PartitionSpec("pipe", *(shardings.gradient_axes(path)[1:] if shardings.per_tick else ()))


def table_names(layout: Layout):
    """Names of activation dims to the axes that are not manual inside the table."""
    sizes = {axis: 1 if AXES[axis].manual else size for axis, size in layout.sizes.items()}
    return activation_names(layout.names, sizes)


def spread_head_names(shardings: Shardings):
    """Names of activation dims to axes for the spread head, which may also use `pipe`."""
    sizes = {axis: 1 if axis in shardings.batch_axes else size for axis, size in shardings.layout.sizes.items()}
    return activation_names(shardings.layout.names, sizes)


def read_in_layer(shardings: Shardings, path: str, value: jax.Array) -> jax.Array:
    """Casts a parameter when a layer reads it; gathers it over `fsdp` unless the step gathers all at once."""
    if not shardings.per_tick or path not in shardings.dims:
        return shardings.cast(value)
    num_scanned = len(shardings.layout.placements[path].leaf.shape) - value.ndim  # dims that scans have removed
    spec, read = _automatic_spec(shardings, path), jax.eval_shape(shardings.cast, value)
    gather = Gather(
        axis="fsdp",
        dim=shardings.dims[path] - num_scanned,
        dtype=read.dtype,
        shard_dtype=value.dtype,
        other_axes=() if spec is None else _xla_axes(shardings.layout),
        spec=PartitionSpec(*(spec or ())[num_scanned:]),
    )
    return gather_parameter(value, gather)


def move_to_stages(layout: Layout, layers: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Moves the layers to the stages that run them."""
    if not layout.parallel.pipeline.layers:
        return redistribute_layers(layout.device_mesh, layout.schedule, layers)
    # padding repeats a layer, so this is not a permutation: XLA gathers by index
    order, _ = padded_layers(layout.parallel.pipeline.layers)
    moved = {path: jnp.take(value, order, axis=0) for path, value in layers.items()}
    return {path: constrain(layout, value, _spec_in_table(layout, path, "stored")) for path, value in moved.items()}


def move_to_storage(layout: Layout, layers: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Moves the layers back to where they are stored."""
    if not layout.parallel.pipeline.layers:
        # otherwise XLA merges the slices of `redistribute_layers` with those for the shards, and reduces before slicing
        layers = jax.lax.optimization_barrier(layers) if layout.schedule.chunks > 1 else layers
        return redistribute_layers(layout.device_mesh, layout.schedule, layers, reverse=True)
    _, places = padded_layers(layout.parallel.pipeline.layers)
    specs = {path: pick(update_specs(layout), tuple(path.split("/"))) for path in layers}
    moved = {path: constrain(layout, value, specs[path]) for path, value in layers.items()}
    return {path: constrain(layout, jnp.take(value, places, axis=0), specs[path]) for path, value in moved.items()}


def gather_for_table(layout: Layout, path: str, value: jax.Array) -> jax.Array:
    """Gathers a parameter over `fsdp`, once per step."""
    with jax.named_scope(SCOPE + path.replace("/", ".")):
        # constrained to shards first: otherwise XLA may gather before the cast, with twice the bytes
        shard = constrain(layout, value, _spec_in_table(layout, path, "stored"))
        return constrain(layout, shard, _spec_in_table(layout, path, "used"))


def shard_end_gradient(shardings: Shardings, path: str, value: jax.Array) -> jax.Array:
    """Shards a gradient of the spread embedding or head over `pipe` and `tensor`, within a replica of the batch."""
    return constrain_to(value, _drop_axes(shardings.layout.placements[path].used, shardings.batch_axes))


def sum_gradients(layout: Layout, path: str, stacked: jax.Array, over) -> jax.Array:
    """Sums gradients [ways, ...] over dim 0, sharded as the update reads them."""
    with jax.named_scope(GRADIENT):
        # dim 0 has one entry per device: XLA makes one reduction of the sum, to the shards of `updated`
        return jnp.sum(
            constrain(layout, stacked, PartitionSpec(over, *_spec_in_table(layout, path, "updated"))), axis=0
        )


def constrain(layout: Layout, value: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(value, layout.sharding(spec))


def constrain_tree_in_table(layout: Layout, what: str, tree: Tree) -> Tree:
    """Constrains a tree inside the table over the axes that are not manual."""
    if what in ("x", "slots"):
        dims = (layout.parallel.batch_axes, layout.names["seq"], ())
        leading = ((),) * (what == "slots")

        def constrain_leaf(x):  # [batch, seq, embed], or a tree with known dim 0 only
            ndim = x.ndim - len(leading)
            return constrain_in_table(layout, x, (*leading, *(dims if ndim == 3 else dims[: min(ndim, 1)])))

        return jax.tree.map(constrain_leaf, tree)
    specs = {path: layout.placements[path].used for path in tree}
    if what == "layers":
        return {path: constrain_in_table(layout, x, ((), (), *specs[path][1:])) for path, x in tree.items()}
    return {path: constrain_in_table(layout, x, specs[path]) for path, x in tree.items()}


def constrain_in_table(layout: Layout, x: jax.Array, entries) -> jax.Array:
    """Constrains a value inside the table; omits manual axes and axes of size 1."""
    dims = ((entry,) if isinstance(entry, str) else entry or () for entry in entries)
    free = [tuple(a for a in axes if not AXES[a].manual and layout.sizes[a] > 1) for axes in dims]
    if not _xla_axes(layout):
        return x
    return constrain_to(x, PartitionSpec(*(axes or None for axes in free)))


def _automatic_spec(shardings: Shardings, path: str) -> PartitionSpec | None:
    """Returns the spec of a parameter over XLA's axes, unless one of them splits the same dim as `fsdp`."""
    spec, dim = _spec_in_table(shardings.layout, path, "used"), shardings.dims[path]
    is_separate = not any(
        set(axes).intersection(_xla_axes(shardings.layout)) for axes in _axes_per_dim(spec)[dim : dim + 1]
    )
    return _drop_axes(spec, shardings.manual_axes) if is_separate else None


def _xla_axes(layout: Layout) -> tuple[str, ...]:
    return tuple(axis for axis, size in layout.sizes.items() if size > 1 and not AXES[axis].manual)


def _spec_in_table(layout: Layout, path: str, which: str) -> PartitionSpec:
    """Returns the spec of a parameter during the table, where `pipe` splits layers."""
    words = tuple(path.split("/"))
    spec = pick(update_specs(layout), words) if which == "updated" else getattr(layout.placements[path], which)
    if path not in layout.stacked_paths:
        return spec
    return PartitionSpec("pipe", *_drop_axes(spec, ("pipe",))[1:])


def _drop_axes(spec: PartitionSpec, left_out: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(tuple(a for a in axes if a not in left_out) or None for axes in _axes_per_dim(spec)))


def _axes_per_dim(spec: PartitionSpec) -> list[tuple[str, ...]]:
    return [(entry,) if isinstance(entry, str) else entry or () for entry in spec]


# Stacks lists of equal layers at the start of a step, and unstacks their gradients at its end.


def stack_layers(layout: Layout, params: Tree) -> Tree:
    """Replaces lists of layers in the parameters by stacks."""
    if not layout.lists:
        return params
    flat = leaves_by_path(params)
    stacks = {stack: [flat.pop(path) for path in members] for stack, members in layout.lists.items()}
    flat |= {stack: _shard_stack(layout, stack, jnp.stack(layers), "stored") for stack, layers in stacks.items()}
    return _nest_paths(flat)


def unstack_layers(layout: Layout, gradients: Tree) -> Tree:
    """Replaces stacks in the gradients by lists of layers."""
    if not layout.lists:
        return gradients
    flat = leaves_by_path(gradients)
    for stack, members in layout.lists.items():
        stacked_gradient = _shard_stack(layout, stack, flat.pop(stack), "updated")
        flat |= {path: stacked_gradient[i] for i, path in enumerate(members)}
    return _nest_paths(flat)


def _shard_stack(layout: Layout, stack: str, value: jax.Array, which: str) -> jax.Array:
    """Shards a stack as its layers are between steps; leaves the dim of layers unsplit."""
    member = layout.lists[stack][0]
    spec = (
        pick(update_specs(layout), tuple(member.split("/"))) if which == "updated" else layout.placements[member].stored
    )
    return jax.lax.with_sharding_constraint(value, layout.sharding(PartitionSpec(None, *spec)))


def _nest_paths(flat: Mapping[str, object]) -> Tree:
    return nest({tuple(path.split("/")): value for path, value in flat.items()})
