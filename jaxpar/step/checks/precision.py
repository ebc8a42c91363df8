"""Checks the dtype that matmuls are asked to run in, read off the step as it was traced.

Casting parameters to bfloat16 can leave matmuls in float32: where a model says so, and where both of its operands came
to be float32 on the way (by angles of positions, or a mask). So the program is asked, and says which lines they are.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxpar.errors import nearest, refuse
from jaxpar.hlo.attribution import equation_frame, is_of_update
from jaxpar.hlo.text import Frame
from jaxpar.hlo.traced_flop import matmul_flop, traced_matmuls
from jaxpar.models.settings.computing import Precision
from jaxpar.pipeline.tables.schedule import Schedule

NOT_BF16 = "matmuls that are not bf16, with their share of FLOP: "
_TOLERATED = 0.05  # share of matmul FLOP that may stay in float32 unnamed: a router, a small head
_NAMED = 8  # lines that a message lists, at most


@dataclass(frozen=True, slots=True)
class Kept:
    """A line of a model whose matmuls do not have two bfloat16 operands.

    Attributes:
      function: Where it stands, such as `Router.__call__`.
      line: `moe.py:41`.
      operands: Of the largest of them, as `f32[8x32x64] * f32[64x128]`.
      share: Of the FLOP of all matmuls.
      mixed: The part of it with one bfloat16 operand. `in_bfloat16` has left none in a forward pass but those that
        their author chose (a `precision` of its own, a custom gradient, a `shard_map`); the others are gradients of
        matmuls in bfloat16 whose result was float32, as scores of attention are, where an author has no word.
    """

    function: str
    line: str
    operands: str
    share: float
    mixed: float = 0.0

    def matches(self, pattern: str) -> bool:
        """Returns whether a pattern names it, by its function or its line."""
        return fnmatchcase(self.function, pattern) or fnmatchcase(self.line, pattern)

    def __str__(self) -> str:
        return f"{self.function} ({self.line}), {self.operands}, {self.share:.1%}"


@dataclass(frozen=True, slots=True)
class Matmuls:
    """The matmuls and convolutions of a traced step.

    Attributes:
      total: How many there are; those in a loop count once.
      low: How many have two bfloat16 operands, or narrower ones.
      share: Share of their FLOP that is bfloat16 or narrower.
      kept: The lines of the others, largest first.
      eight: How many of `low` have an operand of 8 bits, as Flax's fp8 matmuls have.
    """

    total: int
    low: int
    share: float
    kept: tuple[Kept, ...] = field(default=())
    eight: int = 0

    def __str__(self) -> str:
        """Returns how many are bf16; `notes` has the others."""
        what = "bf16 or float8" if self.eight else "bf16"
        return f"{self.low} of {self.total} matrix products are {what} ({self.share:.1%} of their multiplications)"

    @property
    def notes(self) -> tuple[str, ...]:
        """A line of text on those that are not bf16, where there are some."""
        return (f"{NOT_BF16}{listed(self.kept)}",) if self.kept else ()


def listed(kept: tuple[Kept, ...]) -> str:
    """Returns the lines in a row."""
    more = f"; and {len(kept) - _NAMED} more" if len(kept) > _NAMED else ""
    return "; ".join(map(str, kept[:_NAMED])) + more


def products(jaxpr: Any, schedule: Schedule | None = None) -> Matmuls:
    """Returns the matmuls of a traced step, but for those of its optimizer and exchange, which compute in float32.

    Args:
      jaxpr: As `jax.jit(...).trace(...)` has it.
      schedule: The table that it runs, where it is a pipeline's.
    """
    total = low = eight = 0
    flop, flop_low = 0.0, 0.0
    others: dict[tuple[str, str], list[tuple[float, str, bool]]] = defaultdict(list)
    for equation, work in traced_matmuls(jaxpr, schedule, skip=is_of_update):
        left, right = (var.aval for var in equation.invars)
        work = matmul_flop(equation) if work is None else work  # a loop that turns as often as the data says: once
        total, flop = total + 1, flop + work
        if _is_low(left.dtype) and _is_low(right.dtype):
            low, flop_low = low + 1, flop_low + work
            eight += jnp.bfloat16 not in (left.dtype, right.dtype)
        else:
            mixed = jnp.bfloat16 in (left.dtype, right.dtype)
            others[_place(equation)].append((work, f"{_shown(left)} * {_shown(right)}", mixed))
    kept = [
        Kept(
            *place,
            operands=max(found)[1],
            share=math.fsum(work for work, _, _ in found) / flop if flop else 0.0,
            mixed=math.fsum(work for work, _, mixed in found if mixed) / flop if flop else 0.0,
        )
        for place, found in others.items()
    ]
    kept.sort(key=lambda each: -each.share)
    return Matmuls(total, low, flop_low / flop if flop else 1.0, tuple(kept), eight)


def _is_low(dtype: Any) -> bool:
    return dtype == jnp.bfloat16 or (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1)


def check_bf16(found: Matmuls, asked: Precision) -> None:
    """Refuses a step that was asked for bfloat16 and computes in float32 what nobody allowed.

    Raises:
      JaxparError: If more than 5 % of the FLOP have no bfloat16 operand and are not allowed, or a pattern allows
        nothing.
    """
    for pattern in asked.allow:
        if not any(each.matches(pattern) for each in found.kept):
            raise refuse(
                f"allow={pattern!r}, and {listed(found.kept) or 'all matmuls are bf16'}",
                rule="a pattern of `allow` matches a matmul that stays in float32, by its function or its line",
                fix=nearest(pattern, [name for each in found.kept for name in (each.function, each.line)])
                if found.kept
                else "leave it out",
            )
    refused = tuple(each for each in found.kept if each.share > each.mixed and not any(map(each.matches, asked.allow)))
    if sum(each.share - each.mixed for each in refused) > _TOLERATED:
        raise refuse(
            f"precision bf16, but {found}; not: {listed(refused)}",
            rule="with bf16 at most 5 % of the multiplications have two float32 operands that nobody allowed",
            fix=f'.astype(x.dtype) where float32 comes in, or {{compute = "bf16", allow = ["{refused[0].function}"]}}',
        )


def _place(equation: Any) -> tuple[str, str]:
    frame = equation_frame(equation) or Frame("", 0, "")
    return frame.function.rpartition("<locals>.")[2], f"{Path(frame.file).name}:{frame.line}"


def _shown(aval: Any) -> str:
    dtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(aval.dtype.name, aval.dtype.name)
    return f"{dtype}[{'x'.join(map(str, aval.shape))}]"
