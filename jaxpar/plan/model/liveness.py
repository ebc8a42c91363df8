"""Bytes that are live at each op of a program, and the seconds of its kernels.

array                  from the kernel that writes it to the last one that reads it
of parameters alone    such as weights in 16 bits: from the first kernel that reads it
gradient               to the end of the program: the update follows
scan                   its stacked results, and the arrays of one turn
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.model.fusion import FusedProgram, TracedKernel, fuse
from jaxpar.plan.model.program import DEGREE, SizedProgram, value

LEAST = 2e-6  # seconds of the smallest kernel: assumed, as in `jaxpar.inspector.timeline`
CLASSES = ("activations", "weights", "gradients")


@dataclass(slots=True)
class _Amounts:
    """Live bytes by class at each moment, [moments, degree]; kernels as (traffic, FLOP, bits, runs)."""

    curves: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in CLASSES})
    kernels: list[tuple[Any, Any, int, int]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Estimate:
    """The estimate of a compiled program, for any number of rows.

    Attributes:
      live: Class (activations, weights, gradients) to the live bytes at each moment. Shape [moments, degree].
      traffic: Bytes that each kernel reads and writes. Shape [kernels, degree].
      flop: FLOP of each kernel's matmul. Shape [kernels, degree].
      bits: Bits of each matmul's operands; 0 for other kernels. Shape [kernels].
      runs: Runs of each kernel in a step. Shape [kernels].
      gradient_bytes: Bytes of all gradients at the end of the program.
      update_kernels: Kernels of the update: norm and update of each array. Convolutions have their own layout of
        weights, in which the update reads and writes the three arrays of the state.
      batch: Bytes of the inputs that are no parameters. A polynomial in the rows.
    """

    live: dict[str, np.ndarray]
    traffic: np.ndarray
    flop: np.ndarray
    bits: np.ndarray
    runs: np.ndarray
    gradient_bytes: float
    update_kernels: int
    batch: np.ndarray

    def peak(self, rows: float, *, weights: float = 1.0, gradients: float = 1.0) -> dict[str, float]:
        """Returns the live bytes by class at the fullest moment.

        Args:
          rows: Rows of a device.
          weights: Factor on the bytes of copies of parameters.
          gradients: Factor on the bytes of gradients.
        """
        factors = {"activations": 1.0, "weights": weights, "gradients": gradients}
        amounts = {name: factors[name] * value(live, rows) for name, live in self.live.items()}
        fullest = int(np.argmax(sum(amounts.values())))
        return {name: float(amount[fullest]) for name, amount in amounts.items()}

    def seconds(self, rows: float, hardware: Hardware) -> dict[str, float]:
        """Returns the seconds of matmuls and of the other kernels."""
        flop, traffic = value(self.flop, rows), value(self.traffic, rows)
        is_matmul = self.bits > 0
        full_precision = hardware.chip.bf16_flops / hardware.chip.f32_flops
        compute = hardware.matmuls(np.where(is_matmul, flop, 1.0)) * np.where(self.bits > 16, full_precision, 1.0)
        seconds = np.maximum(np.maximum(np.where(is_matmul, compute, 0.0), hardware.stream(traffic)), LEAST)
        seconds = self.runs * seconds
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
    live = {name: np.array(curve) for name, curve in amounts.curves.items()}
    live["activations"] = live["activations"] + batch
    traffic, flop, bits, runs = zip(*amounts.kernels, strict=True)
    return Estimate(
        live=live,
        traffic=np.array(traffic),
        flop=np.array(flop),
        bits=np.array(bits),
        runs=np.array(runs),
        update_kernels=2 * len(outputs) + 4 * kernels,
        gradient_bytes=float(value(live["gradients"][-1], rows)),
        batch=np.zeros(DEGREE + 1) + batch,
    )


def _program_amounts(
    program: SizedProgram, rows: float, params: Collection[int], gradients: Collection[int]
) -> tuple[_Amounts, list[bool]]:
    """Returns the amounts of a program, and which of its results are of parameters alone."""
    fused = fuse(program, rows, gradients=gradients)
    bodies, of_params = _bodies(fused, rows, {*params})
    lives = _lives(program, fused, gradients, of_params)
    end = len(program.ops)
    changes = {name: np.zeros((end + 2, DEGREE + 1)) for name in CLASSES}
    of_gradients = _gradient_arrays(fused, gradients)
    for entry, (first, last) in lives.items():
        name = "gradients" if entry in of_gradients else "weights" if entry in of_params else "activations"
        changes[name][first] += program.sizes[entry]
        changes[name][last + 1] -= program.sizes[entry]
    levels = {name: np.cumsum(change, axis=0)[: end + 1] for name, change in changes.items()}
    amounts = _Amounts()
    for place in range(end + 1):
        body = bodies.get(place)
        for name in CLASSES:
            inner = body.curves[name] if body is not None else [0.0]
            amounts.curves[name] += [levels[name][place] + more for more in inner]
    for kernel in fused.kernels:
        amounts.kernels += _kernel_amounts(kernel, bodies.get(kernel.place))
    return amounts, [entry in of_params for entry in program.outputs]


def _gradient_arrays(fused: FusedProgram, gradients: Collection[int]) -> set[int]:
    return {leaf for entry in gradients for leaf in fused.leaves[entry]}


def _bodies(fused: FusedProgram, rows: float, params: set[int]) -> tuple[dict[int, _Amounts], set[int]]:
    """Returns the amounts of one turn of each loop, by its place; and the arrays made of parameters alone."""
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
    program: SizedProgram, fused: FusedProgram, gradients: Collection[int], of_params: set[int]
) -> dict[int, tuple[int, int]]:
    """Returns the first and the last place of each array that the program writes."""
    end, lives, reads = len(program.ops), {}, {}
    for kernel in fused.kernels:
        for leaf in kernel.leaves:
            reads.setdefault(leaf, []).append(kernel.place)
    kept = _gradient_arrays(fused, gradients) | {entry for entry in program.outputs if entry is not None}
    for kernel in fused.kernels:
        if kernel.op.kind == "stack" or kernel.is_copy:
            continue
        for number, entry in enumerate(kernel.op.outputs):
            carried = kernel.op.body is not None and number < kernel.op.carried
            first = kernel.place + carried
            last = end if entry in kept else max(reads.get(entry, [first]))
            if entry in of_params and entry in reads and kernel.op.body is None:
                first = min(reads[entry])
            lives[entry] = min(first, last), last
    return lives


def _kernel_amounts(kernel: TracedKernel, body: _Amounts | None) -> Iterator[tuple[Any, Any, int, int]]:
    op, matmul = kernel.op, None if kernel.is_copy else kernel.op.matmul
    if body is not None:
        for traffic, flop, bits, runs in body.kernels:
            yield traffic, flop, bits, runs * op.length
        return
    zeros = np.zeros(DEGREE + 1)
    if matmul is None:
        yield kernel.traffic + zeros, zeros, 0, 1
    else:
        yield kernel.traffic + zeros, matmul.flop, matmul.bits, 1
