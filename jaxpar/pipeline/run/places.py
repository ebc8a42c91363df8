"""The places of a table's messages and residuals, in unequal stages, while they wait.

    table ──► ticks in which ops run ──► lifetimes of messages ──► places in outboxes and inboxes: see `edges`

Residuals of parts of different programs, from a forward to its backward, are in one pool of bytes on every device:

    stage 0   | part 0, group 0 | part 0, group 1 | part 0, group 2 |     as many places as forwards that wait
    stage 1   | part 1, group 0      | part 1, group 1      |              of other sizes, in the same bytes

A part writes each residual in its place, inside of its branch, so a tick moves the bytes of its own part alone.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.jaxprs.dataflow import shapes
from jaxpar.jaxprs.part_programs import PartProgram
from jaxpar.pipeline.run.edges import Edge, Inbox, Outbox, assign_places, decode, encode, tree_bytes
from jaxpar.pipeline.run.model_functions import floats
from jaxpar.pipeline.run.stage_replicas import StageReplicas
from jaxpar.pipeline.tables.generators import forwards
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.sharding.names import Tree


class MicrobatchId(NamedTuple):
    """A microbatch that a device runs in a tick.

    Attributes:
      group: Index of its group.
      number: Its index among the microbatches of the group on this device.
      microbatch: Its index in the step.
    """

    group: jax.Array
    number: jax.Array | int
    microbatch: jax.Array


class OpTicks:
    """The tick and the stage in which each op of a table runs.

    Attributes:
      ticks: Number of ticks.
      places: (op, group, part) to (tick, stage).
    """

    def __init__(self, schedule: Schedule, *, train: bool):
        cells = schedule.cells if train else forwards(schedule)
        self.ticks, self._groups = len(cells), range(schedule.microbatches)
        self.places = {
            (cell.op, cell.microbatch, schedule.part(stage, cell.chunk)): (tick, stage)
            for tick, row in enumerate(cells)
            for stage, cell in enumerate(row)
            if cell
        }
        self._last_op = "F" if not train else "W" if schedule.split else "B"

    def lifetimes(self, source: int, op: str, reader: int) -> list[tuple[int, int]]:
        """Returns for each group the tick of an op of a part, and the last tick in which `reader` needs its result."""
        return [
            (self.places[op, group, source][0], self.places[self._last_op, group, reader][0]) for group in self._groups
        ]


class Messages:
    """The messages of a table.

    Args:
      parts: The parts.
      stages: Of each part, the stage that runs it.
      replicas: The devices of the stages.
      op_ticks: When each op runs.
      train: Whether gradients are sent.

    Attributes:
      inbox: The bytes of the inbox that each message has.
      sent_groups: Of each tick and edge, the group whose messages are sent, or -1. Shape [ticks, edges], int32.
      width: Bytes that a device sends in a tick at most.
    """

    def __init__(
        self, parts: Sequence[PartProgram], stages: Sequence[int], replicas: StageReplicas, op_ticks: OpTicks, *,
        train: bool,
    ):  # fmt: skip
        edges = _find_edges(parts, train=train)
        self._edges = {(edge.kind, edge.source, edge.target): edge for edge in edges}
        self._outboxes = {
            (kind, part): Outbox([edge for edge in edges if (edge.kind, edge.source) == (kind, part)])
            for kind in "xg"
            for part in range(len(parts))
        }
        lifetimes = {
            edge: op_ticks.lifetimes(edge.source, "F" if edge.kind == "x" else "B", edge.target) for edge in edges
        }
        self.inbox = Inbox(self._outboxes, stages, replicas, lifetimes)
        self.sent_groups = np.full((op_ticks.ticks, len(edges)), -1, np.int32)
        for number, spans in enumerate(lifetimes.values()):
            for group, (tick, _) in enumerate(spans):
                self.sent_groups[tick, number] = group
        self.width = max(replicas.share(stages[part]) * outbox.size for (_, part), outbox in self._outboxes.items())

    def outbox(self, part: int, op: str) -> Outbox | None:
        """Returns the places of what an op of a part sends, or None if it sends nothing."""
        return {"F": self._outboxes["x", part], "B": self._outboxes["g", part]}.get(op)

    def read(self, kind: Literal["x", "g"], source: int, target: int, inbox: jax.Array, index: MicrobatchId) -> Tree:
        """Returns the message from one part to another about a microbatch."""
        return self.inbox.read(inbox, self._edges[kind, source, target], index.group, index.number)


def _find_edges(parts: Sequence[PartProgram], *, train: bool) -> list[Edge]:
    edges = []
    for target, part in enumerate(parts):
        for source, variables in part.receives.items():
            tree = shapes(variables)
            edges.append(Edge("x", source, target, tree))
            if train and floats(tree):
                edges.append(Edge("g", target, source, floats(tree)))
    return edges


class ResidualPool:
    """Places of residuals.

    Attributes:
      size: Bytes of the pool: those of the stage that needs most.
    """

    def __init__(
        self,
        residuals: Mapping[int, Sequence[jax.ShapeDtypeStruct]],
        stages: Sequence[int],
        replicas: StageReplicas,
        lifetimes: Mapping[int, Sequence[tuple[int, int]]],
    ):
        """Assigns places.

        Args:
          residuals: Of each part that keeps some, the shapes of what a microbatch leaves.
          stages: Of each part, the stage that runs it.
          replicas: The devices of the stages.
          lifetimes: Of each of these parts and each group, the tick of the forward, and the last that reads it.
        """
        self._residuals, self._starts = {part: list(shapes) for part, shapes in residuals.items()}, {}
        self._sizes = {part: tree_bytes(shapes) for part, shapes in residuals.items()}
        ends = [0] * len(replicas.counts)
        for part, size in self._sizes.items():
            count, places = assign_places(lifetimes[part])
            stage = stages[part]
            group_bytes = replicas.share(stage) * size
            self._starts[part] = (ends[stage] + places * group_bytes).astype(np.int32)
            ends[stage] += count * group_bytes
        self.size = max([1, *ends])

    def write(
        self, pool: jax.Array, part: int, group: jax.Array, number: jax.Array | int, values: Sequence[jax.Array]
    ) -> jax.Array:
        """Writes the residuals of a microbatch, of which `number` says the how many-th of its group on this device."""
        start = self._find_start(part, group, number)
        for value in values:
            data = encode(value, tree_bytes(value))
            pool = lax.dynamic_update_slice(pool, data, (start,))
            start = start + data.size
        return pool

    def read(self, pool: jax.Array, part: int, group: jax.Array, number: jax.Array | int) -> list[jax.Array]:
        """Returns the residuals of a microbatch."""
        start, values = self._find_start(part, group, number), []
        for shape in self._residuals[part]:
            values.append(decode(lax.dynamic_slice(pool, (start,), (tree_bytes(shape),)), shape))
            start = start + tree_bytes(shape)
        return values

    def _find_start(self, part: int, group: jax.Array, number: jax.Array | int) -> jax.Array:
        return jnp.asarray(self._starts[part])[group] + number * self._sizes[part]
