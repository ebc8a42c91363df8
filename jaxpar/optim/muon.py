"""Which parameters muon makes orthogonal, told by the names of their dims: optax takes every array of two dims for one.

    blocks/attention/query  [layers, embed, heads, head_dim]    each layer's, as embed x (heads, head_dim)
    blocks/attention/out    [layers, heads, head_dim, embed]    each layer's, as (heads, head_dim) x embed
    blocks/norm/scale       [layers, embed]                     a vector of each layer: AdamW's
    embed, head             [vocab, embed], [embed, vocab]      AdamW's, as is everything else

By its number of dims the scales of all layers would be a matrix, and the matrices of a stack none. Without names those
with two dims are matrices, as in optax, and of more dims, as those of convolutions, nobody knows: `share` says so.

Source: Jordan et al. (2024), https://kellerjordan.github.io/posts/muon: for hidden layers; embedding and head by AdamW.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from jaxpar.errors import refuse

DIMS = "muon_weight_dimension_numbers"  # the argument of optax's muon
Names = Mapping[str, tuple[str | None, ...] | None]
STACKS = ("layers", "expert")  # names of dims along which there is a matrix each
TABLES = ("vocab", "vocab_table", "seq_table", "patches", "classes")  # of what is looked up, and of heads
VECTOR = re.compile(r"(^|[/_])(bias|scale|beta|gamma)$")


def matrices(names: Callable[[], Names]) -> Callable[[Any], Any]:
    """Returns the argument `DIMS` of optax's muon: a function of parameters to what makes a matrix of each, or None.

    Args:
      names: Returns for each parameter's path the names of its dims, or None where it has none: of such, those with two
        dims are matrices, as in optax.
    """

    def dims(params: Any) -> Any:
        known = names()

        def one(keys: Any, leaf: Any) -> MuonDimensionNumbers | None:
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            return _of(path, known.get(path) or (None,) * leaf.ndim)

        return jax.tree_util.tree_map_with_path(one, params)

    return dims


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which parameters of a model muon makes orthogonal.

    Attributes:
      all: How many are trained.
      orthogonal: Paths of those that are.
      bare: Of these, those that are so by two dims alone, which have no names.
      unknown: Paths of those of more dims, whose names do not say which of them make a matrix.
    """

    all: int
    orthogonal: Sequence[str]
    bare: Sequence[str]
    unknown: Sequence[str]

    def __str__(self) -> str:
        made = len(self.orthogonal)
        said = f"muon: {made} of {self.all} parameters orthogonal, {self.all - made} updated by AdamW"
        if self.bare:
            said += f"; taken for matrices by their two dims, which have no names: {_some(self.bare)}"
        if self.unknown:
            said += f"; left to AdamW, since no names of dims tell what a matrix is: {_some(self.unknown)}"
        return said


def share(shapes: Mapping[str, Sequence[int]], names: Names) -> Share:
    """Returns which parameters muon makes orthogonal.

    Args:
      shapes: Of those that are trained, by path.
      names: As `matrices` is given them.

    Raises:
      JaxparError: If it is none: an AdamW by another name.
    """
    known = {path: names.get(path) or (None,) * len(shape) for path, shape in shapes.items()}
    made = [path for path, dims in known.items() if _of(path, dims)]
    bare = [path for path in made if {*known[path]} <= {None, *STACKS}]  # that of a stack names nothing that is in it
    unknown = [path for path, dims in known.items() if path not in made and _is_open(path, dims)]
    found = Share(all=len(known), orthogonal=made, bare=bare, unknown=unknown)
    if not made:
        raise refuse(
            f"optimizer.name = {found}",
            rule="muon makes matrices of hidden layers orthogonal, known by two dims or by names of more",
            fix='optimizer.name = "adamw", or names: nnx.with_partitioning(init, ("embed", "mlp"))',
        )
    return found


def _some(paths: Sequence[str]) -> str:
    return f"{paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}"


def _is_open(path: str, names: tuple[str | None, ...]) -> bool:
    """Returns whether a parameter that is no matrix is neither a vector, by name or dims, nor a table or a head."""
    own = [name for name in names if name not in STACKS]
    return len(own) > 1 and not VECTOR.search(path) and set(names).isdisjoint(TABLES)


def _of(path: str, names: tuple[str | None, ...]) -> MuonDimensionNumbers | None:
    return None if VECTOR.search(path) else matrix(names)


def matrix(names: tuple[str | None, ...]) -> MuonDimensionNumbers | None:
    """Returns which dims of a parameter are what it multiplies an activation over, and which are what comes out.

    Of more than two dims, those beside the stream's, `embed`: None where neither end of them is the stream.
    """
    own = tuple(dim for dim, name in enumerate(names) if name not in STACKS)
    if len(own) < 2 or not set(names).isdisjoint(TABLES):
        return None
    first, last = names[own[0]], names[own[-1]]
    if last == "embed" and first != "embed":
        return MuonDimensionNumbers(own[:-1], own[-1:])
    return MuonDimensionNumbers(own[:1], own[1:]) if len(own) == 2 or first == "embed" else None
