"""Warns if a loss pairs the rows of a batch that is split into microbatches.

A contrastive loss compares each row with all others, so that an array of it grows with the square of the rows. Each
microbatch has the pairs of its own rows alone, and the loss then depends on the number of microbatches.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxpar.hlo.attribution import equation_frame
from jaxpar.hlo.text import SourceFrame
from jaxpar.hlo.traced_flop import inner_jaxprs
from jaxpar.models.experts import active_experts
from jaxpar.models.islands import implemented
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.author.explicit import sharding_translation
from jaxpar.sharding.names import Compute
from jaxpar.sharding.nnx.hooks import step_hooks
from jaxpar.step.stochastic_loss.loss import traceable_loss


def check_row_pairs(layout: Layout, loss: Callable, batch: Mapping[str, Any], microbatches: int) -> None:
    """Warns if the loss has an array that is four times as large for twice the rows.

    A loss whose operations depend on the number of rows, such as a Python loop over them, is not checked.

    Args:
      layout: The layout of the model.
      loss: Maps (model, batch) to its sums.
      batch: Shapes of the whole batch.
      microbatches: Number of microbatches, at least 2.
    """
    few, many = (_equations(layout, loss, batch, times, microbatches) for times in (1, 2))
    if [equation.primitive for equation, _ in few] != [equation.primitive for equation, _ in many]:
        return
    for (small, frame), (large, _) in zip(few, many, strict=True):
        for one, two in zip(small.outvars, large.outvars, strict=True):
            if 1 < 4 * getattr(one.aval, "size", 0) == getattr(two.aval, "size", 0):
                place = f"{Path(frame.file).name}:{frame.line}" if frame else small.primitive.name
                rows = next(iter(batch.values())).shape[0]
                warnings.warn(
                    f"{layout.blueprint.name}: the loss pairs the rows of a batch, as an array of {place} "
                    f"({one.aval.str_short()}) grows with the square of their number. Each of {microbatches} "
                    f"microbatches has the pairs of its {rows // microbatches} rows alone, and the loss is not that of "
                    f"{rows} rows\n  fix: one microbatch; or ignore this if the loss is meant for each microbatch",
                    stacklevel=4,
                )
                return


def _equations(
    layout: Layout, loss: Callable, batch: Mapping[str, Any], times: int, microbatches: int
) -> list[tuple[JaxprEqn, SourceFrame | None]]:
    """Traces the loss of some microbatches' rows."""
    blueprint = layout.blueprint

    def forward(key, batch):
        params, model_state = blueprint.init(key)
        return traceable_loss(loss)(blueprint.bind(params, model_state, lambda path, value: value, Compute()), batch)

    key = jax.eval_shape(jax.random.key, 0)
    shapes = {
        name: jax.ShapeDtypeStruct((times * value.shape[0] // microbatches, *value.shape[1:]), value.dtype)
        for name, value in batch.items()
    }
    with (
        jax.set_mesh(layout.device_mesh),  # the model may use mesh axes directly
        sharding_translation(),
        step_hooks(),
        implemented({"mixture": active_experts}),  # its slots are of a microbatch in any case
    ):
        return [*_flattened(jax.make_jaxpr(forward)(key, shapes).jaxpr, None)]


def _flattened(jaxpr: Jaxpr, enclosing: SourceFrame | None) -> Iterator[tuple[JaxprEqn, SourceFrame | None]]:
    """Yields all equations, those of inner jaxprs too, with the user's lines."""
    for equation in jaxpr.eqns:
        frame = equation_frame(equation, enclosing)
        yield equation, frame
        for value in equation.params.values():
            for inner in inner_jaxprs(value):
                yield from _flattened(inner, frame)
