"""The shares of arrays that a device has, in another trace of a model whose dims were chosen.

    parameters     cut along the dims that were chosen, by their paths
    activations    as the arrays of the same line and shape in the trace for which dims were chosen
    backward pass  an operation that runs over a cut dim is split along it, and its other arrays with it
    constants      as the result of the elementwise operation that reads them, such as masked scores of a mask

The other trace may recompute activations, and have another number of examples.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

from jax.extend.core import Jaxpr

from jaxpar.sharding.infer_names.dim_pieces import DimPiece, flat
from jaxpar.specs.optimize import Cuts, Solution
from jaxpar.specs.program import Array, TracedProgram, follow


class ArrayShares:
    """The dims that a solution cuts, for other traces of the same model and loss."""

    def __init__(self, cuts: Cuts, solution: Solution):
        self.size = cuts.n
        program, pieces = cuts.program, cuts.classes.pieces
        cut = {piece for piece, state in pieces.items() if state in solution.cut}
        self.of_path = {path: _positions(array, cut) for path, array in program.params.items()}
        of_line: defaultdict[Hashable, set[tuple[int, ...]]] = defaultdict(set)
        for array in program.arrays:
            of_line[_line_and_shape(array, program)].add(_positions(array, cut))
        self.of_line = {key: next(iter(positions)) for key, positions in of_line.items() if len(positions) == 1}

    def __call__(
        self, jaxpr: Jaxpr, paths: Sequence[str], batch: Sequence[int], gradients: Sequence[int]
    ) -> Callable[[Any], float]:
        """Returns the share that a device has of the array of each variable; see `follow` for the arguments."""
        program = _followed(jaxpr, tuple(paths), tuple(batch), tuple(gradients))
        cut = self._seeds(program)
        results: dict[int, list[float]] = defaultdict(list)
        for constant, result in program.constants:
            results[id(constant)].append(self._share(result, cut))

        def share(variable: Any) -> float:
            array = program.of_variable.get(variable)
            return max(results[id(array)]) if id(array) in results else self._share(array, cut)

        return share

    def _seeds(self, program: TracedProgram) -> set[DimPiece]:
        places = [(array, self.of_path.get(path, ())) for path, array in program.params.items()]
        places += [(array, self.of_line.get(_line_and_shape(array, program), ())) for array in program.arrays]
        return {piece for array, dims in places for dim in dims for piece in [*flat(array.dims[dim])][:1]}

    def _share(self, array: Array | None, cut: set[DimPiece]) -> float:
        return 1.0 if array is None or cut.isdisjoint(array.pieces()) else 1.0 / self.size


@lru_cache(maxsize=8)  # each size of an axis asks for the same programs, one per remat policy
def _followed(
    jaxpr: Jaxpr, paths: tuple[str, ...], batch: tuple[int, ...], gradients: tuple[int, ...]
) -> TracedProgram:
    return follow(jaxpr, paths, batch, gradients)


def _positions(array: Array, cut: set[DimPiece]) -> tuple[int, ...]:
    """Returns the dims of an array whose first piece is cut."""
    firsts = [next(flat(dim), None) for dim in array.dims]
    return tuple(index for index, piece in enumerate(firsts) if piece in cut)


def _line_and_shape(array: Array, program: TracedProgram) -> Hashable:
    """Returns the line of an array, its item size, and its shape without the dims of examples."""
    shape = tuple(
        0 if any(piece in program.rows for piece in flat(dim)) else size
        for size, dim in zip(array.shape, array.dims, strict=True)
    )
    return array.line, array.backward, array.itemsize, shape
