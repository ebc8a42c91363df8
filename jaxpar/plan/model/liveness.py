"""Bytes that are live at each op of a program, and the seconds of its kernels.

array                  from the kernel that writes it to the last one that reads it
of parameters alone    such as weights in 16 bits: from the first kernel that reads it
gradient               to the end of the program: the update follows; where it is scattered, whole while it is made
kernel run later       what it reads is kept until then: `kernel_order.py`
elementwise result     in the memory of an operand that is read last: `buffer_reuse.py`
scan                   its stacked results, and the arrays of one iteration
scores of a stack      of one iteration once more: matmuls of the backward pass copy them out of it, in their own layout
parameter, gathered    from its first kernel to its last one, of a pass or of both; of a stack, a layer in an iteration
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxpar.plan.machine.hardware import SMALLEST_KERNEL, Hardware
from jaxpar.plan.model.buffer_reuse import results_over_operands
from jaxpar.plan.model.fusion import FusedProgram, TracedKernel, fills_operand, fuse
from jaxpar.plan.model.kernel_order import LISTED, REDUCED, SCATTERED, fill_places, gradient_arrays, run_places
from jaxpar.plan.model.pooling import keep_positions
from jaxpar.plan.model.program import DEGREE, SizedProgram, value

CLASSES = ("activations", "weights", "gradients")
UNREDUCED = "unreduced gradients"  # class of those that are made at a moment
GATHERED = {"pass": "gathered for a pass", "step": "gathered for a step"}  # classes, by how long gathers are kept
Live = dict[str, np.ndarray]


@dataclass(slots=True)
class _Gather:
    """Bytes that are gathered of a parameter, and the kernels that read them, of the forward and the backward pass.

    A loop gathers a layer of a stack in each iteration; the bytes are those of all layers.
    """

    size: Any = 0.0
    places: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    is_stack: bool = False

    def lives(self, *, in_loop: bool) -> Iterator["_Life"]:
        """Yields the live ranges of the gathered bytes, those of a pass and, outside of loops, those of both."""
        if not self.is_stack:
            for places in filter(None, self.places):
                yield _Life(GATHERED["pass"], self.size, min(places), max(places))
        if not in_loop:
            places = [*self.places[0], *self.places[1]]
            yield _Life(GATHERED["step"], self.size, min(places), max(places))


@dataclass(slots=True)
class _Amounts:
    """Live bytes as in `Estimate`, [moments, degree]; kernels as (traffic, FLOP, bits, runs, is a cast of weights)."""

    gathers: dict[int, _Gather] = field(default_factory=dict)
    shards: list[int | None] = field(default_factory=list)  # the sharded input of which each result is a copy
    curves: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    kernels: list[tuple[Any, Any, int, int, bool]] = field(default_factory=list)


class _Life(NamedTuple):
    """Bytes of a class (see `Estimate.live`) that are live from one op to another."""

    name: str
    size: Any
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Estimate:
    """The estimate of a compiled program, for any number of rows.

    Attributes:
      live: Bytes up to which collectives of gradients are combined, 0 without replicas, to: class (see `CLASSES`,
        `UNREDUCED` and `GATHERED`) to the live bytes at each moment. Shape [moments, degree]. `LISTED` has those in the
        order of XLA's list scheduler, if the program has gradients and no collectives.
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

    def peak(
        self,
        rows: float,
        *,
        weights: float = 1.0,
        gradients: float = 1.0,
        gathered: str = "",
        combined: int = 0,
        updated: float = 0.0,
    ) -> dict[str, float]:
        """Returns the live bytes by class at the fullest moment.

        Args:
          rows: Rows of a device.
          weights: Factor on the bytes of copies of parameters.
          gradients: Factor on the bytes of gradients.
          gathered: Where the parameters are shards, how long an array of them is kept that was gathered: for a "pass"
            or a "step"; they are then the class of weights, and `weights` has no effect. "" if none is gathered.
          combined: Bytes up to which collectives of gradients are combined, `SCATTERED` or `REDUCED`; 0 without
            replicas.
          updated: Bytes that the update writes: parameters and optimizer state. XLA keeps the list scheduler's order if
            its peak is at most these: it counts the results of the update as new memory.
        """
        if combined == 0 and LISTED in self.live:
            listed = sum(value(self.live[LISTED][name], rows) for name in CLASSES)
            combined = LISTED if float(np.max(listed)) <= updated else 0
        factors = {"activations": 1.0, "weights": weights, "gradients": gradients}
        live = self.live[combined]
        amounts = {name: factors[name] * value(live[name], rows) for name in CLASSES}
        if combined == SCATTERED:  # shards, but for those that are made at the moment
            amounts["gradients"] += max(0.0, 1.0 - gradients) * value(live[UNREDUCED], rows)
        if gathered:
            amounts["weights"] = value(live[GATHERED[gathered]], rows)
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
    amounts, _ = _program_amounts(program, rows, inputs, inputs, outputs)
    kernels = sum(op.matmul.kind == "convolution" for op in program.ops if op.matmul and op.backward) // 2
    batch = sum(program.sizes[entry] for entry in program.inputs if entry not in inputs)
    live = {
        combined: {name: np.array(curve) + batch * (name == "activations") for name, curve in curves.items()}
        for combined, curves in amounts.curves.items()
    }
    traffic, flop, bits, runs, casts = zip(*amounts.kernels, strict=True) if amounts.kernels else ((),) * 5
    return Estimate(
        live=live,
        traffic=np.reshape(traffic, (-1, DEGREE + 1)),
        flop=np.reshape(flop, (-1, DEGREE + 1)),
        bits=np.array(bits),
        runs=np.array(runs),
        casts=np.array(casts),
        update_kernels=2 * len(outputs) + 4 * kernels,
        gradient_bytes=float(value(live[0]["gradients"][-1], rows)),
        batch=np.zeros(DEGREE + 1) + batch,
    )


def _program_amounts(
    program: SizedProgram,
    rows: float,
    params: Collection[int],
    shards: Collection[int],
    gradients: Collection[int],
    *,
    loop: str = "",
) -> tuple[_Amounts, list[bool]]:
    """Returns the amounts of a program, and a mask of its results that depend on parameters alone.

    `shards` are those of the parameters that the program itself gathers; in a loop the others are gathered before it.
    `loop` is the pass of the loop of which it is an iteration, "forward" or "backward", or "".
    """
    program = keep_positions(program)
    fused = fuse(program, rows, gradients=gradients)
    bodies, of_params = _bodies(fused, rows, {*params}, loop)
    amounts, copies = _Amounts(), _score_copies(program)
    listed = () if any(op.waits for op in program.ops) else (LISTED,)
    for combined in (0, *listed, SCATTERED, REDUCED) if gradients else (0,):
        places = run_places(program, fused, gradients, rows, combined, in_backward_loop=loop == "backward")
        fills = fill_places(program, fused, rows) if combined == LISTED else {}
        lives = _lives(program, fused, gradients, of_params, places, fills)
        of_gradients = gradient_arrays(fused, gradients)
        classes = {entry: "weights" if entry in of_params else "activations" for entry in lives}
        classes |= dict.fromkeys(of_gradients & classes.keys(), "gradients")
        live = [_Life(classes[entry], program.sizes[entry], *life) for entry, life in lives.items()]
        amounts.gathers, roots = _gathers(program, fused, shards, of_params, bodies, places)
        amounts.shards = [roots.get(entry) for entry in program.outputs]
        live += [
            _Life(UNREDUCED, program.sizes[entry], lives[entry][0], lives[entry][0])
            for kernel in fused.kernels
            for entry in of_gradients.intersection(kernel.op.outputs)
            if kernel.op.body is None and entry in lives
        ]
        live += [life for gather in amounts.gathers.values() for life in gather.lives(in_loop=bool(loop))]
        amounts.curves[combined] = _curves(len(program.ops), live, bodies, copies)
    for kernel in fused.kernels:
        amounts.kernels += _kernel_amounts(kernel, bodies.get(kernel.place), of_params)
    return amounts, [entry in of_params for entry in program.outputs]


def _curves(
    end: int, lives: Iterable[_Life], bodies: dict[int, _Amounts], copies: Mapping[int, Any]
) -> dict[str, list[Any]]:
    """Returns the live bytes by class at each moment of a program with `end` ops."""
    changes = {name: np.zeros((end + 2, DEGREE + 1)) for name in (*CLASSES, UNREDUCED, *GATHERED.values())}
    for life in lives:
        changes[life.name][life.first] += life.size
        changes[life.name][life.last + 1] -= life.size
    curves: dict[str, list[Any]] = {name: [] for name in changes}
    for name, change in changes.items():
        levels = np.cumsum(change, axis=0)[: end + 1]
        for place, level in enumerate(levels):
            inner = bodies[place].curves[0][name] if place in bodies else [0.0]
            copied = copies.get(place, 0.0) if name == "activations" else 0.0
            curves[name] += [level + copied + more for more in inner]
    return curves


def _gathers(
    program: SizedProgram,
    fused: FusedProgram,
    shards: Collection[int],
    of_params: Collection[int],
    bodies: Mapping[int, _Amounts],
    places: Mapping[int, int],
) -> tuple[dict[int, _Gather], dict[int | None, int]]:
    """Returns the gather of each parameter of which a device has a shard, and the parameter of each copy of one.

    They are gathered in the dtype in which they are read: shards are cast first.
    """
    roots: dict[int | None, int] = {entry: entry for entry in shards}
    gathers: dict[int, _Gather] = {}
    for kernel in fused.kernels:
        op, place = kernel.op, places.get(kernel.place, kernel.place)
        if op.body is None and kernel.leaves and kernel.leaves <= {*of_params}:  # a copy, such as a cast
            copied = {roots.get(leaf) for leaf in kernel.leaves}
            if len(copied) == 1 and (root := copied.pop()) is not None:
                roots |= dict.fromkeys(op.outputs, root)
            continue
        for number, entry in enumerate(op.inputs):
            leaves = fused.leaves[entry]
            for leaf in leaves.keys() & roots.keys():
                size = program.sizes[entry] if len(leaves) == 1 else leaves[leaf]
                gather = gathers.setdefault(roots[leaf], _Gather())
                if op.body is not None and number >= len(op.inputs) - op.scanned:
                    inner = bodies[kernel.place].gathers.get(op.body.inputs[number])
                    size = op.length * inner.size if inner else 0.0
                    gather.is_stack = True
                gather.size = np.maximum(gather.size, size)
                gather.places[op.backward].append(place)
        if op.body is not None:  # layers that the forward pass keeps for the backward pass
            roots_inside = {inner: roots.get(outer) for inner, outer in zip(op.body.inputs, op.inputs, strict=True)}
            for entry, inner in zip(op.outputs, bodies[kernel.place].shards, strict=True):
                if inner is not None and (root := roots_inside[inner]) is not None:
                    roots[entry] = root
    return gathers, roots


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


def _bodies(fused: FusedProgram, rows: float, params: set[int], loop: str) -> tuple[dict[int, _Amounts], set[int]]:
    """Returns the amounts of one iteration of each loop, by its index, and arrays that depend on parameters alone."""
    bodies, of_params = {}, params
    for kernel in fused.kernels:
        op = kernel.op
        if op.body is not None:
            inner = {entry for entry, outer in zip(op.body.inputs, op.inputs, strict=True) if outer in of_params}
            layers = inner.intersection(op.body.inputs[len(op.body.inputs) - op.scanned :])
            bodies[kernel.place], outputs = _program_amounts(
                op.body, rows, inner, layers, (), loop="backward" if op.backward or loop == "backward" else "forward"
            )
            of_params |= {entry for entry, alone in zip(op.outputs, outputs, strict=True) if alone}
        elif kernel.leaves and kernel.leaves <= of_params:
            of_params |= {*op.outputs}
    return bodies, of_params


def _lives(
    program: SizedProgram,
    fused: FusedProgram,
    gradients: Collection[int],
    of_params: set[int],
    places: Mapping[int, int],
    fills: Mapping[int, int],
) -> dict[int, tuple[int, int]]:
    """Returns the live range (first, last op) of each written array.

    `places` maps ops that run later than in the program to where they run, and `fills` scatters to where their zeros
    are made.
    """
    end, lives, reads = len(program.ops), {}, {}
    for kernel in fused.kernels:
        for leaf in kernel.leaves:
            reads.setdefault(leaf, []).append(places.get(kernel.place, kernel.place))
    kept = gradient_arrays(fused, gradients) | {entry for entry in program.outputs if entry is not None}
    for kernel in fused.kernels:
        if kernel.op.kind == "stack" or kernel.is_copy:
            continue
        for number, entry in enumerate(kernel.op.outputs):
            carried = kernel.op.body is not None and number < kernel.op.carried
            filled = fills_operand(kernel.op) and max(reads.get(kernel.op.inputs[0], [-1])) == kernel.place
            first = places.get(kernel.place, kernel.place) + (carried or filled)  # in the place of an operand
            first = min(first, fills.get(kernel.place, first))
            last = end if entry in kept else max(reads.get(entry, [first]))
            if entry in of_params and entry in reads and kernel.op.body is None:
                first = min(reads[entry])
            lives[entry] = min(first, last), last
    for entry in results_over_operands(program, fused, lives, of_params):
        first, last = lives[entry]
        lives[entry] = first + 1, last
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
