"""A layout is a value: where every array of a training job lives, and why."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.errors import refuse
from jaxpar.exchange.shard_shape import ShardShape
from jaxpar.exchange.traffic import Traffic
from jaxpar.mesh.chips import find_chip
from jaxpar.models.dim_names import axes_of
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.gather import constrained, gather, gather_combined, padding, reshard_padded
from jaxpar.parallel.pages.fragment import LayoutPage, fragment, to_dict
from jaxpar.parallel.placement import Placement
from jaxpar.parallel.unsplit_parameters import unsplit_note
from jaxpar.parallel.zero import state_spec
from jaxpar.pipeline.run.asynchronous import microbatches_per_update
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.sharding.adapters import is_scales
from jaxpar.sharding.lists import Lists, longest_list
from jaxpar.sharding.names import SCOPE, Blueprint, Tree, nest, path_of, pick
from jaxpar.sharding.rules import SMALL, Axes, own_dims
from jaxpar.sharding.shard_bytes import shard_bytes, shard_shape
from jaxpar.units import show_bytes, show_count

MEMBERS = (None, "head_dim")  # names that jaxpar may infer for the dim of an ensemble's members


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The layout of a training job, from a `Parallel`, a model and a mesh.

    Attributes:
      parallel: The declaration, its sizes inferred.
      blueprint: The model.
      placements: Path of a parameter to its placement.
      other_state: Path of every other array of the model's state to its placement.
      names: Names of activation dims to mesh axes, earlier first.
      mesh: The mesh, or None without devices (`jaxpar check` on a laptop).
      simulated: Whether the devices are simulated on the processor, present or not.
      target: The chip that the job is meant for, if its devices do not tell: a key of `jaxpar.mesh.chips`.
      lists: Path of a stack's parameter to the layers' parameters, for lists of layers that a pipeline stacks.
      notes: Choices of techniques that the declaration left open, with the reason, a sentence each.
      frozen: Paths of parameters that the optimizer leaves alone, so that replicas never exchange them. Empty until a
        step is built, for a layout is composed without an optimizer; likewise `opt_state_messages`.
      opt_state_messages: Optimizer state that replicas send each other.
    """

    parallel: Parallel
    blueprint: Blueprint
    placements: Mapping[str, Placement]
    names: Mapping[str, Axes]
    other_state: Mapping[str, Placement] = field(default_factory=dict)
    mesh: Mesh | None = field(default=None, repr=False)
    simulated: bool = False
    target: str = ""
    lists: Lists = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    opt_state_messages: tuple[Traffic, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis to size."""
        return self.parallel.sizes

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def chip(self) -> str:
        """The chip of the devices, else the target chip: a key of `jaxpar.mesh.chips`, or "" if none is known."""
        device_chip = None if self.mesh is None or self.simulated else find_chip(self.mesh.devices.flat[0].device_kind)
        return device_chip.key if device_chip else self.target

    @property
    def training_bytes(self) -> int:
        """Bytes per device of all parameters, and of gradients and two Adam moments of the trained ones."""
        trained = [place for path, place in self.placements.items() if path not in self.frozen]
        whole = sum(shard_bytes(place.leaf, place.whole, self.sizes) for place in trained)
        cut = sum(shard_bytes(place.leaf, place.sharded, self.sizes) for place in trained)
        stage = self.parallel.stage
        return self.per_device(self.placements) + (cut if stage >= 2 else whole) + 2 * (cut if stage >= 1 else whole)

    @property
    def depth(self) -> int:
        """Layers of the model's deepest stack, in one array or in a list of layers; 1 where there is none."""
        stacks = [place.leaf.shape[0] for place in self.placements.values() if place.names[:1] == ("layers",)]
        return max([*stacks, *map(len, longest_list(self.blueprint.leaves, 1).values())], default=1)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes whose devices see different examples."""
        return self.parallel.batch_axes

    @property
    def replicas(self) -> int:
        """Number of shards of the batch."""
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    @property
    def microbatches(self) -> int:
        """Microbatches of a batch in a pipeline; 1 without one."""
        return self.schedule.microbatches if self.sizes["pipe"] > 1 else 1

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates in a step: one with a flush, else one per microbatch (2bw: one per P microbatches)."""
        if self.sizes["pipe"] == 1:
            return 1
        return self.microbatches // microbatches_per_update(self.parallel.pipeline.weights, self.schedule)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule: the op of each stage of `pipe` in every tick."""
        return self.parallel.pipeline.table(self.sizes["pipe"])

    @cached_property
    def stacked_paths(self) -> tuple[str, ...]:
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
    def device_mesh(self) -> Mesh:
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
        return NamedSharding(self.device_mesh, spec)

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
        """Specs of the parameters sharded by the axes of ZeRO."""
        return self._tree(lambda place: place.sharded)

    @cached_property
    def gradients(self) -> Tree:
        """Specs of the gradients and their accumulator: sharded from stage 2 on."""
        return self.sharded if self.parallel.stage >= 2 else self._tree(lambda place: place.whole)

    @cached_property
    def update_specs(self) -> Tree:
        """Specs in which the optimizer works: sharded from stage 1 on."""
        return self.sharded if self.parallel.stage >= 1 else self._tree(lambda place: place.whole)

    def other_specs(self, state: Tree) -> Tree:
        """Returns a spec for every array of the model's state that is no parameter."""

        def spec(keys, _) -> PartitionSpec:
            if (path := path_of(keys)) not in self.other_state:
                raise refuse(
                    f"{self.blueprint.name} has the array {path}, which Flax does not show on shapes alone",
                    rule="a model keeps arrays in variables, or in attributes that Flax knows to be data",
                    fix="nnx.Variable around it, or nnx.data(...); of a layer of Flax's own a newer Flax: "
                    "nnx.WeightNorm with scales needs more than 0.12.8, and use_scale=False does not",
                )
            return self.other_state[path].stored

        return jax.tree_util.tree_map_with_path(spec, state)

    def owner(self, keys) -> str | None:
        """Returns the path of the parameter that an array belongs to: the one that ends the array's own path.

        If none does, one inside of that path: an optimizer may keep several arrays for a parameter, in a tuple.
        """
        words = path_of(keys).split("/")
        spans = ((begin, end) for end in range(len(words), 0, -1) for begin in range(end))
        return next((path for begin, end in spans if (path := "/".join(words[begin:end])) in self.placements), None)

    def optimizer_specs(self, state: Tree) -> Tree:
        """Returns a spec for every array of any optax state.

        A leaf belongs to the parameter whose path is in its own path: see `owner`. With the parameter's shape it takes
        the parameter's spec; with another shape (Adafactor's row and column statistics, 8-bit codes in blocks) it takes
        the axes of ZeRO and of its parameter on dims that divide: see `cut_of`. Scalars stay whole.
        """
        axes = tuple(axis for axis in self.parallel.zero_axes if self.sizes[axis] > 1)
        axes = axes if self.parallel.stage >= 1 else ()

        def spec(keys, leaf) -> PartitionSpec:
            owner = self.owner(keys)
            if owner and tuple(leaf.shape) == self.placements[owner].leaf.shape:
                return pick(self.update_specs, tuple(owner.split("/")))
            param = pick(self.update_specs, tuple(owner.split("/"))) if owner else ()
            return state_spec(leaf, self.sizes, axes, tuple(axis for entry in param for axis in axes_of(entry)))

        return jax.tree_util.tree_map_with_path(spec, state)

    def sends(self) -> tuple[Traffic, ...]:
        """Returns the messages of the replicas over `data`, by their exchange; empty for a single replica."""
        replicas = self.sizes["data"]
        return (*self.parallel.exchange.traffic(self.parts, replicas), *self.opt_state_messages) if replicas > 1 else ()

    @property
    def parts(self) -> dict[str, ShardShape]:
        """Path of each trained parameter to the shard that a device stores between steps."""

        def one(place: Placement) -> ShardShape:
            shape = shard_shape(place.leaf.shape, place.stored, self.sizes)
            return ShardShape(
                shape, place.leaf.dtype, layers=place.names[:1] == ("layers",), total_size=place.leaf.size
            )

        return {path: one(place) for path, place in self.placements.items() if path not in self.frozen}

    def batch_spec(self, shape) -> PartitionSpec:
        """Returns the spec of a batch array: examples over all axes whose devices see different examples."""
        return PartitionSpec(self.batch_axes) if shape else PartitionSpec()

    def use(self, path: str, value: jax.Array, dtype=None) -> jax.Array:
        """Returns a parameter as the model reads it: cast to `dtype`, then gathered over the axes of ZeRO.

        Casting first halves the bytes of a bfloat16 gather. Inside a scan over stacked layers the value is one layer's
        slice. Other state is gathered in every ZeRO stage, and never cast: it may be an average, or a table of angles.
        """
        if path in self.other_state:
            return self._use_other(path, value)
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            cast = dtype is not None and value.dtype != dtype and self._is_cast(path, value)
            if cast:
                value = value.astype(dtype)
            place = self.placements[path]
            # stages 1 and 2 gather it at the beginning of the step
            if self.parallel.stage in (1, 2) or place.stored == place.used or self.mesh is None:
                return value
            self._check_sliced(path, value.shape)
            stored, whole, used = map(self.sharding, place.slice_specs(value.shape))
            if cast:  # else XLA may gather float32 and cast afterwards
                value = jax.lax.with_sharding_constraint(value, stored)
            looked_up = place.names[:1] == ("vocab",) or (
                place.names[:1] == ("vocab_table",) and self.sizes["pipe"] > 1
            )
            # a further axis that shards parameters moves them by its own technique
            further_axes = bool(self.parallel.axes) and self.sizes["data"] * self.sizes["context"] == 1
            direct = looked_up or further_axes or any(padding(value.shape, used))
            return reshard_padded(value, used, whole) if direct else gather(value, used, stored)

    def small_stacks(self, params: Tree, dtype=None, as_stored: Set[str] = frozenset()) -> Tree:
        """Gathers small vectors over `fsdp`, those of stacked layers for all layers at once; returns all parameters.

        In a loop each iteration would gather its own vector. With `data` or `tensor`, XLA would not combine that gather
        with those of matrices, as it writes their device groups differently; `gather_combined` makes them equal with
        `tensor`. Gradients travel as before. Paths in `to_dict` are skipped: the model also reads them uncast.
        """
        if self.parallel.stage != 3 or self.sizes["pipe"] > 1 or self.mesh is None:
            return params

        # JAX cannot nest a shard_map over `tensor` alone in a program mapped over replicas
        with_tensor = self.sizes["tensor"] > 1 and self.mesh.shape["data"] == self.sizes["data"]

        def one(keys, value: jax.Array) -> jax.Array:
            place = self.placements[path := path_of(keys)]
            vector = value.ndim == (2 if place.names[:1] == ("layers",) else 1)
            # an extra leading dim may be that of a stack, which the model slices
            stack = place.is_split([0]) and own_dims(path, place.leaf) < value.ndim and place.names[0] in MEMBERS
            small = place.leaf.bytes < SMALL and (vector or stack)
            if not small or place.stored == place.used or path in as_stored:
                return value
            with jax.named_scope(SCOPE + path.replace("/", ".")):
                cast_value = value.astype(dtype) if dtype is not None and self._is_cast(path, value) else value
                used, stored = self.sharding(place.used), self.sharding(place.stored)
                if with_tensor and not any("tensor" in axes_of(entry) for entry in place.stored):
                    return gather_combined(cast_value, used, stored, "tensor")
                return gather(cast_value, used, stored)

        return jax.tree_util.tree_map_with_path(one, params)

    def _is_cast(self, path: str, value: jax.Array) -> bool:
        """Whether the step's dtype applies to a parameter: not to 8-bit integers, nor to their scales."""
        return jnp.issubdtype(value.dtype, jnp.floating) and not is_scales(self.blueprint, path)

    def _use_other(self, path: str, value: jax.Array) -> jax.Array:
        place = self.other_state[path]
        if place.stored == place.used or self.mesh is None:
            return value
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            self._check_sliced(path, value.shape)
            *_, used = place.slice_specs(value.shape)
            return constrained(value, self.sharding(used))

    def _check_sliced(self, path: str, shape: tuple[int, ...]) -> None:
        """Refuses a large stack that is split over the dim that the model slices; a small one is gathered before.

        Raises:
          JaxparError: With a rule for each large parameter of the same module that is split the same way.
        """
        places = {**self.other_state, **self.placements}
        sliced = places[path].sliced_dims(shape)
        if not places[path].is_split(sliced) or places[path].leaf.bytes < SMALL:
            return
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
        raise refuse(
            f"{path} {self.describe(path)}: the model takes dim {sliced[0]} apart, by a scan or a vmap, and "
            f"{places[path].stored[sliced[0]]} splits it",
            rule="a dim of stacked layers stays whole, so that each layer is gathered when it runs",
            fix=f"paths={rules} in Parallel, or names in the model",
        )

    def describe(self, path: str) -> str:
        """Returns `f32[embed/fsdp, mlp/tensor]` for one parameter or other array."""
        return {**self.other_state, **self.placements}[path].describe(self.sizes)

    def explain(self) -> str:
        """Returns a table of every array of the model: its spec, shape, bytes per device, and the rule that placed it.

        Random keys and other scalars of non-parameter state are left out. Above the table stand the summary, the
        techniques' choices, and how per-replica steps are synchronized.
        """
        rows = [("parameter", "placed as", "shape", "per device", "because")]
        for path, place in {**self.placements, **self.other_arrays}.items():
            size = show_bytes(place.per_device(self.sizes))
            shape = " x ".join(map(str, place.leaf.shape)) or "scalar"
            rows.append((path, self.describe(path), shape, size, place.why))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.summary(), *self.notes, *[self.sync_note] * bool(self.sync_note), "", *lines])

    def with_frozen(self, frozen: frozenset[str], besides: tuple[Traffic, ...]) -> "Layout":
        """Returns the same layout for an optimizer that freezes these parameters and sends this part of its state."""
        return replace(self, frozen=frozen, opt_state_messages=besides) if frozen or besides else self

    def with_note(self, note: str) -> "Layout":
        """Returns the same layout with one more note on a choice."""
        return replace(self, notes=(*self.notes, note))

    @property
    def sync_note(self) -> str:
        """How replicas with per-replica steps synchronize, as a sentence; "" where XLA sums their gradients."""
        exchange = self.parallel.exchange
        return f"exchange: {exchange.explain(self.sends())}" if exchange.per_replica else ""

    def summary(self) -> str:
        """Returns one line: the mesh, the stage, and the size of parameters and other state, whole and per device.

        It names large parameters that no axis splits, though others are split, with the reason.
        """
        leaves = [place.leaf for place in self.placements.values()]
        per_device, share = self.per_device(self.placements), self.per_device(self.other_arrays)
        axes = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one device"
        zero_over = f" over {self.parallel.zero_over}" if len(self.parallel.zero_axes) > 1 else ""
        shared = any(self.sizes[axis] > 1 for axis in self.parallel.zero_axes)
        stage = f", ZeRO-{self.parallel.stage}{zero_over}" if shared else ""
        total = sum(leaf.bytes for leaf in leaves)
        count = sum(leaf.size for leaf in leaves)
        updates = f", {self.updates_per_step} updates a step" if self.updates_per_step > 1 else ""
        methods = "".join(f", {axis} by {way}" for axis, way in self.parallel.ways.items())
        methods += f" x ulysses {self.parallel.ulysses}" if self.parallel.ulysses > 1 else ""
        exchange = f", {self.parallel.exchange}" if self.parallel.exchange.per_replica else ""
        sequence = ", sequence" if self.parallel.sequence else ""
        total_bytes = sum(place.leaf.bytes for place in self.other_arrays.values())
        state = f"; other state {show_bytes(total_bytes)}, {show_bytes(share)} per device" if total_bytes else ""
        return (
            f"{self.blueprint.name} on {axes}{stage}{sequence}{methods}{updates}{exchange}: "
            f"{show_count(count)} parameters, {show_bytes(total)}, {show_bytes(per_device)} per device{state}"
            f"{unsplit_note(self.placements)}"
        )

    def _repr_html_(self) -> str:
        """The layout as a picture for notebooks: the devices, their links, and the shards that each device stores."""
        return fragment(self._page_data)

    def to_dict(self) -> dict[str, Any]:
        """Returns the picture of `_repr_html_` as JSON data, for the record of a run."""
        return to_dict(self._page_data)

    @property
    def _page_data(self) -> LayoutPage:
        notes = [*self.notes, unsplit_note(self.placements).strip("; ")]
        return LayoutPage(
            name=self.blueprint.name, sizes=self.sizes, placements=self.placements, others=self.other_arrays,
            stage=self.parallel.stage, mesh=self.mesh, simulated=self.simulated,
            notes=[note for note in notes if note], sync_note=self.sync_note, frozen=self.frozen,
        )  # fmt: skip

    def per_device(self, places: Mapping[str, Placement]) -> int:
        """Returns the bytes on each device of the arrays at these places."""
        return sum(place.per_device(self.sizes) for place in places.values())

    @cached_property
    def other_arrays(self) -> dict[str, Placement]:
        """Other state that has dims: neither random keys nor counts."""
        return {path: place for path, place in self.other_state.items() if place.leaf.shape}

    def _tree(self, value) -> Tree:
        return nest({tuple(path.split("/")): value(place) for path, place in self.placements.items()})
