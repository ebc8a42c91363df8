"""The executor of a table whose parts are different programs: in a tick each device runs the branch of its part.

    a tick   one `lax.switch` over (op, part)     F: y of x     B: gradients of x and parameters     W: of parameters
             then the permutes of each edge, into the inbox of the stage that reads the message

The last part computes the loss in its backward, so its forward is empty, unless it updates state. A backward recomputes
the forward of its part, or reads its residuals. A collective inside of a branch that other devices do not take would
never end: messages are sent outside of the switch, and parts have none. A tick handles a group of microbatches: see
`StageReplicas`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.jaxprs.dataflow import shapes
from jaxpar.jaxprs.part_programs import PartProgram
from jaxpar.jaxprs.split_backward import Halves, halves
from jaxpar.pipeline.run.edges import Edge, Inbox, Outbox, tree_bytes
from jaxpar.pipeline.run.residual_pool import ResidualPool
from jaxpar.pipeline.run.slots import load
from jaxpar.pipeline.run.stage import Keep
from jaxpar.pipeline.run.stage_buffers import Shapes, StageBuffers
from jaxpar.pipeline.run.stage_replicas import StageReplicas
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.pipeline.tables.synchronous import forwards
from jaxpar.sharding.names import AGAIN, BACKWARD, CHOICE, GRADIENT, TABLE, Tree, is_float

MicrobatchData = Callable[[jax.Array], Sequence[jax.Array]]
Carry = dict[str, Any]  # what a device carries from tick to tick
Runs = Mapping[tuple[str, int, int], tuple[int, int]]  # (op, group, part) to (tick, stage)


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


class BranchTable:
    """A table, compiled for parts of different programs, shapes and parameters.

    Attributes:
      schedule: The table of groups of microbatches.
      replicas: The devices of each stage.
      parts: The parts.
      buffers: Buffers that hold the parameters of any one stage.
      inbox: The bytes of the inbox that each message has.
      rows: Branch and group of each tick and stage. Shape [ticks, stages, 2], int32.
      owners: Index of state to the stage that updates it.
      residuals: Part to the bytes that its forward leaves for its backward, if it keeps residuals.
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
        keep: Keep = "inputs",
    ):
        """Lays out buffers and messages.

        Args:
          schedule: A table with as many parts.
          replicas: The devices of each of its stages.
          parts: The parts.
          params: Path to the shape of every parameter, in the order of the parts' indices.
          loss: Index of the loss among the outs of the last part.
          train: Whether to compute gradients; else the forwards alone run.
          keep: What a forward leaves for its backward.
        """
        self.schedule, self.replicas, self.parts, self.train = schedule, replicas, list(parts), train
        self._paths, self._loss = list(params), loss
        self._stages = [schedule.locate(part)[0] for part in range(len(parts))]
        stages: list[dict[str, jax.ShapeDtypeStruct]] = [{} for _ in range(schedule.stages)]
        for stage, part in zip(self._stages, parts, strict=True):
            stages[stage] |= {self._paths[i]: params[self._paths[i]] for i in part.params}
        self.buffers = StageBuffers(stages)
        self.owners = {i: stage for stage, part in zip(self._stages, parts, strict=True) for i in part.state}
        cells = schedule.cells if train else forwards(schedule)
        runs = {
            (cell.op, cell.microbatch, schedule.part(stage, cell.chunk)): (tick, stage)
            for tick, row in enumerate(cells)
            for stage, cell in enumerate(row)
            if cell
        }
        ops = ("F", "B", "W") if schedule.split else ("F", "B")
        self._branches = {pair: 1 + i for i, pair in enumerate((part, op) for part in range(len(parts)) for op in ops)}
        self.rows = np.zeros((len(cells), schedule.stages, 2), np.int32)
        for (op, group, part), (tick, stage) in runs.items():
            self.rows[tick, stage] = self._branches[part, op], group
        self._edges = {(edge.kind, edge.source, edge.target): edge for edge in self._build_edges()}
        self._outboxes = {
            (kind, part): Outbox([edge for edge in self._edges.values() if (edge.kind, edge.source) == (kind, part)])
            for kind in "xg"
            for part in range(len(parts))
        }
        self.inbox, self._sent_groups = self._plan_messages(len(cells), runs)
        # the last part computes the loss in its backward, and so has no residuals
        residual_parts = range(len(parts) - 1) if train and keep == "residuals" else range(0)
        self._halves = {part: self._trace_halves(part, params) for part in residual_parts}
        self._pool = ResidualPool(
            {part: each.residuals for part, each in self._halves.items()},
            self._stages,
            replicas,
            {part: self._lifetimes(runs, part, "F", part) for part in residual_parts},
        )
        self.residuals = {part: tree_bytes(each.residuals) for part, each in self._halves.items()}
        self._width = max(
            replicas.share(self._stages[part]) * outbox.size for (_, part), outbox in self._outboxes.items()
        )

    def _build_edges(self) -> list[Edge]:
        edges = []
        for target, part in enumerate(self.parts):
            for source, variables in part.receives.items():
                tree = shapes(variables)
                edges.append(Edge("x", source, target, tree))
                if self.train and _floats(tree):
                    edges.append(Edge("g", target, source, _floats(tree)))
        return edges

    def _plan_messages(self, ticks: int, runs: Runs) -> tuple[Inbox, np.ndarray]:
        """Returns the inbox, and of each tick and edge the group whose messages are sent, or -1."""
        sent, lifetimes = np.full((ticks, len(self._edges)), -1, np.int32), {}
        for number, edge in enumerate(self._edges.values()):
            lifetimes[edge] = self._lifetimes(runs, edge.source, "F" if edge.kind == "x" else "B", edge.target)
            for group, (tick, _) in enumerate(lifetimes[edge]):
                sent[tick, number] = group
        return Inbox(self._outboxes, self._stages, self.replicas, lifetimes), sent

    def _lifetimes(self, runs: Runs, source: int, op: str, reader: int) -> list[tuple[int, int]]:
        """Returns for each group the tick in which a part runs an op, and the last that reads its result."""
        last = "F" if not self.train else "W" if self.schedule.split else "B"
        groups = range(self.schedule.microbatches)
        return [(runs[op, group, source][0], runs[last, group, reader][0]) for group in groups]

    def run(
        self, params: Sequence[jax.Array], data: MicrobatchData, state: Mapping[int, jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array], dict[int, jax.Array]]:
        """Runs the table on one device, in `jax.shard_map` over `pipe`.

        Args:
          params: The buffers of this device's stage.
          data: Maps the number of a microbatch to its data, which every device of `pipe` has.
          state: Index to state, before the first microbatch.

        Returns:
          The sums of the outs, zero on devices of other stages than the last; the sums of gradients of the loss, as
          buffers; and the state, which only devices of its owner have updated.
        """
        carry = self._scan_ticks(data, self._initial_carry(state), lambda carry, row: params, lambda carry, row: carry)
        return carry["outs"], carry["gradients"], carry["state"]

    def _initial_carry(self, state: Mapping[int, jax.Array]) -> Carry:
        return {
            "outs": [jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes(self.parts[-1].outs)],
            "gradients": self.buffers.zeros() if self.train else [],
            "state": dict(state),
            "residuals": jnp.zeros(self._pool.size, jnp.uint8),
        }

    def _scan_ticks(
        self,
        data: MicrobatchData,
        carry: Carry,
        read_params: Callable[[Carry, jax.Array], Sequence[jax.Array]],
        finish_tick: Callable[[Carry, jax.Array], Carry],
        scales: jax.Array | None = None,
    ) -> Carry:
        """Runs all ticks.

        Args:
          data: As for `run`.
          carry: What the device carries.
          read_params: Maps (carry, row) to the buffers of parameters that this cell reads.
          finish_tick: Maps (carry, row) to the carry after the tick; all devices run it, so it may contain collectives.
          scales: The cotangent of each microbatch's loss; 1 by default. Shape [microbatches].
        """

        def idle(row, inbox, carry):
            del row, inbox
            return jnp.zeros(self._width, jnp.uint8), carry

        branches = [idle] * (1 + len(self._branches))
        for (part, op), number in self._branches.items():
            run_op = self._forward(part, data) if op == "F" else self._backward(part, op, data, scales)
            outbox = {"F": self._outboxes["x", part], "B": self._outboxes["g", part]}.get(op)
            if op == "F" or self.train:
                branches[number] = self._branch(run_op, part, outbox, read_params)

        @jax.named_scope(TABLE)
        def tick(state, xs):
            (row, sent), (inbox, carry) = xs, state
            with jax.named_scope(CHOICE):
                outbox, carry = lax.switch(row[0], branches, row, inbox, carry)
            return (self.inbox.send(inbox, outbox, sent), finish_tick(carry, row)), None

        rows = jnp.asarray(self.rows)[:, jnp.asarray(self.replicas.stages)[lax.axis_index("pipe")]]
        start = jnp.zeros(self.inbox.size, jnp.uint8), carry
        return lax.scan(tick, start, (rows, jnp.asarray(self._sent_groups)))[0][1]

    def mean_state(self, state: Mapping[int, jax.Array], batch_axes: Sequence[str]) -> dict[int, jax.Array]:
        """Returns the state of each owner on all devices: the mean over its replicas and over `batch_axes`."""
        stage, replicas = jnp.asarray(self.replicas.stages)[lax.axis_index("pipe")], self.replicas.counts
        owned = {i: jnp.where(stage == self.owners[i], value, jnp.zeros_like(value)) for i, value in state.items()}
        totals = lax.psum(owned, ("pipe", *batch_axes))
        copies = lax.psum(1, tuple(batch_axes))
        return {i: (total / (copies * replicas[self.owners[i]])).astype(total.dtype) for i, total in totals.items()}

    def _branch(self, run_op: Callable, part: int, outbox: Outbox | None, read_params: Callable) -> Callable:
        """Returns a branch of the switch, which runs an op for this device's microbatches of a group.

        Args:
          run_op: Maps (carry, parameters, inbox, index) to the carry and the messages to send.
          part: The part whose op it is.
          outbox: The places of the messages, or None if none are sent.
          read_params: As for `_scan_ticks`.
        """
        stage, replicas = self._stages[part], self.replicas
        share = replicas.share(stage)

        def run(row, inbox, carry):
            replica = jnp.asarray(replicas.replica_numbers)[lax.axis_index("pipe")] if replicas.counts[stage] > 1 else 0
            stage_params = self.buffers.read(read_params(carry, row), stage)
            params = {i: stage_params[self._paths[i]] for i in self.parts[part].params}

            def run_microbatch(carry, number):
                microbatch = row[1] * replicas.group + number * replicas.counts[stage] + replica
                carry, messages = run_op(carry, params, inbox, MicrobatchId(row[1], number, microbatch))
                return carry, jnp.zeros(0, jnp.uint8) if outbox is None else outbox.fill(messages or {})

            carry, sent = run_microbatch(carry, 0) if share == 1 else lax.scan(run_microbatch, carry, jnp.arange(share))
            return jnp.pad(sent.ravel(), (0, self._width - sent.size)), carry

        return run

    def _received_messages(self, part: int, inbox: jax.Array, index: MicrobatchId) -> dict[int, list[jax.Array]]:
        edges = {source: self._edges["x", source, part] for source in self.parts[part].receives}
        return {source: self.inbox.read(inbox, edge, index.group, index.number) for source, edge in edges.items()}

    def _targets(self, part: int) -> list[int]:
        """Returns the parts that send gradients to a part."""
        return [target for target, variables in self.parts[part].sends.items() if _floats(shapes(variables))]

    def _compute_messages(self, part: int, params: Tree, inputs: tuple, floats: Sequence[jax.Array]) -> list:
        """Returns the floating-point values that a part sends to each of `_targets`.

        Args:
          part: The part.
          params: Index to parameter.
          known: (data, state, what the part received).
          floats: The floating-point leaves of what it received.
        """
        data, state, x = inputs
        sent, _, _ = self.parts[part].run(params, data, state, _replace_floats(x, floats))
        return [_floats(sent[target]) for target in self._targets(part)]

    def _trace_halves(self, part: int, params: Shapes) -> Halves:
        """Returns the forward and the backward of a part."""
        program, part_inputs = self.parts[part], self.parts[part].inputs
        received = {source: shapes(variables) for source, variables in program.receives.items()}
        inputs = shapes(part_inputs.data), {i: shapes([part_inputs.state[i]])[0] for i in program.reads_state}, received
        params_of_part = {i: params[self._paths[i]] for i in program.params}
        stage = lambda params, inputs, floats: self._compute_messages(part, params, inputs, floats)  # noqa: E731
        return halves(stage, params_of_part, inputs, _floats(received), split=False, whole=True)

    def _op_inputs(self, part: int, data: MicrobatchData, carry: Carry, inbox: jax.Array, index: MicrobatchId) -> tuple:
        state = {i: carry["state"][i] for i in self.parts[part].reads_state}
        return data(index.microbatch), state, self._received_messages(part, inbox, index)

    def _forward(self, part: int, data: MicrobatchData) -> Callable:
        program, last = self.parts[part], part == len(self.parts) - 1

        def run(carry: Carry, params: Tree, inbox: jax.Array, index: MicrobatchId):
            if last and self.train and not program.state:
                return carry, None
            inputs = self._op_inputs(part, data, carry, inbox, index)
            sent, outs, new = program.run(params, *inputs)
            carry = carry | {"state": carry["state"] | new}
            if last and not self.train:
                carry["outs"] = [total + value for total, value in zip(carry["outs"], outs, strict=True)]
            if part in self._halves:
                y, residuals = self._halves[part].forward(params, inputs, _floats(inputs[2]))
                for target, values in zip(self._targets(part), y, strict=True):
                    sent[target] = _replace_floats(sent[target], values)
                pool = self._pool.write(carry["residuals"], part, index.group, index.number, residuals)
                carry["residuals"] = pool
            return carry, sent

        return run

    def _backward(self, part: int, op: str, data: MicrobatchData, scales: jax.Array | None) -> Callable:
        last = part == len(self.parts) - 1

        def loss(params, inputs, floats):
            data, state, x = inputs
            _, outs, _ = self.parts[part].run(params, data, state, _replace_floats(x, floats))
            return outs[self._loss], outs

        def differentiate_loss(params, inputs, index):
            with jax.named_scope(AGAIN):
                y, pull, outs = jax.vjp(
                    lambda *args: loss(args[0], inputs, args[1]), params, _floats(inputs[2]), has_aux=True
                )
            with jax.named_scope(BACKWARD):
                return *pull(
                    jnp.ones_like(y) if scales is None else load(scales, index.microbatch).astype(y.dtype)
                ), outs

        def pull_messages(carry, params, inputs, inbox, index):
            arrived = [self._edges["g", target, part] for target in self._targets(part)]
            g = [self.inbox.read(inbox, edge, index.group, index.number) for edge in arrived]
            if part in self._halves:
                residuals = self._pool.read(carry["residuals"], part, index.group, index.number)
                with jax.named_scope(BACKWARD):
                    return self._halves[part].backward(params, inputs, _floats(inputs[2]), residuals, g)
            with jax.named_scope(AGAIN):
                call = lambda params, floats: self._compute_messages(part, params, inputs, floats)  # noqa: E731
                _, pull = jax.vjp(call, params, _floats(inputs[2]))
            with jax.named_scope(BACKWARD):
                return pull(g)

        def run(carry: Carry, params: Tree, inbox: jax.Array, index: MicrobatchId):
            inputs, carry = self._op_inputs(part, data, carry, inbox, index), dict(carry)
            if last:
                dparams, dx, outs = differentiate_loss(params, inputs, index)
                if op == "B":
                    carry["outs"] = [total + value for total, value in zip(carry["outs"], outs, strict=True)]
            else:
                dparams, dx = pull_messages(carry, params, inputs, inbox, index)
            if op == "W" or not self.schedule.split:
                with jax.named_scope(GRADIENT):
                    gradients = {self._paths[i]: value for i, value in dparams.items()}
                    carry["gradients"] = self.buffers.add(carry["gradients"], self._stages[part], gradients)
            if op == "W":
                return carry, None
            grads = iter(dx)
            return carry, {source: [next(grads) for _ in _floats(leaves)] for source, leaves in inputs[2].items()}

        return run


def _floats(tree: Tree) -> list:
    """Returns the floating-point leaves, which have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def _replace_floats(tree: Tree, floats: Sequence[jax.Array]) -> Tree:
    """Replaces the floating-point leaves of a tree."""
    leaves = iter(floats)
    return jax.tree.map(lambda leaf: next(leaves) if is_float(leaf) else leaf, tree)
