"""Finds the arrays that one key of `Parallel.activations` names: those of an expression that have one shape.

    forward      x    [batch, tokens, features]   <- file.py:31 [..., features] = ["batch", "tokens", ""]
    recomputed   x    [batch, tokens, features]
    backward     dx   [batch, tokens, features]

A name of a line is a sharding constraint on all arrays of its sizes that the line computes, and the transpose of a
constraint constrains the gradient. So an axis that cuts one of these arrays cuts each of them along the same dim.
"""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from jaxpar.sharding.infer_names.dim_pieces import flat
from jaxpar.specs.program import Array, TracedProgram

_PACKAGE = f"{Path(__file__).parents[1]}/"  # jaxpar's layers constrain activations themselves, and differ within a step


class LineKey(NamedTuple):
    """A line of source, and the sizes of an array that it computes.

    Attributes:
      file: The file.
      line: The number of the line.
      column: The column of its expression, counted from 1; None if unknown.
      rank: Number of dims of the array.
      sizes: Sizes of its dims after that of examples; of all dims but the first if it has none.
    """

    file: str
    line: int
    column: int | None
    rank: int
    sizes: tuple[int, ...]


def line_key(program: TracedProgram, array: Array) -> LineKey | None:
    """Returns the key of an activation of the forward pass; None for other arrays, and where no line can name it."""
    line, examples = array.line, _dims_of_examples(program, array)
    if line is None or line.file.startswith(_PACKAGE) or array.backward or array.learned or not array.shape:
        return None
    if len(examples) > 1 or examples == [len(array.shape) - 1]:
        return None
    return LineKey(line.file, line.line, line.column, len(array.shape), array.shape[(examples or [0])[0] + 1 :])


def arrays_of_lines(program: TracedProgram) -> dict[LineKey, list[Array]]:
    """Returns the activations that lines may name, by their keys, if an operation reads or computes one of a key."""
    multiplied = {
        id(array)
        for operation in program.operations
        if not operation.backward
        for array in (*operation.operands, operation.result)
    }
    arrays: defaultdict[LineKey, list[Array]] = defaultdict(list)
    for array in program.arrays:
        if _dims_of_examples(program, array) and (key := line_key(program, array)):
            arrays[key].append(array)
    return {key: given for key, given in arrays.items() if any(id(array) in multiplied for array in given)}


def _dims_of_examples(program: TracedProgram, array: Array) -> list[int]:
    pieces = [next(flat(dim), None) for dim in array.dims]
    return [place for place, piece in enumerate(pieces) if piece in program.rows]


def groups_cut_alike(program: TracedProgram) -> list[list[Array]]:
    """Returns groups of arrays of one shape whose dims are cut alike: activations of one key and their gradients.

    One expression may compute several arrays of one shape. If they were cut along different dims, no name could
    describe all of them, and XLA would choose for each: the traffic was then mostly far above the prediction.
    """
    partners = {id(array): given for given in program.marks.values() for array in given}
    groups = []
    for named in arrays_of_lines(program).values():
        members = {id(each): each for array in named for each in (array, *partners.get(id(array), ()))}
        groups.append([*members.values()])
    return [group for group in groups if len(group) > 1]
