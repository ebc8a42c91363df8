"""The executor runs the table of any schedule inside one compiled program.

If the ops of a tick are of one kind, all stages execute it, and the results of idle stages are masked. So there is no
conditional: no collective in a block can deadlock, and a GPU needs no round trip to its host. If a table mixes kinds of
ops in a tick, a `lax.switch` per tick and stage chooses one. All code here runs inside `shard_map`, on one stage's
arrays.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxpar.pipeline.run.gradient_sums import Shards
from jaxpar.pipeline.run.program import Loop, Program, TickKind
from jaxpar.pipeline.run.stage import Keep, Stage
from jaxpar.pipeline.run.tick import initial_state, run_tick
from jaxpar.pipeline.run.traced_model import PipelineFunctions

Tree = Any


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
