"""The arrays that a compiled program writes to memory, and its kernels: elementwise ops are fused, as XLA does.

    matmuls, sorts, scatters, ...     their results are arrays
    reductions, results of scans      arrays
    elementwise ops                   an array if writing it once is cheaper than computing it in each of its m readers:
                                      m L > L + (1 + m) B, for B bytes of it and L bytes of leaves; or if it has more
                                      than `MOST_LEAVES`; or because of the ops around it

The leaves of an op are the arrays that it is computed from. The traffic of a kernel is its result and its leaves, but
for those that an independent fusion within `NEARBY` ops has read: XLA merges the two.

These are written because of the ops around them, whatever they cost (`find_written`):

    operands of matmuls, sorts, ...   but a matmul computes an op of one array (relu, a scale) while it reads it
    tanh, erf, sin, cos               if the forward pass reads them, and the backward pass what cheap ops make of them
    x - max(x) over rows              in a kernel of Triton together with the maximum, if the rows are short and several
                                      ops read it, as in log_softmax
    softmax                           maximum and sum of short rows are in the kernel of the quotient that alone reads
                                      them
    gathered results of one array     where devices split a model
    short arrays, spread over others  if a root, a quotient or a logarithm would be computed for every element

Checked against programs that XLA 0.12 compiles for H100s: `python -m tests.bench.traced_models`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.plan.model.program import PARTS, SizedProgram, TracedOp, value

MOST_LEAVES = 10
NEARBY = 12  # ops
MARGIN = 1.05  # an array is written only if that saves at least 5 % of the traffic

Leaves = dict[int, Any]  # array to the bytes that are read of it, polynomials in the rows
COSTLY = ("tanh", "erf", "erfc", "erf_inv", "sin", "cos", "tan")  # by XLA's count of their instructions
PROLOGUES = frozenset(
    "abs add cbrt ceil cos div erf exp exp2 expm1 floor log log1p logistic max min mul neg one_minus_square rsqrt sign "
    "sin sqrt sub tan tanh".split()
)  # ops that a matmul computes while it reads their result, if they have a single array operand
LONGEST = 16384  # elements of a row in Triton's softmax: seen for 8,192, and not for 50,304
ROOTS = ("rsqrt", "sqrt", "div", "log", "exp", "pow", "cbrt")
SPREAD = 8  # times as many elements
# ops whose element i does not read element i of each operand alone
REORDERING_OPS = PARTS | {
    "broadcast_in_dim",
    "transpose",
    "concatenate",
    "pad",
    "rev",
    "dynamic_update_slice",
    "iota",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
}


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
    """Kernels of a program in order, and the leaves of each of its arrays.

    Attributes:
      kernels: The kernels.
      leaves: Array to its leaves.
      same_order: Maps the result of an elementwise kernel to the leaves of which its element i reads element i only.
    """

    kernels: list[TracedKernel]
    leaves: dict[int, Leaves]
    same_order: dict[int, frozenset[int]]


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
    return FusedProgram(fusion.kernels, fusion.leaves, fusion.same_order)


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
        self.ordered: dict[int, frozenset[int]] = {entry: frozenset((entry,)) for entry in self.leaves}
        self.same_order: dict[int, frozenset[int]] = {}
        self.kernels: list[TracedKernel] = []
        self.last_read: dict[int, int] = {}  # array -> index of the last fusion that reads it
        self.kernel_of: dict[int, int] = {}  # array -> index of the kernel that writes it
        self.above: dict[int, set[int]] = {}  # kernel -> nearby kernels whose results it needs, by index

    def add(self, place: int, op: TracedOp) -> None:
        """Fuses an op with its readers, or adds its kernel."""
        leaves, ordered = self._merged_leaves(op), self._merged_order(op)
        fused = op.kind == "elementwise" and not self._is_written(op, leaves)
        if fused or self.written.in_reader.issuperset(op.outputs):
            self.leaves.update(dict.fromkeys(op.outputs, leaves))
            self.ordered.update(dict.fromkeys(op.outputs, ordered))
            return
        if op.kind == "elementwise":
            self.same_order.update(dict.fromkeys(op.outputs, ordered))
        self._add_copies(place, op)
        self.kernels.append(TracedKernel(place, op, frozenset(leaves), self._traffic(place, op, leaves)))
        for entry in op.outputs:
            self.leaves[entry] = {entry: self.program.sizes[entry]}
            self.ordered[entry] = frozenset((entry,))

    def _merged_order(self, op: TracedOp) -> frozenset[int]:
        """Returns the leaves of which each element of the op's result reads the same element alone."""
        if op.kind != "elementwise" or op.name in REORDERING_OPS:
            return frozenset()
        ordered = frozenset[int]().union(*(self.ordered[entry] for entry in op.inputs))
        return ordered.difference(*(self.leaves[entry].keys() - self.ordered[entry] for entry in op.inputs))

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


@dataclass(frozen=True, slots=True)
class WrittenArrays:
    """Arrays that are written in any case.

    Attributes:
      arrays: Their numbers.
      in_reader: Results of reductions that the kernel of their reader computes.
    """

    arrays: set[int]
    in_reader: set[int]


def find_written(program: SizedProgram, sizes: np.ndarray, gradients: set[int]) -> WrittenArrays:
    """Finds the arrays that are written in any case.

    Args:
      program: Ops.
      sizes: Bytes of each array.
      gradients: Results that the update reads: they are fused with it.
    """
    written = {entry for entry in program.outputs if entry is not None} - gradients
    written.update(entry for op in program.ops if op.collective == "gather" for entry in op.outputs)
    for op in program.ops:
        if op.kind in ("heavy", "loop"):
            written.update(op.inputs[1:] if fills_operand(op) else op.inputs)
    prologues = _fuse_prologues(program, sizes, written)
    written |= _costly(program, written) - prologues
    normalized, maxima = _shifted_by_maxima(program)
    return WrittenArrays(written | normalized | _spread(program, sizes), maxima | _softmax_statistics(program))


def fills_operand(op: TracedOp) -> bool:
    """Whether an op writes into its first operand."""
    return op.name.startswith("scatter")


def _fuse_prologues(program: SizedProgram, sizes: np.ndarray, written: set[int]) -> set[int]:
    """Replaces results of ops that a matmul computes while it reads them by the ops' operands; returns the results."""
    prologues: set[int] = set()
    readers: dict[int, set[str]] = defaultdict(set)
    for op in program.ops:
        for entry in op.inputs:
            readers[entry].add(op.name if op.kind in ("heavy", "loop") else "")
    results = {*program.outputs}
    for op in reversed(program.ops):
        entry = op.outputs[0]
        if op.kind != "elementwise" or op.name not in PROLOGUES or len(op.inputs) != 1 or entry in results:
            continue
        if entry in written and readers[entry] <= {"", "dot_general"} and sizes[entry] == sizes[op.inputs[0]]:
            written.remove(entry)
            prologues.add(entry)
            written.add(op.inputs[0])
            readers[op.inputs[0]] |= readers[entry]
    return prologues


def _costly(program: SizedProgram, written: set[int]) -> set[int]:
    """Returns the results of costly ops that both passes read, the backward pass after cheap ops."""
    awaited: set[int] = set()
    counts = Counter(entry for op in program.ops for entry in {*op.inputs})
    for op in reversed(program.ops):
        passed = op.kind == "elementwise" and op.outputs[0] in awaited and op.outputs[0] not in written
        if passed or (op.backward and op.kind in ("elementwise", "reduce")):
            awaited.update(op.inputs)
    costly = {op.outputs[0] for op in program.ops if op.name in COSTLY and not op.backward}
    return {entry for entry in costly & awaited if counts[entry] > 1}


def _shifted_by_maxima(program: SizedProgram) -> tuple[set[int], set[int]]:
    """Returns the results of x - max(x) that several ops read, and the maxima."""
    readers = defaultdict(list)
    for op in program.ops:
        for entry in {*op.inputs}:
            readers[entry].append(op)
    normalized, maxima = set(), set()
    for op in program.ops:
        if op.name != "reduce_max" or not 1 < op.row <= LONGEST:
            continue
        entry = op.outputs[0]
        while len(readers[entry]) == 1 and len(readers[entry][0].inputs) == 1:
            entry = readers[entry][0].outputs[0]
        for reader in readers[entry]:
            if reader.name == "sub" and reader.inputs == (op.inputs[0], entry) and len(readers[reader.outputs[0]]) > 1:
                normalized.add(reader.outputs[0])
                maxima.add(op.outputs[0])
    return normalized, maxima


def _softmax_statistics(program: SizedProgram) -> set[int]:
    """Returns the maxima and sums inside of softmaxes over short rows: only their quotient is read elsewhere."""
    readers: dict[int, list[TracedOp]] = defaultdict(list)
    for op in program.ops:
        for entry in {*op.inputs}:
            readers[entry].append(op)
    reduced: set[int] = set()
    for op in program.ops:
        if op.name != "reduce_max" or not 1 < op.row <= LONGEST:
            continue
        chain = [op]
        while len(found := readers[chain[-1].outputs[0]]) == 1 and found[0].kind == "elementwise":
            chain.append(found[0])
        tail = {reader.name: reader for reader in readers[chain[-1].outputs[0]]}
        if {*tail} != {"reduce_sum", "div"} or chain[-1].name != "exp" or "sub" not in [link.name for link in chain]:
            continue
        if tail["reduce_sum"].row == op.row and readers[tail["reduce_sum"].outputs[0]] == [tail["div"]]:
            reduced.update((*op.outputs, *tail["reduce_sum"].outputs))
    return reduced.difference(program.outputs)


def _spread(program: SizedProgram, sizes: np.ndarray) -> set[int]:
    """Returns the operands of broadcasts that a root, a quotient or a logarithm made."""
    rooted: set[int] = set()
    spread: set[int] = set()
    for op in program.ops:
        if op.kind != "elementwise" or not op.inputs:
            continue
        grows = sizes[op.outputs[0]] >= SPREAD * sizes[op.inputs[0]]
        if op.name == "broadcast_in_dim" and grows:
            spread.update(rooted.intersection(op.inputs))
        elif op.name in ROOTS or not rooted.isdisjoint(op.inputs):
            rooted.add(op.outputs[0])
    return spread
