"""The executor of a table whose parts are different programs: in a tick each device runs the branch of its part.

    a tick   one `lax.switch` over (op, part)     F: y of x     B: gradients of x and parameters     W: of parameters
             then one permute for each edge, into the inbox of the stage that reads the message

The last part computes the loss in its backward, so it has no forward op. A backward recomputes the forward of its part.
A collective inside of a branch that other devices do not take would never end: messages are sent outside of the switch,
and parts have none.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.pipeline.run.edges import Edge, Inbox, encode
from jaxpar.pipeline.run.slots import load
from jaxpar.pipeline.run.stage_buffers import Shapes, StageBuffers
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.pipeline.tables.synchronous import forwards
from jaxpar.sharding.names import AGAIN, BACKWARD, CHOICE, GRADIENT, TABLE, Tree

Part = Callable[[Mapping[str, jax.Array], Tree, Tree], Tree]  # (parameters, batch, x) to y


class BranchTable:
    """A table, compiled for parts of different programs, shapes and parameters.

    Attributes:
      schedule: The table.
      buffers: Buffers that hold the parameters of any one stage.
      inbox: Places of the messages.
      rows: Of each tick and stage, the branch and the microbatch. Shape [ticks, stages, 2], int32.
      sums: Shapes of the sums that the last part returns.
    """

    def __init__(self, schedule: Schedule, parts: Sequence[Part], reads: Sequence[Shapes], batch: Tree, *, train: bool):
        """Traces all parts for the shapes of one microbatch.

        Args:
          schedule: A table with as many parts.
          parts: The first is called with x = (), and the last returns {name: (sum, count)}, with the entry `loss`.
          reads: Of each part, path to the shape of every parameter that it reads.
          batch: Shapes of one microbatch.
          train: Whether to compute gradients; else the forwards alone run.
        """
        self.schedule, self.reads, self.train = schedule, reads, train
        self._parts = parts
        self._stages = [schedule.place(part)[0] for part in range(len(parts))]
        stages: list[dict[str, jax.ShapeDtypeStruct]] = [{} for _ in range(schedule.stages)]
        for stage, shapes in zip(self._stages, reads, strict=True):
            stages[stage] |= shapes
        self.buffers = StageBuffers(stages)
        inputs: list[Tree] = [()]
        for part, shapes in zip(parts[:-1], reads[:-1], strict=True):
            inputs.append(jax.eval_shape(part, shapes, batch, inputs[-1]))
        self.sums = jax.eval_shape(parts[-1], reads[-1], batch, inputs[-1])
        self._inputs = inputs
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
        for (op, microbatch, part), (tick, stage) in at.items():
            self.rows[tick, stage] = self._branches[part, op], microbatch
        self.inbox, self._sent = self._messages(len(cells), at)
        self._width = max((edge.bytes for edge in self.inbox.edges), default=0)

    def _messages(self, ticks: int, at: Mapping[tuple[str, int, int], tuple[int, int]]) -> tuple[Inbox, np.ndarray]:
        """Returns the inbox, and of each tick and edge the microbatch whose message is sent, or -1."""
        pairs = [(part - 1, part) for part in range(1, len(self._parts))]
        edges = [Edge("x", source, target, self._inputs[target]) for source, target in pairs]
        if self.train:
            edges += [Edge("g", target, source, _floats(self._inputs[target])) for source, target in pairs]
        last_read = "F" if not self.train else "W" if self.schedule.split else "B"
        sent, lifetimes = np.full((ticks, len(edges)), -1, np.int32), []
        for number, edge in enumerate(edges):
            spans = []
            for microbatch in range(self.schedule.microbatches):
                tick, _ = at["F" if edge.kind == "x" else "B", microbatch, edge.source]
                sent[tick, number] = microbatch
                spans.append((tick, at[last_read, microbatch, edge.target][0]))
            lifetimes.append(spans)
        return Inbox(edges, self._stages, lifetimes), sent

    def run(self, rows: jax.Array, params: Sequence[jax.Array], batch: Tree) -> tuple[Tree, list[jax.Array]]:
        """Runs the table on one stage, in `jax.shard_map` over `pipe`.

        Args:
          rows: This stage's rows. Shape [ticks, 2].
          params: This stage's buffers.
          batch: This stage's batch; dim 0 is microbatches.

        Returns:
          The sums, zero on all stages but the last; and the sums of gradients of the loss, as buffers.
        """

        def idle(microbatch, inbox, gradients, sums):
            del microbatch, inbox
            return self._outbox(()), gradients, sums

        branches = [idle] * (1 + len(self._branches))
        for (part, op), number in self._branches.items():
            if op == "F":
                branches[number] = self._forward(part, params, batch)
            elif self.train:
                branches[number] = self._backward(part, op, params, batch)

        @jax.named_scope(TABLE)
        def tick(state, xs):
            (row, sent), (inbox, gradients, sums) = xs, state
            with jax.named_scope(CHOICE):
                outbox, gradients, sums = lax.switch(row[0], branches, row[1], inbox, gradients, sums)
            return (self.inbox.send(inbox, outbox, sent), gradients, sums), None

        sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.sums)
        start = jnp.zeros(self.inbox.size, jnp.uint8), self.buffers.zeros() if self.train else [], sums
        (_, gradients, sums), _ = lax.scan(tick, start, (rows, jnp.asarray(self._sent)))
        return sums, gradients

    def _outbox(self, tree: Tree) -> jax.Array:
        return encode(tree, self._width)

    def _input(self, inbox: jax.Array, part: int, microbatch: jax.Array) -> Tree:
        return self.inbox.read(inbox, self.inbox.edge("x", part), microbatch) if part else ()

    def _params(self, buffers: Sequence[jax.Array], part: int) -> dict[str, jax.Array]:
        of_stage = self.buffers.read(buffers, self._stages[part])
        return {path: of_stage[path] for path in self.reads[part]}

    def _forward(self, part: int, params: Sequence[jax.Array], batch: Tree) -> Callable:
        last = part == len(self._parts) - 1

        def run(microbatch, inbox, gradients, sums):
            if last and self.train:
                return self._outbox(()), gradients, sums
            x = self._input(inbox, part, microbatch)
            y = self._parts[part](self._params(params, part), load(batch, microbatch), x)
            if last:
                return self._outbox(()), gradients, jax.tree.map(jnp.add, sums, y)
            return self._outbox(y), gradients, sums

        return run

    def _backward(self, part: int, op: str, params: Sequence[jax.Array], batch: Tree) -> Callable:
        last = part == len(self._parts) - 1

        def run(microbatch, inbox, gradients, sums):
            x, known = self._input(inbox, part, microbatch), load(batch, microbatch)

            def call(params, moving):
                y = self._parts[part](params, known, _with_floats(x, moving))
                return (y["loss"][0], y) if last else (_floats(y), None)

            with jax.named_scope(AGAIN):
                y, pull, new_sums = jax.vjp(call, self._params(params, part), _floats(x), has_aux=True)
            with jax.named_scope(BACKWARD):
                cotangent = jnp.ones_like(y) if last else self.inbox.read(inbox, self.inbox.edge("g", part), microbatch)
                dparams, dx = pull(cotangent)
            if op == "W" or not self.schedule.split:
                with jax.named_scope(GRADIENT):
                    gradients = self.buffers.add(gradients, self._stages[part], dparams)
            if last and op == "B":
                sums = jax.tree.map(jnp.add, sums, new_sums)
            return self._outbox(dx if part and op == "B" else ()), gradients, sums

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
