"""Tensor parallelism, as in Megatron-LM, with or without sequence parallelism."""

import warnings

from jaxpar.errors import Problem
from jaxpar.models.dim_names import IMAGES, spec_axes
from jaxpar.parallel.declaration import Axes, Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.base import Technique, unsplit_axis_problems


def problems(parallel: Parallel) -> list[Problem]:
    """Returns the problems of `sequence`."""
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


def names(parallel: Parallel) -> dict[str, Axes]:
    """Returns whole channels if a rule splits the examples of convolutions over `tensor` (Krizhevsky 2014)."""
    return {"channels": None} if "tensor" in spec_axes(parallel.rules.get(IMAGES)) else {}


def check(layout: Layout, named: set[str], _: object) -> None:
    """Warns if the model names too few dims for sequence parallelism."""
    inner = {name for name, axes in layout.names.items() if axes and "tensor" in axes} - {"seq"}
    missing = [dims for dims, names in (("seq", {"seq"}), ("heads or mlp", inner)) if not named & names]
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
    names=names,
    idle=lambda layout: unsplit_axis_problems(layout, "tensor", "named heads, mlp, vocab (or by your rules)"),
    check=check,
)
