"""The ways to split one operation over the axes: v of `formulation.py`."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from jaxpar.sharding.infer_names.dim_pieces import DimPiece
from jaxpar.specs.classes import Classes
from jaxpar.specs.collectives import PARTIAL, State, States
from jaxpar.specs.program import Operation


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to split an operation: the loop of it that each axis cuts, or none.

    Attributes:
      loops: For each axis the index of the loop, or None.
      operands: The states in which the operation reads each operand.
      result: The states of the result before any collective: a partial sum where a loop contracts.
      devices: Number of devices that share the work.
    """

    loops: tuple[int | None, ...]
    operands: tuple[States, ...]
    result: States
    devices: int


def strategies_of(
    operation: Operation, classes: Classes, sizes: Sequence[int], uncut: Collection[DimPiece]
) -> list[Strategy]:
    """Returns all ways to split an operation, with the states of its operands and its result.

    Args:
      operation: The operation.
      classes: Classes of the program's pieces.
      sizes: Size of each axis, outermost first.
      uncut: Pieces that no axis may split.
    """
    replicated = (None, (None,) * len(operation.operands), None)
    options = [[replicated, *_loops(operation, classes, size, uncut)] for size in sizes]
    strategies = []
    for chosen in product(*options):
        loops = tuple(loop for loop, _, _ in chosen)
        devices = math.prod(size for size, loop in zip(sizes, loops, strict=True) if loop is not None)
        if None not in loops and len({*loops}) < len(loops) and _size_of(operation, loops[0]) % devices:
            continue
        operands = tuple(zip(*(states for _, states, _ in chosen), strict=True))
        result = tuple(state for _, _, state in chosen)
        strategies.append(Strategy(loops=loops, operands=operands, result=result, devices=devices))
    return strategies


def _loops(
    operation: Operation, classes: Classes, devices: int, uncut: Collection[DimPiece]
) -> Iterator[tuple[int, tuple[State, ...], State]]:
    """Yields each loop that an axis may cut: its number, its operands' states, and its result's state."""
    arrays = (*operation.operands, operation.result)
    for number, (operands, result) in enumerate(operation.loops):
        pieces = (*operands, result)
        if any(piece.size % devices for piece in pieces if piece is not None) or any(
            piece in uncut for piece in pieces
        ):
            continue
        leading = all(
            piece is None or array.constant or piece in array.pieces()
            for piece, array in zip(pieces, arrays, strict=True)
        )
        if leading:
            state = PARTIAL if result is None else classes.pieces[result]
            yield number, tuple(map(classes.of_piece, operands)), state


def _size_of(operation: Operation, loop: int | None) -> int:
    operands, result = operation.loops[loop or 0]
    return next(piece.size for piece in (*operands, result) if piece is not None)
