"""Which parameters muon makes orthogonal, told by the names of their dims: optax takes every array of two dims for one.

    blocks/attention/query  [layers, embed, heads, head_dim]    each layer's, as embed x (heads, head_dim)
    blocks/attention/out    [layers, heads, head_dim, embed]    each layer's, as (heads, head_dim) x embed
    blocks/norm/scale       [layers, embed]                     a vector of each layer: AdamW's
    embed, head             [vocab, embed], [embed, vocab]      AdamW's, as is everything else

By its number of dims the scales of all layers would be a matrix, and the matrices of a stack none.

Source: Jordan et al. (2024), https://kellerjordan.github.io/posts/muon: for hidden layers; embedding and head by AdamW.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

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
            return None if VECTOR.search(path) else matrix(known.get(path) or (None,) * leaf.ndim)

        return jax.tree_util.tree_map_with_path(one, params)

    return dims


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
