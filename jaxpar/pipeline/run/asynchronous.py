"""Asynchronous updates (PipeDream): a stage updates its weights inside the table, so microbatches read old weights.

    weights      an F reads                          a B differentiates at        equivalent to
    stash        the newest of its stage             the weights of its F         a replay at the recorded weights
    vertical     the newest of stage 0 when the      the weights of its F         SGD with gradients P - 1 updates late
                 microbatch entered
    2bw          those of the batch before last      the weights of its F         SGD with gradients 1 update late
    none         the newest of its stage             the newest of its stage      nothing: it is no function's gradient

The number of a version of the weights is its number of updates, and a stage stores the last few versions. The table
gives the version that each cell reads, and the cells after which the stage updates. The optimizer is the user's optax
chain on the parameters of one stage, so a global norm is the norm of a stage.

Sources: PipeDream, Narayanan et al. 2019, arXiv:1806.03377, sections 3.2 and 3.3; PipeDream-2BW, Narayanan et al. 2021,
arXiv:2006.09503, section 3.1, w(t+1) = w(t) - rate x gradient(w(t-1)), here with as many microbatches per update as
there are stages, the fewest for which two versions are enough.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.errors import refuse
from jaxpar.optim import step_inputs
from jaxpar.pipeline.run.execute import initial_state, run_table, run_tick
from jaxpar.pipeline.run.model_functions import PipelineFunctions
from jaxpar.pipeline.run.stage import Keep, Stage
from jaxpar.pipeline.run.stage_buffers import load, store
from jaxpar.pipeline.run.tick_program import COLUMNS, Program, TableRow, TickKind, program
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.sharding.names import SCOPE

Tree = Any
Weights = Literal["flush", "stash", "vertical", "2bw", "none"]
VERSIONS = f"{SCOPE}versions of the weights"  # the scope by which the inspector finds and names this memory


@dataclass(frozen=True, kw_only=True)
class VersionPlan:
    """The version of the weights that each cell of a table reads, and the cells after which the stage updates.

    Attributes:
      program: The table, whose rows have the columns `version` and `update`.
      per_update: Number of microbatches per update.
      versions: Number of versions that a stage stores at once, including the newest.
    """

    program: Program
    per_update: int
    versions: int


def microbatches_per_update(weights: Weights, table: Schedule) -> int:
    """Returns the number of microbatches per update."""
    return {"flush": table.microbatches, "2bw": table.stages}.get(weights, 1)


def plan_versions(program: Program, weights: Weights) -> VersionPlan:
    """Finds the version of the weights that each cell of a table reads, and the cells after which stages update.

    Raises:
      JaxparError: If backward is split, a stage has several chunks, or (2bw) the number of stages does not divide the
        number of microbatches.
    """
    table = program.schedule
    if table.split or table.chunks > 1:
        raise refuse(
            f"weights={weights!r} with schedule {table.name}",
            rule="weights other than 'flush' need a schedule with one chunk per stage whose backward is not split in B "
            "and W",
            fix='schedule="1f1b", PipeDream\'s own',
        )
    _check_order(table, weights)
    per_update = microbatches_per_update(weights, table)
    if table.microbatches % per_update:
        raise refuse(
            f"weights='2bw' with microbatches={table.microbatches} on pipe={table.stages}",
            rule="with weights='2bw' the microbatches are a multiple of the stages, as each update takes one per stage",
            fix=f"microbatches={-(-table.microbatches // per_update) * per_update}",
        )
    rows = program.rows.copy()
    version, update = COLUMNS.index("version"), COLUMNS.index("update")
    rows[..., version:] = 0  # the last two columns, -1 in tables with a flush
    updates = [0] * table.stages
    versions_read: dict[tuple[int, int], int] = {}
    entered: dict[int, int] = {}
    versions = 1
    for tick, row in enumerate(table.cells):
        for stage, cell in enumerate(row):
            if cell is None:
                continue
            if cell.op == "F":
                # `entered` is set by the first stage, which runs the first F of every microbatch
                entered.setdefault(cell.microbatch, updates[stage])
                delayed = {"vertical": entered[cell.microbatch], "2bw": max(cell.microbatch // per_update - 1, 0)}
                versions_read[stage, cell.microbatch] = delayed.get(weights, updates[stage])
            elif weights == "none":
                # this B reads other weights than its F; otherwise it has the version that its F read
                versions_read[stage, cell.microbatch] = updates[stage]
            needed = versions_read[stage, cell.microbatch]
            if needed > updates[stage]:
                raise refuse(
                    f"tick {tick}, stage {stage} of {table.name}: {cell} needs {needed} updates, {updates[stage]} made",
                    rule=f"with weights={weights!r} no cell reads a version of the weights that its stage has not made",
                    fix='schedule="1f1b", in which every stage has made it by then',
                )
            versions = max(versions, updates[stage] - needed + 1)
            rows[tick, stage, version] = needed
            rows[tick, stage, update] = cell.op == "B" and (cell.microbatch + 1) % per_update == 0
        for stage in range(table.stages):  # after the tick, whose cells still read the previous version
            updates[stage] += int(rows[tick, stage, update])
    return VersionPlan(program=replace(program, rows=rows), per_update=per_update, versions=versions)


def _check_order(table: Schedule, weights: Weights) -> None:
    """Refuses tables in which an update would contain gradients of another update's microbatches."""
    finished, last = [0] * table.stages, table.locate(table.parts - 1)[0]
    entered = 0
    for tick, stage, (op, microbatch, _) in table:
        # the last stage's F already adds the head's gradient: a second F before the B would add that of the next update
        early_forward = stage == last and op == "F" and entered > finished[last]
        if early_forward or (op == "B" and microbatch != finished[stage]):
            raise refuse(
                f"weights={weights!r} with schedule {table.name}: tick {tick}, stage {stage}: {op}{microbatch}",
                rule="with weights other than 'flush', backwards come in the order of microbatches, and on the last "
                "stage each comes before the next forward",
                fix='schedule="1f1b", PipeDream\'s own',
            )
        entered += stage == last and op == "F"
        finished[stage] += op == "B"


class StageResult(NamedTuple):
    """The results of one stage after the last tick.

    Attributes:
      sums: Name to (sum, count); zero on all stages except the last.
      params: The newest parameters (shared, layers).
      optimizer: The optimizer's state of these parameters.
      square: Sum of the squares of the last update's gradients.
    """

    sums: Any
    params: tuple[Tree, Tree]
    optimizer: Any
    square: jax.Array


@dataclass(frozen=True, kw_only=True)
class AsynchronousTable:
    """Runs a table on a stage, including updates of the weights.

    Attributes:
      plan: Result of `plan_versions`.
      model: Its embedding, layers and head.
      update: Maps (gradients, optimizer state, params) to (params, optimizer state, sum of the gradients' squares).
      constrain: As for `execute`.
      keep: As for `execute`.
      fill: As for `execute`.
    """

    plan: VersionPlan
    model: PipelineFunctions
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any, jax.Array]]
    constrain: Callable[[str, Tree], Tree]
    keep: Keep = "inputs"
    fill: float = 0.0

    def train(
        self, rows: jax.Array, params: tuple[Tree, Tree], optimizer_state: Tree, inputs: Tree, *, scales: jax.Array
    ) -> StageResult:
        """Runs the table on this stage.

        Args:
          rows: This stage's rows.
          params: (shared, layers) of this stage.
          optimizer_state: The optax state of these parameters.
          inputs: As for `execute`.
          scales: Cotangent of each microbatch's loss: 1 / tokens of its update. Shape [microbatches].
        """
        plan, stage = self.plan, _VersionedStage(self, params, inputs, scales)
        chunked = (params[0], stage.chunks)
        with jax.named_scope(VERSIONS):  # a ring buffer: version n is in slot n % versions
            versions = jax.tree.map(lambda x: jnp.broadcast_to(x, (plan.versions, *x.shape)), chunked)
        state = initial_state(stage, self.fill) | {
            "history": versions,
            "optimizer": optimizer_state,
            "updates": jnp.zeros((), jnp.int32),
            "square": jnp.zeros((), jnp.float32),
        }
        state = run_table(plan.program, partial(self._run_tick, stage), state, rows)
        shared, chunks = load(state["history"], state["updates"] % plan.versions)
        params = (shared, jax.tree.map(lambda x: x[0], chunks))
        return StageResult(state["sums"], params, state["optimizer"], state["square"])

    def _run_tick(self, stage: Stage, kind: TickKind, state: dict, numbers: jax.Array) -> dict:
        """Runs one tick, then the update that follows it."""
        state = run_tick(stage, kind, state, numbers)
        row, versions = TableRow.read(numbers), self.plan.versions
        active = (row.update == 1) & (row.op > 0)
        # computes the update in every tick and drops most: stages update in different ticks, and XLA copies the buffers
        # that a conditional writes
        params = load(state["history"], state["updates"] % versions)
        gradients = (state["shared"], state["layers"])
        new_params, optimizer, square = self.update(gradients, state["optimizer"], params)
        update_count = state["updates"] + active.astype(jnp.int32)
        select = lambda a, b: jax.tree.map(lambda x, y: jnp.where(active, x, y), a, b)  # noqa: E731
        zeros = jax.tree.map(jnp.zeros_like, gradients)
        shared, layers = select(zeros, gradients)  # after an update the sums restart at zero
        with jax.named_scope(VERSIONS):
            new_history = store(state["history"], new_params, update_count % versions, active)
        return state | {
            "history": new_history,
            "optimizer": select(optimizer, state["optimizer"]),
            "updates": update_count,
            "square": jnp.where(active, square, state["square"]),
            "shared": shared,
            "layers": layers,
        }


class _VersionedStage(Stage):
    """A stage whose ops read the version of the weights that the table names."""

    def __init__(self, table: AsynchronousTable, params: tuple[Tree, Tree], inputs: Tree, scales: jax.Array):
        super().__init__(table.plan.program, table.model, *params, inputs, keep=table.keep, constrain=table.constrain)
        self.versions, self.scales = table.plan.versions, scales

    def parameters(self, state: dict, row: TableRow) -> tuple[Tree, Tree]:
        """Returns the version of the weights that this cell reads."""
        with jax.named_scope(VERSIONS):
            shared, chunks = load(state["history"], row.version % self.versions)
        return shared, jax.tree.map(lambda x: x[0], chunks)  # one chunk per stage: `plan_versions` has checked this

    def scale(self, row: TableRow) -> jax.Array:
        """Returns 1 / tokens of the update of this microbatch."""
        # divides at once: the update follows inside the table, not after the last tick
        return load(self.scales, row.microbatch)


def stage_update(
    optimizer: optax.GradientTransformation, join: Callable, split: Callable, reduce: Callable
) -> Callable:
    """Builds `update` of `AsynchronousTable`, which applies the optimizer to the parameters of a stage.

    Args:
      optimizer: The user's optax chain.
      join: Maps (shared, chunks) to a tree with the structure of the optimizer's parameters.
      split: The inverse of `join`.
      reduce: Sums gradients over the replicas of the stage.
    """

    def update(gradients, state, params):
        tree = join(*params)
        # reduced in float32, then cast to the dtype of the parameters, which the optimizer's state expects
        summed = jax.tree.map(lambda g, p: g.astype(p.dtype), join(*reduce(gradients)), tree)
        square = sum(jnp.sum(jnp.square(jnp.abs(g).astype(jnp.float32))) for g in jax.tree.leaves(summed))
        updates, state = step_inputs.update(optimizer, summed, state, tree, None)
        return split(optax.apply_updates(tree, updates)), state, square

    return update


def history(schedule: Schedule, weights: Weights) -> np.ndarray:
    """Returns the version of the weights at which each backward differentiates. Shape [stages, microbatches]."""
    rows = plan_versions(program(schedule), weights).program.rows
    versions = np.zeros((schedule.stages, schedule.microbatches), np.int32)
    for tick, stage, cell in schedule:
        if cell.op == "B":
            versions[stage, cell.microbatch] = rows[tick, stage, COLUMNS.index("version")]
    return versions
