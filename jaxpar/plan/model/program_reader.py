"""Reads the program of a traced function from its jaxprs at two numbers of rows.

    jaxpr of 2 rows ─┐
                     ├─► ops in program order: calls inlined, views resolved, dead and repeated ops left out
    jaxpr of 4 rows ─┘   each dim is linear in the rows, so that an array [rows, rows] has a square

Views (reshapes, transposes of matrices) are the array that they show. A scan is one op with a program of its own.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core import Literal as Constant

from jaxpar.errors import refuse
from jaxpar.plan.model.program import DEGREE, Kind, Polynomial, SizedProgram, TracedMatmul, TracedOp

# pairs of batch sizes for tracing: of a size that equals that of another dim JAX may make other ops, and models may
# choose the number of their chunks by it, so that pairs are tried until both sizes have the same ops
ROWS = ((14, 22), (16, 32), (2, 4), (6, 12))
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
PATTERN_OPS = frozenset(
    ("iota", "concatenate", "pad", "dynamic_update_slice")
)  # of constants make arrays of several values


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
        if kind == "elementwise" and name not in PATTERN_OPS and self.uniform.issuperset(inputs):
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
