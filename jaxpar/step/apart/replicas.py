"""Replicas that make their steps apart from each other, and agree as an exchange says.

    batch ─► its rows to each replica ─► gradients of each ─► exchange.gradients ─► update (of each, where they differ)
                                                              every so many steps ─► exchange.agree

One program is `vmap` of one replica's step over the leading dim `replica`. That dim is split over `data`, so `data` is
none of the axes that the step inside may name: `fsdp`, `context` and `tensor` are there as ever.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.exchange.all_reduce import AllReduce
from jaxpar.exchange.base import NO_MODEL, Replicas
from jaxpar.exchange.between import AXIS, Between
from jaxpar.exchange.global_model import global_params, merge_replicas
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.constrain import activation_names
from jaxpar.sharding.names import Tree
from jaxpar.step.apart.predicting import REPLICA
from jaxpar.step.gradients import Batch, Gradients, constrained, metrics, updated
from jaxpar.step.losses import Sums
from jaxpar.step.parameters.frozen import joined, without, zeroed
from jaxpar.step.state import State, of_one_replica
from jaxpar.step.whole import Whole


def synchronous(layout: Layout) -> Layout:
    """Returns the layout of one model on all devices, whose replicas are equal."""
    return dataclasses.replace(layout, parallel=dataclasses.replace(layout.parallel, exchange=AllReduce()))


def of_one(layout: Layout) -> Layout:
    """Returns the layout of one replica, on the mesh of all: nothing that it says is split over `data`."""
    return dataclasses.replace(layout, parallel=dataclasses.replace(layout.parallel, data=1, exchange=AllReduce()))


class Apart(Gradients):
    """The steps of replicas, each made as if it were alone.

    Attributes:
      one: What differentiates the model of one replica.
      evaluated: What measures the global model, on all devices; where there is none, the model of one replica, or an
        ensemble, if the exchange averages predictions.
      exchange: How they agree. It sees nothing of parameters that are frozen: these are equal, and stay so.
    """

    def __init__(self, layout: Layout, one: Whole, evaluated: Gradients):
        self.layout, self.one, self.evaluated, self.exchange = layout, one, evaluated, layout.parallel.exchange
        self.every = self.exchange.every
        self._scalars = jax.jit(_scalars)

    def gradients(self, params: Tree, model_state: Tree, batch: Batch) -> tuple[Tree, Sums, Tree]:
        """Returns gradients, sums and model state of each replica: [replica, ...]."""
        return self.each(self.one.gradients)(params, model_state, self._rows(batch))

    def global_model(self, params: Tree, model_state: Tree, own: Tree) -> tuple[Tree, Tree]:
        """Returns parameters and state of the model that replicas train; where they train several, all of them."""
        if self.exchange.global_model == NO_MODEL:
            return params, model_state
        params = global_params(self.exchange, params, own)
        return constrained(self.layout, params, self.layout.stored), jax.tree.map(merge_replicas, model_state)

    def evaluate(self, params: Tree, model_state: Tree, batch: Batch) -> Sums:
        """Returns the sums of the global model; of replicas that train several, each of its own rows, or the sums of
        the mean of what they predict, of all rows.
        """
        if self.exchange.global_model != NO_MODEL:
            return self.evaluated.evaluate(params, model_state, batch)
        if not self.exchange.averages_predictions:
            sums = self.each(self.evaluated.evaluate)(params, model_state, self._rows(batch))
            return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        axes = self.layout.sharding(PartitionSpec(tuple(axis for axis in self.layout.batch_axes if axis != AXIS)))
        batch = {name: jax.lax.with_sharding_constraint(value, axes) for name, value in batch.items()}
        sums = self.each(self.evaluated.evaluate, rows=None)(params, model_state, batch)
        return jax.tree.map(lambda x: x[0], sums)  # all have the same

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Batch, on_device: Callable[[Any], Any]
    ) -> tuple[State, dict[str, Any]]:
        """Makes one update: of each replica by gradients of its own, where they differ."""
        gradients, sums, model_state = self.gradients(state.params, state.model_state, batch)
        # each replica has divided by its own tokens: replicas that agree on one gradient need that of the whole batch
        gradients = self._weighed(self._trained(gradients), sums["loss"][1])
        between = self._between(self.one.layout.updated)
        gradients, own = self.exchange.gradients(gradients, state.exchange, between)

        total, count = sums["loss"] if self.exchange.differ else jax.tree.map(jnp.sum, sums["loss"])

        def one(gradients: Tree, held: Any, params: Tree, loss: jax.Array):
            gradients = zeroed(self.one.frozen, self.one.layout, gradients)
            return updated(self.one.layout, optimizer, gradients, lambda: held, params, loss=loss)

        update = jax.vmap(one, spmd_axis_name=AXIS) if self.exchange.differ else one
        params, kept, norm = update(gradients, on_device(state.optimizer), state.params, total / count)
        return State(state.step + 1, params, kept, model_state, own), {"sums": sums, "grad_norm": norm}

    def _weighed(self, gradients: Tree, tokens: jax.Array) -> Tree:
        """Returns gradients of means over `tokens` [replica] as an exchange takes them: see `Exchange.gradients`."""
        share = jnp.ones_like(tokens) if self.exchange.differ else tokens / jnp.mean(tokens)

        def one(x: jax.Array) -> jax.Array:
            weights, counts = (each.reshape(-1, *(1,) * (x.ndim - 1)) for each in (share, tokens > 0))
            return jnp.where(counts, x * weights.astype(x.dtype), 0)  # a mean of nothing is nan, not 0

        return jax.tree.map(one, gradients)

    def meeting(self, step: int) -> int:
        """Returns which meeting a step ends with, as the exchange says."""
        return self.exchange.meeting(step)

    def agree(self, state: State, found: dict[str, Any], meeting: int) -> tuple[State, dict[str, Any]]:
        """Returns the state after the replicas met."""
        return self.met(state, self.exchange.agree(*self.meet(state, meeting))), found

    def meet(self, state: State, meeting: int) -> tuple[Replicas, Between]:
        """Returns the replicas of a state as an exchange sees them, and where they are."""
        held = self.layout.optimizer_specs(of_one_replica(state.optimizer) if self.exchange.differ else state.optimizer)
        between = dataclasses.replace(self._between(self.layout.stored), optimizer=held, meeting=meeting)
        trained = self._trained(state.params)
        given = Replicas(params=trained, optimizer=state.optimizer, own=state.exchange, model_state=state.model_state)
        return given, between

    def met(self, state: State, replicas: Replicas) -> State:
        """Returns a state with the replicas as an exchange made them."""
        params = joined(replicas.params, state.params)
        return State(state.step, params, replicas.optimizer, replicas.model_state, replicas.own)

    def silent(self, *, exchanges: int) -> tuple[str, ...]:
        """Returns `data`, but for steps in which replicas meet."""
        return () if exchanges or not self.exchange.differ else (AXIS,)

    def told(self, found: dict[str, Any]) -> dict[str, jax.Array]:
        """Returns means over the examples of all replicas, and the mean of their norms.

        By a program of its own, so that a step in which replicas do not meet sends nothing over `data`.
        """
        return self._scalars(found)

    def _between(self, specs: Tree) -> Between:
        return Between(mesh=self.layout.on, specs=self._trained(specs), parts=self.layout.parts)

    def _trained(self, tree: Tree) -> Tree:
        """Returns a tree of parameters, or of what stands for them, without those that are frozen."""
        return without(self.one.frozen, tree)

    def each(self, function: Callable, *, rows: int | None = 0) -> Callable:
        """Returns a function of (params, model state, batch) of one replica as one of all.

        Args:
          function: Of one.
          rows: 0 where each has its own entry of the batch; None where all see all of it.
        """
        params = 0 if self.exchange.differ else None

        def inside(*args):
            with activation_names(self.one.layout.names, self.one.layout.sizes):
                return function(*args)

        return jax.vmap(inside, in_axes=(params, 0, rows), axis_name=REPLICA, spmd_axis_name=AXIS)

    def _rows(self, batch: Batch) -> Batch:
        """Returns a batch as [replica, rows, ...]: each has its rows already."""
        axes = PartitionSpec(AXIS, tuple(axis for axis in self.layout.batch_axes if axis != AXIS))

        def split(value: jax.Array) -> jax.Array:
            count = self.layout.sizes[AXIS]
            rows = value.reshape(count, value.shape[0] // count, *value.shape[1:])
            return jax.lax.with_sharding_constraint(rows, self.layout.sharding(axes))

        return {name: split(value) for name, value in batch.items()}


def _scalars(found: dict[str, Any]) -> dict[str, jax.Array]:
    sums = jax.tree.map(partial(jnp.sum, axis=0), found["sums"])
    rest = {name: value for name, value in found.items() if name not in ("sums", "grad_norm")}
    return metrics(sums, jnp.mean(found["grad_norm"])) | rest
