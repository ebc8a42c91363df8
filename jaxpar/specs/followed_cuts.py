"""Rows for what XLA's partitioner does by itself, so that no strategy chooses otherwise.

an axis cuts an operand                it cuts that loop too, unless it cuts the other operand along another loop
it cuts a fused projection and a part  the whole is exchanged with its parts; neither is gathered
it cuts a part alone                   a whole that each device has is cut first, and then exchanged as well
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxpar.specs.collectives import Resharding, State
from jaxpar.specs.cut_columns import CutColumns
from jaxpar.specs.integer_program import IntegerProgram
from jaxpar.specs.program import Array, Operation
from jaxpar.specs.strategies import Strategy


def follow_operands(
    program: IntegerProgram,
    cuts: CutColumns,
    operation: Operation,
    axis: int,
    strategies: Sequence[Strategy],
    v: Sequence[int],
) -> None:
    """Adds the rows of the cuts of two operands.

    If one operand is sharded and the other is replicated, XLA does not gather the sharded one: it slices the replicated
    one, and sums the results.

    Args:
      program: Gets the rows.
      cuts: The columns of the cuts.
      operation: The operation.
      axis: Index of the axis.
      strategies: The ways to split the operation.
      v: The column of each strategy.
    """
    x = cuts.x
    columns: dict[tuple[int, tuple[State, ...]], list[int]] = {}
    for strategy, column in zip(strategies, v, strict=True):
        if (loop := strategy.loops[axis]) is not None:
            columns.setdefault((loop, tuple(states[axis] for states in strategy.operands)), []).append(column)
    if len(operation.operands) == 2:
        cuttable = [set() if each.constant else set(cuts.states(each, axis)) for each in operation.operands]
        for (_, states), users in columns.items():
            for index, state in enumerate(states):
                if state not in cuttable[index]:
                    continue
                others = cuttable[1 - index] - {states[1 - index]}
                if state not in others:  # else a cut of this operand cuts the other along another loop
                    terms = dict.fromkeys(users, 1.0) | {x[axis, state]: -1.0}  # type: ignore[index]
                    program.add_row(terms | {x[axis, other]: 1.0 for other in others}, 0, np.inf)


def follow_parts(
    program: IntegerProgram,
    cuts: CutColumns,
    operation: Operation,
    axis: int,
    strategies: Sequence[Strategy],
    v: Sequence[int],
) -> None:
    """Adds the row of the cuts of a fused projection and a part of it; see `follow_operands` for the arguments."""
    if chosen := exchange_strategies(operation, axis, strategies, v):
        strategy = chosen[0][0]
        ends = [cuts.x.get((axis, state)) for state in (strategy.operands[0][axis], strategy.result[axis])]  # type: ignore[arg-type]
        if None not in ends:  # else no array is ever cut along one of the two
            needed = ends if operation.backward else ends[1:]
            terms: dict[int, float] = {end: -1.0 for end in needed if end is not None}
            program.add_row(terms | {column: 1.0 for _, column in chosen}, 1 - len(needed), np.inf)


def exchange_strategies(
    operation: Operation, axis: int, strategies: Sequence[Strategy], v: Sequence[int]
) -> list[tuple[Strategy, int]]:
    """Returns the strategies, with their columns, in which an axis cuts a fused projection and its parts."""
    last = len(operation.loops) - 1
    pairs = zip(strategies, v, strict=True) if operation.is_fused else ()
    return [(strategy, column) for strategy, column in pairs if strategy.loops[axis] == last]


def part_exchanges(
    operation: Operation, axis: int, devices: int, strategies: Sequence[Strategy], v: Sequence[int]
) -> Iterator[tuple[int, Resharding, Array]]:
    """Yields the all-to-alls of a fused projection that an axis of this size cuts: (column, collective, array)."""
    for strategy, column in exchange_strategies(operation, axis, strategies, v):
        for array in operation.exchanged_arrays:
            sent = (devices - 1) / devices * array.bytes / strategy.devices
            source, target = strategy.operands[0], strategy.result
            yield column, Resharding(axis=axis, kind="all-to-all", bytes=sent, source=source, target=target), array
