"""Checks the dtypes of the matmuls in a traced step.

With parameters in bfloat16, a matmul may still run in float32: because the model requests it, or because an operation
with a float32 array (position angles, a mask) promoted both operands. The check reads the jaxpr and names the lines.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from jaxpar.errors import refuse, suggest
from jaxpar.hlo.flop import matmul_flop, traced_matmuls
from jaxpar.hlo.source_frames import equation_frame, is_update_equation
from jaxpar.hlo.text import SourceFrame
from jaxpar.models.settings.computing import Precision

if TYPE_CHECKING:  # a plain step loads no pipeline
    from jaxpar.pipeline.tables.schedule import Schedule

NOT_BF16 = "matmuls that are not bf16, with their share of FLOP: "
_TOLERATED = 0.05  # share of matmul FLOP that may stay in float32 without `allow`: a router, a small head
_NAMED = 8  # lines that a message lists, at most


@dataclass(frozen=True, slots=True)
class HighPrecisionLine:
    """A source line whose matmuls do not have two bfloat16 operands.

    Attributes:
      function: The function of the line, such as `Router.__call__`.
      line: File and line, such as `moe.py:41`.
      operands: The operands of the largest matmul, such as `f32[8x32x64] * f32[64x128]`.
      share: Share of the FLOP of all matmuls.
      mixed: The part of `share` with one bfloat16 operand. After `demote_matmuls`, the only such matmuls of a forward
        pass are chosen by the author (a `precision` argument, a custom gradient, a `shard_map`); all others are
        gradients of bfloat16 matmuls with a float32 result, such as attention scores, which the author cannot control.
    """

    function: str
    line: str
    operands: str
    share: float
    mixed: float = 0.0

    def matches(self, pattern: str) -> bool:
        """Whether a glob pattern matches the function or the line."""
        return fnmatchcase(self.function, pattern) or fnmatchcase(self.line, pattern)

    def __str__(self) -> str:
        return f"{self.function} ({self.line}), {self.operands}, {self.share:.1%}"


@dataclass(frozen=True, slots=True)
class Matmuls:
    """The matmuls and convolutions of a traced step.

    Attributes:
      total: Number of matmuls; a matmul in a loop counts once.
      low: Number of matmuls with two operands of at most 16 bits.
      share: Share of the FLOP in these matmuls.
      high_precision: The source lines of the other matmuls, largest first.
      eight: Number of matmuls among `low` with an 8-bit operand, such as Flax's fp8 matmuls.
    """

    total: int
    low: int
    share: float
    high_precision: tuple[HighPrecisionLine, ...] = field(default=())
    eight: int = 0

    def __str__(self) -> str:
        """Summarizes the bf16 matmuls; `notes` lists the others."""
        dtypes = "bf16 or float8" if self.eight else "bf16"
        return f"{self.low} of {self.total} matrix products are {dtypes} ({self.share:.1%} of their multiplications)"

    @property
    def notes(self) -> tuple[str, ...]:
        """A line of text that lists the matmuls that are not bf16, if any."""
        return (f"{NOT_BF16}{format_lines(self.high_precision)}",) if self.high_precision else ()


def format_lines(lines: tuple[HighPrecisionLine, ...]) -> str:
    """Joins source lines for a message."""
    more = f"; and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    return "; ".join(map(str, lines[:_NAMED])) + more


def count_matmuls(jaxpr: Jaxpr, schedule: "Schedule | None" = None) -> Matmuls:
    """Counts the matmuls of a traced step, except in optimizer and exchange, which compute in float32.

    Args:
      jaxpr: The jaxpr of `jax.jit(...).trace(...)`.
      schedule: The schedule of a pipeline.
    """
    total = low = eight = 0
    flop, flop_low = 0.0, 0.0
    high_matmuls: dict[tuple[str, str], list[tuple[float, str, bool]]] = defaultdict(list)
    for equation, work in traced_matmuls(jaxpr, schedule, skip=is_update_equation):
        left, right = (var.aval for var in equation.invars[:2])
        work = matmul_flop(equation) if work is None else work  # a data-dependent trip count counts as one
        total, flop = total + 1, flop + work
        if _is_low(left.dtype) and _is_low(right.dtype):
            low, flop_low = low + 1, flop_low + work
            eight += jnp.bfloat16 not in (left.dtype, right.dtype)
        else:
            mixed = jnp.bfloat16 in (left.dtype, right.dtype)
            high_matmuls[_place(equation)].append((work, f"{_format_aval(left)} * {_format_aval(right)}", mixed))
    lines = [
        HighPrecisionLine(
            *place,
            operands=max(entries)[1],
            share=math.fsum(work for work, _, _ in entries) / flop if flop else 0.0,
            mixed=math.fsum(work for work, _, mixed in entries if mixed) / flop if flop else 0.0,
        )
        for place, entries in high_matmuls.items()
    ]
    lines.sort(key=lambda line: -line.share)
    return Matmuls(total, low, flop_low / flop if flop else 1.0, tuple(lines), eight)


def _is_low(dtype: Any) -> bool:
    return dtype == jnp.bfloat16 or (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1)


def check_bf16(matmuls: Matmuls, precision: Precision) -> None:
    """Refuses a bf16 step that runs too many matmuls in float32 without permission.

    Raises:
      JaxparError: If more than 5 % of the FLOP have no bfloat16 operand and are not allowed, or a pattern of `allow`
        matches nothing.
    """
    for pattern in precision.allow:
        if not any(line.matches(pattern) for line in matmuls.high_precision):
            raise refuse(
                f"allow={pattern!r}, and {format_lines(matmuls.high_precision) or 'all matmuls are bf16'}",
                rule="a pattern of `allow` matches a matmul that stays in float32, by its function or its line",
                fix=suggest(pattern, [name for line in matmuls.high_precision for name in (line.function, line.line)])
                if matmuls.high_precision
                else "leave it out",
            )
    refused = tuple(
        line
        for line in matmuls.high_precision
        if line.share > line.mixed and not any(map(line.matches, precision.allow))
    )
    if sum(line.share - line.mixed for line in refused) > _TOLERATED:
        raise refuse(
            f"precision bf16, but {matmuls}; not: {format_lines(refused)}",
            rule="with bf16 at most 5 % of the multiplications have two float32 operands that nobody allowed",
            fix=f'.astype(x.dtype) where float32 comes in, or {{compute = "bf16", allow = ["{refused[0].function}"]}}',
        )


def _place(equation: JaxprEqn) -> tuple[str, str]:
    frame = equation_frame(equation) or SourceFrame("", 0, "")
    return frame.function.rpartition("<locals>.")[2], f"{Path(frame.file).name}:{frame.line}"


def _format_aval(aval: Any) -> str:
    dtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(aval.dtype.name, aval.dtype.name)
    return f"{dtype}[{'x'.join(map(str, aval.shape))}]"
