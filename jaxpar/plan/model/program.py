"""A traced function as a flat list of ops on arrays, whose sizes are polynomials in the number of rows.

`program_reader.py` makes it of jaxprs. Here is how several devices split it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from jax.extend.core import Jaxpr

DEGREE = 3  # of the polynomials
Kind = Literal["heavy", "reduce", "elementwise", "stack", "loop"]
MatmulKind = Literal["weights", "batched", "convolution"]

PARTS = frozenset(("slice", "split", "dynamic_slice", "gather"))  # read a part of their first operand
Polynomial = np.ndarray


@dataclass(frozen=True, slots=True)
class TracedMatmul:
    """Size and kind of a matmul or a convolution.

    Attributes:
      flop: FLOP of one. A polynomial in the rows, from the constant on.
      kind: "weights", "batched" (has a batch dim) or "convolution".
      copied: Positions of the operands whose batch dims do not lead: a library needs a copy.
      bits: Bits of the operands' dtype.
    """

    flop: Any
    kind: MatmulKind
    copied: tuple[int, ...]
    bits: int


@dataclass(frozen=True, slots=True)
class TracedOp:
    """An op of a program.

    Attributes:
      name: Name of its primitive.
      kind: "elementwise" ops are fused; "reduce" ends a fusion; "heavy" ops read and write arrays; "stack" writes a
        slice of a scan's stacked result; "loop" is a scan.
      inputs: Numbers of the arrays that it reads.
      outputs: Numbers of its results.
      backward: Whether it is part of the backward pass.
      matmul: The matmul that it is, or None.
      body: SizedProgram of one iteration of a loop, or None.
      length: Iterations of a loop.
      carried: Number of a loop's results that are its final carry; the others are stacked over iterations.
      row: Elements that a reduction over the last dim reads for each result; 0 for other ops.
      scanned: Number of a loop's inputs that are stacks, the last ones; each iteration reads a slice of them.
      is_slice: Whether it reads such a slice.
      collective: What devices that split arrays do after it: "sum" their results of a matmul or a reduction, also if
        only the result of whole rows is gathered; "gather" the result of an elementwise op of one array; "" for
        neither.
    """

    name: str
    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    backward: bool = False
    matmul: TracedMatmul | None = None
    body: "SizedProgram | None" = None
    length: int = 1
    carried: int = 0
    row: int = 0
    scanned: int = 0
    is_slice: bool = False
    collective: Literal["", "sum", "gather"] = ""

    @property
    def waits(self) -> bool:
        """Whether devices that split arrays wait for a collective after it, or in an iteration of it."""
        return bool(self.collective) or (self.body is not None and any(op.waits for op in self.body.ops))


@dataclass(slots=True)
class SizedProgram:
    """Ops in program order, and the arrays that they read and write.

    Attributes:
      sizes: Bytes of each array. A polynomial in the rows, from the constant on.
      widths: Bytes of an element of each array.
      ops: The ops.
      inputs: Numbers of the arguments' arrays.
      outputs: Numbers of the results, None for a constant.
      variables: The variable of each array in `jaxpr`, or in one inside of it.
      views: Maps arrays to the variables of their views.
      jaxpr: The jaxpr of the smaller number of rows.
    """

    sizes: list[Any] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    ops: list[TracedOp] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    variables: list[Any] = field(default_factory=list)
    views: dict[int, list[Any]] = field(default_factory=dict)
    jaxpr: Jaxpr | None = None

    def split(self, share: Callable[[Any], float]) -> "SizedProgram":
        """Returns the program of one device of several that split arrays.

        Args:
          share: Maps a variable to the share of its array that the device has. An array that is gathered for one of its
            views stays gathered. A matmul is split as the most split of its arrays.
        """
        return self._split(share, ())[0]

    def _split(self, share: Callable[[Any], float], least: Sequence[float]) -> tuple["SizedProgram", list[float]]:
        """Returns the program of one device, and the shares of its arrays; `least` has lower bounds for its inputs."""
        shares = [
            max(map(share, (variable, *self.views.get(entry, ())))) for entry, variable in enumerate(self.variables)
        ]
        for entry, bound in zip(self.inputs, least, strict=bool(least)):
            shares[entry] = max(shares[entry], bound)
        ops = []
        for op in self.ops:
            if op.body is not None:
                op, results = op.body._split_loop(op, share, shares)
                for entry, bound in results.items():
                    shares[entry] = max(shares[entry], bound)
            elif op.is_slice:
                shares[op.outputs[0]] = max(shares[op.outputs[0]], shares[op.inputs[0]])
            else:
                op = _split_op(op, shares)
            ops.append(op)
        sizes = [part * size for part, size in zip(shares, self.sizes, strict=True)]
        return replace(self, sizes=sizes, ops=ops), shares

    def _split_loop(
        self, op: TracedOp, share: Callable[[Any], float], shares: Sequence[float]
    ) -> tuple[TracedOp, dict[int, float]]:
        """Returns the loop of this body on one device, and the shares of its stacked results.

        What is gathered outside is whole inside, and the other way round; but what iterations hand on is split again.
        """
        first = len(op.inputs) - op.scanned - op.carried
        least = [
            0.0 if first <= number < first + op.carried else shares[entry] for number, entry in enumerate(op.inputs)
        ]
        body, of_body = self._split(share, least)
        pairs = [*zip(op.outputs, body.outputs, strict=True)][op.carried :]
        return replace(op, body=body), {entry: of_body[inner] for entry, inner in pairs if inner is not None}

    def matmuls(self, times: int = 1, backward: bool = False) -> Iterator[tuple[TracedMatmul, int, bool]]:
        """Yields each matmul with its number of runs, and whether it is part of the backward pass."""
        for op in self.ops:
            if op.matmul is not None:
                yield op.matmul, times, backward or op.backward
            elif op.body is not None:
                yield from op.body.matmuls(times * op.length, backward or op.backward)


def _split_op(op: TracedOp, shares: Sequence[float]) -> TracedOp:
    if not op.inputs or not op.outputs:
        return op
    result = shares[op.outputs[0]]
    least = min(shares[entry] for entry in op.inputs)
    if op.matmul is not None:
        op = replace(op, matmul=replace(op.matmul, flop=min(least, result) * op.matmul.flop))
    if least >= result:
        return op
    if op.kind == "reduce":  # of parts of rows: no kernel has all of a row
        return replace(op, collective="sum", row=0)
    if op.matmul is not None:
        return replace(op, collective="sum")
    return replace(op, collective="gather") if op.kind == "elementwise" and len(op.inputs) == 1 else op


def value(polynomials: Any, rows: float) -> Any:
    """Returns the values of polynomials [..., degree] at a number of rows."""
    return np.asarray(polynomials) @ np.power(float(rows), np.arange(DEGREE + 1))
