"""Checks the dtype that matmuls really run in, read off the lowered program.

Casting parameters to bfloat16 can leave every product in float32: one float32 operand (a table
that froze its dtype, an input nobody cast) promotes the rest. So the program is asked.
"""

import math
import re
from dataclasses import dataclass

from jaxpar.errors import refuse

_PRODUCT = re.compile(
    r"stablehlo\.(dot_general|convolution)[ (].*?:\s*\(tensor<([^>]*)>,\s*tensor<([^>]*)>\)\s*->\s*tensor<([^>]*)>"
)
_CONTRACTING = re.compile(r"contracting_dims = \[([\d, ]*)\]")
_TOLERATED = 0.05  # share of matrix FLOP that may stay in float32: a router, a final norm


@dataclass(frozen=True, slots=True)
class Matmuls:
    """The matrix products and convolutions of a lowered program.

    Attributes:
      total: How many there are.
      low: How many have two bfloat16 operands.
      share: Share of their multiplications that is bfloat16; loop bodies count once.
      others: The largest that are not, as `f32[8x32x64] * f32[64x128]`.
    """

    total: int
    low: int
    share: float
    others: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.low} of {self.total} matrix products are bf16 ({self.share:.1%} of their multiplications)"


def products(stablehlo: str) -> Matmuls:
    """Returns the matrix products of a StableHLO text."""
    rows = []
    for line in stablehlo.splitlines():
        if match := _PRODUCT.search(line):
            kind, left, right, out = match.groups()
            *dims, _ = out.split("x")
            work = math.prod(map(int, dims))
            if kind == "dot_general" and (contracting := _CONTRACTING.search(line)):
                left_dims = left.split("x")[:-1]
                work *= math.prod(int(left_dims[int(d)]) for d in contracting[1].split(",") if d.strip())
            else:
                work *= math.prod(map(int, right.split("x")[:-1])) // max(1, int(dims[-1]))
            low = left.endswith("bf16") and right.endswith("bf16")
            rows.append((work, low, f"{_shown(left)} * {_shown(right)}"))
    total = sum(work for work, _, _ in rows)
    others = sorted({(work, text) for work, low, text in rows if not low}, reverse=True)
    return Matmuls(
        total=len(rows),
        low=sum(low for _, low, _ in rows),
        share=sum(work for work, low, _ in rows if low) / total if total else 1.0,
        others=tuple(text for _, text in others[:3]),
    )


def check_bf16(found: Matmuls) -> None:
    """Refuses a program that was asked for bfloat16 and computes in float32.

    Raises:
      JaxparError: If more than 5 % of the multiplications are not bfloat16.
    """
    if found.share < 1 - _TOLERATED:
        raise refuse(
            f"precision bf16, but {found}; the largest others: {'; '.join(found.others)}",
            rule="with bf16 at least 95 % of the multiplications have two bf16 operands",
            fix="give the layers dtype=jnp.bfloat16, or cast what the model is fed; one f32 operand promotes the rest",
        )


def _shown(tensor: str) -> str:
    *dims, dtype = tensor.split("x")
    return f"{dtype}[{'x'.join(dims)}]"
