"""The FLOP that a model needs for a training step, without recomputation."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxpar.hlo.flop import forward_flop
from jaxpar.models.experts import active_experts
from jaxpar.models.islands import use_islands
from jaxpar.sharding.author.explicit import sharding_translation
from jaxpar.sharding.names import Compute
from jaxpar.sharding.nnx_hooks import step_hooks
from jaxpar.step.step import Step
from jaxpar.step.stochastic_loss import traceable_loss


def model_flop(step: Step, batch: Mapping[str, Any]) -> float:
    """Returns the model FLOP of a step over all devices: the forward pass, plus twice that for the backward pass.

    For a population this is the sum over its members. Of a mixture (`jp.mixture`) it is that of the experts that tokens
    choose, without empty slots.
    """
    blueprint, loss = step.layout.blueprint, traceable_loss(step.loss)
    exchange = step.layout.parallel.exchange
    models = exchange.count(step.layout.sizes["data"]) if exchange.same_examples else 1

    def forward(key, batch):
        params, model_state = blueprint.init(key)
        return loss(blueprint.bind(params, model_state, lambda path, value: value, Compute()), batch)

    shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch.items()}
    key = jax.random.key(0)
    with (
        jax.set_mesh(step.layout.device_mesh),
        sharding_translation(),
        step_hooks(),
        use_islands({"mixture": active_experts}),
    ):  # the model may use mesh axes directly
        return 3.0 * models * forward_flop(forward, key, shapes)
