"""Counts the FLOP of a program: of the hardware in the compiled one, and of matmuls and convolutions in a jaxpr.

A multiplication and an addition of a matrix product or a convolution count as two FLOP, elementwise operations as none.
Instructions of the compiled program count with the trip count of each loop.

Before compilation and sharding, `forward_flop` excludes recomputation, as in MFU (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B), and `traced_matmuls` has all matmuls of a step: with the user's rematerialization, and
the idle ticks of a pipeline.
"""

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import Jaxpr

from jaxpar.errors import refuse
from jaxpar.hlo.source_frames import is_recomputed
from jaxpar.hlo.text import Module, Op, instruction
from jaxpar.hlo.trip_counts import branch_runs, walk
from jaxpar.sharding.names import CHOICE

if TYPE_CHECKING:
    from jaxpar.pipeline.tables.schedule import Schedule

_GEMM = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")


@dataclass(frozen=True, slots=True)
class Flop:
    """FLOP of one device in one step of the compiled program.

    Attributes:
      forward: FLOP of the forward pass, and of operations outside of both passes.
      backward: FLOP of the backward pass, without recomputation.
      recomputed: FLOP of recomputation, in the backward pass or by XLA.
      by_dtype: Dtype of the operands to FLOP.
      unknown: Whether a loop has an unknown trip count, and its FLOP count once.
      squeezed: The part of `recomputed` that XLA chose to recompute, to save memory.
    """

    forward: int
    backward: int
    recomputed: int
    by_dtype: dict[str, int]
    unknown: bool
    squeezed: int = 0

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.forward + self.backward + self.recomputed


def hardware_flop(module: Module, schedule: "Schedule | None" = None) -> Flop:
    """Returns the FLOP of the compiled program in one step, on each device."""
    sums = {"forward": 0, "backward": 0, "recomputed": 0, "squeezed": 0}
    per_dtype: dict[str, int] = {}
    has_unknown = False
    for visit in walk(module, schedule):
        flop = op_flop(module, visit.computation, visit.op)
        if not flop:
            continue
        has_unknown |= visit.times is None
        flop *= 1 if visit.times is None else visit.times
        label = visit.op.label
        is_recomputation = visit.squeezed or is_recomputed(label)
        sums["recomputed" if is_recomputation else "backward" if "transpose(" in label else "forward"] += flop
        sums["squeezed"] += visit.squeezed * flop
        dtype = operand_dtype(module, visit.computation, visit.op)
        per_dtype[dtype] = per_dtype.get(dtype, 0) + flop
    return Flop(**sums, by_dtype=per_dtype, unknown=has_unknown)


def operand_dtype(module: Module, computation: str, op: Op) -> str:
    """Returns the dtype of an instruction's first operand."""
    return module.ops_by_name[computation][op.operands[0]].arrays[0].dtype


def op_flop(module: Module, computation: str, op: Op) -> int:
    """Returns the FLOP of one run of an instruction, which are 0 unless it is a matmul or a convolution.

    Raises:
      JaxparError: If its dims do not match those of its operands.
    """
    try:
        return _op_flop(module, computation, op)
    except (IndexError, KeyError, ValueError, ZeroDivisionError) as error:
        raise refuse(
            f"{op.name} = {op.opcode}({', '.join(op.operands)}){op.attributes[:80]}",
            rule="a dot contracts dims that its operands have",
            fix="the text as XLA printed it, whole",
        ) from error


def _op_flop(module: Module, computation: str, op: Op) -> int:
    ops = module.ops_by_name[computation]
    if op.opcode == "dot":
        lhs = ops[op.operands[0]].arrays[0].dims
        contracted = (op.attribute("lhs_contracting_dims") or "").split(",")
        return 2 * op.arrays[0].size * math.prod(lhs[int(dim)] for dim in contracted if dim)
    if op.opcode == "convolution" or (op.opcode == "custom-call" and "__cudnn$conv" in op.attributes):
        return _convolution(op, ops)
    if op.opcode == "custom-call" and any(f'custom_call_target="{name}"' in op.attributes for name in _GEMM):
        numbers = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', op.attributes)
        lhs = ops[op.operands[0]].arrays[0].dims
        dims = [int(dim) for dim in json.loads(numbers[1])] if numbers else []
        return 2 * op.arrays[0].size * math.prod(lhs[dim] for dim in dims)
    return 0


def _convolution(op: Op, here: dict[str, Op]) -> int:
    """Returns 2 x outputs x kernel entries per output; for a gradient, the FLOP of the forward convolution."""
    labels = op.attribute("dim_labels")
    if not labels:
        return 0
    outputs, kernel = op.arrays[0], here[op.operands[1]].arrays[0]
    if "__cudnn$convBackwardFilter" in op.attributes:  # cuDNN's gradients keep the labels of the forward pass
        outputs, kernel = kernel, outputs
    elif "__cudnn$convBackwardInput" in op.attributes:
        outputs = here[op.operands[0]].arrays[0]
    spread = re.search(r"lhs_dilate=([\dx]+)", op.attribute("window") or "")  # skips zeros between inputs
    zeros = math.prod(int(step) for step in spread[1].split("x")) if spread else 1
    features = kernel.dims[re.split("_|->", labels)[1].index("o")]
    return 2 * outputs.size * kernel.size // features // zeros


# Parses only the lines of a compiled program that lead to its matmuls: a few of thousands, in a fraction of the time.
#
#     ENTRY ── while ── body ── fusion ── dot, and the instructions that have its operands' shapes
#
# The resulting module lacks all else: use it for FLOP only.

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$", re.MULTILINE)
_MATMUL = re.compile(r" (?:dot|convolution)\(|\"__cublas\$|\"__cudnn\$conv")
_CALL = re.compile(
    r" (?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)| branch_computations=\{([^}]*)\}"
)


def parse_matmuls(text: str) -> Module:
    """Parses only matmuls, convolutions, their operands and their callers from a text; see `text.parse`.

    Args:
      text: Text that XLA has just printed; it is not checked for damage.
    """
    heads = list(_HEAD.finditer(text))
    starts, names = [head.start() for head in heads], [head[2] for head in heads]
    selected: dict[str, dict[int, Op]] = {name: {} for name in names}

    def keep(position: int) -> Op:
        """Parses the instruction on the line of a position, and adds it to the module."""
        begin, end = text.rfind("\n", 0, position) + 1, text.find("\n", position)
        by_start = selected[names[bisect_right(starts, position) - 1]]
        return by_start.get(begin) or by_start.setdefault(begin, instruction(text[begin:end].strip(), 0))

    callers: dict[str, list[int]] = {}
    for call in _CALL.finditer(text):
        for name in (call[1] or call[2]).split(","):
            callers.setdefault(name.strip().lstrip("%"), []).append(call.start())
    for matmul in _MATMUL.finditer(text):
        begin = starts[bisect_right(starts, matmul.start()) - 1]
        for name in keep(matmul.start()).operands:
            position = text.find(f"%{name} = ", begin)
            keep(position if position >= 0 else text.index(f" {name} = ", begin) + 1)
    todo = [name for name, ops in selected.items() if ops]
    while todo:
        for position in callers.pop(todo.pop(), ()):
            keep(position)
            todo.append(names[bisect_right(starts, position) - 1])
    return Module(
        name="",
        partitions=1,
        entry=next(head[2] for head in heads if head[1]),
        computations={name: [ops[position] for position in sorted(ops)] for name, ops in selected.items()},
        scheduled=False,
        frames={},
    )


def forward_flop(function: Callable, *args: Any) -> int:
    """Counts the FLOP of one evaluation, of matmuls and convolutions only.

    Args:
      function: A function, which is traced but not run.
      *args: Arrays or `jax.ShapeDtypeStruct`s.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def traced_matmuls(
    jaxpr: Jaxpr,
    schedule: "Schedule | None" = None,
    times: float | None = 1,
    *,
    skip: Callable[[Any], bool] = lambda equation: False,
) -> Iterator[tuple[Any, Any]]:
    """Yields (equation, FLOP) of each matmul and convolution that a traced step runs, over all devices.

    FLOP are None inside a loop whose trip count depends on the data. All branches of a conditional count, as in
    `hardware_flop`.

    Args:
      jaxpr: The jaxpr of `jax.jit(...).trace(...)`.
      schedule: The table that it runs, if it has a pipeline.
      times: Number of runs of the jaxpr.
      skip: Returns whether to omit an equation and its inner jaxprs.
    """
    for equation in jaxpr.eqns:
        if skip(equation):
            continue
        if flop := matmul_flop(equation):
            yield equation, None if times is None else times * flop
            continue
        name, params = equation.primitive.name, equation.params
        inner_times = times
        if name == "while":
            inner_times = None
        elif times is not None and name == "scan":
            inner_times = times * params["length"]
        elif times is not None and name == "shard_map":  # its body is one device's along the manual axes
            inner_times = times * math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
        elif times is not None and schedule and str(equation.source_info.name_stack).endswith(CHOICE):
            # the loops around it count ticks, but a stage takes each branch once for every microbatch and chunk
            branches = params.get("branches", ())
            for index, branch in enumerate(branches):
                runs = times * branch_runs(schedule, len(branches), index) / schedule.ticks
                yield from traced_matmuls(branch.jaxpr, schedule, runs, skip=skip)
            continue
        for value in params.values():
            for inner in _jaxprs(value):
                yield from traced_matmuls(inner, schedule, inner_times, skip=skip)


def matmul_flop(equation: Any) -> int:
    """Returns the FLOP of one matmul or convolution; 0 for any other equation.

    Of a ragged matmul they are those of each entry with the matrix of its own group; see `ragged_groups`.
    """
    name = equation.primitive.name
    if name == "dot_general":
        (contract, _), _ = equation.params["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(lhs[dim] for dim in contract)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        feature_dim = equation.params["dimension_numbers"].rhs_spec[0]
        zeros = math.prod(equation.params["lhs_dilation"])  # zeros between the inputs are not multiplied
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[feature_dim] // zeros
    if name == "ragged_dot_general":
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (_, contract), (_, batch) = numbers.dot_dimension_numbers
        lhs, rhs = (operand.aval.shape for operand in equation.invars[:2])
        shared = {*contract, *batch, *numbers.rhs_group_dimensions}
        return 2 * math.prod(lhs) * math.prod(size for dim, size in enumerate(rhs) if dim not in shared)
    return 0


def ragged_groups(equation: Any) -> int:
    """Returns the number of groups of a ragged matmul, such as the number of experts; 1 for any other equation.

    XLA multiplies each entry by the matrices of all groups, on CPUs and GPUs (jax 0.12.0).
    """
    return equation.invars[2].aval.shape[-1] if equation.primitive.name == "ragged_dot_general" else 1


def equation_flop(equation: Any) -> int:
    """Returns the FLOP of an equation with its inner jaxprs; of a conditional, those of its largest branch."""
    name = equation.primitive.name
    times = equation.params.get("length", 1) if name == "scan" else 1
    inner = [_count(sub) for value in equation.params.values() for sub in _jaxprs(value)]
    return matmul_flop(equation) + (max(inner, default=0) if name == "cond" else times * sum(inner))


def _count(jaxpr: Jaxpr) -> int:
    return sum(map(equation_flop, jaxpr.eqns))


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    """Yields the jaxprs in a parameter of an equation: a jaxpr, or those of a sequence."""
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _jaxprs(item)
