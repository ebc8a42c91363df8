"""The arrays that a compiled program writes to memory, and its kernels: elementwise ops are fused, as XLA does.

    matmuls, sorts, scatters, ...     their results are arrays; their operands by `written_arrays.py`
    reductions, results of scans      arrays
    elementwise ops                   an array if writing it once is cheaper than computing it in each of its m readers:
                                      m L > L + (1 + m) B, for B bytes of it and L bytes of leaves; or if it has more
                                      than `MOST_LEAVES`; or by `written_arrays.py`

The leaves of an op are the arrays that it is computed from. The traffic of a kernel is its result and its leaves, but
for those that an independent fusion within `NEARBY` ops has read: XLA merges the two.

Checked against programs that XLA 0.12 compiles for H100s: `python -m tests.bench.traced_models`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.plan.model.program import PARTS, SizedProgram, TracedOp, value
from jaxpar.plan.model.written_arrays import fills_operand, find_written

MOST_LEAVES = 10
NEARBY = 12  # ops
MARGIN = 1.05  # an array is written only if that saves at least 5 % of the traffic

Leaves = dict[int, Any]  # array to the bytes that are read of it, polynomials in the rows


@dataclass(frozen=True, slots=True)
class TracedKernel:
    """A kernel of a program.

    Attributes:
      place: Number of its op in the program.
      op: Its op.
      leaves: The arrays that it reads.
      traffic: Bytes that it reads and writes. A polynomial in the rows.
      is_copy: Whether it only copies an operand of the op.
    """

    place: int
    op: TracedOp
    leaves: frozenset[int]
    traffic: Any
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class FusedProgram:
    """Kernels of a program in order, and the leaves of each of its arrays."""

    kernels: list[TracedKernel]
    leaves: dict[int, Leaves]


def fuse(program: SizedProgram, rows: float, *, gradients: Iterable[int] = ()) -> FusedProgram:
    """Decides which arrays a program writes.

    Args:
      program: Ops with sizes.
      rows: Rows at which costs are compared.
      gradients: Results that the update reads: they are fused with it.
    """
    fusion = _Fusion(program, rows, {*gradients})
    for place, op in enumerate(program.ops):
        fusion.add(place, op)
    return FusedProgram(fusion.kernels, fusion.leaves)


class _Fusion:
    def __init__(self, program: SizedProgram, rows: float, gradients: set[int]):
        self.program, self.rows = program, rows
        self.bytes = value(np.array(program.sizes), rows) if program.sizes else np.zeros(0)
        self.written = find_written(program, self.bytes, gradients)
        self.readers = Counter(entry for op in program.ops for entry in {*op.inputs})
        self.readers.update(entry for entry in program.outputs if entry is not None)
        self.makers = {entry: op for op in program.ops for entry in op.outputs}
        self.leaves: dict[int, Leaves] = {
            entry: {entry: size} for entry, size in enumerate(program.sizes) if entry not in self.makers
        }
        self.kernels: list[TracedKernel] = []
        self.last_read: dict[int, int] = {}  # array -> index of the last fusion that reads it
        self.kernel_of: dict[int, int] = {}  # array -> index of the kernel that writes it
        self.above: dict[int, set[int]] = {}  # kernel -> nearby kernels whose results it needs, by index

    def add(self, place: int, op: TracedOp) -> None:
        """Fuses an op with its readers, or adds its kernel."""
        leaves = self._merged_leaves(op)
        fused = op.kind == "elementwise" and not self._is_written(op, leaves)
        if fused or self.written.in_reader.issuperset(op.outputs):
            self.leaves.update(dict.fromkeys(op.outputs, leaves))
            return
        self._add_copies(place, op)
        self.kernels.append(TracedKernel(place, op, frozenset(leaves), self._traffic(place, op, leaves)))
        for entry in op.outputs:
            self.leaves[entry] = {entry: self.program.sizes[entry]}

    def _merged_leaves(self, op: TracedOp) -> Leaves:
        merged: Leaves = {}
        for number, entry in enumerate(op.inputs):
            for leaf, size in self.leaves[entry].items():
                if op.name in PARTS and number == 0:
                    part = self.program.sizes[op.outputs[0]]
                    size = part if value(part, self.rows) < value(size, self.rows) else size
                if leaf not in merged or value(size, self.rows) > value(merged[leaf], self.rows):
                    merged[leaf] = size
        return merged

    def _is_written(self, op: TracedOp, leaves: Leaves) -> bool:
        result = op.outputs[0]
        if result in self.written.arrays or len(leaves) > MOST_LEAVES:
            return True
        count, size = self.readers[result], self.bytes[result]
        read = sum(value(leaf, self.rows) for leaf in leaves.values())
        return count * read > MARGIN * (read + (1 + count) * size)

    def _add_copies(self, place: int, op: TracedOp) -> None:
        """Adds copies of a matmul's operands whose batch dims do not lead, unless a fusion can write them so."""
        for number in op.matmul.copied if op.matmul else ():
            entry = op.inputs[number]
            if entry not in self.makers or self.makers[entry].kind == "heavy":
                traffic = 2 * self.program.sizes[entry]
                self.kernels.append(TracedKernel(place, op, frozenset((entry,)), traffic, is_copy=True))

    def _traffic(self, place: int, op: TracedOp, leaves: Leaves) -> Any:
        written = sum(self.program.sizes[entry] for entry in op.outputs)
        makers = {self.kernel_of[leaf] for leaf in leaves if place - self.kernel_of.get(leaf, -NEARBY - 1) <= NEARBY}
        self.above[place] = makers.union(*(self.above[maker] for maker in makers))
        self.kernel_of.update(dict.fromkeys(op.outputs, place))
        if op.kind == "heavy":  # a scatter clears its result, then reads and writes it
            return (3 if fills_operand(op) else 1) * written + sum(leaves.values())
        traffic = written * (2 if op.kind == "stack" else 1)  # XLA clears a slice of a stack before it writes it
        for leaf, size in leaves.items():
            reader = self.last_read.get(leaf, -NEARBY - 1)
            if place - reader > NEARBY or reader in self.above[place]:
                traffic = traffic + size
            self.last_read[leaf] = place
        return traffic
