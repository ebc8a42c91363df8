"""Selects the parameters that muon orthogonalizes, by dim names; optax alone selects every array of two dims.

    blocks/attention/query  [layers, embed, heads, head_dim]    muon, per layer: embed x (heads, head_dim)
    blocks/attention/out    [layers, heads, head_dim, embed]    muon, per layer: (heads, head_dim) x embed
    blocks/norm/scale       [layers, embed]                     AdamW: one vector per layer
    embed, head             [vocab, embed], [embed, vocab]      AdamW, as for all other parameters

By the number of dims alone, the stacked scales of all layers would be a matrix, and stacked matrices would not. Without
names, two-dim parameters are matrices, as in optax; parameters with more dims, such as those of convolutions, are
ambiguous, and `muon_coverage` lists them.

Source: Jordan et al. (2024), https://kellerjordan.github.io/posts/muon: for hidden layers; embedding and head by AdamW.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.tree_util import KeyPath
from optax.contrib import MuonDimensionNumbers

from jaxpar.errors import refuse

DIMS = "muon_weight_dimension_numbers"  # argument of optax's muon
Names = Mapping[str, tuple[str | None, ...] | None]
STACKS = ("layers", "expert")  # names of dims that stack one matrix per entry
TABLES = ("vocab", "vocab_table", "seq_table", "patches", "classes")  # dims of lookup tables and heads
VECTOR = re.compile(r"(^|[/_])(bias|scale|beta|gamma)$")


def matrix_dims(names: Callable[[], Names]) -> Callable[[Any], Any]:
    """Builds the argument `DIMS` of optax's muon: a function of parameters to their matrix dims, or None.

    Args:
      names: Function that returns path to dim names, or to None for a parameter without names, which is then a matrix
        if it has two dims, as in optax.
    """

    def dims(params: optax.Params) -> Any:
        dim_names = names()

        def one(keys: KeyPath, leaf: jax.Array) -> MuonDimensionNumbers | None:
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            return _matrix_dims(path, dim_names.get(path) or (None,) * leaf.ndim)

        return jax.tree_util.tree_map_with_path(one, params)

    return dims


@dataclass(frozen=True, kw_only=True)
class MuonCoverage:
    """The parameters of a model that muon orthogonalizes.

    Attributes:
      all: Number of trained parameters.
      orthogonal: Paths of the orthogonalized parameters.
      unnamed: Paths among `orthogonal` of parameters without names, which are matrices because they have two dims.
      ambiguous: Paths of parameters with more dims, whose names do not determine the two sides of a matrix.
    """

    all: int
    orthogonal: Sequence[str]
    unnamed: Sequence[str]
    ambiguous: Sequence[str]

    def __str__(self) -> str:
        count = len(self.orthogonal)
        text = f"muon: {count} of {self.all} parameters orthogonal, {self.all - count} updated by AdamW"
        if self.unnamed:
            text += f"; treated as matrices because they have two dims, without names: {_some(self.unnamed)}"
        if self.ambiguous:
            text += f"; left to AdamW, because no dim names show which dims form a matrix: {_some(self.ambiguous)}"
        return text


def muon_coverage(shapes: Mapping[str, Sequence[int]], names: Names) -> MuonCoverage:
    """Lists the parameters that muon orthogonalizes.

    Args:
      shapes: Shapes of the trained parameters, by path.
      names: As in `matrix_dims`.

    Raises:
      JaxparError: If there are none, since muon would then be AdamW.
    """
    dims_by_path = {path: names.get(path) or (None,) * len(shape) for path, shape in shapes.items()}
    orthogonal = [path for path, dims in dims_by_path.items() if _matrix_dims(path, dims)]
    # names of stack dims say nothing about the dims of the matrix
    unnamed = [path for path in orthogonal if {*dims_by_path[path]} <= {None, *STACKS}]
    ambiguous = [path for path, dims in dims_by_path.items() if path not in orthogonal and _is_open(path, dims)]
    result = MuonCoverage(all=len(dims_by_path), orthogonal=orthogonal, unnamed=unnamed, ambiguous=ambiguous)
    if not orthogonal:
        raise refuse(
            f"optimizer.name = {result}",
            rule="muon orthogonalizes matrices of hidden layers, recognized by two dims or by dim names",
            fix='optimizer.name = "adamw", or names: nnx.with_partitioning(init, ("embed", "mlp"))',
        )
    return result


def _some(paths: Sequence[str]) -> str:
    return f"{paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}"


def _is_open(path: str, names: tuple[str | None, ...]) -> bool:
    """Whether a parameter that is not a matrix is ambiguous: neither a vector, by name or dims, nor a table or head."""
    inner_names = [name for name in names if name not in STACKS]
    return len(inner_names) > 1 and not VECTOR.search(path) and set(names).isdisjoint(TABLES)


def _matrix_dims(path: str, names: tuple[str | None, ...]) -> MuonDimensionNumbers | None:
    return None if VECTOR.search(path) else matrix(names)


def matrix(names: tuple[str | None, ...]) -> MuonDimensionNumbers | None:
    """Splits the dims of a parameter into those that a matmul contracts and those that it outputs.

    With more than two dims, `embed` must be the first or the last; all others form the other side. Otherwise None.
    """
    inner_dims = tuple(dim for dim, name in enumerate(names) if name not in STACKS)
    if len(inner_dims) < 2 or not set(names).isdisjoint(TABLES):
        return None
    first, last = names[inner_dims[0]], names[inner_dims[-1]]
    if last == "embed" and first != "embed":
        return MuonDimensionNumbers(inner_dims[:-1], inner_dims[-1:])
    return MuonDimensionNumbers(inner_dims[:1], inner_dims[1:]) if len(inner_dims) == 2 or first == "embed" else None
