"""A layout: the sharding of every array of a training job, and the rules that chose it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.errors import refuse
from jaxpar.mesh.collective import ShardShape, Traffic
from jaxpar.models.settings.computing import Logits
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.placement import Placement, unsplit_note
from jaxpar.sharding.infer_stacks import Lists
from jaxpar.sharding.names import Blueprint, shard_shape
from jaxpar.sharding.rules import Axes
from jaxpar.units import show_bytes, show_count

MEMBERS = (None, "head_dim")  # names that jaxpar may infer for the dim of an ensemble's members

if TYPE_CHECKING:  # a plain step loads no pipeline
    from jaxpar.pipeline.tables.schedule import Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutData:
    """The placement of every array of a training job, from a `Parallel`, a model and a mesh.

    Attributes:
      parallel: The declaration, with inferred sizes.
      blueprint: The model.
      placements: Path of a parameter to its placement.
      other_state: Path of every other array of the model's state to its placement.
      names: Names of activation dims to mesh axes, earlier first.
      mesh: The mesh, or None without devices (`jaxpar check` on a laptop).
      simulated: Whether the devices are simulated, present or not.
      target: The chip that the job is for, if the devices do not determine it: a key of `jaxpar.mesh.chips`.
      lists: If a pipeline stacks the layers of a list, maps the path of each stacked parameter to those in the list.
      notes: A sentence per choice that a technique made because the declaration left it open, with the reason.
      details: Sentences on choices with little at stake, which only `explain` shows.
      frozen: Paths of parameters that the optimizer freezes, so that replicas never exchange them. Empty until a step
        is built, because `compose` does not know the optimizer; likewise `opt_state_messages`.
      opt_state_messages: Traffic of optimizer states between replicas.
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
    details: tuple[str, ...] = ()
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
    def replicas(self) -> int:
        """Number of shards of the batch."""
        return math.prod(self.sizes[axis] for axis in self.parallel.batch_axes)

    @property
    def microbatches(self) -> int:
        """Number of microbatches in a pipeline; 1 without a pipeline."""
        return self.schedule.microbatches * self.schedule.group if self.sizes["pipe"] > 1 else 1

    @cached_property
    def schedule(self) -> "Schedule":
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

    def describe(self, path: str) -> str:
        """Returns `f32[embed/fsdp, mlp/tensor]` for one parameter or other array."""
        return {**self.other_state, **self.placements}[path].describe(self.sizes)


# The messages of the replicas over `data`, as their exchange declares them.


def replica_messages(layout: LayoutData) -> tuple[Traffic, ...]:
    """Returns the traffic of the exchange between replicas over `data`; empty for a single replica."""
    replicas = layout.sizes["data"]
    return (
        (*layout.parallel.exchange.traffic(trained_shards(layout), replicas), *layout.opt_state_messages)
        if replicas > 1
        else ()
    )


def trained_shards(layout: LayoutData) -> dict[str, ShardShape]:
    """Maps the path of each trained parameter to the shard that a device stores between steps."""

    def to_shard_shape(place: Placement) -> ShardShape:
        shape = shard_shape(place.leaf.shape, place.stored, layout.sizes)
        return ShardShape(shape, place.leaf.dtype, layers=place.names[:1] == ("layers",), total_size=place.leaf.size)

    return {path: to_shard_shape(place) for path, place in layout.placements.items() if path not in layout.frozen}


def sync_note(layout: LayoutData) -> str:
    """Describes in a sentence how per-replica steps synchronize; "" if XLA sums their gradients."""
    exchange = layout.parallel.exchange
    return f"exchange: {exchange.explain(replica_messages(layout))}" if exchange.per_replica else ""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Layout(LayoutData):
    """The layout of a training job, with methods that describe it; see `LayoutData` for the attributes."""

    def __repr__(self) -> str:
        return f"<layout: {self.summary()}>"

    def explain(self) -> str:
        """Returns a table of every array of the model: its spec, shape, bytes per device, and the rule that placed it.

        It omits random keys and other scalars of non-parameter state. Above the table are the summary, the techniques'
        choices, the logits of a traced loss, and the method that synchronizes per-replica steps.
        """
        rows = [("parameter", "placed as", "shape", "per device", "because")]
        for path, place in {**self.placements, **other_arrays(self)}.items():
            size = show_bytes(place.per_device(self.sizes))
            shape = " x ".join(map(str, place.leaf.shape)) or "scalar"
            rows.append((path, self.describe(path), shape, size, place.why))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(
            [self.summary(), *self.notes, *self.details, *[sync_note(self)] * bool(sync_note(self)), "", *lines]
        )

    def summary(self) -> str:
        """Returns one line: the mesh, the ZeRO stage, and the bytes of parameters and state, in total and per device.

        If some parameters are split, it lists large ones that no axis splits, with the reason.
        """
        leaves = [place.leaf for place in self.placements.values()]
        param_share, other_share = per_device(self, self.placements), per_device(self, other_arrays(self))
        axes = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one device"
        shared = [axis for axis in self.parallel.zero_axes if self.sizes[axis] > 1]
        zero_over = f" over {' x '.join(shared)}" if len(self.parallel.zero_axes) > 1 else ""
        stage = f", ZeRO-{self.parallel.stage}{zero_over}" if shared else ""
        total = sum(leaf.bytes for leaf in leaves)
        count = sum(leaf.size for leaf in leaves)
        updates = self.parallel.pipeline.updates(self.schedule) if self.sizes["pipe"] > 1 else 1
        many_updates = f", {updates} updates a step" if updates > 1 else ""
        methods = "".join(f", {axis} by {way}" for axis, way in self.parallel.implementations.items())
        methods += f" x ulysses {self.parallel.ulysses}" if self.parallel.ulysses > 1 else ""
        exchange = f", {self.parallel.exchange}" if self.parallel.exchange.per_replica else ""
        sequence = ", sequence" if self.parallel.sequence else ""
        total_bytes = sum(place.leaf.bytes for place in other_arrays(self).values())
        state = f"; other state {show_bytes(total_bytes)}, {show_bytes(other_share)} per device" if total_bytes else ""
        return (
            f"{self.blueprint.name} on {axes}{stage}{sequence}{methods}{many_updates}{exchange}: "
            f"{show_count(count)} parameters, {show_bytes(total)}, {show_bytes(param_share)} per device{state}"
            f"{unsplit_note(self.placements)}"
        )

    def replica_messages(self) -> tuple[Traffic, ...]:
        """Returns the traffic of the exchange between replicas over `data`; empty for a single replica."""
        return replica_messages(self)

    def _repr_html_(self) -> str:
        """Draws the layout for notebooks: the devices, their links, and the shards on each device."""
        from jaxpar.parallel.layout_page import fragment  # pages are loaded only where they are shown

        return fragment(self._page_data)

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `_repr_html_` as JSON data, for the record of a run."""
        from jaxpar.parallel.layout_page import to_dict

        return to_dict(self._page_data)

    @property
    def _page_data(self) -> Any:
        from jaxpar.parallel.layout_page import LayoutPage

        notes = [*self.notes, unsplit_note(self.placements).strip("; ")]
        return LayoutPage(
            name=self.blueprint.name, sizes=self.sizes, placements=self.placements, others=other_arrays(self),
            stage=self.parallel.stage, mesh=self.mesh, simulated=self.simulated,
            notes=[note for note in notes if note], sync_note=sync_note(self), frozen=self.frozen,
        )  # fmt: skip


def other_arrays(layout: LayoutData) -> dict[str, Placement]:
    """Returns the placements of other state that has dims, which excludes random keys and counts."""
    return {path: place for path, place in layout.other_state.items() if place.leaf.shape}


def per_device(layout: LayoutData, places: Mapping[str, Placement]) -> int:
    """Returns the bytes per device of arrays with these placements."""
    return sum(place.per_device(layout.sizes) for place in places.values())


def with_note(layout: Layout, note: str) -> Layout:
    """Returns the same layout with one more note on a choice."""
    return replace(layout, notes=(*layout.notes, note))


def with_logits(layout: Layout, logits: Logits) -> Layout:
    """Returns the same layout with the logits of its loss: a note if they are large, else a detail."""
    text = str(logits)
    if text in (*layout.notes, *layout.details):
        return layout
    return with_note(layout, text) if logits.is_large else replace(layout, details=(*layout.details, text))
