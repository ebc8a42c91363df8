"""A traced function as a flat list of ops on arrays, whose sizes are polynomials in the number of rows.

    jaxpr of 2 rows ─┐
                     ├─► ops in program order: calls inlined, views resolved, dead and repeated ops left out
    jaxpr of 4 rows ─┘   each dim is linear in the rows, so that an array [rows, rows] has a square

Views (reshapes, transposes of matrices) are the array that they show. A scan is one op with a program of its own.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core import Literal as Constant

from jaxpar.errors import refuse

# pairs of batch sizes for tracing: of a size that equals that of another dim JAX may make other ops, and models may
# choose the number of their chunks by it, so that pairs are tried until both sizes have the same ops
ROWS = ((14, 22), (16, 32), (2, 4), (6, 12))
DEGREE = 3  # of the polynomials
Kind = Literal["heavy", "reduce", "elementwise", "stack", "loop"]
MatmulKind = Literal["weights", "batched", "convolution"]

CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
CALLS += ("custom_vjp_call_jaxpr", "custom_lin", "shard_map")
VIEWS = ("reshape", "squeeze", "expand_dims", "sharding_constraint", "copy", "copy_p", "name", "pvary", "reshard")
VIEWS += ("mesh_cast", "stop_gradient", "optimization_barrier")
# only listed ops count as elementwise: `fft` has the shape of its operand, too
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim cbrt ceil clamp "
    "concatenate convert_element_type cos cosh digamma div dynamic_slice dynamic_update_slice eq erf erf_inv erfc exp "
    "exp2 expm1 floor gather ge gt integer_pow iota is_finite le lgamma log log1p logistic lt max min mul ne neg "
    "nextafter not one_minus_square or pad pow random_bits random_fold_in random_seed random_split random_unwrap "
    "random_wrap reduce_precision rem rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical "
    "sign sin sinh slice split sqrt square sub tan tanh threefry2x32 transpose xor".split()
)
REDUCES = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split()
)
PARTS = frozenset(("slice", "split", "dynamic_slice", "gather"))  # read a part of their first operand
VARIED = frozenset(("iota", "concatenate", "pad", "dynamic_update_slice"))  # of constants make arrays of several values
Polynomial = np.ndarray


@dataclass(frozen=True, slots=True)
class TracedMatmul:
    """Size and kind of a matmul or a convolution.

    Attributes:
      flop: FLOP of one. A polynomial in the rows, from the constant on.
      kind: "weights", "batched" (has a batch dim) or "convolution".
      copied: Positions of the operands whose batch dims do not lead: a library needs a copy.
      bits: Bits of the operands' dtype.
    """

    flop: Any
    kind: MatmulKind
    copied: tuple[int, ...]
    bits: int


@dataclass(frozen=True, slots=True)
class TracedOp:
    """An op of a program.

    Attributes:
      name: Name of its primitive.
      kind: "elementwise" ops are fused; "reduce" ends a fusion; "heavy" ops read and write arrays; "stack" writes a
        slice of a scan's stacked result; "loop" is a scan.
      inputs: Numbers of the arrays that it reads.
      outputs: Numbers of its results.
      backward: Whether it is part of the backward pass.
      matmul: The matmul that it is, or None.
      body: SizedProgram of one iteration of a loop, or None.
      length: Iterations of a loop.
      carried: Number of a loop's results that are its final carry; the others are stacked over iterations.
      row: Elements that a reduction over the last dim reads for each result; 0 for other ops.
      scanned: Number of a loop's inputs that are stacks, of which an iteration reads a slice; the last ones.
      is_slice: Whether it is that slice.
      collective: What devices that split arrays do after it: "sum" their results of a matmul or a reduction, also if
        only the result of whole rows is gathered; "gather" the result of an elementwise op of one array; "" for
        neither.
    """

    name: str
    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    backward: bool = False
    matmul: TracedMatmul | None = None
    body: "SizedProgram | None" = None
    length: int = 1
    carried: int = 0
    row: int = 0
    scanned: int = 0
    is_slice: bool = False
    collective: Literal["", "sum", "gather"] = ""

    @property
    def waits(self) -> bool:
        """Whether devices that split arrays wait for a collective after it, or in an iteration of it."""
        return bool(self.collective) or (self.body is not None and any(op.waits for op in self.body.ops))


@dataclass(slots=True)
class SizedProgram:
    """Ops in program order, and the arrays that they read and write.

    Attributes:
      sizes: Bytes of each array. A polynomial in the rows, from the constant on.
      widths: Bytes of an element of each array.
      ops: The ops.
      inputs: Numbers of the arguments' arrays.
      outputs: Numbers of the results, None for a constant.
      variables: The variable of each array in `jaxpr`, or in one inside of it.
      views: Maps arrays to the variables of their views.
      jaxpr: The jaxpr of the smaller number of rows.
    """

    sizes: list[Any] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    ops: list[TracedOp] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    variables: list[Any] = field(default_factory=list)
    views: dict[int, list[Any]] = field(default_factory=dict)
    jaxpr: Jaxpr | None = None

    def split(self, share: Callable[[Any], float]) -> "SizedProgram":
        """Returns the program of one device of several that split arrays.

        Args:
          share: Maps a variable to the share of its array that the device has. An array that is gathered for one of its
            views stays gathered. A matmul is split as the most split of its arrays.
        """
        return self._split(share, ())[0]

    def _split(self, share: Callable[[Any], float], least: Sequence[float]) -> tuple["SizedProgram", list[float]]:
        """Returns the program of one device, and the shares of its arrays; `least` has lower bounds for its inputs."""
        shares = [
            max(map(share, (variable, *self.views.get(entry, ())))) for entry, variable in enumerate(self.variables)
        ]
        for entry, bound in zip(self.inputs, least, strict=bool(least)):
            shares[entry] = max(shares[entry], bound)
        ops = []
        for op in self.ops:
            if op.body is not None:
                op, results = op.body._split_loop(op, share, shares)
                for entry, bound in results.items():
                    shares[entry] = max(shares[entry], bound)
            elif op.is_slice:
                shares[op.outputs[0]] = max(shares[op.outputs[0]], shares[op.inputs[0]])
            else:
                op = _split_op(op, shares)
            ops.append(op)
        sizes = [part * size for part, size in zip(shares, self.sizes, strict=True)]
        return replace(self, sizes=sizes, ops=ops), shares

    def _split_loop(
        self, op: TracedOp, share: Callable[[Any], float], shares: Sequence[float]
    ) -> tuple[TracedOp, dict[int, float]]:
        """Returns the loop of this body on one device, and the shares of its stacked results.

        What is gathered outside is whole inside, and the other way round; but what iterations hand on is split again.
        """
        first = len(op.inputs) - op.scanned - op.carried
        least = [
            0.0 if first <= number < first + op.carried else shares[entry] for number, entry in enumerate(op.inputs)
        ]
        body, of_body = self._split(share, least)
        pairs = [*zip(op.outputs, body.outputs, strict=True)][op.carried :]
        return replace(op, body=body), {entry: of_body[inner] for entry, inner in pairs if inner is not None}

    def matmuls(self, times: int = 1, backward: bool = False) -> Iterator[tuple[TracedMatmul, int, bool]]:
        """Yields each matmul with its number of runs, and whether it is part of the backward pass."""
        for op in self.ops:
            if op.matmul is not None:
                yield op.matmul, times, backward or op.backward
            elif op.body is not None:
                yield from op.body.matmuls(times * op.length, backward or op.backward)


def _split_op(op: TracedOp, shares: Sequence[float]) -> TracedOp:
    if not op.inputs or not op.outputs:
        return op
    result = shares[op.outputs[0]]
    least = min(shares[entry] for entry in op.inputs)
    if op.matmul is not None:
        op = replace(op, matmul=replace(op.matmul, flop=min(least, result) * op.matmul.flop))
    if least >= result:
        return op
    if op.kind == "reduce":  # of parts of rows: no kernel has all of a row
        return replace(op, collective="sum", row=0)
    if op.matmul is not None:
        return replace(op, collective="sum")
    return replace(op, collective="gather") if op.kind == "elementwise" and len(op.inputs) == 1 else op


def read_program(trace: Callable[[int], Jaxpr], *, name: str) -> SizedProgram:
    """Reads a function from its jaxprs at two numbers of rows.

    Args:
      trace: Maps a number of examples to the jaxpr.
      name: Name of the model, for messages.

    Raises:
      JaxparError: If the ops of the jaxpr depend on the number of examples, for all pairs of numbers that are tried.
    """
    differing = ""
    for rows in ROWS:
        jaxprs = [trace(count) for count in rows]
        small, large = (_Reader().read(jaxpr) for jaxpr in jaxprs)
        outlines = _outline(small), _outline(large)
        if outlines[0] == outlines[1]:
            return replace(_merge(small, large, rows), jaxpr=jaxprs[0])
        place = next((i for i, pair in enumerate(zip(*outlines, strict=False)) if len({*pair}) > 1), -1)
        first, second = (outline[place][0] for outline in outlines)
        differing = differing or f"op {place} is {first} for {rows[0]} rows and {second} for {rows[1]}"
    raise refuse(
        f"{name}: {differing}",
        rule="a plan needs a model and a loss whose ops are the same for any number of rows",
        fix="a model without Python branches on the size of its batch",
    )


def _outline(program: SizedProgram) -> list[tuple]:
    outline: list[tuple] = []
    for op in program.ops:
        outline.append((op.name, op.inputs, op.outputs, op.length))
        if op.body is not None:
            outline += _outline(op.body)
    return outline


class _Reader:
    """Reads a jaxpr. `sizes` holds shapes, and FLOP are tuples of dims, until two programs are merged."""

    def __init__(self):
        self.program, self.known, self.barriers = SizedProgram(), {}, 0
        self.uniform: set[int] = set()  # arrays whose entries are all the same constant

    def read(
        self,
        jaxpr: Jaxpr,
        *,
        scanned: Iterable[int] = (),
        stacked: Iterable[int] = (),
        constants: Collection[int] = (),
    ) -> SizedProgram:
        """Reads a jaxpr. `scanned` inputs are slices of scanned arrays; `stacked` outputs become slices of stacks."""
        program, scanned, stacked = self.program, {*scanned}, {*stacked}
        env: dict[Any, int | None] = {var: self._array(var) for var in jaxpr.constvars}
        env |= {var: None if place in constants else self._array(var) for place, var in enumerate(jaxpr.invars)}
        program.inputs = [entry for var in jaxpr.invars if (entry := env[var]) is not None]
        for place in scanned:
            var = jaxpr.invars[place]
            if (entry := env[var]) is not None:
                env[var] = self._add("dynamic_slice", "elementwise", (entry,), (var,), is_slice=True)[0]
        outputs = self._inline(jaxpr, env, backward=False, salt=0)
        for place in stacked:
            if (entry := outputs[place]) is not None:
                variables = (jaxpr.outvars[place],)
                outputs[place] = self._add("dynamic_update_slice", "stack", (entry,), variables)[0]
        program.outputs = outputs
        _remove_dead(program)
        return program

    def _array(self, variable: Any) -> int:
        self.program.sizes.append(tuple(variable.aval.shape))
        self.program.widths.append(getattr(variable.aval.dtype, "itemsize", 4))
        self.program.variables.append(variable)
        return len(self.program.sizes) - 1

    def _add(self, name: str, kind: Kind, inputs: Sequence[int], results: Sequence[Any], **details: Any) -> list[int]:
        outputs = [self._array(variable) for variable in results]
        self.program.ops.append(TracedOp(name, kind, tuple(inputs), tuple(outputs), **details))
        if kind == "elementwise" and name not in VARIED and self.uniform.issuperset(inputs):
            self.uniform.update(outputs)
        return outputs

    def _inline(self, jaxpr: Jaxpr, env: dict, *, backward: bool, salt: int) -> list[int | None]:
        read = lambda var: None if isinstance(var, Constant) else env[var]  # noqa: E731
        for eqn in jaxpr.eqns:
            inputs = [read(var) for var in eqn.invars]
            is_backward = backward or "transpose(" in str(eqn.source_info.name_stack)
            outputs = self._equation(eqn, inputs, is_backward, salt)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, inputs: list[int | None], backward: bool, salt: int) -> list[int | None]:
        name, call = eqn.primitive.name, _call(eqn)
        if name == "cond":
            call, inputs = eqn.params["branches"][0].jaxpr, inputs[1:]
        if call is not None:
            if eqn.params.get("prevent_cse"):  # what remat computes again is not what the forward pass computed
                self.barriers += 1
                salt = self.barriers
            env = dict(zip(call.invars, inputs, strict=True))
            env.update({var: self._array(var) for var in call.constvars})
            return self._inline(call, env, backward=backward, salt=salt)
        if _is_view(eqn) and inputs[0] is not None:
            for entry, result in zip(inputs, eqn.outvars, strict=False):  # a barrier has as many results as operands
                if entry is not None:
                    self.program.views.setdefault(entry, []).append(result)
            return inputs[: len(eqn.outvars)]
        if _is_view(eqn):
            return self._simple(eqn, inputs, backward)
        if name in ("scan", "while"):
            return [*self._loop(eqn, inputs, backward)]
        key = name, salt, tuple(map(_identity, eqn.invars, inputs)), str(sorted(eqn.params.items(), key=str))
        if key not in self.known:
            self.known[key] = self._simple(eqn, inputs, backward)
        return self.known[key]

    def _simple(self, eqn: JaxprEqn, inputs: Sequence[int | None], backward: bool) -> list[int | None]:
        name = eqn.primitive.name
        fused = name in ELEMENTWISE or name in VIEWS or self._is_fused_window(eqn, inputs)
        kind = "elementwise" if fused else "reduce" if name in REDUCES else "heavy"
        arrays, results = [entry for entry in inputs if entry is not None], eqn.outvars
        matmul, shape = _matmul(eqn), _aval(eqn.invars[0]).shape if eqn.invars else ()
        row = shape[-1] if shape and eqn.params.get("axes") == (len(shape) - 1,) else 0
        if kind == "elementwise":  # each result of a split is an op of its own
            return [self._add(name, kind, arrays, [result], backward=backward)[0] for result in results]
        return [*self._add(name, kind, arrays, results, backward=backward, matmul=matmul, row=row)]

    def _is_fused_window(self, eqn: JaxprEqn, inputs: Sequence[int | None]) -> bool:
        """Whether windows do not overlap, as in an average of pixels, or spread pixels again, as in its gradient."""
        if not eqn.primitive.name.startswith("reduce_window"):
            return False
        spread = any(op.name == "pad" and op.outputs[0] == inputs[0] for op in self.program.ops[-4:])
        sizes, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
        return spread or all(size <= stride for size, stride in zip(sizes, strides, strict=True))

    def _loop(self, eqn: JaxprEqn, inputs: Sequence[int | None], backward: bool) -> list[int]:
        closed = eqn.params["jaxpr" if eqn.primitive.name == "scan" else "body_jaxpr"]
        body: Jaxpr = closed.jaxpr
        skipped = len(eqn.invars) - len(body.invars)  # constants of the condition of a `while`
        # releases name the counts of a scan differently: what is scanned or stacked has a dim more outside
        outside, inside = eqn.invars[skipped:], body.invars
        scanned = [i for i, (out, var) in enumerate(zip(outside, inside, strict=True)) if _rank(out) > _rank(var)]
        stacked = [
            i for i, (out, var) in enumerate(zip(eqn.outvars, body.outvars, strict=True)) if _rank(out) > _rank(var)
        ]
        arrays = [
            self._constant(var) if entry is None else entry for entry, var in zip(inputs, eqn.invars, strict=True)
        ]
        carried, given = len(eqn.outvars) - len(stacked), arrays[skipped:]
        # XLA makes arrays of one constant value inside of the loop, where they are fused
        unchanged = range(len(inside) - len(scanned) - carried)
        constants = {place for place in unchanged if given[place] in self.uniform}
        return self._add(
            eqn.primitive.name, "loop", [entry for place, entry in enumerate(given) if place not in constants],
            eqn.outvars, backward=backward, length=eqn.params.get("length", 1), carried=carried, scanned=len(scanned),
            body=_Reader().read(body, scanned=scanned, stacked=stacked, constants=constants),
        )  # fmt: skip

    def _constant(self, var: Any) -> int:
        return self._add("broadcast_in_dim", "elementwise", (), [var])[0]


def _rank(var: Any) -> int:
    return len(var.aval.shape)


def _aval(var: Any) -> Any:
    return var.aval


def _identity(var: Any, number: int | None) -> Any:
    return number if number is not None else ("constant", str(var))


def _call(eqn: JaxprEqn) -> Jaxpr | None:
    """Returns the jaxpr that an equation calls, or None."""
    if eqn.primitive.name in CALLS:
        for param in eqn.params.values():
            jaxpr = getattr(param, "jaxpr", param)
            if hasattr(jaxpr, "eqns") and len(jaxpr.invars) == len(eqn.invars):
                return jaxpr
    return None


def _is_view(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name in VIEWS:
        return True
    if not eqn.invars or isinstance(eqn.invars[0], Constant):
        return False
    before, after = _aval(eqn.invars[0]), _aval(eqn.outvars[0])
    if name == "transpose":
        moved = [dim for dim in eqn.params["permutation"] if before.shape[dim] != 1]
        return len(before.shape) <= 2 or moved == sorted(moved)
    if name == "broadcast_in_dim":
        return before.size == after.size
    return name == "convert_element_type" and before.dtype == after.dtype


def _matmul(eqn: JaxprEqn) -> TracedMatmul | None:
    """Describes a matmul; its FLOP are the dims that are multiplied."""
    if eqn.primitive.name not in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
        return None
    out, (lhs, rhs) = _aval(eqn.outvars[0]).shape, map(_aval, eqn.invars[:2])
    bits = 8 * lhs.dtype.itemsize
    if eqn.primitive.name == "ragged_dot_general":  # XLA multiplies each entry by the matrices of all groups
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batched) = numbers.dot_dimension_numbers
        shared = {*contracted, *batched, *numbers.rhs_group_dimensions}
        free = [size for dim, size in enumerate(rhs.shape) if dim not in shared]
        return TracedMatmul((*lhs.shape, *free, _aval(eqn.invars[2]).shape[-1]), "weights", (), bits)
    if eqn.primitive.name == "dot_general":
        (contracted, _), batched = eqn.params["dimension_numbers"]
        copied = tuple(i for i, dims in enumerate(batched) if tuple(dims) != tuple(range(len(dims))))
        dims = (*out, *(lhs.shape[dim] for dim in contracted))
        return TracedMatmul(dims, "batched" if batched[0] else "weights", copied, bits)
    numbers = eqn.params["dimension_numbers"]
    kernel = [size for dim, size in enumerate(rhs.shape) if dim != numbers.rhs_spec[0]]
    return TracedMatmul((*out, *kernel), "convolution", (), bits)


def _remove_dead(program: SizedProgram) -> None:
    live, ops = {entry for entry in program.outputs if entry is not None}, []
    for op in reversed(program.ops):
        if not live.isdisjoint(op.outputs):
            ops.append(op)
            live.update(op.inputs)
    program.ops = ops[::-1]


def _merge(small: SizedProgram, large: SizedProgram, rows: tuple[int, int]) -> SizedProgram:
    """Returns the program with polynomials in place of shapes."""
    merged = []
    for op, other in zip(small.ops, large.ops, strict=True):
        if op.matmul is not None and other.matmul is not None:
            flop = 2.0 * _polynomial(op.matmul.flop, other.matmul.flop, rows)
            merged.append(replace(op, matmul=replace(op.matmul, flop=flop)))
        elif op.body is not None and other.body is not None:
            merged.append(replace(op, body=_merge(op.body, other.body, rows)))
        else:
            merged.append(op)
    sizes = [
        width * _polynomial(*shapes, rows)
        for width, shapes in zip(small.widths, zip(small.sizes, large.sizes, strict=True), strict=True)
    ]
    return replace(small, sizes=sizes, ops=merged)


def _polynomial(small: tuple[int, ...], large: tuple[int, ...], rows: tuple[int, int]) -> Polynomial:
    """Returns the product of dims as a polynomial in the rows, each dim linear in them."""
    product = np.zeros(DEGREE + 1)
    product[0] = 1.0
    for few, many in zip(small, large, strict=True):
        slope = (many - few) / (rows[1] - rows[0])
        constant = few - slope * rows[0]
        shifted = np.concatenate([[0.0], product[:-1]])
        product = constant * product + slope * shifted if slope else few * product
    return product


def value(polynomials: Any, rows: float) -> Any:
    """Returns the values of polynomials [..., degree] at a number of rows."""
    return np.asarray(polynomials) @ np.power(float(rows), np.arange(DEGREE + 1))
