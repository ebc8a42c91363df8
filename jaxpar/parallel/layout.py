"""A layout is a value: where every array of a training job lives, and why."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.errors import refuse
from jaxpar.exchange.sent import Sent
from jaxpar.mesh.axes import batch_axes
from jaxpar.parallel.declare import Parallel
from jaxpar.parallel.gather import constrained, gather
from jaxpar.pipeline.run.unflushed import microbatches_per_update
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.sharding.names import SCOPE, Blueprint, Leaf, Tree, nest, path_of, pick
from jaxpar.sharding.rules import Axes
from jaxpar.sharding.shard_bytes import shard_bytes, shard_shape, short_dtype
from jaxpar.units import show_bytes, show_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The place of one parameter.

    Attributes:
      leaf: Its shape, dtype and the names of its dims.
      names: Names of the dims, given or found by path.
      stored: Spec of the parameter between steps.
      used: Spec where the model reads it.
      sharded: Spec with the `fsdp` axis, that gradients and optimizer state take by stage.
      why: The rule that placed it.
    """

    leaf: Leaf
    names: tuple[str | None, ...]
    stored: PartitionSpec
    used: PartitionSpec
    sharded: PartitionSpec
    why: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The layout of a training job, from a `Parallel`, a model and a mesh.

    Attributes:
      parallel: The declaration, its sizes inferred.
      blueprint: The model.
      placements: Path of a parameter to where it lives.
      names: Names of activation dims to mesh axes, earlier first.
      mesh: The mesh, or None where the devices are not there (`jaxpar check` on a laptop).
      notes: What techniques chose where the declaration left it to them, and why, a sentence each.
    """

    parallel: Parallel
    blueprint: Blueprint
    placements: Mapping[str, Placement]
    names: Mapping[str, Axes]
    mesh: Mesh | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis to size."""
        return self.parallel.sizes

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes of the mesh whose devices each see other examples."""
        return batch_axes(self.sizes)

    @property
    def replicas(self) -> int:
        """Ways the batch is split."""
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    @property
    def microbatches(self) -> int:
        """Pieces of a batch that a pipeline takes one after the other; 1 without one."""
        return self.schedule.microbatches if self.sizes["pipe"] > 1 else 1

    @property
    def updates_per_step(self) -> int:
        """Updates of the optimizer in a step: one with a flush, else one per microbatch (2bw: per P of them)."""
        if self.sizes["pipe"] == 1:
            return 1
        return self.microbatches // microbatches_per_update(self.parallel.pipeline.weights, self.schedule)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule: what the stages of `pipe` do in every tick."""
        return self.parallel.pipeline.table(self.sizes["pipe"])

    @cached_property
    def stacked(self) -> tuple[str, ...]:
        """Paths of the parameters that a pipeline spreads over its stages: dim 0 is the layers."""
        if self.sizes["pipe"] == 1:
            return ()
        uneven = bool(self.parallel.pipeline.layers)
        return tuple(
            path
            for path, place in self.placements.items()
            if place.names[:1] == ("layers",) and (uneven or place.stored[:1] == ("pipe",))
        )

    @property
    def on(self) -> Mesh:
        """The mesh.

        Raises:
          JaxparError: If the layout was composed without devices.
        """
        if self.mesh is None:
            raise refuse(
                "a layout composed without devices cannot hold arrays",
                rule="arrays are placed on the devices of a mesh",
                fix="compose(model, parallel) on real or simulated devices",
            )
        return self.mesh

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Returns the sharding of a spec on this layout's mesh."""
        return NamedSharding(self.on, spec)

    @cached_property
    def params(self) -> Tree:
        """The parameters, as abstract arrays."""
        return self._tree(lambda place: jax.ShapeDtypeStruct(place.leaf.shape, place.leaf.dtype))

    @cached_property
    def stored(self) -> Tree:
        """Specs of the parameters between steps."""
        return self._tree(lambda place: place.stored)

    @cached_property
    def sharded(self) -> Tree:
        """Specs of what the `fsdp` axis may shard."""
        return self._tree(lambda place: place.sharded)

    @cached_property
    def gradients(self) -> Tree:
        """Specs of the gradients and their accumulator: sharded from stage 2 on."""
        return self.sharded if self.parallel.stage >= 2 else self._tree(lambda place: place.used)

    @cached_property
    def updated(self) -> Tree:
        """Specs in which the optimizer works: sharded from stage 1 on."""
        return self.sharded if self.parallel.stage >= 1 else self._tree(lambda place: place.used)

    def owner(self, keys) -> str | None:
        """Returns the path of the parameter that an array belongs to: the one that ends its own path."""
        words = path_of(keys).split("/")
        return next((path for i in range(len(words)) if (path := "/".join(words[i:])) in self.placements), None)

    def optimizer_specs(self, state: Tree) -> Tree:
        """Returns a spec for every array of any optax state.

        A leaf belongs to the parameter whose path ends its own path. With the parameter's shape
        it takes the parameter's spec; with another shape (Adafactor's row and column
        statistics) the `fsdp` axis on its largest dim that divides; scalars stay whole.
        """
        axis = self.sizes["fsdp"] if self.parallel.stage >= 1 else 1

        def spec(keys, leaf) -> PartitionSpec:
            owner = self.owner(keys)
            if owner and tuple(leaf.shape) == self.placements[owner].leaf.shape:
                return pick(self.updated, tuple(owner.split("/")))
            dims = [dim for dim, size in enumerate(leaf.shape) if size and size % axis == 0]
            if axis == 1 or not dims or not jnp.issubdtype(leaf.dtype, jnp.floating):
                return PartitionSpec()
            best = max(dims, key=lambda dim: leaf.shape[dim])
            return PartitionSpec(*(None,) * best, "fsdp")

        return jax.tree_util.tree_map_with_path(spec, state)

    def sends(self) -> tuple[Sent, ...]:
        """Returns what the replicas over `data` send each other, by their exchange; nothing where there is but one."""
        parts = {
            path: jax.ShapeDtypeStruct(shard_shape(place.leaf.shape, place.stored, self.sizes), place.leaf.dtype)
            for path, place in self.placements.items()
        }
        return self.parallel.exchange.sends(parts, self.sizes["data"]) if self.sizes["data"] > 1 else ()

    def batch_spec(self, shape) -> PartitionSpec:
        """Returns where a batch array goes: examples over `data`, `fsdp` and other axes that see other examples."""
        return PartitionSpec(self.batch_axes) if shape else PartitionSpec()

    def use(self, path: str, value: jax.Array, dtype=None) -> jax.Array:
        """Returns a parameter as the model reads it: cast to `dtype`, then gathered over `fsdp`.

        Casting first halves what a bfloat16 gather moves. Inside a scan over stacked layers
        the value is one layer's slice.
        """
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            cast = dtype is not None and jnp.issubdtype(value.dtype, jnp.floating) and value.dtype != dtype
            if cast:
                value = value.astype(dtype)
            place = self.placements[path]
            if self.parallel.stage < 3 or place.stored == place.used or self.mesh is None:
                return value
            kept = self._unscanned(path, place, value.ndim)
            stored = self.sharding(_only(place.stored, place, kept))
            if cast:  # else XLA may gather float32 and cast what arrives
                value = jax.lax.with_sharding_constraint(value, stored)
            used = self.sharding(_only(place.used, place, kept))
            looked_up = place.names[:1] == ("vocab",)
            summed_once = self.sizes["data"] * self.sizes["context"] == 1
            return constrained(value, used) if looked_up or summed_once else gather(value, used, stored)

    def _unscanned(self, path: str, place: Placement, rank: int) -> list[int]:
        """Returns the dims that are left where the model reads one layer of a stack."""
        dims = list(range(len(place.leaf.shape)))
        gone = len(dims) - rank
        layers = [dim for dim in dims if place.names[dim] == "layers"]
        out = layers[:gone] if len(layers) >= gone else dims[:gone]
        for dim in out:
            if dim < len(place.stored) and place.stored[dim] is not None:
                names = ["layers" if d == dim else place.names[d] or "" for d in dims]
                raise refuse(
                    f"{path} {self.describe(path)}: the model scans over dim {dim}, which {place.stored[dim]} splits",
                    rule="a dim of stacked layers stays whole, so that each layer is gathered when it runs",
                    fix=f'paths={{"{path}": {names}}} in Parallel, or names in the model',
                )
        return [dim for dim in dims if dim not in out]

    def describe(self, path: str) -> str:
        """Returns `f32[embed/fsdp, mlp/tensor]` for one parameter."""
        place = self.placements[path]
        dims = []
        for dim, (size, name) in enumerate(zip(place.leaf.shape, place.names, strict=True)):
            axes = place.stored[dim] if dim < len(place.stored) else None
            axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
            dims.append("/".join([str(name or size), *(axis for axis in axes if self.sizes[axis] > 1)]))
        return f"{short_dtype(place.leaf.dtype)}[{', '.join(dims)}]"

    def explain(self) -> str:
        """Returns a table: every parameter, where its dims go, its bytes per device, and which rule placed it.

        Above it the summary, what techniques chose, and how replicas agree that step apart.
        """
        rows = [("parameter", "placed as", "shape", "per device", "because")]
        for path, place in self.placements.items():
            size = show_bytes(shard_bytes(place.leaf, place.stored, self.sizes))
            shape = " x ".join(map(str, place.leaf.shape)) or "scalar"
            rows.append((path, self.describe(path), shape, size, place.why))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.summary(), *self.notes, *[self.agreement] * bool(self.agreement), "", *lines])

    def noted(self, note: str) -> "Layout":
        """Returns the same layout with one more sentence on what was chosen."""
        return replace(self, notes=(*self.notes, note))

    @property
    def agreement(self) -> str:
        """How replicas that step apart agree, as a sentence; nothing where XLA sums their gradients."""
        exchange = self.parallel.exchange
        return f"exchange: {exchange.explain(self.sends())}" if exchange.apart else ""

    def summary(self) -> str:
        """Returns one line: the mesh, the stage, and the parameters' size whole and per device."""
        leaves = [place.leaf for place in self.placements.values()]
        per_device = sum(shard_bytes(place.leaf, place.stored, self.sizes) for place in self.placements.values())
        axes = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one device"
        stage = f", ZeRO-{self.parallel.stage}" if self.sizes["fsdp"] > 1 else ""
        total = sum(leaf.bytes for leaf in leaves)
        count = sum(leaf.size for leaf in leaves)
        updates = f", {self.updates_per_step} updates a step" if self.updates_per_step > 1 else ""
        how = "".join(f", {axis} by {way}" for axis, way in self.parallel.how.items())
        apart = f", {self.parallel.exchange}" if self.parallel.exchange.apart else ""
        sequence = ", sequence" if self.parallel.sequence else ""
        return (
            f"{self.blueprint.name} on {axes}{stage}{sequence}{how}{updates}{apart}: "
            f"{show_count(count)} parameters, {show_bytes(total)}, {show_bytes(per_device)} per device"
        )

    def _tree(self, value) -> Tree:
        return nest({tuple(path.split("/")): value(place) for path, place in self.placements.items()})


def _only(spec: PartitionSpec, place: Placement, dims: list[int]) -> PartitionSpec:
    """Returns what a spec says of these dims."""
    entries = (*spec, *(None,) * (len(place.leaf.shape) - len(spec)))
    return PartitionSpec(*(entries[dim] for dim in dims))
