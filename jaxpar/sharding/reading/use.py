"""Names of dims by what the model's program does with them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jax.extend.core import Jaxpr

from jaxpar.sharding.reading.pieces import Dim, Piece, flat
from jaxpar.sharding.reading.program import follow

# A table with more rows than this, in multiples of its width, is cut by rows even if nothing else is made along them:
# that sends activations, where a table that is gathered would send itself. It is the size of a feed-forward matrix.
WIDE = 4


@dataclass(frozen=True, slots=True)
class Read:
    """The dims of a bare parameter, as they were read.

    Attributes:
      names: The name of each dim, or None.
      pieces: Per dim, the number of pieces that it may be cut into at most: a dim of heads x head_dim is cut between
        heads.
      why: What they were read from.
      followed: Whether the whole use of the parameter is known, so that one without a dim to be cut has none.
    """

    names: tuple[str | None, ...]
    pieces: tuple[int, ...]
    why: str
    followed: bool = False


def by_use(jaxpr: Jaxpr, paths: Sequence[str]) -> dict[str, Read]:
    """Returns the dims of all parameters of a traced model, which are its first arguments."""
    params = {path: tuple(tuple(flat(dim)) for dim in dims) for path, dims in follow(jaxpr, paths).items()}
    names = _pairs(params)
    return {path: _read(path, dims, names) for path, dims in params.items()}


def _pairs(params: Mapping[str, Sequence[Dim]]) -> dict[Piece, str]:
    """Returns the pieces that one parameter makes and another contracts, with their names; one for each parameter.

    Those where queries meet keys come first, then those of fewest parameters: what every layer reads and adds to, the
    stream, would take all of them.
    """
    order = {piece: n for n, piece in enumerate(p for dims in params.values() for dim in dims for p in dim)}
    fit = [piece for piece in order if _computed_apart(piece)]
    fit.sort(key=lambda p: (-p.facts.met, len(p.facts.made | p.facts.taken), order[p]))
    chosen: dict[Piece, str] = {}
    done: dict[str, Piece] = {}
    for piece in fit:
        owners = [path for path in piece.facts.made | piece.facts.taken if path in params]
        if all(path not in done or _follows(params[path], done[path], piece) for path in owners):
            chosen[piece] = "heads" if piece.facts.met else "mlp"
            done |= dict.fromkeys(owners, piece)
    return chosen


def _computed_apart(piece: Piece) -> bool:
    facts = piece.facts
    used = facts.made and facts.taken and facts.made.isdisjoint(facts.taken)
    return bool(used) and not (facts.mixed or facts.looked_up or facts.scanned)


def _follows(dims: Sequence[Dim], first: Piece, piece: Piece) -> bool:
    """Returns whether a piece comes after another in a dim, and is used alike: heads in groups that share keys."""
    return first.facts.met == piece.facts.met and any(pair == (first, piece) for dim in dims for pair in pairwise(dim))


def _read(path: str, dims: Sequence[Dim], pairs: Mapping[Piece, str]) -> Read:
    rows = [_row(path, index, dims, pairs) for index in range(len(dims))]
    cut = [piece for dim in dims for piece in dim if piece in pairs]
    return Read(
        names=tuple(name for name, _ in rows),
        pieces=tuple(count for _, count in rows),
        why="use: " + (_told(path, cut[0], pairs[cut[0]]) if cut else ", ".join(_plain(rows)) or "no dim to be cut"),
        followed=not any("not followed" in piece.facts.mixed for dim in dims for piece in dim),
    )


def _row(path: str, index: int, dims: Sequence[Dim], pairs: Mapping[Piece, str]) -> tuple[str | None, int]:
    """Returns the name of a dim, and the number of pieces that it may be cut into."""
    dim = dims[index]
    size = math.prod(piece.size for piece in dim)
    if not dim:
        return None, 1
    if any(piece.facts.scanned for piece in dim):
        return "layers", size
    leading = [piece for piece in dim if piece in pairs]
    if leading:
        # one that is not the first lies within parts of a fused matrix: contiguous pieces are of those parts
        last = max(n for n, piece in enumerate(dim) if piece in pairs)
        return pairs[leading[0]], math.prod(piece.size for piece in dim[: last + 1])
    others = math.prod(piece.size for n, other in enumerate(dims) if n != index for piece in other)
    facts = dim[0].facts
    tied = facts.looked_up and facts.made
    read_out = facts.made and not facts.taken and not facts.looked_up and len(dims) > 1
    head = read_out and path in facts.made and size >= others  # whole, every device would compute all of its results
    if tied or head or (path in facts.looked_up and size > WIDE * others):
        return "vocab", size
    if any(piece.facts.met or "contracted between activations" in piece.facts.mixed for piece in dim):
        return "head_dim", size
    return "embed" if facts.made or facts.taken else None, size


def _told(path: str, piece: Piece, name: str) -> str:
    made, taken = piece.facts.made, piece.facts.taken
    if path in made:
        return f"{name} are made here and contracted by {_short(taken)}"
    if path in taken:
        return f"{name} are contracted here and made by {_short(made)}"
    return f"{name} are made by {_short(made)}"


def _plain(rows: Iterable[tuple[str | None, int]]) -> list[str]:
    return ["rows are looked up, or read out" for name, _ in rows if name == "vocab"]


def _short(paths: Iterable[str]) -> str:
    """Returns the ends of paths, those of equal layers once."""
    ends = sorted({"/".join(path.split("/")[-2:]) for path in paths})
    return ", ".join(ends[:3]) + (", ..." if len(ends) > 3 else "")
