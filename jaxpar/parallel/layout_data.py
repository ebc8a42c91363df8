"""The data of a layout: the declaration, the model, and the placement of every array on the mesh."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.errors import refuse
from jaxpar.exchange.traffic import ShardShape, Traffic
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.placement import Placement
from jaxpar.sharding.lists import Lists
from jaxpar.sharding.names import Blueprint, shard_shape
from jaxpar.sharding.rules import Axes

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
      lists: Path of a stacked parameter to the paths of the layers' parameters, for lists that a pipeline stacks.
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
