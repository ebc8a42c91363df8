"""The executor of a table whose parts are different programs: in a tick each device runs the branch of its part.

    a tick   one `lax.switch` over (op, part)     F: y of x     B: gradients of x and parameters     W: of parameters
             then the permutes of each edge, into the inbox of the stage that reads the message

The last part computes the loss in its backward, so its forward is empty, unless it updates state. A backward recomputes
the forward of its part, or reads its residuals. A collective inside of a branch that other devices do not take would
never end: messages are sent outside of the switch, and parts have none. A tick handles a group of microbatches: see
`StageReplicas`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.jaxprs.dataflow import shapes
from jaxpar.jaxprs.part_programs import PartProgram
from jaxpar.pipeline.run.edges import Outbox, tree_bytes
from jaxpar.pipeline.run.model_functions import PartFunctions, floats
from jaxpar.pipeline.run.places import Messages, MicrobatchId, OpTicks, ResidualPool
from jaxpar.pipeline.run.stage import Keep
from jaxpar.pipeline.run.stage_buffers import Shapes, StageBuffers
from jaxpar.pipeline.run.stage_replicas import StageReplicas
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.sharding.names import CHOICE, GRADIENT, TABLE, Tree

MicrobatchData = Callable[[jax.Array], Sequence[jax.Array]]
Carry = dict[str, Any]  # what a device carries from tick to tick


class BranchTable:
    """A table, compiled for parts of different programs, shapes and parameters.

    Attributes:
      schedule: The table of groups of microbatches.
      replicas: The devices of each stage.
      parts: The parts.
      buffers: Buffers that hold the parameters of any one stage.
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
        op_ticks = OpTicks(schedule, train=train)
        ops = ("F", "B", "W") if schedule.split else ("F", "B")
        self._branches = {pair: 1 + i for i, pair in enumerate((part, op) for part in range(len(parts)) for op in ops)}
        self.rows = np.zeros((op_ticks.ticks, schedule.stages, 2), np.int32)
        for (op, group, part), (tick, stage) in op_ticks.places.items():
            self.rows[tick, stage] = self._branches[part, op], group
        self._messages = Messages(parts, self._stages, replicas, op_ticks, train=train)
        # the last part computes the loss in its backward, and so has no residuals
        last, keeps = len(parts) - 1, train and keep == "residuals"
        of_part = [{i: params[self._paths[i]] for i in part.params} for part in parts]
        self._functions = [
            PartFunctions(part, of_part[number], keep_residuals=keeps and number < last)
            for number, part in enumerate(parts)
        ]
        residuals = {part: halves.residuals for part, each in enumerate(self._functions) if (halves := each.halves)}
        lifetimes = {part: op_ticks.lifetimes(part, "F", part) for part in residuals}
        self._pool = ResidualPool(residuals, self._stages, replicas, lifetimes)
        self.residuals = {part: tree_bytes(tree) for part, tree in residuals.items()}

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
            return jnp.zeros(self._messages.width, jnp.uint8), carry

        branches = [idle] * (1 + len(self._branches))
        for (part, op), number in self._branches.items():
            run_op = self._forward(part, data) if op == "F" else self._backward(part, op, data, scales)
            outbox = self._messages.outbox(part, op)
            if op == "F" or self.train:
                branches[number] = self._branch(run_op, part, outbox, read_params)

        @jax.named_scope(TABLE)
        def tick(state, xs):
            (row, sent), (inbox, carry) = xs, state
            with jax.named_scope(CHOICE):
                outbox, carry = lax.switch(row[0], branches, row, inbox, carry)
            return (self._messages.inbox.send(inbox, outbox, sent), finish_tick(carry, row)), None

        rows = jnp.asarray(self.rows)[:, jnp.asarray(self.replicas.stages)[lax.axis_index("pipe")]]
        start = jnp.zeros(self._messages.inbox.size, jnp.uint8), carry
        return lax.scan(tick, start, (rows, jnp.asarray(self._messages.sent_groups)))[0][1]

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
            return jnp.pad(sent.ravel(), (0, self._messages.width - sent.size)), carry

        return run

    def _op_inputs(self, part: int, data: MicrobatchData, carry: Carry, inbox: jax.Array, index: MicrobatchId) -> tuple:
        program = self.parts[part]
        return (
            data(index.microbatch),
            {i: carry["state"][i] for i in program.reads_state},
            {source: self._messages.read("x", source, part, inbox, index) for source in program.receives},
        )

    def _forward(self, part: int, data: MicrobatchData) -> Callable:
        functions, last = self._functions[part], part == len(self.parts) - 1

        def run(carry: Carry, params: Tree, inbox: jax.Array, index: MicrobatchId):
            if last and self.train and not self.parts[part].state:
                return carry, None
            inputs = self._op_inputs(part, data, carry, inbox, index)
            sent, outs, state, residuals = functions.forward(params, inputs)
            carry = carry | {"state": carry["state"] | state}
            if last and not self.train:
                carry["outs"] = [total + value for total, value in zip(carry["outs"], outs, strict=True)]
            if residuals is not None:
                carry["residuals"] = self._pool.write(carry["residuals"], part, index.group, index.number, residuals)
            return carry, sent

        return run

    def _backward(self, part: int, op: str, data: MicrobatchData, scales: jax.Array | None) -> Callable:
        functions, last = self._functions[part], part == len(self.parts) - 1

        def run(carry: Carry, params: Tree, inbox: jax.Array, index: MicrobatchId):
            inputs, carry, residuals = self._op_inputs(part, data, carry, inbox, index), dict(carry), None
            if last:
                dparams, dx, outs = functions.loss_backward(params, inputs, self._loss, scales, index.microbatch)
                if op == "B":
                    carry["outs"] = [total + value for total, value in zip(carry["outs"], outs, strict=True)]
            else:
                g = [self._messages.read("g", target, part, inbox, index) for target in functions.targets]
                if functions.halves is not None:
                    residuals = self._pool.read(carry["residuals"], part, index.group, index.number)
                dparams, dx = functions.backward(params, inputs, residuals, g)
            if op == "W" or not self.schedule.split:
                with jax.named_scope(GRADIENT):
                    gradients = {self._paths[i]: value for i, value in dparams.items()}
                    carry["gradients"] = self.buffers.add(carry["gradients"], self._stages[part], gradients)
            if op == "W":
                return carry, None
            grads = iter(dx)
            return carry, {source: [next(grads) for _ in floats(leaves)] for source, leaves in inputs[2].items()}

        return run
