"""Pieces of dims: jaxpar joins dims that a program equates, and splits dims that it reshapes into several.

A dim of an array is a tuple of pieces, the outermost first: `[batch, seq, heads * head_dim]` has a third dim of two
pieces once a reshape splits it. Joined pieces become one piece (union-find), and share their facts.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class DimFacts:
    """The uses of a piece in a program.

    Attributes:
      produced_by: Parameters whose matmuls with activations have it as an output dim.
      contracted_by: Parameters whose matmuls with activations contract it.
      batched_count: Number of matmuls of two activations with it as a batch dim, such as queries with keys.
      batched_by: Parameters whose matmuls with activations have it as a batch dim, as those of experts.
      looked_up: Parameters that are indexed along it.
      mixed: Reasons why its entries depend on each other: reduced, contracted between activations, or not followed.
      scanned: Whether a scan iterates over it.
      convolved: Whether it is a dim of channels, produced or contracted by a convolution.
    """

    produced_by: set[str] = field(default_factory=set)
    contracted_by: set[str] = field(default_factory=set)
    batched_count: int = 0
    batched_by: set[str] = field(default_factory=set)
    looked_up: set[str] = field(default_factory=set)
    mixed: set[str] = field(default_factory=set)
    scanned: bool = False
    convolved: bool = False

    def add(self, other: "DimFacts") -> None:
        """Adds the facts of a piece that is joined with this one."""
        self.produced_by |= other.produced_by
        self.contracted_by |= other.contracted_by
        self.batched_count += other.batched_count
        self.batched_by |= other.batched_by
        self.looked_up |= other.looked_up
        self.mixed |= other.mixed
        self.scanned |= other.scanned
        self.convolved |= other.convolved


@dataclass(eq=False)
class DimPiece:
    """A piece of a dim.

    Attributes:
      size: Number of entries.
      facts: How the program uses it.
      parts: The pieces that it was split into; they then hold the facts.
      parent: The piece that it was joined with, or None.
    """

    size: int
    facts: DimFacts = field(default_factory=DimFacts)
    parts: tuple["DimPiece", ...] = ()
    parent: "DimPiece | None" = None


Dim = tuple[DimPiece, ...]  # empty for a dim of size 1 or 0


def fresh(size: int) -> Dim:
    """Returns a new dim without facts."""
    return (DimPiece(size),) if size > 1 else ()


def flat(dim: Iterable[DimPiece]) -> Iterator[DimPiece]:
    """Yields the current pieces of a dim."""
    for piece in dim:
        while piece.parent is not None:
            piece = piece.parent
        if piece.parts:
            yield from flat(piece.parts)
        else:
            yield piece


def join(first: Dim, second: Dim) -> None:
    """Joins two dims of equal size, and splits the pieces of either at the boundaries of the other."""
    left, right = [*flat(first)][::-1], [*flat(second)][::-1]
    while left and right:
        a, b = left.pop(), right.pop()
        current = [(stack, [*flat((piece,))]) for stack, piece in ((left, a), (right, b))]
        if any(pieces != [piece] for (_, pieces), piece in zip(current, (a, b), strict=True)):
            for stack, pieces in current:  # split or joined meanwhile
                stack.extend(reversed(pieces))
        elif a is b:
            continue
        elif a.size == b.size:
            a.facts.add(b.facts)
            b.parent = a
        elif a.size % b.size == 0:
            left.extend(reversed(split(a, b.size)))
            right.append(b)
        elif b.size % a.size == 0:
            right.extend(reversed(split(b, a.size)))
            left.append(a)
        else:
            mix((a, b, *left, *right), "not followed")
            return


def regroup(dims: Sequence[Dim], sizes: Sequence[int]) -> list[Dim]:
    """Returns the dims of a reshaped array; new ones if it has no entries."""
    if 0 in sizes:
        return [fresh(size) for size in sizes]
    pieces = [piece for dim in dims for piece in flat(dim)][::-1]
    dims_out: list[Dim] = []
    for index, size in enumerate(sizes):
        dim: list[DimPiece] = []
        while (missing := size // math.prod(p.size for p in dim)) > 1:
            piece = pieces.pop()
            if missing % piece.size == 0:
                dim.append(piece)
            elif piece.size % missing == 0:
                first, second = split(piece, missing)
                dim.append(first)
                pieces.append(second)
            else:
                mix((*dim, piece, *pieces), "not followed")
                return [*dims_out, *(fresh(size) for size in sizes[index:])]
        dims_out.append(tuple(dim))
    return dims_out


def mix(dim: Iterable[DimPiece], why: str) -> None:
    """Records that the entries of a dim depend on each other."""
    for piece in flat(dim):
        piece.facts.mixed.add(why)


def split(piece: DimPiece, first: int) -> tuple[DimPiece, DimPiece]:
    """Splits a piece in two, of which the first has `first` entries; both get its facts."""
    parts = DimPiece(first), DimPiece(piece.size // first)
    for part in parts:
        part.facts.add(piece.facts)
    piece.parts = parts
    return parts
