"""Gradients of a model whose stages are different programs: any list of callables in `jp.pipelined`, cut into stages.

    params ─► cast ─► sent to the stages that read them ─► the table: a branch for each part ─► sums ─► sent back
                      └────────────────────── once per step ───────────────────────────────────────┘

The model's parts come from tracing its loss: part 0 begins before `jp.pipelined`, and the last part ends with the loss.
`pipe`, `data` and `fsdp` are manual while the table runs. See `jaxpar.pipeline.run.branch_table`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse
from jaxpar.jaxprs.part_programs import PartProgram
from jaxpar.mesh.chips import CHIPS
from jaxpar.parallel.declaration import FOUND
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.state_specs import update_specs
from jaxpar.parallel.techniques.context import chip_key
from jaxpar.partition.fixed_replicas import BestCut, find_stages
from jaxpar.partition.stage_costs import costs_of_parts, op_times
from jaxpar.partition.traced_chain import FORWARDS
from jaxpar.pipeline.run.branch_table import BranchTable
from jaxpar.pipeline.run.shard_exchange import ShardExchange
from jaxpar.pipeline.run.stage_buffers import load
from jaxpar.pipeline.run.stage_replicas import StageReplicas
from jaxpar.sharding.names import GRADIENT, SCOPE, Compute, Tree, leaves_by_path, nest
from jaxpar.step.frozen_parameters import zero_frozen
from jaxpar.step.gradients import Gradients, apply_gradients
from jaxpar.step.losses import Sums
from jaxpar.step.numerics import Numerics
from jaxpar.step.overwritten_state import check_overwritten, divide_by_count
from jaxpar.step.pipelined.model_state import salt_by_replica
from jaxpar.step.pipelined.shardings import Shardings, constrain, table_names
from jaxpar.step.pipelined.traced_pieces import TracedPieces, trace_pieces
from jaxpar.step.state import State

MANUAL = ("pipe", "data", "fsdp")


@dataclass(frozen=True, eq=False)
class TracedMicrobatch:
    """The loss of one microbatch of one device, with the data and state of every microbatch.

    Attributes:
      pieces: The loss.
      data: Maps the number of a microbatch to its data.
      table_state: Index to the state that the table updates, before the first microbatch.
      final_data_state: The other leaves of the state, after the last microbatch.
    """

    pieces: TracedPieces
    data: Callable[[jax.Array], list[jax.Array]]
    table_state: dict[int, jax.Array]
    final_data_state: list[jax.Array]

    def final_state(self, updated: Mapping[int, jax.Array]) -> tuple[jax.Array, ...]:
        """Returns all leaves of the state after the last microbatch, given those that the table has updated."""
        of_table = dict(zip(self.pieces.updated_leaves, updated.values(), strict=True))
        others = iter(self.final_data_state)
        return tuple(of_table[i] if i in of_table else next(others) for i in range(len(self.pieces.state)))


class UnequalStages(Gradients):
    """Gradients of a model and its loss by a table whose parts are different programs.

    Attributes:
      shardings: Shardings of the step's arrays.
      frozen: Paths of parameters whose gradients the optimizer does not read: these gradients are zero.
    """

    def __init__(self, layout: Layout, loss: Callable, numerics: Numerics, frozen: frozenset[str] = frozenset()):
        check_overwritten(layout)
        _check_layout(layout)
        self.layout, self.loss, self.numerics, self.frozen = layout, loss, numerics, frozen
        self.shardings = Shardings(layout, numerics.dtype)
        self._found: BestCut | None = None

    def gradients(self, params: Tree, model_state: Tree, batch: Mapping[str, jax.Array]) -> tuple[Tree, Sums, Tree]:
        """Returns the gradients of the mean loss over all microbatches, the loss sums, and the new model state."""
        sums, gradients, state = self._run(params, model_state, batch, train=True)
        gradients = divide_by_count(gradients, sums["loss"][1], params)
        return zero_frozen(self.frozen, self.layout, gradients), sums, state

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Mapping[str, jax.Array], on_device: Callable
    ) -> tuple[State, dict[str, jax.Array]]:
        """Updates the parameters once, by the gradients of the batch."""
        results = self.gradients(state.params, state.model_state, batch)
        return apply_gradients(self.layout, optimizer, state, results, on_device)

    def evaluate(self, params: Tree, model_state: Tree, batch: Mapping[str, jax.Array]) -> Sums:
        """Returns the loss sums of a batch; runs only the table's forwards."""
        return self._run(params, model_state, batch, train=False)[0]

    def _run(self, params: Tree, model_state: Tree, batch: Mapping[str, jax.Array], *, train: bool):
        shardings, layout = self.shardings, self.layout
        stored = {path: shardings.cast(value) for path, value in sorted(leaves_by_path(params).items())}
        specs = {path: manual_spec(layout.placements[path].stored) for path in stored}
        by_rows = PartitionSpec(shardings.batch_axes)

        def local(replica, params, model_state, batch):
            with table_names(layout):
                traced = self._trace(stored, model_state, batch, replica[0], train=train)
                table = self._table(traced.pieces, stored, train=train)
                exchange = ShardExchange(table.buffers, table.replicas, specs, layout.sizes)
                with jax.named_scope(f"{SCOPE}parameters sent to the stages"):
                    buffers = exchange.send_params(params)
                outs, gradients, updated = table.run(buffers, traced.data, traced.table_state)
            sums = jax.tree.unflatten(traced.pieces.sums, outs)
            sums = jax.tree.map(lambda x: jax.lax.psum(x, ("pipe", *shardings.batch_axes)), sums)
            if not train:
                return sums, {}, ()
            with jax.named_scope(GRADIENT):
                found = exchange.send_gradients(gradients, shardings.batch_axes)
            gradients = {path: found.get(path, jnp.zeros(value.shape, jnp.float32)) for path, value in params.items()}
            return sums, gradients, traced.final_state(table.mean_state(updated, shardings.batch_axes))

        sums, gradients, state = jax.shard_map(
            local,
            mesh=layout.device_mesh,
            axis_names=set(shardings.manual_axes),
            in_specs=(by_rows, specs, PartitionSpec(), by_rows),
            out_specs=(PartitionSpec(), specs if train else {}, PartitionSpec()),
            check_vma=False,
        )(jnp.arange(shardings.replicas), stored, model_state, batch)
        if not train:
            return sums, {}, model_state
        gradients = nest({tuple(path.split("/")): value for path, value in gradients.items()})
        gradients = jax.tree.map(partial(constrain, layout), gradients, update_specs(layout))
        return sums, gradients, jax.tree.unflatten(jax.tree.structure(model_state), state)

    def _trace(
        self, stored: Mapping[str, jax.Array], model_state: Tree, batch: Mapping[str, jax.Array], replica: jax.Array,
        *, train: bool,
    ) -> "TracedMicrobatch":  # fmt: skip
        """Traces the loss of a microbatch of one device, and computes the state that does not follow from it."""
        layout, shardings, count = self.layout, self.shardings, self.layout.microbatches
        compute = Compute(train=train, dtype=shardings.dtype, remat=self.numerics.remat)
        whole = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in stored.items()}
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model_state)
        microbatch = {
            name: jax.ShapeDtypeStruct((len(leaf) // count, *leaf.shape[1:]), leaf.dtype)
            for name, leaf in batch.items()
        }
        pieces = trace_pieces(layout, self.loss, compute, shardings.cast, whole, shapes, microbatch)
        # rows i, i + count, ... are microbatch i; dim 0 stays that of rows, because XLA would copy the batch
        rows = [leaf.reshape(len(leaf) // count, count, *leaf.shape[1:]) for leaf in jax.tree.leaves(batch)]
        state = jax.tree.leaves(model_state)
        if train:
            each, after = pieces.compute_data_state(state, count)
        else:
            each, after = [jnp.broadcast_to(leaf, (count, *leaf.shape)) for leaf in state], state
        each = salt_by_replica(each, replica, shardings.replicas)

        def data(microbatch: jax.Array) -> list[jax.Array]:
            of_batch = (jax.lax.dynamic_index_in_dim(leaf, microbatch, 1, keepdims=False) for leaf in rows)
            return [*load(each, microbatch), *of_batch]

        updated = {i: state[leaf] for i, leaf in enumerate(pieces.updated_leaves)} if train else {}
        return TracedMicrobatch(pieces, data, updated, after)

    def _table(self, pieces: TracedPieces, stored: Mapping[str, jax.Array], *, train: bool) -> BranchTable:
        """Cuts the pieces into parts, and lays out their table."""
        layout, keep = self.layout, self.layout.parallel.pipeline.keep
        replicas, parts = self._cut_parts(pieces, train=train)
        whole = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in stored.items()}
        table = BranchTable(layout.schedule, replicas, parts, whole, loss=pieces.loss, train=train, keep=keep)
        if train:
            self._write_note(table, stored)
        return table

    def _write_note(self, table: BranchTable, stored: Mapping[str, jax.Array], versions: int = 1) -> None:
        """Describes the stages that were found, and what the table costs with this many versions of the weights."""
        found, schedule = self._found, self.layout.schedule
        if found is None:
            return
        forwards = [seconds / FORWARDS for seconds in found.chain.seconds]
        times = op_times(forwards, found.stages, split=schedule.split, keep=self.layout.parallel.pipeline.keep)
        shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in stored.values()]
        costs = costs_of_parts(table.parts, shapes, schedule, times, table.residuals)
        costs = replace(costs, parameters=versions * costs.parameters)
        self.notes = (str(replace(found, costs=costs)),)

    def _cut_parts(self, pieces: TracedPieces, *, train: bool) -> tuple[StageReplicas, list[PartProgram]]:
        layout, stages = self.layout, self.layout.parallel.pipeline.stages
        replicas = StageReplicas(tuple(layout.parallel.pipeline.replicas or (1,) * layout.schedule.stages))
        if stages == FOUND:
            self._found = self._find_stages(pieces, replicas)
            stages = self._found.stages
        else:
            _check_pieces(pieces, stages)
        return replicas, pieces.parts(stages, train=train)

    def _find_stages(self, pieces: TracedPieces, replicas: StageReplicas) -> BestCut:
        """Finds the number of pieces of each part. Simulated devices stand for H100s."""
        schedule, key = self.layout.schedule, chip_key(self.layout) or "h100"
        chip = next(chip for chip in CHIPS if chip.key == key)
        counts = [replicas.counts[schedule.locate(part)[0]] for part in range(schedule.parts)]
        return find_stages(pieces.chain(chip), counts, chip)


def manual_spec(spec: PartitionSpec) -> PartitionSpec:
    """Returns the part of a spec that is over axes of `MANUAL`."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return PartitionSpec(*(tuple(axis for axis in axes if axis in MANUAL) or None for axes in entries))


def _check_layout(layout: Layout) -> None:
    """Refuses axes and parameters that parts of different programs do not run with."""
    other = {axis: size for axis, size in layout.sizes.items() if size > 1 and axis not in MANUAL}
    stages = layout.parallel.pipeline.stages
    if other:
        axis, size = next(iter(other.items()))
        raise refuse(
            f"pipeline.stages={stages} with {axis}={size}",
            rule=f"stages of different programs run over {', '.join(MANUAL)}: a collective over {axis} inside of one "
            "would wait for stages that run another",
            fix=f"{axis}=1, and fsdp={layout.sizes['fsdp'] * size}",
        )
    if layout.blueprint.adapters:
        raise refuse(
            f"adapters with pipeline.stages={stages}",
            rule="a stage of different programs has gradients of all parameters that it reads",
            fix="pipe=1, or equal layers in one stack",
        )
    if short := [path for path, place in layout.placements.items() if place.leaf.dtype == jnp.float16]:
        raise refuse(
            f"{short[0]} in float16 with pipeline.stages={stages}",
            rule="stages make gradients of the summed loss, which float16 may not hold",
            fix="parameters in bfloat16 or float32, or pipe=1",
        )


def _check_pieces(pieces: TracedPieces, stages: Sequence[int]) -> None:
    if pieces.pieces == sum(stages):
        return
    got = f"{pieces.pieces} pieces" if pieces.pieces else "no list of pieces"
    raise refuse(
        f"{pieces.name} gives jp.pipelined {got}, and pipeline.stages cuts {sum(stages)}",
        rule="pipeline.stages has the number of pieces of each stage, in a list that jp.pipelined(pieces, x) runs",
        fix=f"numbers that sum to {pieces.pieces}" if pieces.pieces else "x = jp.pipelined([piece, ...], x)",
    )
