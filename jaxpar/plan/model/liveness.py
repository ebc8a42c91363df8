"""Bytes that are live at each op of a program, and the seconds of its kernels.

array                  from the kernel that writes it to the last one that reads it
of parameters alone    such as weights in 16 bits: from the first kernel that reads it
gradient               to the end of the program: the update follows
gradient of replicas   XLA combines their collectives up to some bytes, and runs the matmuls whose results one of them
                       takes when the last of these can run: what they read is kept until then, or until devices
                       that split the model wait for another collective
scan                   its stacked results, and the arrays of one turn
scores of a stack      of one turn once more: matmuls of the backward pass copy them out of it, in their own layout
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.mesh.xla import SMALL
from jaxpar.plan.machine.hardware import SMALLEST_KERNEL, Hardware
from jaxpar.plan.model.fusion import FusedProgram, TracedKernel, fills_operand, fuse
from jaxpar.plan.model.pooling import keep_positions
from jaxpar.plan.model.program import DEGREE, SizedProgram, value

CLASSES = ("activations", "weights", "gradients")
# bytes up to which collectives are combined: of fsdp as `jaxpar.mesh.xla` says, all-reduces as XLA does by itself
SCATTERED, REDUCED = SMALL, 30 * 2**20
Live = dict[str, np.ndarray]


@dataclass(slots=True)
class _Amounts:
    """Live bytes as in `Estimate`, [moments, degree]; kernels as (traffic, FLOP, bits, runs, is a cast of weights)."""

    curves: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    kernels: list[tuple[Any, Any, int, int, bool]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Estimate:
    """The estimate of a compiled program, for any number of rows.

    Attributes:
      live: Bytes up to which collectives of gradients are combined, 0 without replicas, to: class (see `CLASSES`) to
        the live bytes at each moment. Shape [moments, degree].
      traffic: Bytes that each kernel reads and writes. Shape [kernels, degree].
      flop: FLOP of each kernel's matmul. Shape [kernels, degree].
      bits: Bits of each matmul's operands; 0 for other kernels. Shape [kernels].
      runs: Runs of each kernel in a step. Shape [kernels].
      casts: Whether each kernel only casts parameters. Shape [kernels].
      gradient_bytes: Bytes of all gradients at the end of the program.
      update_kernels: Kernels of the update: norm and update of each array. Convolutions have their own layout of
        weights, in which the update reads and writes the three arrays of the state.
      batch: Bytes of the inputs that are no parameters. A polynomial in the rows.
    """

    live: dict[int, Live]
    traffic: np.ndarray
    flop: np.ndarray
    bits: np.ndarray
    runs: np.ndarray
    casts: np.ndarray
    gradient_bytes: float
    update_kernels: int
    batch: np.ndarray

    def peak(self, rows: float, *, weights: float = 1.0, gradients: float = 1.0, combined: int = 0) -> dict[str, float]:
        """Returns the live bytes by class at the fullest moment.

        Args:
          rows: Rows of a device.
          weights: Factor on the bytes of copies of parameters.
          gradients: Factor on the bytes of gradients.
          combined: Bytes up to which collectives of gradients are combined, `SCATTERED` or `REDUCED`; 0 without
            replicas.
        """
        factors = {"activations": 1.0, "weights": weights, "gradients": gradients}
        amounts = {name: factors[name] * value(live, rows) for name, live in self.live[combined].items()}
        fullest = int(np.argmax(sum(amounts.values())))
        return {name: float(amount[fullest]) for name, amount in amounts.items()}

    def seconds(self, rows: float, hardware: Hardware, *, casts: bool = True) -> dict[str, float]:
        """Returns the seconds of matmuls and of the other kernels.

        Args:
          rows: Rows of a device.
          hardware: The machine.
          casts: Whether the program casts parameters. If not, it slices a copy that was cast before, by small kernels.
        """
        flop, traffic = value(self.flop, rows), value(self.traffic, rows)
        is_matmul = self.bits > 0
        full_precision = hardware.chip.bf16_flops / hardware.chip.f32_flops
        compute = hardware.matmuls(np.where(is_matmul, flop, 1.0)) * np.where(self.bits > 16, full_precision, 1.0)
        seconds = np.maximum(np.maximum(np.where(is_matmul, compute, 0.0), hardware.stream(traffic)), SMALLEST_KERNEL)
        seconds = self.runs * np.where(self.casts & (not casts), SMALLEST_KERNEL, seconds)
        return {"matmuls": float(seconds[is_matmul].sum()), "elementwise": float(seconds[~is_matmul].sum())}


def estimate(program: SizedProgram, rows: float, *, params: Sequence[int], gradients: Sequence[int]) -> Estimate:
    """Estimates the compiled program of a loss and its gradients.

    Args:
      program: The program.
      rows: Rows of a device at which fusions are chosen.
      params: Places of the parameters among the inputs.
      gradients: Places of the gradients among the outputs.
    """
    inputs = {program.inputs[place] for place in params}
    outputs = {entry for place in gradients if (entry := program.outputs[place]) is not None}
    amounts, _ = _program_amounts(program, rows, inputs, outputs)
    kernels = sum(op.matmul.kind == "convolution" for op in program.ops if op.matmul and op.backward) // 2
    batch = sum(program.sizes[entry] for entry in program.inputs if entry not in inputs)
    live = {
        combined: {name: np.array(curve) + batch * (name == "activations") for name, curve in curves.items()}
        for combined, curves in amounts.curves.items()
    }
    traffic, flop, bits, runs, casts = zip(*amounts.kernels, strict=True)
    return Estimate(
        live=live,
        traffic=np.array(traffic),
        flop=np.array(flop),
        bits=np.array(bits),
        runs=np.array(runs),
        casts=np.array(casts),
        update_kernels=2 * len(outputs) + 4 * kernels,
        gradient_bytes=float(value(live[0]["gradients"][-1], rows)),
        batch=np.zeros(DEGREE + 1) + batch,
    )


def _program_amounts(
    program: SizedProgram, rows: float, params: Collection[int], gradients: Collection[int]
) -> tuple[_Amounts, list[bool]]:
    """Returns the amounts of a program, and a mask of its results that depend on parameters alone."""
    program = keep_positions(program)
    fused = fuse(program, rows, gradients=gradients)
    bodies, of_params = _bodies(fused, rows, {*params})
    amounts, copies = _Amounts(), _score_copies(program)
    for combined in (0, SCATTERED, REDUCED) if gradients else (0,):
        delays = _delays(program, fused, gradients, rows, combined) if combined else {}
        lives = _lives(program, fused, gradients, of_params, delays)
        of_gradients = _gradient_arrays(fused, gradients)
        amounts.curves[combined] = _curves(program, lives, bodies, of_params, of_gradients, copies)
    for kernel in fused.kernels:
        amounts.kernels += _kernel_amounts(kernel, bodies.get(kernel.place), of_params)
    return amounts, [entry in of_params for entry in program.outputs]


def _curves(
    program: SizedProgram,
    lives: dict[int, tuple[int, int]],
    bodies: dict[int, _Amounts],
    of_params: set[int],
    of_gradients: set[int],
    copies: Mapping[int, Any],
) -> dict[str, list[Any]]:
    """Returns the live bytes by class at each moment."""
    end = len(program.ops)
    changes = {name: np.zeros((end + 2, DEGREE + 1)) for name in CLASSES}
    for entry, (first, last) in lives.items():
        name = "gradients" if entry in of_gradients else "weights" if entry in of_params else "activations"
        changes[name][first] += program.sizes[entry]
        changes[name][last + 1] -= program.sizes[entry]
    curves: dict[str, list[Any]] = {name: [] for name in CLASSES}
    for name, change in changes.items():
        levels = np.cumsum(change, axis=0)[: end + 1]
        for place, level in enumerate(levels):
            inner = bodies[place].curves[0][name] if place in bodies else [0.0]
            copied = copies.get(place, 0.0) if name == "activations" else 0.0
            curves[name] += [level + copied + more for more in inner]
    return curves


def _score_copies(program: SizedProgram) -> dict[int, Any]:
    """Maps each backward scan, by its index, to the bytes of the scores that it reads from stacks per iteration."""
    layers: dict[int, Any] = {}
    copies: dict[int, Any] = {}
    for place, op in enumerate(program.ops):
        if op.body is None:
            continue
        if op.backward and (read := [entry for entry in layers if entry in op.inputs]):
            copies[place] = sum(layers[entry] for entry in read)
        scores = _scores(op.body)
        pairs = zip(op.outputs[op.carried :], op.body.outputs[op.carried :], strict=True)
        layers.update((outer, op.body.sizes[inner]) for outer, inner in pairs if inner is not None and inner in scores)
    return copies


def _scores(body: SizedProgram) -> set[int]:
    """Returns the first batched matmul's results, with what elementwise ops and stacks make of them."""
    scores: set[int] = set()
    elements = None
    for op in body.ops:
        counts = [np.asarray(body.sizes[entry]) / body.widths[entry] for entry in op.outputs]
        first = op.matmul is not None and op.matmul.kind == "batched" and elements is None
        if first:
            elements = counts[0]
        derived = op.kind in ("elementwise", "stack") and not scores.isdisjoint(op.inputs)
        if first or (derived and elements is not None and np.allclose(counts[0], elements)):
            scores.update(op.outputs)
    return scores


def _delays(
    program: SizedProgram, fused: FusedProgram, gradients: Collection[int], rows: float, combined: int
) -> dict[int, int]:
    """Returns the place of each matmul that makes a gradient, to that of the last gradient of its collective."""
    of_gradients, delays, group, size = _gradient_arrays(fused, gradients), {}, [], 0.0
    for kernel in fused.kernels:
        if kernel.is_copy or kernel.op.kind != "heavy" or of_gradients.isdisjoint(kernel.op.outputs):
            group = [] if kernel.op.waits else group
            continue
        added = sum(float(value(program.sizes[entry], rows)) for entry in kernel.op.outputs)
        if size + added > combined:
            group, size = [], 0.0
        group += [kernel.place] * (kernel.op.matmul is not None)
        size += added
        delays |= dict.fromkeys(group, kernel.place)
    return delays


def _gradient_arrays(fused: FusedProgram, gradients: Collection[int]) -> set[int]:
    return {leaf for entry in gradients for leaf in fused.leaves[entry]}


def _bodies(fused: FusedProgram, rows: float, params: set[int]) -> tuple[dict[int, _Amounts], set[int]]:
    """Returns the amounts of one iteration of each loop, by its index, and arrays that depend on parameters alone."""
    bodies, of_params = {}, params
    for kernel in fused.kernels:
        op = kernel.op
        if op.body is not None:
            inner = {entry for entry, outer in zip(op.body.inputs, op.inputs, strict=True) if outer in of_params}
            bodies[kernel.place], outputs = _program_amounts(op.body, rows, inner, ())
            of_params |= {entry for entry, alone in zip(op.outputs, outputs, strict=True) if alone}
        elif kernel.leaves and kernel.leaves <= of_params:
            of_params |= {*op.outputs}
    return bodies, of_params


def _lives(
    program: SizedProgram,
    fused: FusedProgram,
    gradients: Collection[int],
    of_params: set[int],
    delays: Mapping[int, int],
) -> dict[int, tuple[int, int]]:
    """Returns the live range (first, last op) of each written array; `delays` maps an op to the later op it awaits."""
    end, lives, reads = len(program.ops), {}, {}
    for kernel in fused.kernels:
        for leaf in kernel.leaves:
            reads.setdefault(leaf, []).append(delays.get(kernel.place, kernel.place))
    kept = _gradient_arrays(fused, gradients) | {entry for entry in program.outputs if entry is not None}
    for kernel in fused.kernels:
        if kernel.op.kind == "stack" or kernel.is_copy:
            continue
        for number, entry in enumerate(kernel.op.outputs):
            carried = kernel.op.body is not None and number < kernel.op.carried
            filled = fills_operand(kernel.op) and max(reads.get(kernel.op.inputs[0], [-1])) == kernel.place
            first = delays.get(kernel.place, kernel.place) + (carried or filled)  # in the place of an operand
            last = end if entry in kept else max(reads.get(entry, [first]))
            if entry in of_params and entry in reads and kernel.op.body is None:
                first = min(reads[entry])
            lives[entry] = min(first, last), last
    return lives


def _kernel_amounts(
    kernel: TracedKernel, body: _Amounts | None, of_params: Collection[int]
) -> Iterator[tuple[Any, Any, int, int, bool]]:
    op, matmul = kernel.op, None if kernel.is_copy else kernel.op.matmul
    if body is not None:
        for traffic, flop, bits, runs, is_cast in body.kernels:
            yield traffic, flop, bits, runs * op.length, is_cast
        return
    zeros = np.zeros(DEGREE + 1)
    if matmul is None:
        is_cast = op.name == "convert_element_type" and bool(kernel.leaves) and kernel.leaves.issubset(of_params)
        yield kernel.traffic + zeros, zeros, 0, 1, is_cast
    else:
        yield kernel.traffic + zeros, matmul.flop, matmul.bits, 1, False
