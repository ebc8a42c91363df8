"""Results of elementwise kernels that XLA writes over an operand, in whose memory they are from then on.

    last reader       nothing reads the operand later, and no kernel that XLA may merge with this one reads it
    same order        element i of the result depends only on element i of the operand, through all fused ops, and both
                      have as many bytes
    no tuple          convolutions, loops and merged kernels return tuples, and XLA writes over no part of one;
                      nor over the result of a reduction

Source: openxla/xla, HeapSimulator::RunComputation and FusionCanShareBufferHint (xla/service/gpu); which results are in
tuples, as seen in programs of XLA 0.12.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping

import numpy as np

from jaxpar.plan.model.fusion import NEARBY, FusedProgram, TracedKernel
from jaxpar.plan.model.program import DEGREE, SizedProgram

MERGED = ("elementwise", "reduce")  # kinds of kernels that XLA merges with others that read the same array


def results_over_operands(
    program: SizedProgram, fused: FusedProgram, lives: Mapping[int, tuple[int, int]], of_params: Collection[int]
) -> list[int]:
    """Returns the results that are written over an operand.

    Args:
      program: The program.
      fused: Its kernels.
      lives: The first and the last op of each written array.
      of_params: Arrays computed of parameters alone, which are never written over.
    """
    makers = {entry: kernel for kernel in fused.kernels if not kernel.is_copy for entry in kernel.op.outputs}
    merged: dict[int, list[TracedKernel]] = defaultdict(list)  # kernels by the array that they read
    for kernel in fused.kernels:
        if kernel.op.kind in MERGED:
            for leaf in kernel.leaves:
                merged[leaf].append(kernel)

    def is_read_nearby(entry: int, kernel: TracedKernel, kinds: Collection[str]) -> bool:
        """Whether another kernel of these kinds reads an array at about the time of a kernel."""
        return any(
            other.place != kernel.place and abs(other.place - kernel.place) <= NEARBY and other.op.kind in kinds
            for other in merged[entry]
        )

    def is_no_tuple(entry: int) -> bool:
        maker = makers[entry]
        if maker.op.kind == "elementwise":
            return not is_read_nearby(entry, maker, ("reduce",))
        is_convolution = maker.op.matmul is not None and maker.op.matmul.kind == "convolution"
        return maker.op.kind == "heavy" and len(maker.op.outputs) == 1 and not is_convolution

    def can_be_overwritten(entry: int, kernel: TracedKernel) -> bool:
        if entry not in lives or entry in of_params:
            return False
        first, last = lives[entry]
        return first < last == kernel.place and is_no_tuple(entry) and not is_read_nearby(entry, kernel, MERGED)

    def bytes_of(entry: int) -> np.ndarray:
        return np.zeros(DEGREE + 1) + program.sizes[entry]

    return [
        entry
        for kernel in fused.kernels
        for entry in kernel.op.outputs
        if entry in fused.same_order and lives.get(entry, (-1, -1))[0] == kernel.place < lives[entry][1]
        and any(can_be_overwritten(leaf, kernel) and np.array_equal(bytes_of(leaf), bytes_of(entry))
                for leaf in fused.same_order[entry])
    ]  # fmt: skip
