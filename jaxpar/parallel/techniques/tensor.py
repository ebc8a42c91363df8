"""Tensor parallelism, as of Megatron-LM, with or without sequence parallelism."""

import warnings
from typing import Any

from jaxpar.errors import Problem
from jaxpar.parallel.declare import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.base import Technique, splits_nothing


def problems(parallel: Parallel) -> list[Problem]:
    """Returns what is wrong with `sequence`."""
    if not isinstance(parallel.sequence, bool):
        return [Problem(f"sequence={parallel.sequence!r}", "sequence is True or False", "sequence=True")]
    if parallel.sequence and parallel.tensor == 1:
        return [
            Problem(
                "sequence=True with tensor=1 does nothing",
                "sequence parallelism splits activations over the axis `tensor`",
                "tensor=2 or more, or sequence=False",
            )
        ]
    return []


def check(layout: Layout, named: set[str], _: Any) -> None:
    """Says so where sequence parallelism has too few names to be one."""
    inner = {name for name, axes in layout.names.items() if axes and "tensor" in axes} - {"seq"}
    missing = [what for what, names in (("seq", {"seq"}), ("heads or mlp", inner)) if not named & names]
    if layout.parallel.sequence and missing:
        warnings.warn(
            f"sequence=True, but {layout.blueprint.name} names no activation dim {' and none '.join(missing)}:"
            " the tokens are split, and XLA may gather weights where it should gather activations. Name them: "
            'jp.constrain(x, "batch", "seq", "embed") on the stream, (..., "mlp") and (..., "heads", None) inside.',
            stacklevel=5,
        )


TENSOR = Technique(
    axis="tensor",
    problems=problems,
    idle=lambda layout: splits_nothing(layout, "tensor", "named heads, mlp, vocab (or by your rules)"),
    check=check,
)
