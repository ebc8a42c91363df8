"""The gradient of max-pooling as XLA compiles it: the positions of the maxima are found in the forward pass, and kept.

    forward     operand ──► maximum of each window in float32, and its position: an s32 for each dim
    backward    gradient of the maxima ── positions ──► scattered into zeros

XLA rewrites `select_and_scatter` so, and finds the positions in the kernel of the forward pass; the operand is not read
again. If a relu makes the operand, the zeros are those that it compares with, and are written with its result.

Source: openxla/xla, xla/service/select_and_scatter_expander.cc; the merged kernels as seen in programs of XLA 0.12.
"""

from dataclasses import replace

from jaxpar.plan.model.program import SizedProgram, TracedOp

POOLING, GRADIENT = "reduce_window_max", "select_and_scatter_add"
POSITION = 4  # bytes of an s32, or of a maximum in float32


def keep_positions(program: SizedProgram) -> SizedProgram:
    """Replaces each max-pooling and its gradient by ops that write and read positions."""
    if not any(op.name == GRADIENT for op in program.ops):
        return program
    program = replace(program, sizes=[*program.sizes], ops=[*program.ops])
    for place, op in enumerate(program.ops):
        if op.name == GRADIENT and len(op.inputs) == 2:
            program.ops[place] = _scatter(program, op)
    return program


def _scatter(program: SizedProgram, op: TracedOp) -> TracedOp:
    """Returns the op in place of a gradient, after that in place of the forward pass."""
    gradient, operand = op.inputs
    forward = [place for place, other in enumerate(program.ops) if (other.name, other.inputs) == (POOLING, (operand,))]
    if not forward:  # a forward pass that is fused with the ops before it
        return op
    maximum = POSITION / program.widths[gradient] * program.sizes[gradient]
    kept = [maximum] * (1 + len(program.variables[gradient].aval.shape))
    relu = any(other.name == "max" and other.inputs and operand in other.outputs for other in program.ops)
    numbers = range(len(program.sizes), len(program.sizes) + len(kept) + relu)
    program.sizes += [*kept, *[program.sizes[operand]] * relu]
    pooling = program.ops[forward[-1]]
    program.ops[forward[-1]] = replace(pooling, kind="heavy", outputs=(*pooling.outputs, *numbers))
    read = gradient, *numbers[: len(kept)]
    return replace(op, name="scatter_maxima", inputs=(numbers[-1], *read)) if relu else replace(op, inputs=read)
