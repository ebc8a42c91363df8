"""Recognizes projections of which one matmul computes several parts, such as queries, keys and values.

    matrix [dim, 3 * heads * width] ─► whole [batch, seq, 3 * heads * width] ─► three parts [batch, seq, heads * width]

    forward    split, three slices, or a reshape to [batch, seq, 3, heads, width]
    backward   concatenate, a pad of each part, or the reshape back

In this example the last dim of the whole consists of the pieces 3, heads and width. An axis that cuts the whole into
contiguous chunks cuts the piece 3, which the parts do not have. XLA then sends the whole to where its parts are needed;
of a reshape it gathers the whole, or the parts. So the dims of the parts are not joined with that of the whole:
an operation lies between them. But for a reshape its last loop runs over the entries of the whole and the first piece
of a part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn

from jaxpar.sharding.infer_names.dim_pieces import Dim, flat

PARTS = 3  # queries, keys and values; the gates of a GRU too


@dataclass(frozen=True, kw_only=True)
class PartAxes:
    """The axes of an equation that splits a fused projection or joins its gradients.

    Attributes:
      operand: The axis of the operands, of the whole or of a part.
      result: The axis of the results.
      backward: Whether it joins gradients.
      exchanges: Number of all-to-alls that it needs if a mesh axis cuts both the whole and its parts.
    """

    operand: int
    result: int
    backward: bool
    exchanges: int


class FusedProjections:
    """The fused projections of one program, found as its equations come."""

    def __init__(self) -> None:
        self._projected: list[Dim] = []
        self._seen: set[tuple[Any, ...]] = set()
        self._sliced: set[int] = set()

    def add(self, dim: Dim) -> None:
        """Adds the last dim of the result of a matmul with a matrix of parameters."""
        self._projected.append(dim)

    def axes(self, eqn: JaxprEqn, dims: Sequence[Dim], *, backward: bool) -> PartAxes | None:
        """Returns the axes of an equation; None if it neither splits a fused projection nor joins its gradients.

        Args:
          eqn: The equation.
          dims: The dims of its first operand.
          backward: Whether it belongs to the backward pass.
        """
        shapes = tuple(tuple(getattr(var.aval, "shape", ())) for var in (*eqn.invars, *eqn.outvars))
        if (name := eqn.primitive.name) == "split" and len(eqn.outvars) == PARTS:
            return self._forward(eqn.params["axis"], eqn.params["axis"], dims, ("concatenate", *shapes[1:], shapes[0]))
        if name == "reshape" and len(shapes[0]) and shapes[1][: len(shapes[0])] == (*shapes[0][:-1], PARTS):
            axis = len(shapes[0]) - 1
            has_heads = len(shapes[1]) > axis + 2  # else the three may be heads
            return self._forward(axis, axis + 1, dims, ("reshape", shapes[1], shapes[0])) if has_heads else None
        if name == "slice" and (axis := _only_difference(*shapes)) is not None and not eqn.params["strides"]:
            whole, part = shapes[0][axis], shapes[1][axis]
            if whole == PARTS * part and eqn.params["start_indices"][axis] % part == 0:
                return self._forward(axis, axis, dims, ("pad", shapes[1], shapes[0]))
        if backward and name in ("concatenate", "reshape") and (name, *shapes) in self._seen:
            axis = eqn.params["dimension"] if name == "concatenate" else len(shapes[-1]) - 1
            return PartAxes(
                operand=axis if name == "concatenate" else axis + 1, result=axis, backward=True, exchanges=1
            )
        if backward and name == "pad" and (name, shapes[0], shapes[-1]) in self._seen:
            axis = _only_difference(shapes[-1], shapes[0])
            return None if axis is None else PartAxes(operand=axis, result=axis, backward=True, exchanges=1)
        return None

    def _forward(self, operand: int, result: int, dims: Sequence[Dim], gradient: tuple[Any, ...]) -> PartAxes | None:
        """Returns the axes if a whole projected dim is split; `gradient` is the equation that joins its gradients."""
        pieces = [*flat(dims[operand])]
        if len(pieces) != 1 or not any(pieces == [*flat(dim)] for dim in self._projected):
            return None
        # compiled for GPUs, XLA exchanges the whole and then its parts; of slices the first one stands for all
        first = gradient[0] != "pad" or id(pieces[0]) not in self._sliced
        self._sliced.add(id(pieces[0]))
        self._seen.add(gradient)
        return PartAxes(operand=operand, result=result, backward=False, exchanges=2 if first else 0)


def _only_difference(whole: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """Returns the only axis along which two shapes differ; None if there are several."""
    if len(whole) != len(part):
        return None
    axes = [axis for axis, sizes in enumerate(zip(whole, part, strict=True)) if sizes[0] != sizes[1]]
    return axes[0] if len(axes) == 1 and math.prod(part) else None
