"""Annotations with fewer names than their parameter has dims.

    nn.DenseGeneral, kernel [embed, heads, head_dim], initialized as [embed, heads x head_dim]
    ("embed", "kv")  ──►  ("embed", "kv", None)        of flat dims the outermost is split, as the flat one would be

Flax's layers over several dims call their initializer with flat dims, so that is what `nn.with_logical_partitioning`
and `nnx.with_partitioning` annotate: everywhere in `MultiHeadDotProductAttention`.
"""

from collections.abc import Sequence
from typing import Any

Names = tuple[str | None, ...]


def fitted(names: Sequence[Any], rank: int, flat: Sequence[int] = ()) -> Names:
    """Returns one name, or None, for each dim of a parameter.

    Args:
      names: As annotated. Where there are fewer than dims, the last dims have none, as in a `PartitionSpec`.
      rank: The number of dims.
      flat: How many dims each of the last names is for, where an initializer was called with flat dims; dims before
        them, such as stacked layers, have a name each.

    >>> fitted(("embed", "kv"), 3, (1, 2)), fitted(("kv", "embed"), 3, (2, 1)), fitted(("embed",), 2)
    (('embed', 'kv', None), ('kv', None, 'embed'), ('embed', None))
    """
    ahead = len(names) - len(flat)
    if flat and ahead >= 0 and ahead + sum(flat) == rank:
        last = [(name, *(None,) * (count - 1)) for name, count in zip(names[ahead:], flat, strict=True)]
        return (*names[:ahead], *(name for group in last for name in group))
    return (*names, *(None,) * (rank - len(names)))


def flat_dims(inputs: int, outputs: int, batch: int) -> dict[str, tuple[int, ...]]:
    """Returns how many dims of a dense layer's parameters each flat dim stands for.

    Args:
      inputs: Dims that its kernel contracts.
      outputs: Dims that it makes.
      batch: Dims that inputs and outputs share, each with a kernel of its own.
    """
    return {"kernel": (batch + inputs, outputs), "bias": (batch + outputs,)}
