"""Which kind of gradients a layout has: the one place that tells them apart."""

from collections.abc import Callable

from jaxpar.errors import refuse
from jaxpar.parallel.layout import Layout
from jaxpar.step.gradients import Gradients
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined.run import Pipelined
from jaxpar.step.pipelined.unflushed import Unflushed
from jaxpar.step.whole import Whole


def gradients_of(layout: Layout, loss: Callable, numerics: Numerics) -> Gradients:
    """Returns what makes the gradients of a layout's steps.

    Args:
      layout: Where arrays live.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      numerics: How it computes.

    Raises:
      JaxparError: If such a layout cannot compute so.
    """
    if layout.sizes["pipe"] == 1:
        return Whole(layout, loss, numerics)
    if numerics.accumulate > 1:
        raise refuse(
            f"accumulate={numerics.accumulate} with pipe={layout.sizes['pipe']}",
            rule="a pipeline accumulates over its microbatches",
            fix=f"accumulate=1 and microbatches={numerics.accumulate * layout.microbatches}",
        )
    if layout.parallel.pipeline.weights == "flush":
        return Pipelined(layout, loss, numerics)
    return Unflushed(layout, loss, numerics)
