"""The gradient of max-pooling as XLA compiles it: the positions of the maxima are found first, and kept until then.

    forward     operand ──► maximum of each window in float32, and its position: an s32 for each dim
    backward    gradient of the maxima ── positions ──► scattered into zeros

XLA rewrites `select_and_scatter` so, and finds the positions in the kernel of the forward pass; the operand is not read
again. If windows do not overlap, the forward pass has no kernel of its own, and if the operand is computed again, its
kernel read another array: they are found just before the scatter. If a relu makes the operand, the zeros that it
compares with are written, and kept until the scatter.

Source: openxla/xla, xla/service/select_and_scatter_expander.cc; the merged kernels as seen in programs of XLA 0.12.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxpar.plan.model.program import SizedProgram, TracedOp

POOLING, GRADIENT = "reduce_window_max", "select_and_scatter_add"
POSITION = 4  # bytes of an s32, or of a maximum in float32


def keep_positions(program: SizedProgram) -> SizedProgram:
    """Replaces each max-pooling and its gradient by ops that write and read positions."""
    if not any(op.name == GRADIENT for op in program.ops):
        return program
    program = replace(program, sizes=[*program.sizes], widths=[*program.widths], ops=[*program.ops])
    for op in [op for op in program.ops if op.name == GRADIENT and len(op.inputs) == 2]:
        _scatter(program, op)
    return program


def _scatter(program: SizedProgram, op: TracedOp) -> None:
    """Replaces one gradient."""
    gradient, operand = op.inputs
    forward = [place for place, other in enumerate(program.ops) if (other.name, other.inputs) == (POOLING, (operand,))]
    maximum = POSITION / program.widths[gradient] * program.sizes[gradient]
    positions = _add_arrays(program, [maximum] * (1 + len(program.variables[gradient].aval.shape)))
    relu = any(other.name == "max" and other.inputs and operand in other.outputs for other in program.ops)
    zeros = _add_arrays(program, [program.sizes[operand]] * relu)
    place = program.ops.index(op)
    if not forward or program.ops[forward[-1]].kind == "elementwise":
        find = TracedOp("find_maxima", "reduce", (operand,), positions, backward=True)
        program.ops[place : place + 1] = [find, replace(op, inputs=(gradient, *positions, *zeros))]
        makers = [number for number, other in enumerate(program.ops) if operand in other.outputs]
        first = (forward or makers or [place])[-1]
        program.ops[first:first] = [TracedOp("zeros", "heavy", (), zeros)] * relu
        return
    pooling = program.ops[forward[-1]]
    program.ops[forward[-1]] = replace(pooling, kind="heavy", outputs=(*pooling.outputs, *positions, *zeros))
    read = gradient, *positions
    program.ops[place] = (
        replace(op, name="scatter_maxima", inputs=(*zeros, *read)) if relu else replace(op, inputs=read)
    )


def _add_arrays(program: SizedProgram, sizes: Sequence[Any]) -> tuple[int, ...]:
    first = len(program.sizes)
    program.sizes += sizes
    program.widths += [POSITION] * len(sizes)
    return tuple(range(first, len(program.sizes)))
