"""Groups equal parts of a program into classes, so that the integer program decides once for all layers of a stack.

The first classes are by properties alone (sizes, shapes, primitives). Each of `ROUNDS` rounds then separates members
that have different neighbours (color refinement, Weisfeiler and Leman 1968). One decision per class is no worse than
one per member in the linear relaxation, which has a symmetric optimum, and equal layers get equal rules.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from jaxpar.sharding.infer_names.dim_pieces import DimPiece, flat
from jaxpar.specs.program import Array, Operation, TracedProgram

ROUNDS = 4


class Classes:
    """Equivalence classes of the pieces of dims, arrays and operations of a program.

    Attributes:
      pieces: Maps each piece to the index of its class.
      arrays: Maps the id of each array to the index of its class.
      operations: Maps each operation to the index of its class.
    """

    def __init__(self, program: TracedProgram):
        arrays = [array for array in program.arrays if array.root is array]
        views = {id(array): array for operation in program.operations for array in operation.operands}
        self._arrays = {**{id(array): array for array in arrays}, **views}
        found = {piece: None for array in self._arrays.values() for dim in array.dims for piece in flat(dim)}
        self.pieces: dict[DimPiece, int] = _numbered(
            {
                piece: (piece.size, piece in program.rows, program.name_of_piece.get(piece), bool(piece.facts.mixed))
                for piece in found
            }
        )
        self.arrays: dict[int, int] = _numbered(
            {key: (array.shape, array.itemsize, bool(array.path), array.times) for key, array in self._arrays.items()}
        )
        self.operations: dict[Operation, int] = _numbered(
            {operation: _kind(operation) for operation in program.operations}
        )
        for _ in range(ROUNDS):
            self._refine(program)

    def of_piece(self, piece: DimPiece | None) -> int | None:
        """Returns the index of the class that a piece belongs to; None for None."""
        return None if piece is None else self.pieces[piece]

    def of_array(self, array: Array) -> int:
        """Returns the index of the class that an array belongs to."""
        return self.arrays[id(array)]

    def _refine(self, program: TracedProgram) -> None:
        pieces, arrays, operations = self.pieces, self.arrays, self.operations
        used: dict[int, list[Hashable]] = {}
        for operation in program.operations:
            for index, array in enumerate(operation.operands):
                for one in {id(array), id(array.root)}:
                    used.setdefault(one, []).append((operations[operation], index))
            used.setdefault(id(operation.result), []).append((operations[operation], "result"))
        of_piece: dict[DimPiece, list[Hashable]] = {piece: [] for piece in pieces}
        for key, array in self._arrays.items():
            for position, dim in enumerate(array.dims):
                for depth, piece in enumerate(flat(dim)):
                    of_piece[piece].append((arrays[key], position, depth))
        for operation in program.operations:
            for index, (operands, result) in enumerate(operation.loops):
                for place, piece in enumerate((*operands, result)):
                    if piece is not None:
                        of_piece[piece].append(("loop", operations[operation], index, place))
        self.operations = _numbered(
            {
                operation: (
                    operations[operation],
                    *(arrays.get(id(array)) for array in (*operation.operands, operation.result)),
                    *((*map(self.of_piece, ins), self.of_piece(out)) for ins, out in operation.loops),
                )
                for operation in program.operations
            }
        )
        self.arrays = _numbered(
            {
                key: (
                    arrays[key],
                    tuple(tuple(pieces[piece] for piece in flat(dim)) for dim in array.dims),
                    _multiset(used.get(key, ())),
                )
                for key, array in self._arrays.items()
            }
        )
        self.pieces = _numbered({piece: (pieces[piece], _set(of_piece[piece])) for piece in pieces})


def _kind(operation: Operation) -> Hashable:
    params = operation.equation.params
    numbers = repr(params.get("dimension_numbers"))
    shapes = tuple(array.shape for array in (*operation.operands, operation.result))
    return (
        operation.equation.primitive.name, numbers, shapes, operation.times, len(operation.loops), operation.backward,
        operation.in_island, len(operation.exchanged_arrays),
    )  # fmt: skip


def _multiset(items: Iterable[Hashable]) -> Hashable:
    return frozenset(Counter(items).items())


def _set(items: Iterable[Hashable]) -> Hashable:
    """Ignores how often an item occurs: dims of the residual stream occur once for each layer that reads it."""
    return frozenset(items)


def _numbered(keys: Mapping[Any, Hashable]) -> dict[Any, int]:
    numbers: dict[Hashable, int] = {}
    return {item: numbers.setdefault(key, len(numbers)) for item, key in keys.items()}
