"""Writes a solution as names of dims: of parameters by their paths, of activations by the lines that compute them.

heads       batch dims of a matmul of two activations, such as queries and keys
vocab       dims that are looked up by index: rows of a table, logits
experts     a batch dim of a parameter and activations
channels    of convolutions
examples    dims of examples that the axis splits, in addition to the axes of the batch
tokens      dims of the batch after that of examples
mlp         output dims of parameters that other parameters contract
features    any other

A name stands for the same axes everywhere. If some heads are split by one axis and others by another, or by both, the
names end with the axes, except for those that the innermost axis splits: heads, heads_context, heads_context_tensor.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.mesh.axes import AXES
from jaxpar.sharding.infer_names.dim_pieces import DimPiece, flat
from jaxpar.sharding.source_lines import SourceLine
from jaxpar.specs.line_keys import LineKey, arrays_of_lines, line_key
from jaxpar.specs.optimize import Solution, SpecsSolver
from jaxpar.specs.program import Array, TracedProgram

ORDER = ("vocab", "heads", "experts", "channels", "tokens", "mlp")  # a dim with two meanings has the first
Names = tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True)
class NamedSpecs:
    """A solution as names of dims.

    Attributes:
      paths: Maps the end of a parameter's path, as a regular expression, to the names of its dims.
      activations: Maps a source line with the sizes of an array's last dims to the names of that array's dims.
      rules: Maps a dim name to the axes that split it, where jaxpar's own rules choose other axes or none.
      without_line: Arrays, as text, that are cut but have no key: another array of their expression has the same sizes.
      names: Maps each class of pieces that is cut to its name.
      axes: Maps each of these names to the mesh axes that the solver chose, outermost first.
    """

    paths: Mapping[str, Names]
    activations: Mapping[str, Names]
    rules: Mapping[str, Any]
    without_line: tuple[str, ...]
    names: Mapping[int, str]
    axes: Mapping[str, tuple[str, ...]]


def name_solution(
    solver: SpecsSolver, solution: Solution, axes: tuple[str, ...], batch_axes: tuple[str, ...] = ()
) -> NamedSpecs:
    """Returns the names for a solution.

    Args:
      solver: The program that was solved.
      solution: Its solution.
      axes: Names of its axes, outermost first.
      batch_axes: Axes of the mesh that split the batch.
    """
    program = solver.program
    name_of = _names_of_pieces(solver, solution, axes)

    def names(array: Array) -> Names:
        pieces = [next(flat(dim), None) for dim in array.dims]
        return tuple(
            None if piece is None else name_of.get(piece) or ("batch" if piece in program.rows else None)
            for piece in pieces
        )  # fmt: skip

    def activation_names(array: Array) -> Names:
        found: list[str | None] = []
        for dim, name in zip(array.dims, names(array), strict=True):
            given = next((program.name_of_piece.get(piece) for piece in flat(dim)), None)
            found.append(name or (given if given not in found else None))  # of scores, the dim of queries alone
        return tuple(found)

    paths = _by_pattern({path: names(array) for path, array in program.params.items()})
    activations, without_line = _by_line(program, activation_names)
    used = {each for given in (*paths.values(), *activations.values()) for each in given if each}
    rules: dict[str, Any] = {}
    for piece, name in sorted(name_of.items(), key=lambda item: item[1]):
        on = tuple(axes[number] for number in solution.axes[solver.classes.pieces[piece]])
        on = (*batch_axes, *on) if piece in program.rows else on
        first, *others = on
        if name in used and (others or name not in AXES[first].splits):
            rules[name] = on if others else first
    axes_of_name = {
        name: tuple(axes[number] for number in solution.axes[solver.classes.pieces[piece]])
        for piece, name in name_of.items()
    }
    of_class = {solver.classes.pieces[piece]: name for piece, name in name_of.items()}
    return NamedSpecs(
        paths=paths, activations=activations, rules=rules, without_line=without_line, names=of_class, axes=axes_of_name
    )


def _names_of_pieces(solver: SpecsSolver, solution: Solution, axes: tuple[str, ...]) -> dict[DimPiece, str]:
    """Returns the name of each piece (of a dim) that an axis cuts."""
    meanings, rows = _meanings(solver.program), solver.program.rows

    def meaning(piece: DimPiece) -> str:
        if piece in rows:
            return "examples"
        return next((each for each in ORDER if piece in meanings[each]), "features")

    numbers = {piece: solution.axes[state] for piece, state in solver.classes.pieces.items() if state in solution.axes}
    splits: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)  # of each meaning, the axes
    for piece, on in numbers.items():
        splits[meaning(piece)].add(on)

    def name(piece: DimPiece, on: tuple[int, ...]) -> str:
        words = [axes[number] for number in on]
        return "_".join((meaning(piece), *words)) if _is_suffixed(on, splits[meaning(piece)]) else meaning(piece)

    return {piece: name(piece, on) for piece, on in numbers.items()}


def _is_suffixed(on: tuple[int, ...], options: set[tuple[int, ...]]) -> bool:
    """Whether a name ends with its axes. Only the option with the fewest (and innermost) axes has a plain name."""
    return on != min(options, key=lambda each: (len(each), [-number for number in each]))


def _meanings(program: TracedProgram) -> dict[str, set[DimPiece]]:
    """Returns the pieces of each kind of dim in `ORDER`, with all pieces that operations join to them."""
    found: dict[str, set[DimPiece]] = {name: set() for name in ORDER}
    made, taken = set(), set()
    for operation in program.operations:
        learned = [operand.learned for operand in operation.operands]
        for operands, result in operation.loops:
            pieces = {piece for piece in (*operands, result) if piece is not None}
            kind = operation.equation.primitive.name
            if kind == "gather" and result is None:
                found["vocab"] |= pieces
            elif kind == "gather" and any(learned) and operands[0] is None:
                found["tokens"] |= pieces - program.rows
            elif kind == "conv_general_dilated" and any(learned):
                found["channels"] |= pieces - program.rows
            elif kind == "dot_general" and None not in operands and result is not None:
                if not operation.backward:
                    found["experts" if any(learned) else "heads"] |= pieces - program.rows
            elif kind == "dot_general" and any(learned):
                (taken if result is None else made).update(pieces)
    for array in program.inputs:
        if array.dims and set(flat(array.dims[0])) & program.rows:
            found["tokens"] |= {piece for dim in array.dims[1:] for piece in flat(dim)}
    for pieces in found.values():
        add_joined(program, pieces)
    add_joined(program, made)
    add_joined(program, taken)
    found["mlp"] = (made & taken) - _residual_stream(program)
    return found


def _residual_stream(program: TracedProgram) -> set[DimPiece]:
    """Returns the pieces of a residual stream: output dims of more than two parameters (a gated MLP has two)."""
    counts: Counter[DimPiece] = Counter()
    for operation in program.operations:
        if not operation.backward and any(operand.learned for operand in operation.operands):
            counts.update({result for _, result in operation.loops if result is not None})
    pieces = {piece for piece, count in counts.items() if count > 2}
    add_joined(program, pieces)
    return pieces


def add_joined(program: TracedProgram, pieces: set[DimPiece]) -> None:
    """Adds all pieces that share a loop of an operation with one of these, repeatedly."""
    before = -1
    while len(pieces) > before:
        before = len(pieces)
        for operation in program.operations:
            for operands, result in operation.loops:
                loop = {piece for piece in (*operands, result) if piece is not None}
                if loop & pieces:
                    pieces |= loop


def _by_pattern(names: Mapping[str, Names]) -> dict[str, Names]:
    """Merges paths with equal names that differ only in layer numbers to one regular expression."""
    groups: dict[str, dict[str, Names]] = defaultdict(dict)
    for path, given in names.items():
        groups["/".join(r"\d+" if part.isdecimal() else re.escape(part) for part in path.split("/"))][path] = given
    merged: dict[str, Names] = {}
    for pattern, members in groups.items():
        if len(set(members.values())) == 1:
            merged[pattern if len(members) > 1 else re.escape(next(iter(members)))] = next(iter(members.values()))
        else:
            merged |= {re.escape(path): given for path, given in members.items()}
    return merged


def _by_line(program: TracedProgram, names_of: Callable[[Array], Names]) -> tuple[dict[str, Names], tuple[str, ...]]:
    """Returns the names of activations by line and sizes, and the keys for which a line has several names.

    A key has the column of an expression only where others of its line compute arrays of its sizes with other names.
    """
    options: defaultdict[LineKey, defaultdict[tuple[int, ...], set[Names]]] = defaultdict(lambda: defaultdict(set))
    for array in program.arrays:
        # an array without examples has no key of its own, but another array's key must not match it
        if (key := line_key(program, array)) is not None:
            for column in {None, key.column}:
                options[key._replace(column=column, sizes=())][key.sizes].add(names_of(array))
    files = {key.file for key in options}
    short = {file: _shortest_suffix(file, files) for file in files}
    activations, ambiguous = {}, []
    for key in arrays_of_lines(program):
        for column in dict.fromkeys((None, key.column)):
            by_sizes = options[key._replace(column=column, sizes=())]
            if count := _needed_sizes(key.sizes, by_sizes):
                line = SourceLine(short[key.file], key.line, key.sizes[len(key.sizes) - count :], column)
                activations[str(line)] = next(iter(by_sizes[key.sizes]))
                break
        else:
            ambiguous.append(str(SourceLine(short[key.file], key.line, key.sizes, key.column)))
    return activations, tuple(ambiguous)


def _needed_sizes(sizes: tuple[int, ...], others: Mapping[tuple[int, ...], set[Names]]) -> int:
    """Returns the number of last sizes that a key must contain to match no array with other names; 0 if none will do.

    Args:
      sizes: Sizes of the dims after that of examples.
      others: The names of all arrays of the line or of the expression, by these sizes.
    """
    for count in range(1, len(sizes) + 1):
        end = sizes[len(sizes) - count :]
        alike = [options for other, options in others.items() if other[max(0, len(other) - count) :] == end]
        if len(set().union(*alike)) == 1:
            return count
    return 0


def _shortest_suffix(file: str, files: set[str]) -> str:
    """Returns the shortest end of a file's path that no other file has."""
    parts = file.split("/")
    for count in range(1, len(parts)):
        end = "/".join(parts[-count:])
        if sum(other == end or other.endswith("/" + end) for other in files) == 1:
            return end
    return file
