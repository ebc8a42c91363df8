"""Embedding and head spread over all stages, rather than on the first and the last one.

    a tick with the head     all stages      the chunk                          y stays where it is
                             all devices     the head on the last stage's y     its matrix split over pipe x tensor
                             all stages      write and send: dL/dy on the last  as without spreading
    with the embedding       all devices     look x up, forward and backward    its table split over pipe x tensor
                             all stages      the chunk, write and send          the first stage takes x
                             all devices     add dL/dx to the table's gradient  backward only

Inside of a stage, head and loss are part of every forward tick that has them, and all stages wait for the last one in
that tick; and every stage holds embedding and head whole, with a sum of their gradients. Here `pipe` is one more axis
over which XLA splits them, by the names of their dims. It costs messages of [tokens, dim] over `pipe`, per microbatch
two for the head and three for the embedding, and the sums of the loss; the time of the head is divided by the stages.

Tables must be phased: only then is it known at compile time in which ticks the last part goes forward. A tick is up to
three programs in a row, those of the stages with `pipe` manual and those of the ends without (XLA cannot nest them in
this order of axes), so buffers are global arrays here: a leading dim for the stages and one for the replicas of the
batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpar.pipeline.jaxprs.dataflow import Traced
from jaxpar.pipeline.run.execute import run_table
from jaxpar.pipeline.run.program import COLUMNS, OP_NUMBER, Program, TickKind
from jaxpar.pipeline.run.slots import load
from jaxpar.pipeline.run.stage import Keep, Row, Stage, add
from jaxpar.pipeline.run.traced_model import Model, TracedModel

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Around:
    """Runs functions of a tick on the stages, or on the replicas with `pipe` left to XLA.

    Attributes:
      mesh: With an axis `pipe`.
      batch_axes: Manual axes whose devices have different examples.
      stages: Context manager in which the code of a stage is traced.
      head: Context manager in which embedding and head are traced.
      place: As for `execute`, inside of a stage.
      place_head: Puts gradients of embedding and head into their sharding over pipe and tensor.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    stages: Callable
    head: Callable
    place: Callable[[str, Tree], Tree]
    place_head: Callable[[Tree], Tree]

    def on_stages(self, function: Callable) -> Callable:
        """Returns a function of (rows, layers, known, *stacked) that runs on every stage and replica.

        Its results are stacked: [stages, replicas, ...].
        """
        # stacked arrays: dim 0 over the stages, dim 1 over the replicas, so each device has exactly one entry of each
        over = PartitionSpec("pipe", self.batch_axes)

        def local(rows, layers, known, *stacked):
            known, stacked = _peeled(known, 1), _peeled(stacked, 2)
            with self.stages():
                return _wrapped(function(rows[0], layers, known, *stacked), 2)

        def run(rows, layers, known, *stacked):
            specs = (PartitionSpec("pipe"), PartitionSpec("pipe"), PartitionSpec(self.batch_axes))
            return self._island({"pipe", *self.batch_axes}, local, (*specs, *(over,) * len(stacked)), over)(
                rows, layers, known, *stacked
            )

        return run

    def on_replicas(self, function: Callable) -> Callable:
        """Returns a function of (shared, *stacked) that runs on every replica of the batch, `pipe` left to XLA.

        Its results are stacked: [replicas, ...].
        """
        over = PartitionSpec(self.batch_axes)

        def local(shared, *stacked):
            with self.head():
                return _wrapped(function(shared, *_peeled(stacked, 1)), 1)

        def run(shared, *stacked):
            specs = (PartitionSpec(), *(over,) * len(stacked))
            return self._island(set(self.batch_axes), local, specs, over)(shared, *stacked)

        return run

    def known(self, function: Callable) -> Callable:
        """Returns a function of (replica, model states, batch) on every replica; its results are stacked."""
        each = PartitionSpec(self.batch_axes)

        def local(*args):
            return _wrapped(function(*args), 1)

        return self._island(set(self.batch_axes), local, (each, PartitionSpec(), each), each)

    def reduced(self, layers: Tree, ends: Tree) -> tuple[Tree, Tree]:
        """Returns gradients summed over all batch axes but `data`, which becomes a leading dim.

        `layers` have shape [data, layers, ...], `ends` (embedding and head) [data, ...].
        """
        # XLA sums over `data` afterwards, where it sees the final sharding and can scatter; a `psum` over all axes at
        # once would all-reduce the full gradient
        over = tuple(axis for axis in self.batch_axes[1:] if self.mesh.shape[axis] > 1)  # XLA refuses sums over one
        each = PartitionSpec(self.batch_axes)

        def total(tree: Tree) -> Tree:
            return jax.tree.map(lambda x: jax.lax.psum(x, over) if over else x, tree)

        def stage(layers):
            return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), total(_peeled(layers, 2)))

        stacked = PartitionSpec("pipe", self.batch_axes)
        island = self._island({"pipe", *self.batch_axes}, stage, (stacked,), PartitionSpec("data", "pipe"))
        whole = self._island(
            set(self.batch_axes), lambda x: _wrapped(total(_peeled(x, 1)), 1), (each,), PartitionSpec("data")
        )
        return island(layers), whole(ends)

    def _island(self, axes: set[str], local: Callable, specs: tuple, out: Any) -> Callable:
        return jax.shard_map(local, mesh=self.mesh, axis_names=axes, in_specs=specs, out_specs=out, check_vma=False)


class Spread:
    """Runs a table whose embedding and head are spread over the stages.

    Args:
      program: Of a phased table.
      model: Its embedding, layers and head.
      around: Where they run.
      layers: Parameters of the stack, leading dim stages x chunks x layers of a chunk.
      embedding: Shared parameters that `model.embed` reads, split over `pipe` and `tensor` where their names say so.
      head: Those that `model.head` reads, likewise.
      known: As for `execute`, with a leading dim for the replicas of the batch.
    """

    def __init__(self, program: Program, model: Model, around: Around, layers, embedding, head, known, *, keep: Keep):
        self.program, self.model, self.around = program, model, around
        self.keep: Keep = keep
        self.layers, self.embedding, self.head, self.known = layers, embedding, head, known
        self.forward_only = not program.kept
        self.traced: TracedModel | None = None
        self.x: Tree = None
        self.first, _ = program.schedule.place(0)
        self.last, _ = program.schedule.place(program.schedule.parts - 1)

    def run(self, fill: float) -> dict:
        """Returns the buffers after the last tick: of `stages`, and sums of `ends`, stacked over the devices."""
        rows = jnp.asarray(self.program.rows)
        # tracing the first island also fills `self.traced` and `self.x`, which every later tick reuses
        state = {"stages": self._on_stages(lambda stage, row: stage.start(fill, head=False))(rows[0])}
        y = jax.tree.map(lambda leaf: jnp.zeros((self.around_replicas, *leaf.shape), leaf.dtype), self.x)
        state["ends"] = self.around.on_replicas(self._start)(self.embedding | self.head, self.known, y)
        return run_table(self.program, self.tick, state, rows)

    @property
    def around_replicas(self) -> int:
        """Replicas of the batch."""
        return int(np.prod([self.around.mesh.shape[axis] for axis in self.around.batch_axes]))

    def tick(self, kind: TickKind, state: dict, rows: jax.Array) -> dict:
        """Runs one tick: rows [stages, columns]."""
        # the table is phased: an op per tick, known while tracing, so that Python and not XLA decides what is run
        (op,) = kind.ops
        x = (self._looked_up(rows),) if kind.first and op != "W" else ()
        if kind.last and op == "F":
            return self._with_head(kind, state, rows, x)

        def step(stage: Stage, row: Row, state: dict, *x: Tree):
            (stage.embedded,) = x or (None,)  # outside of ticks of the first part no stage needs an embedding
            ops = {"F": stage.forward, "B": stage.backward, "W": stage.weights}
            done = ops[op](kind, state, row, stage.masked(row, op))
            return _changed(state, stage.write(kind, state, row, done)), done.out

        stages, out = self._on_stages(step)(rows, state["stages"], *x)
        stages = state["stages"] | stages
        if not kind.first or op != "B":
            return state | {"stages": stages}
        number, microbatch, part = (rows[self.first, COLUMNS.index(key)] for key in ("op", "microbatch", "part"))
        # kinds are shared between ticks, so in some of these ticks the first stage idles or runs another of its parts:
        # then zeros are added
        mine = (number == OP_NUMBER["B"]) & (part == 0)
        dx = jax.tree.map(lambda leaf: jnp.where(mine, leaf[self.first], 0).astype(leaf.dtype), out)
        back = self.around.on_replicas(self._embed_back)
        ends = back(self.embedding, self.known, dx, state["ends"], self._each(microbatch))
        return {"stages": stages, "ends": ends}

    def _looked_up(self, rows: jax.Array) -> Tree:
        """Returns the embedded input of the first stage in this tick, for every stage."""

        def embed(shared: Tree, known: Tree, microbatch: jax.Array) -> Tree:
            return self.model.embed(shared, load(known, microbatch))[0]

        microbatch = self._each(rows[self.first, COLUMNS.index("microbatch")])
        return self._everywhere(self.around.on_replicas(embed)(self.embedding, self.known, microbatch))

    def _with_head(self, kind: TickKind, state: dict, rows: jax.Array, x: tuple) -> dict:
        """Runs a tick that goes forward to the head."""

        # `write` without `out` stores what the forward kept and sends nothing: the message of the last stage, dL/dy,
        # is known only after the head, so all stages send in `deliver`
        def chunk(stage: Stage, row: Row, state: dict, *x: Tree):
            (stage.embedded,) = x or (None,)
            done = stage.forward(kind._replace(last=False), state, row, stage.masked(row, "F"))
            return _changed(state, stage.write(kind, state, row, done._replace(out=None))), done.out

        # the last stage sends itself the gradient of its output, all others send their output on
        def deliver(stage: Stage, row: Row, state: dict, y: Tree, dy: Tree):
            last = (row.op == OP_NUMBER["F"]) & (row.part == self.program.schedule.parts - 1)
            out = jax.tree.map(lambda a, b: jnp.where(last, a, b), dy, y)
            return _changed(state, stage.send(kind, state, row, out))

        stages, y = self._on_stages(chunk)(rows, state["stages"], *x)
        stages = state["stages"] | stages
        microbatch = self._each(rows[self.last, COLUMNS.index("microbatch")])
        out = jax.tree.map(lambda leaf: leaf[self.last], y)
        ends, dy = self.around.on_replicas(self._head)(self.head, self.known, out, state["ends"], microbatch)
        delivered = self._on_stages(deliver)(rows, stages, y, self._everywhere(dy))
        return {"stages": stages | delivered, "ends": ends}

    def _each(self, number: jax.Array) -> jax.Array:
        """Returns a number with a leading dim of replicas."""
        return jnp.broadcast_to(number, (self.around_replicas,))

    def _everywhere(self, tree: Tree) -> Tree:
        """Returns [replicas, ...] as [stages, replicas, ...]."""
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.program.schedule.stages, *leaf.shape)), tree)

    def _on_stages(self, function: Callable) -> Callable:
        """Returns a function of (rows, *stacked) that runs `function(stage, row, *stacked)` on every stage."""

        def local(numbers, layers, known, *stacked):
            # `shared` is empty: embedding and head run outside. The model is traced once and handed to later ticks,
            # else every body of a loop would trace it again
            stage = Stage(
                self.program, self.model, {}, layers, known,
                keep=self.keep, place=self.around.place, traced=self.traced,
            )  # fmt: skip
            self.traced, self.x = stage.traced, stage.traced.x
            return function(stage, Row(*(numbers[i] for i in range(len(COLUMNS)))), *stacked)

        island = self.around.on_stages(local)
        return lambda rows, *stacked: island(rows, self.layers, self.known, *stacked)

    def _start(self, shared: Tree, known: Tree, y: Tree) -> dict:
        # sums in float32 or more, whatever the gradients are: in bfloat16 a sum of many microbatches stops growing
        one = jax.tree.map(lambda leaf: leaf[0], known)
        sums = Traced(self.model.head, shared, one, y).shapes
        zeros = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)))
        return {"sums": zeros(sums), "shared": {} if self.forward_only else self.around.place_head(zeros(shared))}

    def _head(self, shared: Tree, known: Tree, y: Tree, state: dict, microbatch: jax.Array):
        one = load(known, microbatch)

        def total(shared, y):
            sums = self.model.head(shared, one, y)
            return sums["loss"][0], sums

        if self.forward_only:
            return state | {"sums": jax.tree.map(jnp.add, state["sums"], total(shared, y)[1])}, y
        _, pull, sums = jax.vjp(total, shared, y, has_aux=True)
        dshared, dy = pull(jnp.ones((), jnp.float32))
        shared, dy = jax.lax.optimization_barrier((self._added(state, dshared), dy))  # as in `Stage.forward`
        return {"sums": jax.tree.map(jnp.add, state["sums"], sums), "shared": shared}, dy

    def _embed_back(self, shared: Tree, known: Tree, dx: Tree, state: dict, microbatch: jax.Array) -> dict:
        _, pull = jax.vjp(lambda shared: self.model.embed(shared, load(known, microbatch))[0], shared)
        return state | {"shared": self._added(state, pull(dx)[0])}

    def _added(self, state: dict, more: Tree) -> Tree:
        """Returns the sums of gradients with those of one end."""
        return state["shared"] | self.around.place_head({path: add(state["shared"][path], more[path]) for path in more})


def _changed(before: dict, after: dict) -> dict:
    """Returns the entries that an op has changed: XLA copies what comes back from the stages, in every tick."""
    return {key: value for key, value in after.items() if value is not before[key]}


def _peeled(tree: Tree, dims: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[dims:]), tree)


def _wrapped(tree: Tree, dims: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf.reshape((1,) * dims + leaf.shape), tree)
