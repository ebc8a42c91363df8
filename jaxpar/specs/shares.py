"""Applies a solution to another trace of the same model: the share of every array that a device has.

    parameters     are cut along the dims of the solution, by their paths
    activations    are cut like the array of the same source line and shape in the trace that was solved; a result of
                   another line, such as logits that were in chunks there, is cut where its operands are
    backward pass  an operation with a loop over a cut dim is split along it, and so are its other arrays
    constants      are cut like the result of the elementwise operation that reads them: a mask like its scores
    gathers        of an activation that matmuls of both passes read: its shards are kept joined between them

Compared with the trace that was solved, the other one may recompute activations, or have more or fewer examples.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from jax.extend.core import Jaxpr, Literal

from jaxpar.sharding.infer_names.dim_pieces import DimPiece, flat
from jaxpar.specs.optimize import Solution, SpecsSolver
from jaxpar.specs.program import Array, TracedProgram, follow_dims

CutDims = tuple[tuple[int, tuple[int, ...]], ...]  # indices of dims, each with the indices of the axes that cut it


class Shares(Protocol):
    """The share of each array of a program that a device has."""

    def __call__(
        self, jaxpr: Jaxpr, paths: Sequence[str], batch: Sequence[int], gradients: Sequence[int]
    ) -> Callable[[Any], float]:
        """Returns a function of a variable; see `jaxpar.specs.program.follow_dims` for the arguments."""
        ...


class ArrayShares:
    """The dims that a solution cuts, for other traces of the same model and loss."""

    def __init__(self, solver: SpecsSolver, solution: Solution):
        self.sizes = solver.sizes
        program, pieces = solver.program, solver.classes.pieces
        cut = {piece: solution.axes[state] for piece, state in pieces.items() if state in solution.axes}
        self.of_path = {path: _dims_of_axes(array, cut) for path, array in program.params.items()}
        of_line: defaultdict[Hashable, set[CutDims]] = defaultdict(set)
        for array in program.arrays:
            of_line[_line_and_shape(array, program)].add(_dims_of_axes(array, cut))
        self.solved = {*of_line}
        self.of_line = {key: next(iter(dims)) for key, dims in of_line.items() if len(dims) == 1}
        self.gather_shares: dict[Hashable, float] = {}
        for array in _operands(program).values():
            share = 0.0 if array.backward else solution.gather_shares.get(solver.classes.of_array(array.root), 0.0)
            key = _line_and_shape(array, program)
            self.gather_shares[key] = max(share, self.gather_shares.get(key, 0.0))

    def __call__(
        self, jaxpr: Jaxpr, paths: Sequence[str], batch: Sequence[int], gradients: Sequence[int]
    ) -> Callable[[Any], float]:
        """Returns the share that a device has of the array of each variable; see `follow_dims` for the arguments."""
        program = cached_program(jaxpr, tuple(paths), tuple(batch), tuple(gradients))
        share, operands = share_of_variable(program, self._seeds(program), self.sizes), _operands(program)

        def kept_share(variable: Any) -> float:
            array = None if isinstance(variable, Literal) else program.of_variable.get(variable)
            if array is None or id(array) not in operands:  # of a line's arrays only what matmuls read is gathered
                return share(variable)
            return max(share(variable), self.gather_shares.get(_line_and_shape(array, program), 0.0))

        return kept_share

    def _seeds(self, program: TracedProgram) -> Mapping[DimPiece, set[int]]:
        """Returns the pieces that are cut, each with the indices of the axes that cut it."""
        places = [(array, self.of_path.get(path, ())) for path, array in program.params.items()]
        places += [(array, self.of_line.get(_line_and_shape(array, program), ())) for array in program.arrays]
        seeds: defaultdict[DimPiece, set[int]] = defaultdict(set)
        for array, dims in places:
            for dim, axes in dims:
                for piece in [*flat(array.dims[dim])][:1]:
                    seeds[piece] |= {*axes}
        for operation in program.operations:
            if not operation.backward and _line_and_shape(operation.result, program) not in self.solved:
                for operands, result in operation.loops:
                    axes = {axis for piece in operands if piece for axis in seeds.get(piece, ())}
                    if result is not None and axes:
                        seeds[result] |= axes
        return seeds


def share_of_variable(
    program: TracedProgram, cut: Mapping[DimPiece, set[int]], sizes: Sequence[int]
) -> Callable[[Any], float]:
    """Returns a function of a variable of a program to the share that a device has of its array.

    Args:
      program: The program.
      cut: The pieces that are cut, each with the indices of the axes that cut it.
      sizes: Sizes of the axes.
    """

    def of_array(array: Array | None) -> float:
        if array is None:
            return 1.0
        axes = {axis for piece in array.pieces() for axis in cut.get(piece, ())}
        return 1.0 / math.prod(sizes[axis] for axis in axes)

    results: dict[int, list[float]] = defaultdict(list)
    for constant, result in program.constants:
        results[id(constant)].append(of_array(result))

    def share(variable: Any) -> float:
        if isinstance(variable, Literal):
            return 1.0
        array = program.of_variable.get(variable)
        return max(results[id(array)]) if id(array) in results else of_array(array)

    return share


@lru_cache(maxsize=8)  # every size of an axis needs the same programs, one per remat policy
def cached_program(
    jaxpr: Jaxpr, paths: tuple[str, ...], batch: tuple[int, ...], gradients: tuple[int, ...]
) -> TracedProgram:
    """Follows the dims of a program, or returns it as followed before; see `follow_dims`."""
    return follow_dims(jaxpr, paths, batch, gradients)


def _operands(program: TracedProgram) -> dict[int, Array]:
    """Returns the arrays that operations read, by their ids; not constants."""
    return {id(array): array for operation in program.operations for array in operation.operands if not array.constant}


def _dims_of_axes(array: Array, cut: Mapping[DimPiece, tuple[int, ...]]) -> CutDims:
    """Returns the dims of an array whose first piece is cut, each with the indices of the axes that cut it."""
    firsts = [next(flat(dim), None) for dim in array.dims]
    return tuple((index, cut[piece]) for index, piece in enumerate(firsts) if piece is not None and piece in cut)


def _line_and_shape(array: Array, program: TracedProgram) -> Hashable:
    """Returns an array's source line, its bytes per element, and its shape without batch dims."""
    shape = tuple(
        0 if any(piece in program.rows for piece in flat(dim)) else size
        for size, dim in zip(array.shape, array.dims, strict=True)
    )
    return array.line, array.backward, array.itemsize, shape
