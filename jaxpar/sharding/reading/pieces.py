"""Pieces of dims: what a program treats as one is joined, what it reshapes apart is split.

A dim of an array is a tuple of pieces, the outermost first: `[batch, seq, heads * head_dim]` has a third dim of two
pieces as soon as a reshape shows them. Joined pieces are one piece from then on (union-find), and share their facts.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Facts:
    """What a program does with a piece.

    Attributes:
      made: Parameters whose matmuls with activations make it.
      taken: Parameters whose matmuls with activations contract it.
      met: How often it is kept in a matmul of two activations, as queries with keys.
      looked_up: Parameters that are indexed along it.
      mixed: Why its entries cannot be computed apart: reduced, contracted between activations, or not followed.
      scanned: Whether a scan goes along it.
    """

    made: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    met: int = 0
    looked_up: set[str] = field(default_factory=set)
    mixed: set[str] = field(default_factory=set)
    scanned: bool = False

    def add(self, other: "Facts") -> None:
        """Adds what is known of another piece that turns out to be this one."""
        self.made |= other.made
        self.taken |= other.taken
        self.met += other.met
        self.looked_up |= other.looked_up
        self.mixed |= other.mixed
        self.scanned |= other.scanned


@dataclass(eq=False)
class Piece:
    """A piece of a dim.

    Attributes:
      size: Number of entries.
      facts: What is done with it.
      parts: The pieces that it was split into; facts are theirs then.
      same: The piece that it was joined with.
    """

    size: int
    facts: Facts = field(default_factory=Facts)
    parts: tuple["Piece", ...] = ()
    same: "Piece | None" = None


Dim = tuple[Piece, ...]  # none for a dim of size 1


def fresh(size: int) -> Dim:
    """Returns a dim of which nothing is known."""
    return (Piece(size),) if size != 1 else ()


def flat(dim: Iterable[Piece]) -> Iterator[Piece]:
    """Yields the pieces that a dim consists of by now."""
    for piece in dim:
        while piece.same is not None:
            piece = piece.same
        if piece.parts:
            yield from flat(piece.parts)
        else:
            yield piece


def join(one: Dim, other: Dim) -> None:
    """Notes that two dims of a size are one, and splits the pieces of either as those of the other are."""
    left, right = [*flat(one)][::-1], [*flat(other)][::-1]
    while left and right:
        a, b = left.pop(), right.pop()
        opened = [(stack, [*flat((piece,))]) for stack, piece in ((left, a), (right, b))]
        if any(found != [piece] for (_, found), piece in zip(opened, (a, b), strict=True)):
            for stack, found in opened:  # split or joined since it was listed
                stack.extend(reversed(found))
        elif a is b:
            continue
        elif a.size == b.size:
            a.facts.add(b.facts)
            b.same = a
        elif a.size % b.size == 0:
            left.extend(reversed(_split(a, b.size)))
            right.append(b)
        elif b.size % a.size == 0:
            right.extend(reversed(_split(b, a.size)))
            left.append(a)
        else:
            mix((a, b, *left, *right), "not followed")
            return


def regroup(dims: Sequence[Dim], sizes: Sequence[int]) -> list[Dim]:
    """Returns the dims of a reshaped array."""
    pieces = [piece for dim in dims for piece in flat(dim)][::-1]
    made: list[Dim] = []
    for index, size in enumerate(sizes):
        dim: list[Piece] = []
        while (need := size // math.prod(p.size for p in dim)) > 1:
            piece = pieces.pop()
            if need % piece.size == 0:
                dim.append(piece)
            elif piece.size % need == 0:
                first, second = _split(piece, need)
                dim.append(first)
                pieces.append(second)
            else:
                mix((*dim, piece, *pieces), "not followed")
                return [*made, *(fresh(size) for size in sizes[index:])]
        made.append(tuple(dim))
    return made


def mix(dim: Iterable[Piece], why: str) -> None:
    """Notes that the entries of a dim are not computed apart."""
    for piece in flat(dim):
        piece.facts.mixed.add(why)


def _split(piece: Piece, first: int) -> tuple[Piece, Piece]:
    parts = Piece(first), Piece(piece.size // first)
    for part in parts:
        part.facts.add(piece.facts)
    piece.parts = parts
    return parts
