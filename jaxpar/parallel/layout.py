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
from jaxpar.exchange.part import Part
from jaxpar.exchange.sent import Sent
from jaxpar.mesh.chips import find_chip
from jaxpar.models.named import axes_of
from jaxpar.parallel.declare import Parallel
from jaxpar.parallel.gather import constrained, cut, gather, gather_beside, padding
from jaxpar.parallel.pages.fragment import Shown, fragment, to_dict
from jaxpar.parallel.placement import Placement
from jaxpar.parallel.unsplit import told
from jaxpar.parallel.zero import cut_of
from jaxpar.pipeline.run.unflushed import microbatches_per_update
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.sharding.adapters import is_scales
from jaxpar.sharding.lists import Lists, longest_list
from jaxpar.sharding.names import SCOPE, Blueprint, Tree, nest, path_of, pick
from jaxpar.sharding.rules import SMALL, Axes, own_dims
from jaxpar.sharding.shard_bytes import shard_bytes, shard_shape
from jaxpar.units import show_bytes, show_count

MEMBERS = (None, "head_dim")  # names that may be read for the dim of an ensemble's members


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The layout of a training job, from a `Parallel`, a model and a mesh.

    Attributes:
      parallel: The declaration, its sizes inferred.
      blueprint: The model.
      placements: Path of a parameter to where it lives.
      others: Path of every other array of the model's state to where it lives.
      names: Names of activation dims to mesh axes, earlier first.
      mesh: The mesh, or None where the devices are not there (`jaxpar check` on a laptop).
      simulated: Whether the devices are simulated on the processor, there or not.
      target: The chip that the job is meant for, where its devices do not say it: a key of `jaxpar.mesh.chips`.
      lists: Parameters of a stack that a pipeline makes of a list of layers, each with those of the layers.
      notes: What techniques chose where the declaration left it to them, and why, a sentence each.
      frozen: Paths of parameters that replicas never send each other: an optimizer leaves them alone. Empty until a
        step is built, for a layout is composed without an optimizer; likewise `besides`.
      besides: What replicas send each other of their optimizers' states.
    """

    parallel: Parallel
    blueprint: Blueprint
    placements: Mapping[str, Placement]
    names: Mapping[str, Axes]
    others: Mapping[str, Placement] = field(default_factory=dict)
    mesh: Mesh | None = field(default=None, repr=False)
    simulated: bool = False
    target: str = ""
    lists: Lists = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    besides: tuple[Sent, ...] = ()

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
        """The chip of its devices, or else that it is meant for: a key of `jaxpar.mesh.chips`, or "" for none known."""
        there = None if self.mesh is None or self.simulated else find_chip(self.mesh.devices.flat[0].device_kind)
        return there.key if there else self.target

    @property
    def held(self) -> int:
        """Bytes of a device's parameters, and of gradients and two moments of Adam of those that are trained."""
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
        """Axes of the mesh whose devices each see other examples."""
        return self.parallel.batch_axes

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
        """Specs of what the axes of ZeRO may shard."""
        return self._tree(lambda place: place.sharded)

    @cached_property
    def gradients(self) -> Tree:
        """Specs of the gradients and their accumulator: sharded from stage 2 on."""
        return self.sharded if self.parallel.stage >= 2 else self._tree(lambda place: place.whole)

    @cached_property
    def updated(self) -> Tree:
        """Specs in which the optimizer works: sharded from stage 1 on."""
        return self.sharded if self.parallel.stage >= 1 else self._tree(lambda place: place.whole)

    def other_specs(self, state: Tree) -> Tree:
        """Returns a spec for every array of the model's state that is no parameter."""

        def spec(keys, _) -> PartitionSpec:
            if (path := path_of(keys)) not in self.others:
                raise refuse(
                    f"{self.blueprint.name} has the array {path}, which Flax does not show on shapes alone",
                    rule="a model keeps arrays in variables, or in attributes that Flax knows to be data",
                    fix="nnx.Variable around it, or nnx.data(...); of a layer of Flax's own a newer Flax: "
                    "nnx.WeightNorm with scales needs more than 0.12.8, and use_scale=False does not",
                )
            return self.others[path].stored

        return jax.tree_util.tree_map_with_path(spec, state)

    def owner(self, keys) -> str | None:
        """Returns the path of the parameter that an array belongs to: the one that ends its own path.

        If none does, one that is inside of it: an optimizer may keep several arrays for a parameter, in a tuple.
        """
        words = path_of(keys).split("/")
        spans = ((begin, end) for end in range(len(words), 0, -1) for begin in range(end))
        return next((path for begin, end in spans if (path := "/".join(words[begin:end])) in self.placements), None)

    def optimizer_specs(self, state: Tree) -> Tree:
        """Returns a spec for every array of any optax state.

        A leaf belongs to the parameter whose path is in its own path: see `owner`. With the parameter's shape
        it takes the parameter's spec; with another shape (Adafactor's row and column statistics, codes of 8 bits in
        blocks) the axes of ZeRO and of its parameter on dims that divide: see `cut_of`. Scalars stay whole.
        """
        axes = tuple(axis for axis in self.parallel.zero_axes if self.sizes[axis] > 1)
        axes = axes if self.parallel.stage >= 1 else ()

        def spec(keys, leaf) -> PartitionSpec:
            owner = self.owner(keys)
            if owner and tuple(leaf.shape) == self.placements[owner].leaf.shape:
                return pick(self.updated, tuple(owner.split("/")))
            own = pick(self.updated, tuple(owner.split("/"))) if owner else ()
            return cut_of(leaf, self.sizes, axes, tuple(axis for entry in own for axis in axes_of(entry)))

        return jax.tree_util.tree_map_with_path(spec, state)

    def sends(self) -> tuple[Sent, ...]:
        """Returns what the replicas over `data` send each other, by their exchange; nothing where there is but one."""
        replicas = self.sizes["data"]
        return (*self.parallel.exchange.sends(self.parts, replicas), *self.besides) if replicas > 1 else ()

    @property
    def parts(self) -> dict[str, Part]:
        """Path of each parameter that is trained to what a device holds of it between steps."""

        def one(place: Placement) -> Part:
            shape = shard_shape(place.leaf.shape, place.stored, self.sizes)
            return Part(shape, place.leaf.dtype, layers=place.names[:1] == ("layers",), whole=place.leaf.size)

        return {path: one(place) for path, place in self.placements.items() if path not in self.frozen}

    def batch_spec(self, shape) -> PartitionSpec:
        """Returns where a batch array goes: examples over `data`, `fsdp` and other axes that see other examples."""
        return PartitionSpec(self.batch_axes) if shape else PartitionSpec()

    def use(self, path: str, value: jax.Array, dtype=None) -> jax.Array:
        """Returns a parameter as the model reads it: cast to `dtype`, then gathered over the axes of ZeRO.

        Casting first halves what a bfloat16 gather moves. Inside a scan over stacked layers
        the value is one layer's slice. Other state is gathered in every ZeRO stage, and never
        cast: it may be an average, or a table of angles.
        """
        if path in self.others:
            return self._use_other(path, value)
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            cast = dtype is not None and value.dtype != dtype and self._is_cast(path, value)
            if cast:
                value = value.astype(dtype)
            place = self.placements[path]
            # stages 1 and 2 have gathered it at the beginning of the step
            if self.parallel.stage in (1, 2) or place.stored == place.used or self.mesh is None:
                return value
            self._check_sliced(path, value.shape)
            stored, whole, used = map(self.sharding, place.slice_specs(value.shape))
            if cast:  # else XLA may gather float32 and cast what arrives
                value = jax.lax.with_sharding_constraint(value, stored)
            looked_up = place.names[:1] == ("vocab",) or (
                place.names[:1] == ("vocab_table",) and self.sizes["pipe"] > 1
            )
            # an axis of one's own that shards parameters, too, exchanges them by itself
            own = bool(self.parallel.axes) and self.sizes["data"] * self.sizes["context"] == 1
            straight = looked_up or own or any(padding(value.shape, used))
            return cut(value, used, whole) if straight else gather(value, used, stored)

    def small_stacks(self, params: Tree, dtype=None, as_stored: Set[str] = frozenset()) -> Tree:
        """Returns the parameters, small vectors gathered over `fsdp`, those of stacked layers for all layers at once.

        In a loop each turn would gather its own, with `data` or `tensor` apart from the matrices, whose groups of
        devices XLA writes in another form and so does not compare as equal. Beside `tensor` they are written as those
        of matrices are. Their gradients travel as ever. Those `as_stored` are left alone: they are also read uncast.
        """
        if self.parallel.stage != 3 or self.sizes["pipe"] > 1 or self.mesh is None:
            return params

        # JAX maps no part of a program over replicas that is manual over `tensor` alone
        beside = self.sizes["tensor"] > 1 and self.mesh.shape["data"] == self.sizes["data"]

        def one(keys, value: jax.Array) -> jax.Array:
            place = self.placements[path := path_of(keys)]
            vector = value.ndim == (2 if place.names[:1] == ("layers",) else 1)
            # a leading dim beside those of its own may be that of a stack, which the model slices
            stack = place.is_split([0]) and own_dims(path, place.leaf) < value.ndim and place.names[0] in MEMBERS
            small = place.leaf.bytes < SMALL and (vector or stack)
            if not small or place.stored == place.used or path in as_stored:
                return value
            with jax.named_scope(SCOPE + path.replace("/", ".")):
                light = value.astype(dtype) if dtype is not None and self._is_cast(path, value) else value
                used, stored = self.sharding(place.used), self.sharding(place.stored)
                if beside and not any("tensor" in axes_of(entry) for entry in place.stored):
                    return gather_beside(light, used, stored, "tensor")
                return gather(light, used, stored)

        return jax.tree_util.tree_map_with_path(one, params)

    def _is_cast(self, path: str, value: jax.Array) -> bool:
        """Returns whether a parameter is computed with in a step's dtype: not whole numbers of 8 bits, nor scales."""
        return jnp.issubdtype(value.dtype, jnp.floating) and not is_scales(self.blueprint, path)

    def _use_other(self, path: str, value: jax.Array) -> jax.Array:
        place = self.others[path]
        if place.stored == place.used or self.mesh is None:
            return value
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            self._check_sliced(path, value.shape)
            *_, used = place.slice_specs(value.shape)
            return constrained(value, self.sharding(used))

    def _check_sliced(self, path: str, shape: tuple[int, ...]) -> None:
        """Refuses a large stack that is split over the dim that the model slices; a small one is gathered before.

        Raises:
          JaxparError: With a rule for each large parameter beside it that is split so.
        """
        places = {**self.others, **self.placements}
        sliced = places[path].sliced_dims(shape)
        if not places[path].is_split(sliced) or places[path].leaf.bytes < SMALL:
            return
        count = [places[path].leaf.shape[dim] for dim in sliced]
        stack = path.split("/")[0] + "/"  # what one scan or vmap slices lies in one module, and is named at once
        alike = [
            each
            for each, place in places.items()
            if each == path or (each.startswith(stack) and place.leaf.bytes >= SMALL and place.is_split(sliced)
                                and [place.leaf.shape[dim] for dim in sliced] == count)
        ]  # fmt: skip
        rules = {
            each: tuple("layers" if dim in sliced else name for dim, name in enumerate(places[each].names))
            for each in alike
        }
        raise refuse(
            f"{path} {self.describe(path)}: the model takes dim {sliced[0]} apart, by a scan or a vmap, and "
            f"{places[path].stored[sliced[0]]} splits it",
            rule="a dim of stacked layers stays whole, so that each layer is gathered when it runs",
            fix=f"paths={rules} in Parallel, or names in the model",
        )

    def describe(self, path: str) -> str:
        """Returns `f32[embed/fsdp, mlp/tensor]` for one parameter or other array."""
        return {**self.others, **self.placements}[path].describe(self.sizes)

    def explain(self) -> str:
        """Returns a table: every array of the model, where its dims go, its bytes per device, which rule placed it.

        Of what is no parameter, random keys and other scalars are left out.

        Above it the summary, what techniques chose, and how replicas agree that step apart.
        """
        rows = [("parameter", "placed as", "shape", "per device", "because")]
        for path, place in {**self.placements, **self.other_arrays}.items():
            size = show_bytes(place.per_device(self.sizes))
            shape = " x ".join(map(str, place.leaf.shape)) or "scalar"
            rows.append((path, self.describe(path), shape, size, place.why))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.summary(), *self.notes, *[self.agreement] * bool(self.agreement), "", *lines])

    def under(self, frozen: frozenset[str], besides: tuple[Sent, ...]) -> "Layout":
        """Returns the same layout, for an optimizer that leaves these parameters alone, of whose state this is sent."""
        return replace(self, frozen=frozen, besides=besides) if frozen or besides else self

    def noted(self, note: str) -> "Layout":
        """Returns the same layout with one more sentence on what was chosen."""
        return replace(self, notes=(*self.notes, note))

    @property
    def agreement(self) -> str:
        """How replicas that step apart agree, as a sentence; nothing where XLA sums their gradients."""
        exchange = self.parallel.exchange
        return f"exchange: {exchange.explain(self.sends())}" if exchange.apart else ""

    def summary(self) -> str:
        """Returns one line: the mesh, the stage, and the parameters' size whole and per device; so of other state.

        Large parameters that no axis splits, though others are split, are named with the reason.
        """
        leaves = [place.leaf for place in self.placements.values()]
        per_device, besides = self.per_device(self.placements), self.per_device(self.other_arrays)
        axes = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one device"
        over = f" over {self.parallel.zero_over}" if len(self.parallel.zero_axes) > 1 else ""
        shared = any(self.sizes[axis] > 1 for axis in self.parallel.zero_axes)
        stage = f", ZeRO-{self.parallel.stage}{over}" if shared else ""
        total = sum(leaf.bytes for leaf in leaves)
        count = sum(leaf.size for leaf in leaves)
        updates = f", {self.updates_per_step} updates a step" if self.updates_per_step > 1 else ""
        how = "".join(f", {axis} by {way}" for axis, way in self.parallel.ways.items())
        how += f" x ulysses {self.parallel.ulysses}" if self.parallel.ulysses > 1 else ""
        apart = f", {self.parallel.exchange}" if self.parallel.exchange.apart else ""
        sequence = ", sequence" if self.parallel.sequence else ""
        whole = sum(place.leaf.bytes for place in self.other_arrays.values())
        other = f"; other state {show_bytes(whole)}, {show_bytes(besides)} per device" if whole else ""
        return (
            f"{self.blueprint.name} on {axes}{stage}{sequence}{how}{updates}{apart}: "
            f"{show_count(count)} parameters, {show_bytes(total)}, {show_bytes(per_device)} per device{other}"
            f"{told(self.placements)}"
        )

    def _repr_html_(self) -> str:
        """The layout as a picture: the mesh, what joins it, and who holds what."""
        return fragment(self._shown)

    def to_dict(self) -> dict[str, Any]:
        """Returns that picture as JSON has it, for the record of a run."""
        return to_dict(self._shown)

    @property
    def _shown(self) -> Shown:
        said = [*self.notes, told(self.placements).strip("; ")]
        return Shown(
            name=self.blueprint.name, sizes=self.sizes, placements=self.placements, others=self.other_arrays,
            stage=self.parallel.stage, mesh=self.mesh, simulated=self.simulated,
            said=[each for each in said if each], agreement=self.agreement, frozen=self.frozen,
        )  # fmt: skip

    def per_device(self, places: Mapping[str, Placement]) -> int:
        """Returns the bytes on each device of the arrays at these places."""
        return sum(place.per_device(self.sizes) for place in places.values())

    @cached_property
    def other_arrays(self) -> dict[str, Placement]:
        """Other state that has dims: neither random keys nor counts."""
        return {path: place for path, place in self.others.items() if place.leaf.shape}

    def _tree(self, value) -> Tree:
        return nest({tuple(path.split("/")): value(place) for path, place in self.placements.items()})
