"""Chooses the kind of gradients for a layout; no other file distinguishes the kinds.

This file imports the code of pipelines and replicas only for layouts that need it.
"""

from collections.abc import Callable

from jaxpar.errors import refuse
from jaxpar.exchange.base import NO_MODEL
from jaxpar.parallel.layout import Layout
from jaxpar.step.gradients import Gradients
from jaxpar.step.numerics import Numerics
from jaxpar.step.stochastic_loss import KeyedGradients, carry_key, key_parameter
from jaxpar.step.unpipelined import Unpipelined


def make_gradients(
    layout: Layout, loss: Callable, numerics: Numerics, *, frozen: frozenset[str] = frozenset(), seed: int = 0
) -> Gradients:
    """Returns the `Gradients` of a layout.

    Args:
      layout: The sharding of all arrays.
      loss: (model, batch), or (model, batch, key), to (sum, count), or to a dict of them with the entry `loss`.
      numerics: Precision, remat and accumulation.
      frozen: Paths of parameters whose gradients the optimizer does not read.
      seed: Seed of the random key, for a loss that takes one.

    Raises:
      JaxparError: If the layout does not support these settings.
    """
    if key_parameter(loss) is None:
        return _make_keyless_gradients(layout, loss, numerics, frozen)
    return KeyedGradients(layout, _make_keyless_gradients(*carry_key(layout, loss), numerics, frozen), seed)


def check_offload(layout: Layout, *, offload: bool) -> None:
    """Refuses to offload the optimizer state of replicas that step separately.

    Raises:
      JaxparError: If both are set.
    """
    if offload and layout.parallel.exchange.per_replica:
        raise refuse(
            f"offload with exchange {layout.parallel.exchange}",
            rule="replicas that step apart keep their optimizer states on their devices",
            fix="offload = false, or zero=1 with a larger fsdp",
        )


def _make_keyless_gradients(layout: Layout, loss: Callable, numerics: Numerics, frozen: frozenset[str]) -> Gradients:
    if layout.blueprint.assigned is not None and (layout.parallel.exchange.per_replica or layout.sizes["pipe"] > 1):
        raise refuse(
            f"{layout.blueprint.name} with layers that assign parameters (nnx.WeightNorm, nnx.SpectralNorm), in a "
            "pipeline or in replicas that step apart",
            rule="such a layer assigns a computed value to a parameter, which the optimizer then updates: this needs "
            "one program for all layers and examples",
            fix="pipe=1 and no exchange; or those of Linen, which assign nothing: nn.WeightNorm(nn.Dense(...))",
        )
    if layout.parallel.exchange.per_replica:
        from jaxpar.step.per_replica.member_steps import PopulationMembers
        from jaxpar.step.per_replica.replicas import PerReplica, ensemble_loss, layout_of_replica, synchronous_layout

        check_offload(layout, offload=numerics.offload)
        exchange, replica = layout.parallel.exchange, layout_of_replica(layout)
        eval_loss = ensemble_loss(loss, layout.blueprint.name) if exchange.averages_predictions else loss
        eval_layout = replica if exchange.global_model == NO_MODEL else synchronous_layout(layout)
        kind = PopulationMembers if exchange.same_examples else PerReplica
        return kind(
            layout, Unpipelined(replica, loss, numerics, frozen), Unpipelined(eval_layout, eval_loss, numerics, frozen)
        )
    if layout.sizes["pipe"] == 1:
        return Unpipelined(layout, loss, numerics, frozen)
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
    if layout.parallel.pipeline.stages and layout.parallel.pipeline.weights != "flush":
        from jaxpar.step.pipelined.asynchronous_stages import AsyncUnequalStages

        return AsyncUnequalStages(layout, loss, numerics, frozen)
    if layout.parallel.pipeline.stages:
        from jaxpar.step.pipelined.unequal_stages import UnequalStages

        return UnequalStages(layout, loss, numerics, frozen)
    if layout.parallel.pipeline.weights == "flush":
        from jaxpar.step.pipelined.synchronous import Pipelined

        return Pipelined(layout, loss, numerics, frozen)
    from jaxpar.step.pipelined.asynchronous_updates import AsyncPipelined

    return AsyncPipelined(layout, loss, numerics, frozen)
