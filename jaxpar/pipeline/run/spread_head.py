"""Runs embedding and head on all stages, instead of on the first and the last stage.

    a tick with the head     all stages      the chunk                          y stays on its stage
                             all devices     the head on the last stage's y     its matrix split over pipe x tensor
                             all stages      write and send; dL/dy on the last stage
    with the embedding       all devices     look x up, forward and backward    its table split over pipe x tensor
                             all stages      the chunk, write and send          the first stage reads x
                             all devices     add dL/dx to the table's gradient  backward only

If head and loss run on the last stage, all stages wait for it in every tick with a loss, and every stage holds
embedding and head unsharded, with the sums of their gradients. Here XLA shards them over `pipe` too, by the names of
their dims. This sends arrays of [tokens, dim] over `pipe`, two per microbatch for the head and three for the embedding,
and the sums of the loss; it divides the time of the head by the number of stages.

Tables must be phased, so that the ticks in which the last part runs forward are known at compile time. A tick is up to
three `shard_map`s in sequence, in which `pipe` is manual for the stages and automatic for embedding and head (XLA
cannot nest them in this order), so buffers are global arrays here, with a dim for stages and a dim for batch replicas
in front.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpar.jaxprs.dataflow import Traced
from jaxpar.pipeline.run.execute import initial_state, run_masked, run_table, send, write
from jaxpar.pipeline.run.model_functions import PipelineFunctions, PipelineModel
from jaxpar.pipeline.run.stage import Keep, Stage
from jaxpar.pipeline.run.stage_buffers import load
from jaxpar.pipeline.run.stage_gradients import add
from jaxpar.pipeline.run.tick_program import COLUMNS, OP_NUMBER, Program, TableRow, TickKind

Tree = Any


@dataclass(frozen=True, kw_only=True)
class ShardMaps:
    """Wraps functions of a tick in `shard_map`: over stages and replicas, or over replicas with `pipe` left to XLA.

    Attributes:
      mesh: A mesh with an axis `pipe`.
      batch_axes: Manual axes that split examples.
      stages: Context manager around the trace of a stage.
      head: Context manager around the trace of embedding and head.
      constrain: As for `execute`, inside of a stage.
      shard_head: Constrains gradients of embedding and head to their sharding over pipe and tensor.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    stages: Callable
    head: Callable
    constrain: Callable[[str, Tree], Tree]
    shard_head: Callable[[Tree], Tree]

    def map_stages(self, function: Callable) -> Callable:
        """Wraps a function of (rows, layers, inputs, *stacked) to run on every stage and replica.

        Its results are stacked: [stages, replicas, ...].
        """
        # stacked arrays: dim 0 over the stages, dim 1 over the replicas, so each device has one entry
        spec = PartitionSpec("pipe", self.batch_axes)

        def run_local(rows, layers, inputs, *stacked):
            inputs, stacked = _drop_dims(inputs, 1), _drop_dims(stacked, 2)
            with self.stages():
                return _add_dims(function(rows[0], layers, inputs, *stacked), 2)

        def run(rows, layers, inputs, *stacked):
            specs = (PartitionSpec("pipe"), PartitionSpec("pipe"), PartitionSpec(self.batch_axes))
            return self._island({"pipe", *self.batch_axes}, run_local, (*specs, *(spec,) * len(stacked)), spec)(
                rows, layers, inputs, *stacked
            )

        return run

    def map_replicas(self, function: Callable) -> Callable:
        """Wraps a function of (shared, *stacked) to run on every replica of the batch, where XLA handles `pipe`.

        Its results are stacked: [replicas, ...].
        """
        stacked_spec = PartitionSpec(self.batch_axes)

        def run_local(shared, *stacked):
            with self.head():
                return _add_dims(function(shared, *_drop_dims(stacked, 1)), 1)

        def run(shared, *stacked):
            specs = (PartitionSpec(), *(stacked_spec,) * len(stacked))
            return self._island(set(self.batch_axes), run_local, specs, stacked_spec)(shared, *stacked)

        return run

    def map_inputs(self, function: Callable) -> Callable:
        """Wraps a function of (replica, model states, batch) to run on every replica; its results are stacked."""
        spec = PartitionSpec(self.batch_axes)

        def run_local(*args):
            return _add_dims(function(*args), 1)

        return self._island(set(self.batch_axes), run_local, (spec, PartitionSpec(), spec), spec)

    def reduce_gradients(self, layers: Tree, ends: Tree) -> tuple[Tree, Tree]:
        """Sums gradients over all batch axes except `data`, which becomes dim 0.

        `layers` have shape [data, layers, ...], `ends` (embedding and head) [data, ...].
        """
        # XLA sums over `data` later, where it sees the final sharding and can scatter; a `psum` over all axes would
        # all-reduce the full gradient
        axes = tuple(axis for axis in self.batch_axes[1:] if self.mesh.shape[axis] > 1)  # XLA refuses sums over size 1
        spec = PartitionSpec(self.batch_axes)

        def total(tree: Tree) -> Tree:
            return jax.tree.map(lambda x: jax.lax.psum(x, axes) if axes else x, tree)

        def stage(layers):
            return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), total(_drop_dims(layers, 2)))

        stacked = PartitionSpec("pipe", self.batch_axes)
        reduce_layers = self._island({"pipe", *self.batch_axes}, stage, (stacked,), PartitionSpec("data", "pipe"))
        reduce_ends = self._island(
            set(self.batch_axes), lambda x: _add_dims(total(_drop_dims(x, 1)), 1), (spec,), PartitionSpec("data")
        )
        return reduce_layers(layers), reduce_ends(ends)

    def _island(self, axes: set[str], function: Callable, specs: tuple, out: object) -> Callable:
        return jax.shard_map(function, mesh=self.mesh, axis_names=axes, in_specs=specs, out_specs=out, check_vma=False)


class SpreadTable:
    """Runs a table whose embedding and head are spread over the stages.

    Args:
      program: The program of a phased table.
      model: Its embedding, layers and head.
      maps: Runs functions on the stages and on the replicas.
      layers: Parameters of the stack; dim 0 is stages x chunks x layers per chunk.
      embedding: Shared parameters that `model.embed` reads, split over `pipe` and `tensor` by the names of their dims.
      head: Shared parameters that `model.head` reads, likewise.
      inputs: As for `execute`, with a dim for the replicas of the batch in front.
    """

    def __init__(
        self,
        program: Program,
        model: PipelineFunctions,
        maps: ShardMaps,
        layers,
        embedding,
        head,
        inputs,
        *,
        keep: Keep,
    ):
        self.program, self.model, self.maps = program, model, maps
        self.keep: Keep = keep
        self.layers, self.embedding, self.head, self.inputs = layers, embedding, head, inputs
        self.forward_only = not program.residual_slots
        self.traced_model: PipelineModel | None = None
        self.x: Tree = None
        self.first, _ = program.schedule.locate(0)
        self.last, _ = program.schedule.locate(program.schedule.parts - 1)

    def run(self, fill: float) -> dict:
        """Runs all ticks; returns the stages' buffers, and the sums of embedding and head, stacked over devices."""
        rows = jnp.asarray(self.program.rows)
        # the trace of the first island also sets `self.traced_model` and `self.x`, which later ticks reuse
        state = {"stages": self._map_stages(lambda stage, row: initial_state(stage, fill, head=False))(rows[0])}
        y = jax.tree.map(lambda leaf: jnp.zeros((self.replica_count, *leaf.shape), leaf.dtype), self.x)
        state["ends"] = self.maps.map_replicas(self._initial_sums)(self.embedding | self.head, self.inputs, y)
        return run_table(self.program, self.tick, state, rows)

    @property
    def replica_count(self) -> int:
        """Number of replicas of the batch."""
        return int(np.prod([self.maps.mesh.shape[axis] for axis in self.maps.batch_axes]))

    def tick(self, kind: TickKind, state: dict, rows: jax.Array) -> dict:
        """Runs one tick. Shape of rows: [stages, columns]."""
        # the table is phased: one op per tick, known while tracing, so that Python branches and not XLA
        (op,) = kind.ops
        x = (self._embed_input(rows),) if kind.first and op != "W" else ()
        if kind.last and op == "F":
            return self._run_head_tick(kind, state, rows, x)

        def step(stage: Stage, row: TableRow, state: dict, *x: Tree):
            (stage.embeddings,) = x or (None,)  # only ticks of the first part need the embedding
            result = run_masked(stage, kind, state, row)
            return _select_changes(state, write(stage, kind, state, row, result)), result.out

        stages, out = self._map_stages(step)(rows, state["stages"], *x)
        stages = state["stages"] | stages
        if not kind.first or op != "B":
            return state | {"stages": stages}
        number, microbatch, part = (rows[self.first, COLUMNS.index(key)] for key in ("op", "microbatch", "part"))
        # ticks share kinds: in some of these ticks the first stage idles or runs another part, and adds zeros
        active = (number == OP_NUMBER["B"]) & (part == 0)
        dx = jax.tree.map(lambda leaf: jnp.where(active, leaf[self.first], 0).astype(leaf.dtype), out)
        back = self.maps.map_replicas(self._embed_vjp)
        ends = back(self.embedding, self.inputs, dx, state["ends"], _broadcast_tree(self.replica_count, microbatch))
        return {"stages": stages, "ends": ends}

    def _embed_input(self, rows: jax.Array) -> Tree:
        """Embeds the first stage's input of this tick, and copies the result to every stage."""

        def embed(shared: Mapping[str, object], inputs: Tree, microbatch: jax.Array) -> Tree:
            return self.model.embed(shared, load(inputs, microbatch))[0]

        microbatch = _broadcast_tree(self.replica_count, rows[self.first, COLUMNS.index("microbatch")])
        return _broadcast_tree(
            self.program.schedule.stages, self.maps.map_replicas(embed)(self.embedding, self.inputs, microbatch)
        )

    def _run_head_tick(self, kind: TickKind, state: dict, rows: jax.Array, x: tuple) -> dict:
        """Runs a tick in which the last part runs forward, and so the head."""

        # `write` without `out` stores the residuals and sends nothing: the message of the last stage, dL/dy, is known
        # only after the head, so all stages send in `deliver`
        def chunk(stage: Stage, row: TableRow, state: dict, *x: Tree):
            (stage.embeddings,) = x or (None,)
            result = run_masked(stage, kind._replace(last=False), state, row)
            return _select_changes(state, write(stage, kind, state, row, result._replace(out=None))), result.out

        # the last stage sends the gradient of its output to itself, all others send their output on
        def deliver(stage: Stage, row: TableRow, state: dict, y: Tree, dy: Tree):
            last = row.runs("F") & (row.part == self.program.schedule.parts - 1)
            out = jax.tree.map(lambda a, b: jnp.where(last, a, b), dy, y)
            return _select_changes(state, send(stage, kind, state, row, out))

        stages, y = self._map_stages(chunk)(rows, state["stages"], *x)
        stages = state["stages"] | stages
        microbatch = _broadcast_tree(self.replica_count, rows[self.last, COLUMNS.index("microbatch")])
        out = jax.tree.map(lambda leaf: leaf[self.last], y)
        ends, dy = self.maps.map_replicas(self._run_head)(self.head, self.inputs, out, state["ends"], microbatch)
        delivered = self._map_stages(deliver)(rows, stages, y, _broadcast_tree(self.program.schedule.stages, dy))
        return {"stages": stages | delivered, "ends": ends}

    def _map_stages(self, function: Callable) -> Callable:
        """Wraps `function(stage, row, *stacked)` to a function of (rows, *stacked) that runs on every stage."""

        def run_local(numbers, layers, inputs, *stacked):
            # `shared` is empty: embedding and head run outside. Later ticks reuse the traced model, which every loop
            # body would trace again otherwise
            stage = Stage(
                self.program, self.model, {}, layers, inputs,
                keep=self.keep, constrain=self.maps.constrain, traced_model=self.traced_model,
            )  # fmt: skip
            self.traced_model, self.x = stage.model, stage.model.x
            return function(stage, TableRow.read(numbers), *stacked)

        island = self.maps.map_stages(run_local)
        return lambda rows, *stacked: island(rows, self.layers, self.inputs, *stacked)

    def _initial_sums(self, shared: Mapping[str, object], inputs: Tree, y: Tree) -> dict:
        # sums in float32 or more for any dtype of gradients: in bfloat16 a sum of many microbatches stops growing
        example = load(inputs, 0)
        sums = Traced(self.model.head, shared, example, y).shapes
        zeros = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)))
        return {"sums": zeros(sums), "shared": {} if self.forward_only else self.maps.shard_head(zeros(shared))}

    def _run_head(self, shared: Mapping[str, object], inputs: Tree, y: Tree, state: dict, microbatch: jax.Array):
        example = load(inputs, microbatch)

        def total(shared, y):
            sums = self.model.head(shared, example, y)
            return sums["loss"][0], sums

        if self.forward_only:
            return state | {"sums": jax.tree.map(jnp.add, state["sums"], total(shared, y)[1])}, y
        _, pull, sums = jax.vjp(total, shared, y, has_aux=True)
        dshared, dy = pull(jnp.ones((), jnp.float32))
        # as in `execute.write`: the gradient is added up before the message is sent
        shared, dy = jax.lax.optimization_barrier((_add_grads(self.maps, state, dshared), dy))
        return {"sums": jax.tree.map(jnp.add, state["sums"], sums), "shared": shared}, dy

    def _embed_vjp(
        self, shared: Mapping[str, object], inputs: Tree, dx: Tree, state: dict, microbatch: jax.Array
    ) -> dict:
        _, pull = jax.vjp(lambda shared: self.model.embed(shared, load(inputs, microbatch))[0], shared)
        return state | {"shared": _add_grads(self.maps, state, pull(dx)[0])}


def _add_grads(maps: ShardMaps, state: dict, grads: Mapping[str, Any]) -> Tree:
    """Adds the gradients of embedding or head to the sums."""
    return state["shared"] | maps.shard_head({path: add(state["shared"][path], grads[path]) for path in grads})


def _select_changes(before: dict, after: dict) -> dict:
    """Returns only the entries that an op changes, because XLA copies the results of the stages in every tick."""
    return {key: value for key, value in after.items() if value is not before[key]}


def _broadcast_tree(count: int, tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)


def _drop_dims(tree: Tree, dims: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[dims:]), tree)


def _add_dims(tree: Tree, dims: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf.reshape((1,) * dims + leaf.shape), tree)
