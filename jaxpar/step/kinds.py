"""Which kind of gradients a layout has: the one place that tells them apart."""

from collections.abc import Callable

from jaxpar.errors import refuse
from jaxpar.exchange.base import NO_MODEL
from jaxpar.parallel.layout import Layout
from jaxpar.step.apart.members import Members
from jaxpar.step.apart.predicting import of_mean_prediction
from jaxpar.step.apart.replicas import Apart, of_one, synchronous
from jaxpar.step.gradients import Gradients
from jaxpar.step.keyed.gradients import KeyedGradients, handed
from jaxpar.step.keyed.loss import key_of
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined.run import Pipelined
from jaxpar.step.pipelined.unflushed import Unflushed
from jaxpar.step.whole import Whole


def gradients_of(
    layout: Layout, loss: Callable, numerics: Numerics, *, frozen: frozenset[str] = frozenset(), seed: int = 0
) -> Gradients:
    """Returns what makes the gradients of a layout's steps.

    Args:
      layout: Where arrays live.
      loss: (model, batch), or (model, batch, key), to (sum, count), or to a dict of them with the entry `loss`.
      numerics: How it computes.
      frozen: Paths of parameters whose gradients the optimizer does not read.
      seed: Of the key of a loss that wants one.

    Raises:
      JaxparError: If such a layout cannot compute so.
    """
    if key_of(loss) is None:
        return _of_layout(layout, loss, numerics, frozen)
    return KeyedGradients(layout, _of_layout(*handed(layout, loss), numerics, frozen), seed)


def check_offload(layout: Layout, *, offload: bool) -> None:
    """Refuses an optimizer state in host memory where replicas step apart.

    Raises:
      JaxparError: If both are asked for.
    """
    if offload and layout.parallel.exchange.apart:
        raise refuse(
            f"offload with exchange {layout.parallel.exchange}",
            rule="replicas that step apart keep their optimizer states on their devices",
            fix="offload = false, or zero=1 with a larger fsdp",
        )


def _of_layout(layout: Layout, loss: Callable, numerics: Numerics, frozen: frozenset[str]) -> Gradients:
    if layout.blueprint.assigned is not None and (layout.parallel.exchange.apart or layout.sizes["pipe"] > 1):
        raise refuse(
            f"{layout.blueprint.name} with layers that assign parameters (nnx.WeightNorm, nnx.SpectralNorm), in a "
            "pipeline or in replicas that step apart",
            rule="such a layer leaves in a parameter what it computes, and the optimizer updates that: in one program "
            "of all layers and examples",
            fix="pipe=1 and no exchange; or those of Linen, which assign nothing: nn.WeightNorm(nn.Dense(...))",
        )
    if layout.parallel.exchange.apart:
        check_offload(layout, offload=numerics.offload)
        exchange, one = layout.parallel.exchange, of_one(layout)
        seen = of_mean_prediction(loss, layout.blueprint.name) if exchange.averages_predictions else loss
        evaluated = one if exchange.global_model == NO_MODEL else synchronous(layout)
        kind = Members if exchange.same_examples else Apart
        return kind(layout, Whole(one, loss, numerics, frozen), Whole(evaluated, seen, numerics, frozen))
    if layout.sizes["pipe"] == 1:
        return Whole(layout, loss, numerics, frozen)
    if numerics.remat == "offload":
        raise refuse(
            f"remat=offload with pipe={layout.sizes['pipe']}",
            rule="a stage of a pipeline holds the inputs of its layers in the slots of its table, on the device",
            fix='jp.Pipeline(keep="inputs"), which keeps one input a stage and microbatch; or pipe=1',
        )
    if numerics.accumulate > 1:
        raise refuse(
            f"accumulate={numerics.accumulate} with pipe={layout.sizes['pipe']}",
            rule="a pipeline accumulates over its microbatches",
            fix=f"accumulate=1 and microbatches={numerics.accumulate * layout.microbatches}",
        )
    if layout.parallel.pipeline.weights == "flush":
        return Pipelined(layout, loss, numerics, frozen)
    return Unflushed(layout, loss, numerics, frozen)
