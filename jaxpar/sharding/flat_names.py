"""Annotations with fewer names than their parameter has dims.

    nn.DenseGeneral, kernel [embed, heads, head_dim], initialized as [embed, heads x head_dim]
    ("embed", "kv")  ──►  ("embed", "kv", None)        of flat dims the outermost is split, as the flat one would be

Flax's layers over several dims call their initializer with flat dims, so `nn.with_logical_partitioning` and
`nnx.with_partitioning` annotate these: everywhere in `MultiHeadDotProductAttention`.
"""

from collections.abc import Sequence
from typing import Any

Names = tuple[str | None, ...]


def fitted(names: Sequence[Any], rank: int, flat: Sequence[int] = ()) -> Names:
    """Returns one name, or None, for each dim of a parameter.

    Args:
      names: As annotated. If there are fewer names than dims, the last dims have none, as in a `PartitionSpec`.
      rank: The number of dims.
      flat: Number of dims of each of the last names, if an initializer was called with flat dims; dims before them,
        such as stacked layers, have a name each.

    >>> fitted(("embed", "kv"), 3, (1, 2)), fitted(("kv", "embed"), 3, (2, 1)), fitted(("embed",), 2)
    (('embed', 'kv', None), ('kv', None, 'embed'), ('embed', None))
    """
    leading = len(names) - len(flat)
    if flat and leading >= 0 and leading + sum(flat) == rank:
        groups = [(name, *(None,) * (count - 1)) for name, count in zip(names[leading:], flat, strict=True)]
        return (*names[:leading], *(name for group in groups for name in group))
    return (*names, *(None,) * (rank - len(names)))


def flat_dims(inputs: int, outputs: int, batch: int) -> dict[str, tuple[int, ...]]:
    """Returns, for each flat dim of a dense layer's parameters, the number of dims that it stands for.

    Args:
      inputs: Dims that the kernel contracts.
      outputs: Dims that the kernel produces.
      batch: Dims that inputs and outputs share, each with its own kernel.
    """
    return {"kernel": (batch + inputs, outputs), "bias": (batch + outputs,)}
