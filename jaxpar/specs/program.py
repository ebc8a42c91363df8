"""Follows the dims of every array through the program (jaxpr) of a loss and its gradients.

    arrays      elementwise operations, transposes, reshapes, sums and loops join dims of different arrays to one
    operations  matmuls, convolutions, lookups and splits of fused projections, before and after which an array may be
                resharded: `operations.py`
    reductions  sums and maxima along dims, which need a collective if an axis cuts that dim

A dim is a tuple of pieces, which reshapes split and merge (`jaxpar.sharding.infer_names.dim_pieces`). An array may be
cut along the first piece of a dim. Constants join no dims: else a mask that all layers read would join their heads.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxpar import models
from jaxpar.hlo.source_frames import equation_frame
from jaxpar.hlo.text import SourceFrame
from jaxpar.sharding.infer_names.dim_pieces import Dim, DimPiece, flat, fresh, join, mix, split
from jaxpar.sharding.infer_names.from_use import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
)
from jaxpar.sharding.infer_names.operations import CALLS, OPERATIONS, TracedArray, elementwise
from jaxpar.specs.activation_marks import MARK
from jaxpar.specs.fused_projections import FusedProjections, PartAxes
from jaxpar.specs.operations import flop_of, loops_of, overlapping_dims

VIEWS = ("reshape", "transpose", "squeeze", "expand_dims", "convert_element_type", "copy", "reduce_precision", MARK)
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp complex conj "
    "convert_element_type copy copy_p cos cosh device_put digamma div eq erf erf_inv erfc exp exp2 expm1 floor "
    "ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not "
    "one_minus_square optimization_barrier or pcast polynomial population_count pow pvary real "
    "reduce_precision rem round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor".split()
) | {MARK}
_IN_FLOAT32 = "float32_attention", "attend_heads"  # functions of jaxpar.models.custom_gradients
GENERATORS = ("iota", "random_bits", "random_seed", "random_wrap", "random_unwrap", "random_fold_in", "random_split",
             "threefry2x32", "random_clone", "empty", "full")  # fmt: skip
SUMS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
WINDOWS = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add",
           "select_and_gather_add", "rev", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "pad")  # fmt: skip
_ATTENTION = tuple(
    str(Path(models.__file__).parent / name) for name in ("islands.py", "blocks/attention.py", "blocks/kernel.py")
)
OWN = ("shard_map", "pallas_call", "reduce", "reduce_window")  # not followed inside: programs of one device or tile
DIM_OPS = ("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "dynamic_slice", "split",
            "concatenate", "unstack", "stack", "dynamic_update_slice", "sort", "argmax", "argmin")  # fmt: skip


@dataclass(eq=False)
class Array:
    """An array of the program.

    Attributes:
      dims: Its dims.
      shape: Its shape.
      itemsize: Bytes of an element.
      constant: Whether its values depend on no parameter and no input.
      path: The path of the parameter that it is, or "".
      learned: Whether it is a parameter, a view of one, or a layer of a stack of them.
      line: The line of the user's source that computes it; None for an input.
      times: Number of times that a run of the program computes it, e.g. the iterations of a loop.
      root: The array of which it is a view, by a reshape or transpose; the array itself if it is no view.
      readers: Number of equations that read it or a view of it.
      backward: Whether the backward pass computes it.
      share: Examples of a device / examples of the trace, if it has a dim of examples; else 1.
      repeats: Number of times that it has each entry of the array from which it was broadcast; 1 if it was not.
    """

    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    itemsize: int
    constant: bool = False
    path: str = ""
    learned: bool = False
    line: SourceFrame | None = None
    times: int = 1
    root: "Array" = None  # type: ignore[assignment]
    readers: int = 0
    backward: bool = False
    share: float = 1.0
    repeats: float = 1.0

    def __post_init__(self):
        self.root = self.root or self

    @property
    def bytes(self) -> float:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize * self.share

    @property
    def sent_bytes(self) -> float:
        """Bytes that collectives of the whole array are for: XLA gathers what was broadcast before the broadcast."""
        return self.bytes / self.root.repeats

    def pieces(self) -> Iterator[DimPiece]:
        """Yields the first piece of each dim, the only one that an axis may cut."""
        for dim in self.dims:
            yield from list(flat(dim))[:1]


@dataclass(eq=False)
class Operation:
    """A matmul, convolution or lookup, or the split of a fused projection and its gradient.

    Attributes:
      equation: Its equation.
      operands: The arrays that it reads.
      result: The array that it computes.
      flop: FLOP each time.
      times: How often the program runs it: more than once in a loop.
      backward: Whether it belongs to the backward pass.
      loops: For each loop, the piece of each operand and of the result that it runs over; None if it runs over none.
      in_island: Whether `jp.attention` runs it: no line of the model names its arrays.
      is_fused: Whether it splits a fused projection or joins its gradients; its last loop then runs over all entries.
      exchanged_arrays: If it is fused, the arrays that an all-to-all sends when an axis cuts its last loop.
    """

    equation: JaxprEqn
    operands: list[Array]
    result: Array
    flop: float
    times: int
    backward: bool = False
    loops: list[tuple[tuple[DimPiece | None, ...], DimPiece | None]] = field(default_factory=list)
    in_island: bool = False
    is_fused: bool = False
    exchanged_arrays: tuple[Array, ...] = ()


@dataclass(eq=False)
class TracedProgram:
    """The program of a loss and its gradients.

    Attributes:
      arrays: All arrays that are not constant.
      operations: All operations, in order.
      reductions: The result of each reduction, and the pieces that it sums over.
      additions: The result and the operands of each addition of two arrays of one shape.
      params: The parameters by their paths.
      inputs: The other inputs.
      unknown: Primitives that the interpreter has no rule for: no dim of their arrays is cut.
      rows: The pieces of batch dims, whose entries are examples.
      of_variable: The array of each variable of the jaxpr and of its inner jaxprs, as last computed.
      constants: Each constant that an elementwise operation reads, and the result, if both have one shape.
      marks: The arrays of each mark, by its number: an activation, the same one recomputed, and its gradient.
      name_of_piece: Pieces that an axis splits by the name that the model gives their dim; no other axis splits them.
    """

    arrays: list[Array] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    reductions: list[tuple[Array, tuple[DimPiece, ...]]] = field(default_factory=list)
    additions: list[tuple[Array, list[Array]]] = field(default_factory=list)
    params: dict[str, Array] = field(default_factory=dict)
    inputs: list[Array] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    rows: set[DimPiece] = field(default_factory=set)
    of_variable: dict[Any, Array] = field(default_factory=dict)
    constants: list[tuple[Array, Array]] = field(default_factory=list)
    marks: dict[int, list[Array]] = field(default_factory=lambda: defaultdict(list))
    name_of_piece: dict[DimPiece, str] = field(default_factory=dict)


def follow_dims(
    jaxpr: Jaxpr, paths: Sequence[str], batch: Sequence[int], gradients: Sequence[int], *, share: float = 1.0
) -> TracedProgram:
    """Follows the dims through a jaxpr.

    Args:
      jaxpr: Computes a loss and its gradients.
      paths: Paths of the parameters, which are its first arguments.
      batch: Indices of the arguments whose dim 0 is examples.
      gradients: For each parameter, the index of the result that is its gradient; -1 if it has none.
      share: Examples of a device / examples of the jaxpr. For one example per device the jaxpr has two, because a dim
        of size 1 is not followed.
    """
    interpreter = _Interpreter()
    inputs = [interpreter.array(var) for var in jaxpr.invars]
    for path, array in zip(paths, inputs, strict=False):
        array.path, array.learned = path, True
    results = interpreter.run(jaxpr, inputs)
    for array, index in zip(inputs, gradients, strict=False):
        if index >= 0:
            _join_all(array.dims, results[index].dims)
    program = interpreter.program
    program.params = {array.path: array for array in inputs if array.path}
    program.inputs = [array for array in inputs if not array.path]
    _align(interpreter)
    _set_examples(program, [inputs[number] for number in batch])
    _scale_examples(program, share)
    return program


class _Interpreter:
    """Interprets a jaxpr with `Array`s in place of values."""

    def __init__(self) -> None:
        self.program = TracedProgram()
        self.times = 1
        self.backward = False
        self.line: SourceFrame | None = None
        self.dims_of_loops: list[tuple[Operation, list[list[Dim | None]]]] = []
        self.fused_projections = FusedProjections()
        self.axes_of_parts: list[tuple[Operation, PartAxes]] = []

    def array(self, var: Any, dims: tuple[Dim, ...] | None = None, **fields: Any) -> Array:
        shape = tuple(getattr(var.aval, "shape", ()))
        dtype = getattr(var.aval, "dtype", None)
        made = Array(
            tuple(fresh(size) for size in shape) if dims is None else dims,
            shape,
            getattr(dtype, "itemsize", 4),
            times=self.times,
            backward=self.backward,
            line=self.line,
            **fields,
        )
        if not made.constant:
            self.program.arrays.append(made)
        return made

    def run(self, jaxpr: Jaxpr, inputs: Sequence[Array]) -> list[Array]:
        arrays: dict[Any, Array] = dict(zip(jaxpr.invars, inputs, strict=True))
        arrays |= {var: self.array(var, constant=True) for var in jaxpr.constvars}

        def read(var: Any) -> Array:
            return self.array(var, constant=True) if isinstance(var, Literal) else arrays[var]

        for eqn in jaxpr.eqns:
            operands = [read(var) for var in eqn.invars]
            arrays.update(zip(eqn.outvars, self.equation(eqn, operands), strict=True))
        self.program.of_variable.update(arrays)
        return [read(var) for var in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
        before = self.backward, self.line  # scopes and lines in an inner program begin at the call
        self.backward |= "transpose(" in str(eqn.source_info.name_stack)
        self.line = equation_frame(eqn, self.line)
        results = self._equation(eqn, operands)
        self.backward, self.line = before
        return results

    def _equation(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
        name = eqn.primitive.name
        if name == "scan":
            return self.scan(eqn, operands)
        if name == "while":
            return self.loop(eqn, operands)
        if name == "cond":
            results = [self.run(branch.jaxpr, operands[1:]) for branch in eqn.params["branches"]]
            return [_join_branches(arrays) for arrays in zip(*results, strict=True)]
        if name not in OWN and (key := next((key for key in CALLS if key in eqn.params), None)):
            inner = eqn.params[key]
            return self.run(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner, operands)
        if operands and not all(operand.constant or operand.learned for operand in operands):
            if (axes := self.fused_projections.axes(eqn, operands[0].dims, backward=self.backward)) is not None:
                for array in {id(operand.root): operand.root for operand in operands}.values():
                    array.readers += 1
                read = operands[:1] if name == "pad" else operands  # not the value that it pads with
                return [_part(self, eqn, read, var, axes) for var in eqn.outvars]
        if name in VIEWS and not operands[0].constant:
            dims = _dims_of_results(self.program, eqn, operands)[0]
            view = self.array(eqn.outvars[0], dims, root=operands[0].root, learned=operands[0].learned)
            if name == MARK:
                self.program.marks[eqn.params["number"]].append(view)
            return [view]
        for array in {id(operand.root): operand.root for operand in operands}.values():
            array.readers += 1
        return self.leaf(eqn, operands)

    def leaf(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
        """Handles an equation without an inner program."""
        name = eqn.primitive.name
        constant = all(operand.constant for operand in operands) or name in GENERATORS
        if constant or not eqn.outvars:
            return [self.array(var, constant=True) for var in eqn.outvars]
        if (loops := loops_of(eqn)) is not None:
            return [self.operation(eqn, operands, loops)]
        if name in SUMS:
            axes, dims = eqn.params["axes"], operands[0].dims
            result = self.array(eqn.outvars[0], tuple(dim for axis, dim in enumerate(dims) if axis not in axes))
            self.program.reductions.append((result, tuple(dims[axis] for axis in axes)))  # type: ignore[arg-type]
            return [result]
        results = _dims_of_results(self.program, eqn, operands)
        made = [self.array(var, dims) for var, dims in zip(eqn.outvars, results, strict=True)]
        if name in ELEMENTWISE:
            self.program.constants += [
                (array, made[0]) for array in operands if array.constant and array.shape == made[0].shape
            ]
        if name == "broadcast_in_dim":
            made[0].repeats = max(1.0, math.prod(made[0].shape) / max(1, math.prod(operands[0].shape)))
        if name in ("add", "add_any") and operands[0].shape == operands[1].shape:
            self.program.additions.append((made[0], [operand.root for operand in operands]))
        return made

    def operation(self, eqn: JaxprEqn, operands: list[Array], loops: list) -> Array:
        result = self.array(eqn.outvars[0])
        in_island = self.line is not None and (
            self.line.file in _ATTENTION or any(name in self.line.function for name in _IN_FLOAT32)
        )
        made = Operation(eqn, operands, result, flop_of(eqn), self.times, self.backward, in_island=in_island)
        self.program.operations.append(made)
        if made.flop and any(array.learned and len(array.shape) == 2 for array in operands):
            self.fused_projections.add(result.dims[-1])
        for array, overlapping in zip((*operands, result), overlapping_dims(eqn), strict=True):
            for dim in overlapping:
                mix(array.dims[dim], "windows of a convolution overlap along it")
        dims = [
            [*(None if at is None else array.dims[at] for at, array in zip(ats, operands, strict=False)),
             None if out is None else result.dims[out]]
            for ats, out in loops
        ]  # fmt: skip
        self.dims_of_loops.append((made, dims))
        return result

    def scan(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
        # inputs by their ranks (a stacked one has one dim more), as releases of JAX name the equation's parameters
        # differently
        inner = eqn.params["jaxpr"]
        body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
        stacked = lambda outer, inner: len(outer.aval.shape) > len(inner.aval.shape)  # noqa: E731
        scanned = sum(stacked(*pair) for pair in zip(eqn.invars, body.invars, strict=True))
        carried = sum(not stacked(*pair) for pair in zip(eqn.outvars, body.outvars, strict=True))
        consts = len(operands) - scanned - carried
        before, self.times = self.times, self.times * eqn.params["length"]
        carry = _carry(self, body.invars[consts : consts + carried], operands[consts : consts + carried])
        slices = []
        for var, array in zip(body.invars[consts + carried :], operands[consts + carried :], strict=True):
            mix(array.dims[0], "a loop runs along it")
            slices.append(self.array(var, array.dims[1:], constant=array.constant, learned=array.learned))
        out = self.run(body, [*operands[:consts], *carry, *slices])
        self.times = before
        for first, last in zip(carry, out[:carried], strict=True):
            if not last.constant:
                _join_all(first.dims, last.dims)
        results = [self.array(var, array.dims) for var, array in zip(eqn.outvars, carry, strict=False)]
        for var, array in zip(eqn.outvars[carried:], out[carried:], strict=True):
            length = fresh(eqn.params["length"])
            mix(length, "a loop runs along it")
            results.append(self.array(var, (length, *(_fresh(array.shape) if array.constant else array.dims))))
        return results

    def loop(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
        first, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body = eqn.params["body_jaxpr"].jaxpr
        carry = _carry(self, body.invars[consts:], operands[first + consts :])
        out = self.run(body, [*operands[first : first + consts], *carry])
        for start, end in zip(carry, out, strict=True):
            if not end.constant:
                _join_all(start.dims, end.dims)
        return carry


def _carry(interpreter: _Interpreter, variables: Sequence[Any], arrays: Sequence[Array]) -> list[Array]:
    """Returns arrays for the carry of a loop. Constants get new dims: later iterations may assign other values."""
    return [
        interpreter.array(var, _fresh(array.shape) if array.constant else array.dims)
        for var, array in zip(variables, arrays, strict=True)
    ]


def _part(interpreter: _Interpreter, eqn: JaxprEqn, operands: list[Array], var: Any, axes: PartAxes) -> Array:
    """Returns a part of a fused projection, or the gradients of its parts joined."""
    name, result = eqn.primitive.name, interpreter.array(var)
    exchanged = result if axes.backward and name != "pad" else operands[0]  # a pad has one part of several
    times = axes.exchanges if var is eqn.outvars[0] else 0
    operation = Operation(
        eqn,
        operands,
        result,
        0.0,
        interpreter.times,
        interpreter.backward,
        is_fused=name != "reshape",
        exchanged_arrays=(exchanged,) * times,
    )
    interpreter.program.operations.append(operation)
    if operation.is_fused:  # else XLA gathers the whole, or its parts
        interpreter.axes_of_parts.append((operation, axes))
    before = min(axes.operand, axes.result)
    after = len(result.dims) - before - 1 if axes.operand == axes.result else 0
    dims: list[list[Dim | None]] = [
        [*(operand.dims[dim] for operand in operands), result.dims[dim]] for dim in (*range(before), *range(-after, 0))
    ]
    interpreter.dims_of_loops.append((operation, dims))
    return result


def _dims_of_results(program: TracedProgram, eqn: JaxprEqn, operands: list[Array]) -> list[tuple[Dim, ...]]:
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        # a constant joins no dims
        traced = [TracedArray(_fresh(a.shape) if a.constant else a.dims, None) for a in operands]
        return [array.dims for array in elementwise(eqn, traced)]
    if name in WINDOWS:
        return _windows(eqn, operands)
    if name in DIM_OPS:
        traced = [TracedArray(a.dims, None) for a in operands]
        return [array.dims for array in OPERATIONS.get(name, elementwise)(eqn, traced)]
    program.unknown.add(name)
    results = [_fresh(tuple(getattr(var.aval, "shape", ()))) for var in eqn.outvars]
    for dim in [dim for array in operands for dim in array.dims] + [dim for dims in results for dim in dims]:
        mix(dim, f"{name} is not followed")
    return results


def _align(interpreter: _Interpreter) -> None:
    """Splits the dims that one loop runs over into pieces of equal sizes, until no loop has dims with other sizes."""
    changed = True
    while changed:
        changed = False
        for _, dims_of_loops in interpreter.dims_of_loops:
            for dims in dims_of_loops:
                present = [dim for dim in dims if dim is not None]
                changed |= any(_split_alike(present[0], dim) for dim in present[1:])
    for operation, dims_of_loops in interpreter.dims_of_loops:
        for dims in dims_of_loops:
            operation.loops += _loops_of_pieces(dims)
    for operation, axes in interpreter.axes_of_parts:
        operands = tuple(next(flat(array.dims[axes.operand]), None) for array in operation.operands)
        result = next(flat(operation.result.dims[axes.result]), None)
        operation.is_fused = result is not None and None not in operands  # a part of one column has no dim
        operation.loops += [(operands, result)] * operation.is_fused
    interpreter.program.reductions = [
        (result, tuple(piece for dim in dims for piece in flat(dim)))  # pyright: ignore[reportArgumentType]
        for result, dims in interpreter.program.reductions
    ]


def _fresh(shape: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(fresh(size) for size in shape)


def _join_all(left: Sequence[Dim], right: Sequence[Dim]) -> None:
    for first, second in zip(left, right, strict=True):
        join(first, second)


def _join_branches(arrays: Sequence[Array]) -> Array:
    followed = [array for array in arrays if not array.constant] or list(arrays[:1])
    for array in followed[1:]:
        _join_all(followed[0].dims, array.dims)
    return followed[0]


def _windows(eqn: JaxprEqn, operands: list[Array]) -> list[tuple[Dim, ...]]:
    """Returns the dims of results; dims along which entries move (windows, padding, reversal) are not cut."""
    source = operands[0]
    params, rank = eqn.params, len(source.shape)
    moved = {
        *(dim for dim, size in enumerate(params.get("window_dimensions", ())) if size > 1),
        *params.get("dimensions", ()),
        *([params["axis"] % rank] if "axis" in params else ()),
        *(dim for dim, config in enumerate(params.get("padding_config", ())) if any(config)),
    }
    results = []
    for var in eqn.outvars:
        dims = []
        for dim, size in enumerate(getattr(var.aval, "shape", ())):
            whole = dim not in moved and size == source.shape[dim]
            dims.append(source.dims[dim] if whole else fresh(size))
            if not whole:
                mix((*source.dims[dim], *dims[dim]), f"{eqn.primitive.name} runs along it")
        results.append(tuple(dims))
    for other in operands[1:]:
        if other.shape == operands[0].shape and not other.constant:
            _join_all(source.dims, other.dims)
        elif not other.constant and len(other.shape) == rank:
            for dim, size in enumerate(other.shape):
                if dim not in moved and size == source.shape[dim]:
                    join(source.dims[dim], other.dims[dim])
                else:
                    mix(other.dims[dim], f"{eqn.primitive.name} runs along it")
    return results


def _split_alike(left: Dim, right: Dim) -> bool:
    """Splits pieces of two dims of one size until both have the same sizes of pieces; returns whether any was split."""
    ours, theirs, changed = [*flat(left)][::-1], [*flat(right)][::-1], False
    while ours and theirs:
        a, b = ours.pop(), theirs.pop()
        if a.size == b.size:
            continue
        large, small, rest = (a, b, ours) if a.size > b.size else (b, a, theirs)
        if large.size % small.size or large.parts or large.parent:
            return changed
        split(large, small.size)
        rest.append(large.parts[1])
        changed = True
    return changed


def _loops_of_pieces(dims: Sequence[Dim | None]) -> Iterator[tuple[tuple[DimPiece | None, ...], DimPiece | None]]:
    pieces = [None if dim is None else list(flat(dim)) for dim in dims]
    sizes = [[piece.size for piece in each] for each in pieces if each is not None]
    if any(each != sizes[0] for each in sizes):
        return
    for index in range(len(sizes[0])):
        *operands, result = (None if each is None else each[index] for each in pieces)
        yield tuple(operands), result


def _set_examples(program: TracedProgram, batch: Sequence[Array]) -> None:
    """Marks the pieces of batch dims: dim 0 of the batch's arrays, and all pieces that operations join to it."""
    rows = {piece for array in batch if array.dims for piece in flat(array.dims[0])}
    while True:
        found = {
            piece
            for operation in program.operations
            for operands, result in operation.loops
            if rows & {*operands, result}
            for piece in (*operands, result)
            if piece is not None
        }
        if found <= rows:
            break
        rows |= found
    program.rows = rows


def _scale_examples(program: TracedProgram, share: float) -> None:
    """Scales the bytes of arrays and the FLOP of operations that have a dim of examples."""
    for array in program.arrays:
        if any(piece in program.rows for dim in array.dims for piece in flat(dim)):
            array.share = share
    for operation in program.operations:
        if any(piece in program.rows for operands, result in operation.loops for piece in (*operands, result)):
            operation.flop *= share
