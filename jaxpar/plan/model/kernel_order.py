"""Kernels that XLA does not run where the program has them; what they read is kept until they run.

gradient of replicas   XLA combines their collectives up to some bytes, and runs all matmuls of one collective together,
                       when the last can run; a collective between devices that split the model ends a group
activation's gradient  after a parameter's gradient of the same array, whose collective runs meanwhile
zeros of a scatter     XLA's list scheduler makes them before the first kernel whose result is at least as large
attention's values     their gradient is the last of a backward loop: XLA keeps the attention weights until then
"""

from collections.abc import Collection, Mapping
from itertools import pairwise

from jaxpar.mesh.xla import SMALL
from jaxpar.plan.model.fusion import FusedProgram, fills_operand
from jaxpar.plan.model.program import SizedProgram, value

# bytes up to which collectives are combined: of fsdp as `jaxpar.mesh.xla` says, all-reduces as XLA does by itself
SCATTERED, REDUCED = SMALL, 30 * 2**20
LISTED = -1  # in place of these bytes: no replicas, in the order of XLA's list scheduler


def run_places(
    program: SizedProgram,
    fused: FusedProgram,
    gradients: Collection[int],
    rows: float,
    combined: int,
    *,
    in_backward_loop: bool,
) -> dict[int, int]:
    """Returns the places where matmuls and transposes run; ops without one run where the program has them.

    Args:
      program: The program.
      fused: Its kernels.
      gradients: The results that are gradients of parameters.
      rows: Rows of a device.
      combined: Bytes up to which collectives of gradients are combined; 0 without replicas.
      in_backward_loop: Whether the program is an iteration of a loop of the backward pass.
    """
    places = _combined_gradients(program, fused, gradients, rows, combined) if combined > 0 else {}
    if combined == SCATTERED:
        places |= _after_gradients(fused, gradient_arrays(fused, gradients), places)
    return places | (_late_matmuls(fused) if in_backward_loop else {})


def fill_places(program: SizedProgram, fused: FusedProgram, rows: float) -> dict[int, int]:
    """Returns the place of each scatter that fills an array of zeros, to the place where the list scheduler makes it.

    Source: openxla/xla, ListScheduler in xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc: of the kernels that
    can run it takes the one that adds the fewest bytes.
    """
    kernels = [kernel for kernel in fused.kernels if not kernel.is_copy]
    sizes = {
        kernel.place: sum(float(value(program.sizes[entry], rows)) for entry in kernel.op.outputs) for kernel in kernels
    }
    # into zeros: a constant has no leaves
    fills = [
        kernel.place
        for kernel in kernels
        if fills_operand(kernel.op) and not fused.leaves.get(kernel.op.inputs[0], True)
    ]
    return {fill: min(place for place, size in sizes.items() if size >= sizes[fill]) for fill in fills}


def gradient_arrays(fused: FusedProgram, gradients: Collection[int]) -> set[int]:
    """Returns the arrays of which gradients are computed, such as the results of matmuls before a cast."""
    return {leaf for entry in gradients for leaf in fused.leaves[entry]}


def _combined_gradients(
    program: SizedProgram, fused: FusedProgram, gradients: Collection[int], rows: float, combined: int
) -> dict[int, int]:
    """Returns the place of each matmul that makes a gradient, to that of the last gradient of its collective."""
    of_gradients, places, group, size = gradient_arrays(fused, gradients), {}, [], 0.0
    for kernel in fused.kernels:
        if kernel.is_copy or kernel.op.kind != "heavy" or of_gradients.isdisjoint(kernel.op.outputs):
            group = [] if kernel.op.waits else group
            continue
        added = sum(float(value(program.sizes[entry], rows)) for entry in kernel.op.outputs)
        if size + added > combined:
            group, size = [], 0.0
        group += [kernel.place] * (kernel.op.matmul is not None)
        size += added
        places |= dict.fromkeys(group, kernel.place)
    return places


def _after_gradients(fused: FusedProgram, of_gradients: set[int], combined: Mapping[int, int]) -> dict[int, int]:
    """Returns the place of each matmul to that of a gradient that is made of the same array just after it.

    XLA makes the gradient first, if its collective waits for no other one: the collective then runs meanwhile.
    """
    places: dict[int, int] = {}
    matmuls = [kernel for kernel in fused.kernels if kernel.op.matmul and kernel.op.backward and not kernel.is_copy]
    for kernel, following in pairwise(matmuls):
        makes_gradient = not of_gradients.isdisjoint(following.op.outputs)
        if makes_gradient and following.leaves & kernel.leaves and combined.get(following.place) == following.place:
            places[kernel.place] = following.place
    return places


def _late_matmuls(fused: FusedProgram) -> dict[int, int]:
    """Returns the place of each matmul of a backward loop to that before the first matmul that reads its result.

    XLA runs such a matmul last: the gradient of the values in attention, which only their projection reads, after
    those of queries and keys. What it reads is kept until then. Gradients of parameters, which no matmul reads, are
    not moved.
    """
    first_reads: dict[int, int] = {}  # by array that leads to a matmul
    places: dict[int, int] = {}
    for kernel in reversed(fused.kernels):
        op, place = kernel.op, kernel.place
        readers = [first_reads[entry] for entry in op.outputs if entry in first_reads]
        is_movable = (op.matmul is not None or op.name == "transpose") and not kernel.is_copy
        if is_movable and readers and min(readers) - 1 > place:
            place = places[kernel.place] = min(readers) - 1
        if op.kind in ("heavy", "loop") or readers:
            first_reads |= {leaf: min(place, first_reads.get(leaf, place)) for leaf in kernel.leaves}
    return places
