"""The executor runs the table of any schedule inside one compiled program.

If the ops of a tick are of one kind, all stages execute it, and the results of idle stages are masked. So there is no
conditional: no collective in a block can deadlock, and a GPU needs no round trip to its host. If a table mixes kinds of
ops in a tick, a `lax.switch` per tick and stage chooses one. All code here runs inside `shard_map`, on one stage's
arrays.

In a tick a stage runs an op, writes the results into its buffers, and exchanges messages with its neighbours. Ops read
buffers inside a switch, and the stage writes them outside, because XLA copies a buffer that a branch writes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.pipeline.run.model_functions import PipelineFunctions
from jaxpar.pipeline.run.stage import BranchChoice, Keep, MaskedChoice, OpResult, Stage
from jaxpar.pipeline.run.stage_buffers import slot_shapes, store
from jaxpar.pipeline.run.stage_gradients import Shards, zeros_like_shapes
from jaxpar.pipeline.run.tick_program import OP_NUMBER, Loop, Program, TableRow, TickKind
from jaxpar.sharding.names import CHOICE, MESSAGE, TABLE

Tree = Any
OPS = {"F": Stage.forward, "B": Stage.backward, "W": Stage.weights}


@jax.named_scope(TABLE)
def initial_state(stage: Stage, fill: float, *, head: bool = True) -> dict:
    """Returns the buffers and sums before the first tick; slots hold `fill`. `head=False` omits `sums`."""

    def slots(count: int, trees: Tree) -> Tree:
        return jax.tree.map(lambda leaf: jnp.full((count, *leaf.shape), fill, leaf.dtype), trees)

    table, model = stage.program, stage.model
    return {
        # x and g share one pool: they have the same shape, and the slot of an x is reused by the next g
        "messages": stage.constrain("slots", slots(table.message_slots, model.x)),
        "residuals": []
        if stage.forward_only or stage.keep == "inputs"
        else slots(table.residual_slots, model.halves.residuals),
        "stash": slots(table.stash_slots, model.halves.stash) if table.stash_slots else [],
        **({"layers": None, "shared": None} if stage.forward_only else stage.gradient_sums.zeros()),
        "sums": zeros_like_shapes(model.sums) if head else {},
    }


@jax.named_scope(TABLE)
def run_tick(stage: Stage, kind: TickKind, state: dict, numbers: jax.Array) -> dict:
    """Runs one tick: this stage's op, then its writes and messages."""
    row = TableRow.read(numbers)
    if kind.phased:
        return write(stage, kind, state, row, run_masked(stage, kind, state, row))
    # stages take different branches: collectives in them must stay within one stage, or they would deadlock
    names = sorted(kind.ops, key=lambda op: OP_NUMBER[op])
    branches = [lambda: _fill_missing(stage, OpResult(), state)]
    branches += [lambda op=op: _fill_missing(stage, OPS[op](stage, kind, state, row, BranchChoice()), state)
                 for op in names]  # fmt: skip
    # op number -> branch; absent ops map to branch 0, idle
    numbered = np.zeros(4, np.int32)
    numbered[[OP_NUMBER[op] for op in names]] = range(1, len(names) + 1)
    with jax.named_scope(CHOICE):
        result = jax.lax.switch(jnp.asarray(numbered)[row.op], branches)
    return write(stage, kind, state, row, result)


def run_masked(stage: Stage, kind: TickKind, state: dict, row: TableRow) -> OpResult:
    """Runs the only op of a tick on all stages, and masks the results of idle ones."""
    # no conditional: idle stages compute too and are masked, so a block may have any collective (all devices reach it),
    # and a GPU need not send a predicate to its host
    (op,) = kind.ops
    return OPS[op](stage, kind, state, row, MaskedChoice(row.runs(op)))


def _fill_missing(stage: Stage, result: OpResult, state: dict) -> OpResult:
    """Fills missing results with zeros or old totals, because branches must return the same structure."""
    return OpResult(
        out=zeros_like_shapes(stage.model.x) if result.out is None else result.out,
        residuals=_zero_slots(state["residuals"]) if result.residuals is None else result.residuals,
        stash=_zero_slots(state["stash"]) if result.stash is None else result.stash,
        layers=zeros_like_shapes(slot_shapes(stage.chunks)) if result.layers is None else result.layers,
        shared=stage.gradient_sums.initial_shared(state["shared"]) if result.shared is None else result.shared,
        sums=state["sums"] if result.sums is None else result.sums,
    )


def _zero_slots(pool: list) -> list:
    return [jnp.zeros(buffer.shape[1:], buffer.dtype) for buffer in pool]


def write(stage: Stage, kind: TickKind, state: dict, row: TableRow, result: OpResult) -> dict:
    """Stores the results of an op, sends `out`, and stores the messages that arrive; returns the new state.

    In a masked tick, an idle stage computes on stale slots. What it writes goes to a free slot, or is masked.
    """
    state, sums = dict(state), stage.gradient_sums
    if (pool := state["residuals"]) and result.residuals is not None:
        state["residuals"] = store(pool, result.residuals, row.residuals, stage.program.write_mask("residuals", row))
    if result.slots is not None:
        state["residuals"] = result.slots
    if result.total is not None:
        state["layers"] = stage.constrain("layers", result.total)
    if state["stash"] and result.stash is not None:
        state["stash"] = store(state["stash"], result.stash, row.stash, stage.program.write_mask("stash", row))
    if result.layers is not None:
        state["layers"] = sums.add_layers(state["layers"], row, result.layers)
    if result.shared is not None:
        ends = {"F": stage.model.head, "B": stage.model.embed}
        state["shared"] = sums.add_shared(state["shared"], result.shared, [ends[op] for op in kind.ops if op in ends])
    if result.sums is not None:
        state["sums"] = result.sums
    if result.out is None:
        return state
    out = result.out
    if result.shared is not None and sums.shards is None:
        # the barrier adds up gradients of embedding and head before the send: otherwise XLA keeps those of many
        # ticks, with their inputs, the gradient of all logits; ZeRO-2 scatters them in the same tick
        out, state["shared"] = jax.lax.optimization_barrier((out, state["shared"]))
    # the barrier completes the writes of a forward, and with several chunks the reads of a backward, before the send:
    # otherwise XLA defers parts of a tick, and copies all slots, which the next tick overwrites
    names = ["residuals"] * (result.slots is not None)
    if result.total is not None and stage.schedule.chunks > 1:
        names = ["residuals", "layers"]
    if names:
        out, results = jax.lax.optimization_barrier((out, {name: state[name] for name in names}))
        state |= results
    return send(stage, kind, state, row, out)


def send(stage: Stage, kind: TickKind, state: dict, row: TableRow, out: Tree) -> dict:
    """Sends the result of every stage, and stores the messages that arrive; returns the new state."""
    state, out = dict(state), stage.constrain("x", out)
    # a permute is a collective: all stages take part in every tick of this kind, and drop the message if their slot is
    # -1. Sends stand outside of the switch, so that all stages reach them
    for direction in ("right", "left", "self_send"):
        if getattr(kind, direction):
            pairs = {"right": stage.program.right, "left": stage.program.left}.get(direction)
            received = jax.tree.map(partial(_permute, pairs=pairs), out) if pairs else out
            slot = getattr(row, direction)
            state["messages"] = stage.constrain("slots", store(state["messages"], received, slot, slot >= 0))
    return state


@jax.named_scope(MESSAGE)
def _permute(x: jax.Array, *, pairs) -> jax.Array:
    return jax.lax.ppermute(x, "pipe", pairs)


class TableGradients(NamedTuple):
    """The sums of one stage after the last tick; shared ones are not yet summed over stages.

    Attributes:
      sums: Name to (sum, count) over the microbatches; zero on all stages except the last.
      shared: Gradients of the summed loss by the parameters that all stages share; None after an evaluation.
      layers: Gradients by the parameters of this stage's layers; None after an evaluation.
    """

    sums: Mapping[str, tuple[jax.Array, jax.Array]]
    shared: Tree
    layers: Tree


def execute(
    program: Program,
    model: PipelineFunctions,
    rows: jax.Array,
    shared: Tree,
    layers: Tree,
    inputs: Tree,
    *,
    keep: Keep = "inputs",
    constrain: Callable[[str, Tree], Tree] = lambda name, tree: tree,
    shards: Shards | None = None,
    fill: float = 0.0,
) -> TableGradients:
    """Runs a table on this stage.

    Args:
      program: The table, as rows and loops; for an evaluation, with forwards only.
      model: Its embedding, layers and head.
      rows: This stage's rows of the table. Shape [ticks, columns], int32.
      shared: Parameters outside of the stack; every stage has all of them.
      layers: Parameters of this stage's layers; dim 0 is chunks x layers per chunk, in order of chunks.
      inputs: Inputs other than parameters, with a slot per microbatch: the batch, PRNG keys for dropout.
      keep: What a forward saves for its backward: its input, if the backward recomputes the forward, or residuals.
      constrain: Constrains a tree, named "x", "layers" or "shared", to its sharding over the axes that are not manual.
      shards: The sharding of the gradient sums, which are then dicts by path; None leaves them unsharded.
      fill: Initial value of the buffers. The result does not depend on it; tests check this with NaN.

    Raises:
      JaxparError: If the model cannot be split into stages, because a block changes the shape or reads outside values.
    """
    # every device traces the same program; only its rows and its layers depend on the stage
    stage = Stage(program, model, shared, layers, inputs, keep=keep, constrain=constrain, shards=shards)
    state = run_table(program, partial(run_tick, stage), initial_state(stage, fill), rows)
    # [chunks, layers, ...] -> [chunks x layers, ...], the shape of the parameters
    merged = (
        None if not program.residual_slots else jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state["layers"])
    )
    return TableGradients(sums=state["sums"], shared=state["shared"], layers=merged)


def run_table(program: Program, tick: Callable, state: dict, rows: jax.Array) -> dict:
    """Runs all ticks and returns the state."""
    for offset, loop in _offsets(program.loops):
        state = _loop(loop, tick, state, rows[offset : offset + loop.ticks])
    return state


def _offsets(body) -> list[tuple[int, Any]]:
    offset, pairs = 0, []
    for item in body:
        pairs.append((offset, item))
        offset += item.ticks if isinstance(item, Loop) else 1
    return pairs


def _loop(loop: Loop, tick: Callable, state: dict, rows: jax.Array) -> dict:
    """Runs a loop of ticks as a scan, whose body is compiled once."""

    def body(state, rows):
        for offset, item in _offsets(loop.body):
            if isinstance(item, TickKind):
                state = tick(item, state, rows[offset])
            else:
                state = _loop(item, tick, state, rows[offset : offset + item.ticks])
        return state, None

    if loop.repeats == 1:
        return body(state, rows)[0]
    # the rows are the scan's inputs: their numbers differ between iterations, the code does not
    return jax.lax.scan(body, state, rows.reshape(loop.repeats, -1, *rows.shape[1:]))[0]
