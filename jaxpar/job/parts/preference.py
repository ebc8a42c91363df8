"""The model of a job that learns preferences, with its frozen reference."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax

from jaxpar.job.file.schema import Job
from jaxpar.optim.patterns import matching
from jaxpar.parallel.compose import as_blueprint
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import with_adapters
from jaxpar.sharding.names import Blueprint
from jaxpar.sharding.reference import copy_to_reference, with_reference
from jaxpar.step.preference_loss import trace_answers
from jaxpar.step.state import State


def resolve_policy(job: Job, build: Callable[[Callable], Blueprint | Callable]) -> Blueprint:
    """Returns the model of a job with its adapters and its reference, which copies the trained parameters alone.

    Args:
      job: The job.
      build: Builds the model, given the loss that calls it as an example.
    """
    model, train = as_blueprint(build(trace_answers)), job.train
    blueprint = with_adapters(model, train.adapters) if train.adapters.rank else model
    if train.adapters.rank:
        return with_reference(blueprint, train.adapters.also)
    frozen = set(matching(model.leaves, train.freeze))
    return with_reference(blueprint, [path for path in model.leaves if path not in frozen])


def begin_reference(layout: Layout, state: State) -> State:
    """Returns a first state whose reference is a copy of its parameters; the given state is deleted."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    copied = jax.jit(partial(copy_to_reference, layout.blueprint), out_shardings=shardings, donate_argnums=0)
    return dataclasses.replace(state, params=copied(state.params))
