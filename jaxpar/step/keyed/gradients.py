"""Gradients of a loss that wants a random key.

    {"model": model_state, "key": key} ─► of each microbatch, replica and stage, as the model state is

What makes gradients knows nothing of it: the key is part of what a model keeps beside its parameters, which goes from
microbatch to microbatch, and where replicas compute by themselves is made different for each.
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
from jaxpar.step.keyed.loss import Drawing
from jaxpar.step.losses import Sums
from jaxpar.step.state import State, of_each

AFTER = 0x7FFF  # folded into a microbatch's key, it is that of the next one: as for Linen's own keys


class Keyed(NamedTuple):
    """A model as its loss sees it, and the key of that loss."""

    model: Any
    key: jax.Array


def handed(layout: Layout, loss: Callable) -> tuple[Layout, Drawing]:
    """Returns a layout whose model brings a key along in its state, and a loss of (model, batch) that takes it."""
    plain = layout.blueprint

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        params, model_state = plain.init(key)
        return params, {"model": model_state, "key": key}

    def bind(params: Tree, state: Tree, use: Use, compute: Compute) -> Keyed:
        return Keyed(plain.bind(params, state["model"], use, compute), state["key"])

    def collect(bound: Keyed) -> Tree:
        return {"model": plain.collect(bound.model), "key": jax.random.fold_in(bound.key, AFTER)}

    overwritten = frozenset(f"model/{path}" for path in plain.overwritten)
    of_plain = plain.assigned
    assigned = None if of_plain is None else lambda bound: of_plain(bound.model)
    blueprint = dataclasses.replace(
        plain, init=init, bind=bind, collect=collect, overwritten=overwritten, assigned=assigned
    )
    return dataclasses.replace(layout, blueprint=blueprint), Drawing(loss)


class KeyedGradients(Gradients):
    """Gradients that hand on a key with the model state, and return the model state alone."""

    def __init__(self, layout: Layout, one: Gradients, seed: int):
        self.layout, self.one, self.seed = layout, one, seed
        self.updates, self.every, self.notes = one.updates, one.every, one.notes

    def gradients(self, params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> tuple[Tree, Sums, Tree]:
        """Returns gradients, sums and the model state afterwards, with the key that every evaluation has."""
        given = self._with(model_state, jax.random.key(self.seed))
        made, sums, after = self.one.gradients(params, given, batch)
        return made, sums, after["model"]

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Mapping[str, Any], on_device: Callable
    ) -> tuple[State, dict[str, jax.Array]]:
        """Makes a step, with the key of its number."""
        key = jax.random.fold_in(jax.random.key(self.seed), state.step)
        given = dataclasses.replace(state, model_state=self._with(state.model_state, key))
        after, found = self.one.update(optimizer, given, batch, on_device)
        return dataclasses.replace(after, model_state=after.model_state["model"]), found

    def global_model(self, params: Tree, model_state: Tree, own: Tree) -> tuple[Tree, Tree]:
        """Returns parameters and model state that are evaluated."""
        return self.one.global_model(params, model_state, own)

    def evaluate(self, params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> Sums:
        """Returns the sums of a batch, with the key that every evaluation has."""
        key = jax.random.key(self.seed)
        several = self.layout.parallel.exchange.global_model == NO_MODEL
        given = self._with(model_state, key) if several else {"model": model_state, "key": key}
        return self.one.evaluate(params, given, batch)

    def meeting(self, step: int) -> int:
        """Returns which meeting of replicas a step ends with."""
        return self.one.meeting(step)

    def agree(self, state: State, found: dict[str, Any], meeting: int) -> tuple[State, dict[str, Any]]:
        """Returns a state whose replicas have come to agree, and the metrics of its step."""
        return self.one.agree(state, found, meeting)

    def silent(self, *, exchanges: int) -> tuple[str, ...]:
        """Returns the mesh axes over which a step sends nothing."""
        return self.one.silent(exchanges=exchanges)

    def told(self, found: dict[str, Any]) -> dict[str, jax.Array]:
        """Returns the metrics of an update as scalars."""
        return self.one.told(found)

    def scored(self, means: dict[str, float]) -> dict[str, float]:
        """Returns what an evaluation says."""
        return self.one.scored(means)

    def _with(self, model_state: Tree, key: jax.Array) -> Tree:
        if self.layout.parallel.exchange.apart:
            key = of_each(self.layout, key)
        return {"model": model_state, "key": key}
