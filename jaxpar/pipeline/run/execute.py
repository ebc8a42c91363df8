"""The one executor: it runs any schedule's table inside one compiled program.

A tick in which all stages run the same op runs it on all of them, masked where a stage is idle. That needs no
conditional: no collective in a block can deadlock, and a GPU needs no round trip to its host. Tables that mix ops in a
tick choose with `lax.switch`, once per tick and stage. Everything here runs inside `shard_map`, on one stage's local
arrays.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxpar.pipeline.run.program import Loop, Program, TickKind
from jaxpar.pipeline.run.stage import Keep, Stage
from jaxpar.pipeline.run.sum_shards import Shards
from jaxpar.pipeline.run.traced_model import Model

Tree = Any


class Gradients(NamedTuple):
    """The sums of one stage after the last tick, to be summed over the stages that share them.

    Attributes:
      sums: Name to (sum, count) over the microbatches; zero on all stages but the last.
      shared: Gradients of the sum of the loss for what all stages share; None after an evaluation.
      layers: Likewise for this stage's layers.
    """

    sums: Mapping[str, tuple[jax.Array, jax.Array]]
    shared: Tree
    layers: Tree


def execute(
    program: Program,
    model: Model,
    rows: jax.Array,
    shared: Tree,
    layers: Tree,
    known: Tree,
    *,
    keep: Keep = "inputs",
    place: Callable[[str, Tree], Tree] = lambda what, tree: tree,
    shards: Shards | None = None,
    fill: float = 0.0,
) -> Gradients:
    """Runs a table on this stage.

    Args:
      program: The table, as rows and loops; of forwards alone for an evaluation.
      model: Its embedding, layers and head.
      rows: This stage's rows. Shape [ticks, columns], int32.
      shared: Parameters outside of the stack, whole.
      layers: Parameters of this stage's layers, leading dim chunks x layers of a chunk, its chunks in their order.
      known: Inputs that are not parameters, with a leading dim of microbatches: the batch, PRNG keys for dropout.
      keep: What a forward keeps for its backward: its input, from which the backward recomputes it, or the residuals
        that the backward reads.
      place: Given "x", "layers" or "shared" and a tree, returns it with its sharding over the axes that are not manual.
      shards: How sums of gradients are sharded (they are then dicts by path); None keeps them whole.
      fill: Value of the buffers before they are written; the result does not depend on it, which tests check with NaN.

    Raises:
      JaxparError: If the model cannot be cut into stages: a block changes the shape, or reads values of outside.
    """
    # every device traces the same program; which stage it is shows in its rows and its layers alone
    run = Stage(program, model, shared, layers, known, keep=keep, place=place, shards=shards)
    state = run_table(program, run.tick, run.start(fill), rows)
    # [chunks, layers, ...] -> [chunks x layers, ...], as the parameters came
    merged = None if not program.kept else jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state["layers"])
    return Gradients(sums=state["sums"], shared=state["shared"], layers=merged)


def run_table(program: Program, tick: Callable, state: dict, rows: jax.Array) -> dict:
    """Returns the state after all ticks."""
    for at, loop in _offsets(program.loops):
        state = _loop(loop, tick, state, rows[at : at + loop.ticks])
    return state


def _offsets(body) -> list[tuple[int, Any]]:
    at, found = 0, []
    for each in body:
        found.append((at, each))
        at += each.ticks if isinstance(each, Loop) else 1
    return found


def _loop(loop: Loop, tick: Callable, state: dict, rows: jax.Array) -> dict:
    """Runs consecutive ticks: a body that is compiled once, in a scan over its repeats."""

    def body(state, rows):
        for at, each in _offsets(loop.body):
            if isinstance(each, TickKind):
                state = tick(each, state, rows[at])
            else:
                state = _loop(each, tick, state, rows[at : at + each.ticks])
        return state, None

    if loop.repeats == 1:
        return body(state, rows)[0]
    # the rows of a turn are the scan's inputs: numbers differ from turn to turn, the code does not
    return jax.lax.scan(body, state, rows.reshape(loop.repeats, -1, *rows.shape[1:]))[0]
