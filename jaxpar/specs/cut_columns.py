"""Columns of what the mesh axes cut: x and y of `formulation.py`.

x[a, c]    whether axis a cuts the dims of class c
y[s]       for two axes: the pair of classes that they cut, or the one class that one of them cuts alone
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from jaxpar.sharding.infer_names.dim_pieces import DimPiece, flat
from jaxpar.specs.classes import Classes
from jaxpar.specs.collectives import State, States
from jaxpar.specs.integer_program import IntegerProgram
from jaxpar.specs.program import Array, TracedProgram


def cuttable_pieces(program: TracedProgram, devices: int, uncut: Collection[DimPiece]) -> set[DimPiece]:
    """Returns the pieces that an axis may cut: its devices divide their size, and they are first in every dim."""
    found: set[DimPiece] = set()
    barred: set[DimPiece] = set(uncut)
    for array in program.arrays:
        seen: set[DimPiece] = set()
        for dim in array.dims:
            for depth, piece in enumerate(flat(dim)):
                found.add(piece)
                if depth or piece.facts.mixed or piece.size % devices or piece in seen:
                    barred.add(piece)
                seen.add(piece)
    return found - barred


class CutColumns:
    """The columns of the states of arrays.

    Attributes:
      cuttable: For each axis the pieces that it may cut.
      x: Maps (axis, class) to the column that says whether the axis cuts the dims of the class.
    """

    def __init__(
        self,
        integer_program: IntegerProgram,
        classes: Classes,
        sizes: Sequence[int],
        cuttable: Sequence[set[DimPiece]],
        arrays: Iterable[Array],
        *,
        both: bool,
    ):
        """Adds the columns of x.

        Args:
          integer_program: Gets the columns and rows.
          classes: Classes of the program's pieces.
          sizes: Size of the axis, or of each of two, outermost first.
          cuttable: For each axis the pieces that it may cut.
          arrays: The arrays that operations read or compute, and the parameters.
          both: Whether two axes may cut one dim together.
        """
        self._program, self._classes, self._sizes, self._both = integer_program, classes, sizes, both
        self.cuttable = cuttable
        self._size_of = {state: piece.size for piece, state in classes.pieces.items()}
        keys = [(axis, state) for array in arrays for axis in range(len(sizes)) for state in self.states(array, axis)]
        self.x: dict[tuple[int, int], int] = {
            key: integer_program.add_column(binary=True) for key in dict.fromkeys(keys)
        }
        self._pairs: dict[States, int] = {}
        self._equal: set[frozenset[int]] = set()  # the columns of each row of `_set_equal`
        self._joint_columns: dict[Any, dict[States, int]] = {}

    def states(self, array: Array, axis: int) -> list[int]:
        """Returns the classes of the pieces along which an axis may cut an array."""
        pieces = [piece for dim in array.root.dims for piece in flat(dim) if piece in self.cuttable[axis]]
        return sorted({self._classes.pieces[piece] for piece in pieces})

    def of_array(self, array: Array) -> Mapping[States, int]:
        """Returns the column of each state in which some axis cuts the array."""
        states = tuple(tuple(self.states(array, axis)) for axis in range(len(self._sizes)))
        return self.of_states(states, exclusive=True)

    def of_states(self, states: tuple[tuple[int, ...], ...], *, exclusive: bool = False) -> Mapping[States, int]:
        """Returns the column of each joint state of the axes, and adds it if there is none.

        Args:
          states: For each axis, the classes that it may cut.
          exclusive: Whether an axis may cut at most one of the classes; with two axes that is always so.
        """
        key = states, exclusive or len(states) > 1
        if key not in self._joint_columns:
            columns = self._joint_columns[key] = self._of_pairs(states) if all(states) else {}
            if not columns:  # there is one axis, or only one of two may cut such an array
                alone = [axis for axis, given in enumerate(states) if given]
                for axis in alone:
                    columns |= {self.one_axis_state(axis, state): self.x[axis, state] for state in states[axis]}
            if key[1] and len(columns) > 1:
                self._program.add_row(dict.fromkeys(columns.values(), 1.0), 0, 1)
        return self._joint_columns[key]

    def cut_alike(self, arrays: Sequence[Array]) -> None:
        """Lets an axis cut a dim of one of these arrays, which have one shape, only with the same dim of all."""
        for axis, cuttable in enumerate(self.cuttable):
            for dims in zip(*(array.dims for array in arrays), strict=True):
                pieces = (next(flat(dim), None) for dim in dims)
                states = {self._classes.pieces[piece] if piece in cuttable else None for piece in pieces}
                columns = {self.x.get((axis, state)) for state in states if state is not None}
                self._set_equal([None, *columns] if None in states else [*columns])

    def require(self, column: int, axis: int, state: State) -> None:
        """Lets a column be 1 only if an axis cuts the dims of a class."""
        self._program.add_row({column: 1.0, self.x[axis, state]: -1.0}, -np.inf, 0)  # type: ignore[index]

    def _set_equal(self, columns: Sequence[int | None]) -> None:
        """Adds rows by which all columns have one value; None stands for 0."""
        first, *others = dict.fromkeys(columns)
        for other in others:
            terms = {column: sign for column, sign in ((first, 1.0), (other, -1.0)) if column is not None}
            if (key := frozenset(terms)) not in self._equal:
                self._equal.add(key)
                self._program.add_row(terms, 0, 0)

    def one_axis_state(self, axis: int, state: State) -> States:
        """Returns the state of an array that no other axis cuts."""
        return tuple(state if number == axis else None for number in range(len(self._sizes)))

    def _of_pairs(self, states: tuple[tuple[int, ...], ...]) -> dict[States, int]:
        """Adds a column per pair of classes, shared by all arrays, and one per class cut by one axis alone.

        The columns with a class sum to its x.
        """
        if len(states) == 1:
            return {}
        columns: dict[States, int] = {}
        for pair in product(*states):
            if pair[0] != pair[1] or (self._both and self._size_of[pair[0]] % math.prod(self._sizes) == 0):
                if pair not in self._pairs:
                    self._pairs[pair] = self._program.add_column()
                columns[pair] = self._pairs[pair]
        both = dict(columns)
        for axis, given in enumerate(states):
            for state in given:
                columns[self.one_axis_state(axis, state)] = alone = self._program.add_column()
                terms = {column: 1.0 for pair, column in both.items() if pair[axis] == state}
                self._program.add_row(terms | {alone: 1.0, self.x[axis, state]: -1.0}, 0, 0)
        return columns
