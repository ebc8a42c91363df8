"""Training without a flush: a stage updates its weights in the middle of the table, so microbatches read old weights.

    weights      an F reads                          a B differentiates with      equals
    stash        the newest of its stage             those of its own F           a replay at the weights recorded
    vertical     those newest on stage 0 when the    the same                     SGD with gradients P - 1 updates late
                 microbatch came in
    2bw          those of the batch before last      the same                     SGD with gradients 1 update late
    none         the newest of its stage             the newest of its stage      nothing: the gradient of no function

A version of the weights is numbered by the updates it contains, and a stage keeps the last few: the table says which
version a cell reads, and which cells are followed by an update. Everything else is the one executor. The optimizer is
the user's own optax chain; it sees the parameters of one stage, so a global norm is the norm of a stage.

Sources: PipeDream, Narayanan et al. 2019, arXiv:1806.03377, sections 3.2 and 3.3; PipeDream-2BW, Narayanan et al. 2021,
arXiv:2006.09503, section 3.1, w(t+1) = w(t) - rate x gradient(w(t-1)), here with as many microbatches to an update as
there are stages, the fewest for which two versions are enough.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.errors import refuse
from jaxpar.optim import extra
from jaxpar.pipeline.run.execute import run_table
from jaxpar.pipeline.run.program import COLUMNS, Program, TickKind, program
from jaxpar.pipeline.run.slots import load, store
from jaxpar.pipeline.run.stage import Keep, Row, Stage
from jaxpar.pipeline.run.traced_model import Model
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.sharding.names import SCOPE

Tree = Any
Weights = Literal["flush", "stash", "vertical", "2bw", "none"]
_VERSIONS = f"{SCOPE}versions of the weights"  # the scope by which the inspector finds and names this memory


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The version of the weights that every cell of a table reads, and the cells after which they are updated.

    Attributes:
      program: The table, its rows filled with the version each cell reads and whether an update follows it.
      per_update: Microbatches per update.
      versions: Versions of its weights that a stage keeps at once, the newest included.
    """

    program: Program
    per_update: int
    versions: int


def microbatches_per_update(weights: Weights, table: Schedule) -> int:
    """Returns how many microbatches of a table make one update."""
    return {"flush": table.microbatches, "2bw": table.stages}.get(weights, 1)


def plan(program: Program, weights: Weights) -> Plan:
    """Returns the plan of a table.

    Raises:
      JaxparError: If backward is split, a stage has several chunks, or (2bw) the microbatches are no whole number of
        updates.
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
    rows[..., version:] = 0  # the last two columns, which are -1 in tables with a flush
    updates = [0] * table.stages
    read: dict[tuple[int, int], int] = {}
    entered: dict[int, int] = {}
    most = 1
    for tick, row in enumerate(table.cells):
        for stage, cell in enumerate(row):
            if cell is None:
                continue
            if cell.op == "F":
                # `entered` is set by the first stage, which runs the first F of every microbatch
                entered.setdefault(cell.microbatch, updates[stage])
                late = {"vertical": entered[cell.microbatch], "2bw": max(cell.microbatch // per_update - 1, 0)}
                read[stage, cell.microbatch] = late.get(weights, updates[stage])
            elif weights == "none":
                # a B at other weights than its F; with `stash` it finds the version of its F in `read`
                read[stage, cell.microbatch] = updates[stage]
            used = read[stage, cell.microbatch]
            if used > updates[stage]:
                raise refuse(
                    f"tick {tick}, stage {stage} of {table.name}: {cell} needs {used} updates, {updates[stage]} made",
                    rule=f"with weights={weights!r} no cell reads a version of the weights that its stage has not made",
                    fix='schedule="1f1b", in which every stage has made it by then',
                )
            most = max(most, updates[stage] - used + 1)
            rows[tick, stage, version] = used
            rows[tick, stage, update] = cell.op == "B" and (cell.microbatch + 1) % per_update == 0
        for stage in range(table.stages):  # after the tick: its own cells still read the version before
            updates[stage] += int(rows[tick, stage, update])
    return Plan(program=replace(program, rows=rows), per_update=per_update, versions=most)


def _check_order(table: Schedule, weights: Weights) -> None:
    """Refuses tables in which an update would contain gradients of microbatches that belong to another one."""
    done, last = [0] * table.stages, table.place(table.parts - 1)[0]
    entered = 0
    for tick, stage, (op, microbatch, _) in table:
        # the last stage's F already adds the head's gradient: a second F before the B would add that of the next update
        late = stage == last and op == "F" and entered > done[last]
        if late or (op == "B" and microbatch != done[stage]):
            raise refuse(
                f"weights={weights!r} with schedule {table.name}: tick {tick}, stage {stage}: {op}{microbatch}",
                rule="with weights other than 'flush', backwards come in the order of microbatches, and on the last "
                "stage each comes before the next forward",
                fix='schedule="1f1b", PipeDream\'s own',
            )
        entered += stage == last and op == "F"
        done[stage] += op == "B"


class Trained(NamedTuple):
    """The results of one stage after the last tick.

    Attributes:
      sums: Name to (sum, count); zero on all stages but the last.
      params: (shared, layers), the newest.
      optimizer: The optimizer's state for them.
      square: Sum of the squares of the last update's gradients.
    """

    sums: Any
    params: tuple[Tree, Tree]
    optimizer: Any
    square: jax.Array


@dataclass(frozen=True, kw_only=True)
class UnflushedTable:
    """A table with its updates, to be run on a stage.

    Attributes:
      plan: As made by `plan`.
      model: Its embedding, layers and head.
      update: (gradients, optimizer state, params) to (params, optimizer state, sum of the gradients' squares).
      place: As for `execute`.
      keep: As for `execute`.
      fill: As for `execute`.
    """

    plan: Plan
    model: Model
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any, jax.Array]]
    place: Callable[[str, Tree], Tree]
    keep: Keep = "inputs"
    fill: float = 0.0

    def train(
        self, rows: jax.Array, params: tuple[Tree, Tree], optimizer_state: Any, known: Tree, *, scales: jax.Array
    ) -> Trained:
        """Runs the table on this stage.

        Args:
          rows: This stage's rows.
          params: (shared, layers) of this stage.
          optimizer_state: The chain's state for them.
          known: As for `execute`.
          scales: Cotangent of each microbatch's loss: 1 / the tokens of its update. Shape [microbatches].
        """
        plan, run = self.plan, _Updating(self, params, known, scales)
        chunked = (params[0], run.chunks)
        with jax.named_scope(_VERSIONS):  # a ring buffer: version n is in slot n % versions
            kept = jax.tree.map(lambda x: jnp.broadcast_to(x, (plan.versions, *x.shape)), chunked)
        state = run.start(self.fill) | {
            "history": kept,
            "optimizer": optimizer_state,
            "updates": jnp.zeros((), jnp.int32),
            "square": jnp.zeros((), jnp.float32),
        }
        state = run_table(plan.program, run.tick, state, rows)
        shared, chunks = load(state["history"], state["updates"] % plan.versions)
        params = (shared, jax.tree.map(lambda x: x[0], chunks))
        return Trained(state["sums"], params, state["optimizer"], state["square"])


class _Updating(Stage):
    """A stage whose weights change between ticks."""

    def __init__(self, how: UnflushedTable, params: tuple[Tree, Tree], known: Tree, scales: jax.Array):
        super().__init__(how.plan.program, how.model, *params, known, keep=how.keep, place=how.place)
        self.plan, self.update, self.scales = how.plan, how.update, scales

    def parameters(self, state: dict, row: Row) -> tuple[Tree, Tree]:
        """Returns the weights of the version that this cell reads."""
        with jax.named_scope(_VERSIONS):
            shared, chunks = load(state["history"], row.version % self.plan.versions)
        return shared, jax.tree.map(lambda x: x[0], chunks)  # one chunk per stage, as `plan` has checked

    def scale(self, row: Row) -> jax.Array:
        """Returns one over the tokens of the update that this microbatch belongs to."""
        # a mean is divided at once here: the update follows in the middle of the table, not after the last tick
        return load(self.scales, row.microbatch)

    def tick(self, kind: TickKind, state: dict, numbers: jax.Array) -> dict:
        """Runs one tick, then the update that follows it."""
        state = super().tick(kind, state, numbers)
        row, versions = Row(*(numbers[i] for i in range(len(COLUMNS)))), self.plan.versions
        take = (row.update == 1) & (row.op > 0)
        # the update is computed in every tick and dropped in most: stages update in different ticks, and XLA copies
        # the buffers that a conditional writes
        now = load(state["history"], state["updates"] % versions)
        gradients = (state["shared"], state["layers"])
        new, optimizer, square = self.update(gradients, state["optimizer"], now)
        done = state["updates"] + take.astype(jnp.int32)
        choose = lambda a, b: jax.tree.map(lambda x, y: jnp.where(take, x, y), a, b)  # noqa: E731
        zeros = jax.tree.map(jnp.zeros_like, gradients)
        shared, layers = choose(zeros, gradients)  # an update starts the sums of the next one at zero
        with jax.named_scope(_VERSIONS):
            kept = store(state["history"], new, done % versions, take)
        return state | {
            "history": kept,
            "optimizer": choose(optimizer, state["optimizer"]),
            "updates": done,
            "square": jnp.where(take, square, state["square"]),
            "shared": shared,
            "layers": layers,
        }


def updating(optimizer: optax.GradientTransformation, join: Callable, split: Callable, reduce: Callable) -> Callable:
    """Returns `update` of `UnflushedTable`: the optimizer applied to a stage's own parameters.

    Args:
      optimizer: The user's optax chain.
      join: (shared, chunks) to the tree that the optimizer's state was made for.
      split: The inverse of `join`.
      reduce: Sums gradients over the replicas of the stage.
    """

    def update(gradients, state, params):
        whole = join(*params)
        # reduced in float32, then in the dtype of the parameters, for which the optimizer's state was made
        summed = jax.tree.map(lambda g, p: g.astype(p.dtype), join(*reduce(gradients)), whole)
        square = sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(summed))
        updates, state = extra.update(optimizer, summed, state, whole, None)
        return split(optax.apply_updates(whole, updates)), state, square

    return update


def history(schedule: Schedule, weights: Weights) -> np.ndarray:
    """Returns [stages, microbatches]: the version that the backward of a microbatch differentiates with."""
    rows = plan(program(schedule), weights).program.rows
    found = np.zeros((schedule.stages, schedule.microbatches), np.int32)
    for tick, stage, cell in schedule:
        if cell.op == "B":
            found[stage, cell.microbatch] = rows[tick, stage, COLUMNS.index("version")]
    return found
