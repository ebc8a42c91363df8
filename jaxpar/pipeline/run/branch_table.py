"""The executor of a table whose parts are different programs: in a tick each device runs the branch of its part.

    a tick   one `lax.switch` over (op, part)     F: y of x     B: gradients of x and parameters     W: of parameters
             then the permutes of each edge, into the inbox of the stage that reads the message

The last part computes the loss in its backward, so its forward is empty, unless it updates state. A backward recomputes
the forward of its part. A collective inside of a branch that other devices do not take would never end: messages are
sent outside of the switch, and parts have none. A tick handles a group of microbatches: see `StageReplicas`.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.jaxprs.dataflow import shapes
from jaxpar.jaxprs.part_programs import PartProgram
from jaxpar.pipeline.run.edges import Edge, Inbox, Outbox
from jaxpar.pipeline.run.slots import load
from jaxpar.pipeline.run.stage_buffers import Shapes, StageBuffers
from jaxpar.pipeline.run.stage_replicas import StageReplicas
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.pipeline.tables.synchronous import forwards
from jaxpar.sharding.names import AGAIN, BACKWARD, CHOICE, GRADIENT, TABLE, Tree

Carry = tuple[list[jax.Array], list[jax.Array], dict[int, jax.Array]]  # sums of gradients, outs of the last part, state


class BranchTable:
    """A table, compiled for parts of different programs, shapes and parameters.

    Attributes:
      schedule: The table of groups of microbatches.
      replicas: The devices of each stage.
      parts: The parts.
      buffers: Buffers that hold the parameters of any one stage.
      inbox: Places of the messages.
      rows: Of each tick and stage, the branch and the group. Shape [ticks, stages, 2], int32.
      owners: Of each index of state, the stage that updates it.
    """

    def __init__(
        self,
        schedule: Schedule,
        replicas: StageReplicas,
        parts: Sequence[PartProgram],
        params: Shapes,
        *,
        loss: int,
        train: bool,
    ):
        """Lays out buffers and messages.

        Args:
          schedule: A table with as many parts.
          replicas: The devices of each of its stages.
          parts: The parts.
          params: Path to the shape of every parameter, in the order of the parts' indices.
          loss: Index of the loss among the outs of the last part.
          train: Whether to compute gradients; else the forwards alone run.
        """
        self.schedule, self.replicas, self.parts, self.train = schedule, replicas, list(parts), train
        self._paths, self._loss = list(params), loss
        self._stages = [schedule.place(part)[0] for part in range(len(parts))]
        stages: list[dict[str, jax.ShapeDtypeStruct]] = [{} for _ in range(schedule.stages)]
        for stage, part in zip(self._stages, parts, strict=True):
            stages[stage] |= {self._paths[i]: params[self._paths[i]] for i in part.params}
        self.buffers = StageBuffers(stages)
        self.owners = {i: stage for stage, part in zip(self._stages, parts, strict=True) for i in part.state}
        cells = schedule.cells if train else forwards(schedule)
        at = {
            (cell.op, cell.microbatch, schedule.part(stage, cell.chunk)): (tick, stage)
            for tick, row in enumerate(cells)
            for stage, cell in enumerate(row)
            if cell
        }
        ops = ("F", "B", "W") if schedule.split else ("F", "B")
        self._branches = {pair: 1 + i for i, pair in enumerate((part, op) for part in range(len(parts)) for op in ops)}
        self.rows = np.zeros((len(cells), schedule.stages, 2), np.int32)
        for (op, group, part), (tick, stage) in at.items():
            self.rows[tick, stage] = self._branches[part, op], group
        self._edges = {(edge.kind, edge.source, edge.target): edge for edge in self._all_edges()}
        self._outboxes = {
            (kind, part): Outbox([edge for edge in self._edges.values() if (edge.kind, edge.source) == (kind, part)])
            for kind in "xg"
            for part in range(len(parts))
        }
        self.inbox, self._sent = self._messages(len(cells), at)
        self._width = max(
            replicas.share(self._stages[part]) * outbox.size for (_, part), outbox in self._outboxes.items()
        )

    def _all_edges(self) -> list[Edge]:
        edges = []
        for target, part in enumerate(self.parts):
            for source, variables in part.receives.items():
                tree = shapes(variables)
                edges.append(Edge("x", source, target, tree))
                if self.train and _floats(tree):
                    edges.append(Edge("g", target, source, _floats(tree)))
        return edges

    def _messages(self, ticks: int, at: Mapping[tuple[str, int, int], tuple[int, int]]) -> tuple[Inbox, np.ndarray]:
        """Returns the inbox, and of each tick and edge the group whose messages are sent, or -1."""
        last_read = "F" if not self.train else "W" if self.schedule.split else "B"
        sent, lifetimes = np.full((ticks, len(self._edges)), -1, np.int32), {}
        for number, edge in enumerate(self._edges.values()):
            spans = []
            for group in range(self.schedule.microbatches):
                tick, _ = at["F" if edge.kind == "x" else "B", group, edge.source]
                sent[tick, number] = group
                spans.append((tick, at[last_read, group, edge.target][0]))
            lifetimes[edge] = spans
        return Inbox(self._outboxes, self._stages, self.replicas, lifetimes), sent

    def run(
        self, params: Sequence[jax.Array], data: Sequence[jax.Array], state: Mapping[int, jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array], dict[int, jax.Array]]:
        """Runs the table on one device, in `jax.shard_map` over `pipe`.

        Args:
          params: The buffers of this device's stage.
          data: The data of all microbatches of the step, on every device of `pipe`; dim 0 is microbatches.
          state: Index to state, before the first microbatch.

        Returns:
          The sums of the outs, zero on devices of other stages than the last; the sums of gradients of the loss, as
          buffers; and the state, which only devices of its owner have updated.
        """

        def idle(group, inbox, carry):
            del group, inbox
            return jnp.zeros(self._width, jnp.uint8), carry

        branches = [idle] * (1 + len(self._branches))
        for (part, op), number in self._branches.items():
            one = self._forward(part, params, data) if op == "F" else self._backward(part, op, params, data)
            outbox = {"F": self._outboxes["x", part], "B": self._outboxes["g", part]}.get(op)
            if op == "F" or self.train:
                branches[number] = self._branch(one, self._stages[part], outbox)

        @jax.named_scope(TABLE)
        def tick(state, xs):
            (row, sent), (inbox, carry) = xs, state
            with jax.named_scope(CHOICE):
                outbox, carry = lax.switch(row[0], branches, row[1], inbox, carry)
            return (self.inbox.send(inbox, outbox, sent), carry), None

        rows = jnp.asarray(self.rows)[:, jnp.asarray(self.replicas.stage_of)[lax.axis_index("pipe")]]
        outs = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes(self.parts[-1].outs)]
        carry: Carry = (self.buffers.zeros() if self.train else [], outs, dict(state))
        start = jnp.zeros(self.inbox.size, jnp.uint8), carry
        (_, (gradients, outs, new_state)), _ = lax.scan(tick, start, (rows, jnp.asarray(self._sent)))
        return outs, gradients, new_state

    def mean_state(self, state: Mapping[int, jax.Array], batch_axes: Sequence[str]) -> dict[int, jax.Array]:
        """Returns the state of each owner on all devices: the mean over its replicas and over `batch_axes`."""
        stage, replicas = jnp.asarray(self.replicas.stage_of)[lax.axis_index("pipe")], self.replicas.counts
        owned = {i: jnp.where(stage == self.owners[i], value, jnp.zeros_like(value)) for i, value in state.items()}
        totals = lax.psum(owned, ("pipe", *batch_axes))
        others = lax.psum(1, tuple(batch_axes))
        return {i: (total / (others * replicas[self.owners[i]])).astype(total.dtype) for i, total in totals.items()}

    def _branch(self, one: Callable, stage: int, outbox: Outbox | None) -> Callable:
        """Returns a branch of the switch, which runs an op for this device's microbatches of a group.

        Args:
          one: Maps (carry, inbox, group, number of the microbatch on this device, its number in the step) to the carry
            and the messages to send.
          stage: The stage that takes the branch.
          outbox: The places of the messages, or None if none are sent.
        """
        share, replicas = self.replicas.share(stage), self.replicas

        def run(group, inbox, carry):
            replica = jnp.asarray(replicas.number_of)[lax.axis_index("pipe")] if replicas.counts[stage] > 1 else 0

            def turn(carry, number):
                microbatch = group * replicas.group + number * replicas.counts[stage] + replica
                carry, messages = one(carry, inbox, group, number, microbatch)
                return carry, jnp.zeros(0, jnp.uint8) if outbox is None else outbox.fill(messages or {})

            carry, sent = turn(carry, 0) if share == 1 else lax.scan(turn, carry, jnp.arange(share))
            return jnp.pad(sent.ravel(), (0, self._width - sent.size)), carry

        return run

    def _received(self, part: int, inbox: jax.Array, group: jax.Array, number) -> dict[int, list[jax.Array]]:
        edges = {source: self._edges["x", source, part] for source in self.parts[part].receives}
        return {source: self.inbox.read(inbox, edge, group, number) for source, edge in edges.items()}

    def _params(self, buffers: Sequence[jax.Array], part: int) -> dict[int, jax.Array]:
        of_stage = self.buffers.read(buffers, self._stages[part])
        return {i: of_stage[self._paths[i]] for i in self.parts[part].params}

    def _forward(self, part: int, params: Sequence[jax.Array], data: Sequence[jax.Array]) -> Callable:
        program, last = self.parts[part], part == len(self.parts) - 1

        def run(carry: Carry, inbox, group, number, microbatch):
            gradients, outs, state = carry
            if last and self.train and not program.state:
                return carry, None
            x = self._received(part, inbox, group, number)
            sent, found, new = program.run(self._params(params, part), load(data, microbatch), state, x)
            if last and not self.train:
                outs = [total + value for total, value in zip(outs, found, strict=True)]
            return (gradients, outs, state | new), sent

        return run

    def _backward(self, part: int, op: str, params: Sequence[jax.Array], data: Sequence[jax.Array]) -> Callable:
        program, last = self.parts[part], part == len(self.parts) - 1
        targets = [target for target, variables in program.sends.items() if _floats(shapes(variables))]

        def run(carry: Carry, inbox, group, number, microbatch):
            gradients, outs, state = carry
            x, known = self._received(part, inbox, group, number), load(data, microbatch)

            def call(params, moving) -> tuple[list[list[jax.Array]], list[jax.Array]]:
                sent, found, _ = program.run(params, known, state, _with_floats(x, moving))
                return [[found[self._loss]]] if last else [_floats(sent[target]) for target in targets], found

            with jax.named_scope(AGAIN):
                y, pull, found = jax.vjp(call, self._params(params, part), _floats(x), has_aux=True)
            with jax.named_scope(BACKWARD):
                arrived = [self._edges["g", target, part] for target in targets]
                g = [self.inbox.read(inbox, edge, group, number) for edge in arrived]
                dparams, dx = pull([[jnp.ones_like(y[0][0])]] if last else g)
            if op == "W" or not self.schedule.split:
                with jax.named_scope(GRADIENT):
                    of_paths = {self._paths[i]: value for i, value in dparams.items()}
                    gradients = self.buffers.add(gradients, self._stages[part], of_paths)
            if last and op == "B":
                outs = [total + value for total, value in zip(outs, found, strict=True)]
            if op == "W":
                return (gradients, outs, state), None
            others = iter(dx)
            moving = {source: [next(others) for _ in _floats(leaves)] for source, leaves in x.items()}
            return (gradients, outs, state), moving

        return run


def _is_float(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _floats(tree: Tree) -> list:
    """Returns the floating-point leaves, which have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _with_floats(tree: Tree, floats: Sequence[jax.Array]) -> Tree:
    """Replaces the floating-point leaves of a tree."""
    others = iter(floats)
    return jax.tree.map(lambda leaf: next(others) if _is_float(leaf) else leaf, tree)
