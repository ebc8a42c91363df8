"""The one executor: it runs any table inside one compiled program.

A tick in which all stages do the same kind of thing runs it on all of them, masked where a stage idles: no
conditional, so that nothing in a block can deadlock and a GPU needs no answer from its host. Tables that mix kinds in a
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
      sums: Name to (sum, count) over the microbatches; zero but on the last stage.
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
      model: The three pieces.
      rows: This stage's rows. Shape [ticks, columns], int32.
      shared: Parameters outside of the stack, whole.
      layers: Parameters of this stage's layers, leading dim chunks x layers of a chunk, its chunks in their order.
      known: What is no parameter, leading dim microbatches: the batch, dropout keys.
      keep: What a forward leaves for its backward: its input, from which it is computed again, or what the
        backward reads.
      place: Given "x", "layers" or "shared" and a tree, returns it with its sharding over the axes that are not manual.
      shards: How sums of gradients are cut, which are dicts by path then; None adds them up whole.
      fill: What the buffers hold before they are written; of no consequence.

    Raises:
      JaxparError: If the model cannot be cut: blocks that change the shape, a stack that reads what is outside.
    """
    run = Stage(program, model, shared, layers, known, keep=keep, place=place, shards=shards)
    state = run_table(program, run.tick, run.start(fill), rows)
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
    """Runs a piece of the table: a body that is compiled once, as often as it is repeated."""

    def body(state, rows):
        for at, each in _offsets(loop.body):
            if isinstance(each, TickKind):
                state = tick(each, state, rows[at])
            else:
                state = _loop(each, tick, state, rows[at : at + each.ticks])
        return state, None

    if loop.repeats == 1:
        return body(state, rows)[0]
    return jax.lax.scan(body, state, rows.reshape(loop.repeats, -1, *rows.shape[1:]))[0]
