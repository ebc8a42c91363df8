"""Gradients of a stochastic loss.

    {"model": model_state, "key": key} ─► each microbatch, replica and stage, like the model state

The wrapped `Gradients` needs no change: the key is part of the model state, which microbatches pass on, and whose keys
differ between replicas that compute separately.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from jaxpar.exchange.base import NO_MODEL
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Compute, Tree, Use
from jaxpar.step.gradients import Gradients
from jaxpar.step.losses import Sums
from jaxpar.step.state import State, replicate_model_state
from jaxpar.step.stochastic_loss.loss import StochasticLoss

AFTER = 0x7FFF  # folded into a microbatch's key to make the next one's, as for Linen's own keys


class KeyedModel(NamedTuple):
    """A bound model and the random key of its loss."""

    model: Any
    key: jax.Array


def carry_key(layout: Layout, loss: Callable) -> tuple[Layout, StochasticLoss]:
    """Returns a layout whose model state carries a random key, and a loss of (model, batch) that uses the key."""
    inner = layout.blueprint

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        params, model_state = inner.init(key)
        return params, {"model": model_state, "key": key}

    def bind(params: Tree, state: Tree, use: Use, compute: Compute) -> KeyedModel:
        return KeyedModel(inner.bind(params, state["model"], use, compute), state["key"])

    def collect(bound: KeyedModel) -> Tree:
        return {"model": inner.collect(bound.model), "key": jax.random.fold_in(bound.key, AFTER)}

    overwritten = frozenset(f"model/{path}" for path in inner.overwritten)
    inner_assigned = inner.assigned
    assigned = None if inner_assigned is None else lambda bound: inner_assigned(bound.model)
    blueprint = dataclasses.replace(
        inner, init=init, bind=bind, collect=collect, overwritten=overwritten, assigned=assigned
    )
    return dataclasses.replace(layout, blueprint=blueprint), StochasticLoss(loss)


class KeyedGradients(Gradients):
    """Adds a key to the model state of the wrapped gradients, and removes it from their results."""

    def __init__(self, layout: Layout, inner: Gradients, seed: int):
        self.layout, self.inner, self.seed = layout, inner, seed
        self.updates, self.sync_every, self.notes = inner.updates, inner.sync_every, inner.notes

    def gradients(self, params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> tuple[Tree, Sums, Tree]:
        """Returns gradients, sums and the new model state, with the evaluation key."""
        keyed_state = _with_key(self.layout, model_state, jax.random.key(self.seed))
        grads, sums, after = self.inner.gradients(params, keyed_state, batch)
        return grads, sums, after["model"]

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Mapping[str, Any], on_device: Callable
    ) -> tuple[State, dict[str, jax.Array]]:
        """Runs a step with the key of its step number."""
        key = jax.random.fold_in(jax.random.key(self.seed), state.step)
        keyed_state = dataclasses.replace(state, model_state=_with_key(self.layout, state.model_state, key))
        new_state, metrics = self.inner.update(optimizer, keyed_state, batch, on_device)
        self.notes = self.inner.notes  # some are known once the loss is traced
        return dataclasses.replace(new_state, model_state=new_state.model_state["model"]), metrics

    def global_model(self, params: Tree, model_state: Tree, exchange_state: Tree) -> tuple[Tree, Tree]:
        """Returns the parameters and model state to evaluate."""
        return self.inner.global_model(params, model_state, exchange_state)

    def evaluate(self, params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> Sums:
        """Returns the sums of a batch, with the evaluation key."""
        key = jax.random.key(self.seed)
        per_replica = self.layout.parallel.exchange.global_model == NO_MODEL
        keyed_state = _with_key(self.layout, model_state, key) if per_replica else {"model": model_state, "key": key}
        return self.inner.evaluate(params, keyed_state, batch)

    def sync_round(self, step: int) -> int:
        """Returns the number of the sync round that ends a step; 0 for none."""
        return self.inner.sync_round(step)

    def synchronize(self, state: State, step_metrics: dict[str, Any], sync_round: int) -> tuple[State, dict[str, Any]]:
        """Synchronizes the replicas; returns the state and the step's metrics."""
        return self.inner.synchronize(state, step_metrics, sync_round)

    def axes_without_traffic(self, *, sync_round: int) -> tuple[str, ...]:
        """Returns the mesh axes over which a step sends nothing."""
        return self.inner.axes_without_traffic(sync_round=sync_round)

    def scalar_metrics(self, raw_metrics: dict[str, Any]) -> dict[str, jax.Array]:
        """Returns the metrics of an update as scalars."""
        return self.inner.scalar_metrics(raw_metrics)

    def evaluation_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Returns the evaluation metrics."""
        return self.inner.evaluation_metrics(means)


def _with_key(layout: Layout, model_state: Tree, key: jax.Array) -> Tree:
    if layout.parallel.exchange.per_replica:
        key = replicate_model_state(layout, key)
    return {"model": model_state, "key": key}
