"""Results of elementwise kernels that XLA writes over an operand, in whose memory they are from then on.

    last reader       nothing reads the operand later, and no kernel that XLA may merge with this one reads it
    same order        of the operand, element i of the result reads element i alone, in all fused ops; equal bytes
    no tuple          convolutions, loops and merged kernels return tuples, whose parts are not written over

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
    program: SizedProgram, fused: FusedProgram, lives: Mapping[int, tuple[int, int]], inputs: Collection[int]
) -> list[int]:
    """Returns the results that are written over an operand.

    Args:
      program: The program.
      fused: Its kernels.
      lives: The first and the last op of each written array.
      inputs: Arrays that are no results of the program, such as copies of parameters.
    """
    makers = {entry: kernel for kernel in fused.kernels if not kernel.is_copy for entry in kernel.op.outputs}
    merged: dict[int, list[TracedKernel]] = defaultdict(list)  # kernels by the array that they read
    for kernel in fused.kernels:
        if kernel.op.kind in MERGED:
            for leaf in kernel.leaves:
                merged[leaf].append(kernel)

    def near(entry: int, kernel: TracedKernel, kinds: Collection[str]) -> bool:
        """Whether another kernel of these kinds reads an array at about the time of a kernel."""
        return any(
            other.place != kernel.place and abs(other.place - kernel.place) <= NEARBY and other.op.kind in kinds
            for other in merged[entry]
        )

    def is_alone(entry: int) -> bool:
        maker = makers[entry]
        if maker.op.kind == "elementwise":
            return not near(entry, maker, ("reduce",))
        is_convolution = maker.op.matmul is not None and maker.op.matmul.kind == "convolution"
        return maker.op.kind == "heavy" and len(maker.op.outputs) == 1 and not is_convolution

    def is_free(entry: int, kernel: TracedKernel) -> bool:
        if entry not in lives or entry in inputs:
            return False
        first, last = lives[entry]
        return first < last == kernel.place and is_alone(entry) and not near(entry, kernel, MERGED)

    def bytes_of(entry: int) -> np.ndarray:
        return np.zeros(DEGREE + 1) + program.sizes[entry]

    return [
        entry
        for kernel in fused.kernels
        for entry in kernel.op.outputs
        if entry in fused.same_order and lives.get(entry, (-1, -1))[0] == kernel.place < lives[entry][1]
        and any(is_free(leaf, kernel) and np.array_equal(bytes_of(leaf), bytes_of(entry))
                for leaf in fused.same_order[entry])
    ]  # fmt: skip
