"""Replicas that compute separate steps, and that an exchange synchronizes.

    batch ─► rows of each replica ─► its gradients ─► exchange.gradients ─► update (per replica, if they differ)
                                                                    every few steps ─► exchange.agree

The program is a `vmap` of one replica's step over dim 0, `replica`. The axis `data` shards that dim, so the inner step
cannot use `data`; it uses `fsdp`, `context` and `tensor` as usual.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse
from jaxpar.exchange.base import NO_MODEL, AllReduce, Replicas
from jaxpar.exchange.global_model import merge_replicas_of_model
from jaxpar.exchange.replica_mesh import AXIS, ReplicaMesh
from jaxpar.parallel.layout import Layout, trained_shards
from jaxpar.parallel.state_specs import optimizer_specs, stored_specs, update_specs
from jaxpar.sharding.constrain import activation_names
from jaxpar.sharding.names import Tree
from jaxpar.step.frozen_parameters import drop_paths, fill_missing, zero_frozen
from jaxpar.step.gradients import Batch, Gradients, constrain_tree, metrics, update_params
from jaxpar.step.losses import Sums
from jaxpar.step.state import State, replica_shapes
from jaxpar.step.unpipelined import Unpipelined

REPLICA = "jaxpar.replica"  # the `vmap` axis over replicas, a name that no model uses


class _Mean:
    """Wraps a replica's model: a call returns the mean over replicas; all other attributes are the replica's."""

    def __init__(self, model: Callable[..., Any]):
        self._model, self._called = model, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._called = True
        outputs = self._model(*args, **kwargs)
        is_float = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.inexact)  # noqa: E731
        return jax.tree.map(lambda x: jax.lax.pmean(x, REPLICA) if is_float(x) else x, outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def ensemble_loss(loss: Callable, name: str) -> Callable:
    """Wraps a loss of (model, batch) so that the model returns the mean output. Runs in a `vmap` over `REPLICA`.

    Raises:
      JaxparError: When called, if the loss uses methods of the model without calling the model itself.
    """

    def averaged(model: Callable[..., Any], batch: Mapping[str, jax.Array]) -> Any:
        mean_model = _Mean(model)
        result = loss(mean_model, batch)
        if not mean_model._called:
            raise refuse(
                f"a loss that does not call {name}, with an exchange that averages predictions",
                rule="outputs of calls of the model are averaged over replicas, outputs of its methods are not",
                fix='model(batch["inputs"]) in the loss, or another exchange',
            )
        return result

    return averaged


@dataclass(frozen=True)
class ReplicaMap:
    """Maps functions of (params, model state, batch); their results are stacked, [replica, ...].

    Attributes:
      layout: The sharding of all arrays.
      replica_layout: That of one replica.
    """

    layout: Layout
    replica_layout: Layout

    def on_rows(self, function: Callable, params: Tree, model_state: Tree, batch: Batch) -> Tree:
        """Runs each replica on its rows; no row moves to another device."""
        axes = PartitionSpec(AXIS, tuple(axis for axis in self.layout.parallel.batch_axes if axis != AXIS))

        def split(value: jax.Array) -> jax.Array:
            count = self.layout.sizes[AXIS]
            rows = value.reshape(count, value.shape[0] // count, *value.shape[1:])
            return jax.lax.with_sharding_constraint(rows, self.layout.sharding(axes))

        return self._map(function, 0)(params, model_state, {name: split(value) for name, value in batch.items()})

    def on_batch(self, function: Callable, params: Tree, model_state: Tree, batch: Batch) -> Tree:
        """Runs each replica on the whole batch."""
        return self._map(function, None)(params, model_state, batch)

    def _map(self, function: Callable, rows: int | None) -> Callable:
        params = 0 if self.layout.parallel.exchange.replicas_differ else None

        def run_replica(*args):
            with activation_names(self.replica_layout.names, self.replica_layout.sizes):
                return function(*args)

        return jax.vmap(run_replica, in_axes=(params, 0, rows), axis_name=REPLICA, spmd_axis_name=AXIS)


@dataclass(frozen=True)
class TrainedState:
    """Reads what an exchange synchronizes from a state, and writes it back.

    Attributes:
      layout: The sharding of all arrays.
      frozen: Paths of frozen parameters.
    """

    layout: Layout
    frozen: frozenset[str]

    def drop_frozen(self, tree: Tree) -> Tree:
        """Removes frozen parameters from a tree of parameters, gradients or specs."""
        return drop_paths(self.frozen, tree)

    def replica_mesh(self, specs: Tree) -> ReplicaMesh:
        """Returns the mesh of the replicas, with the specs of the trained parameters."""
        return ReplicaMesh(
            mesh=self.layout.device_mesh, specs=self.drop_frozen(specs), parts=trained_shards(self.layout)
        )

    def read(self, state: State, sync_round: int) -> tuple[Replicas, ReplicaMesh]:
        """Returns the inputs of an exchange: the replicas of a state, and their specs."""
        differ = self.layout.parallel.exchange.replicas_differ
        opt_specs = optimizer_specs(self.layout, replica_shapes(state.optimizer) if differ else state.optimizer)
        replica_mesh = dataclasses.replace(
            self.replica_mesh(stored_specs(self.layout)), optimizer=opt_specs, sync_round=sync_round
        )
        inputs = Replicas(
            params=self.drop_frozen(state.params),
            opt_state=state.optimizer,
            exchange_state=state.exchange,
            model_state=state.model_state,
        )
        return inputs, replica_mesh

    def write(self, state: State, replicas: Replicas) -> State:
        """Returns the state with these replicas."""
        params = fill_missing(replicas.params, state.params)
        return State(state.step, params, replicas.opt_state, replicas.model_state, replicas.exchange_state)


def synchronous_layout(layout: Layout) -> Layout:
    """Returns the layout of the global model on all devices, with synchronous data parallelism."""
    return dataclasses.replace(layout, parallel=dataclasses.replace(layout.parallel, exchange=AllReduce()))


def layout_of_replica(layout: Layout) -> Layout:
    """Returns the layout of one replica on the mesh of all replicas; its specs do not use `data`."""
    return dataclasses.replace(layout, parallel=dataclasses.replace(layout.parallel, data=1, exchange=AllReduce()))


class PerReplica(Gradients):
    """Gradients and updates of replicas, each of which computes as if it were alone.

    Attributes:
      replica_gradients: Differentiates the model of one replica.
      evaluator: Evaluates the global model on all devices. If there is no global model, it evaluates the model of one
        replica, or an ensemble if the exchange averages predictions.
      exchange: Synchronizes the replicas.
      replica_map: Maps functions of one replica over all replicas.
      trained: The part of a state that the exchange synchronizes.
    """

    def __init__(self, layout: Layout, replica_gradients: Unpipelined, evaluator: Gradients):
        self.layout, self.replica_gradients, self.evaluator = layout, replica_gradients, evaluator
        self.exchange = layout.parallel.exchange
        self.replica_map = ReplicaMap(layout, replica_gradients.layout)
        self.trained_state = TrainedState(layout, replica_gradients.frozen)
        self.sync_every = self.exchange.every
        self._scalars = jax.jit(_scalars)

    def gradients(self, params: Tree, model_state: Tree, batch: Batch) -> tuple[Tree, Sums, Tree]:
        """Returns gradients, sums and model state of each replica: [replica, ...]."""
        return self.replica_map.on_rows(self.replica_gradients.gradients, params, model_state, batch)

    def global_model(self, params: Tree, model_state: Tree, exchange_state: Tree) -> tuple[Tree, Tree]:
        """Returns parameters and state of the global model, or of all replicas if they train several models."""
        if self.exchange.global_model == NO_MODEL:
            return params, model_state
        params, model_state = merge_replicas_of_model(self.exchange, params, model_state, exchange_state)
        return constrain_tree(self.layout, params, stored_specs(self.layout)), model_state

    def evaluate(self, params: Tree, model_state: Tree, batch: Batch) -> Sums:
        """Returns the loss sums of the global model.

        If replicas train several models, it evaluates each replica on its rows, and an ensemble on all rows.
        """
        if self.exchange.global_model != NO_MODEL:
            return self.evaluator.evaluate(params, model_state, batch)
        if not self.exchange.averages_predictions:
            sums = self.replica_map.on_rows(self.evaluator.evaluate, params, model_state, batch)
            return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        axes = self.layout.sharding(
            PartitionSpec(tuple(axis for axis in self.layout.parallel.batch_axes if axis != AXIS))
        )
        batch = {name: jax.lax.with_sharding_constraint(value, axes) for name, value in batch.items()}
        sums = self.replica_map.on_batch(self.evaluator.evaluate, params, model_state, batch)
        return jax.tree.map(lambda x: x[0], sums)  # equal on all replicas

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Batch, on_device: Callable[[Tree], Tree]
    ) -> tuple[State, dict[str, Any]]:
        """Updates the parameters once, per replica if replicas differ."""
        gradients, sums, model_state = self.gradients(state.params, state.model_state, batch)
        # each replica divided by its own token count: a shared gradient must be that of the whole batch
        gradients = _weight_by_tokens(
            self.trained_state.drop_frozen(gradients), sums["loss"][1], differ=self.exchange.replicas_differ
        )
        replica_mesh = self.trained_state.replica_mesh(update_specs(self.replica_gradients.layout))
        gradients, exchange_state = self.exchange.gradients(gradients, state.exchange, replica_mesh)

        total, count = sums["loss"] if self.exchange.replicas_differ else jax.tree.map(jnp.sum, sums["loss"])

        def update_replica(gradients: Tree, opt_state: Tree, params: Tree, loss: jax.Array):
            gradients = zero_frozen(self.replica_gradients.frozen, self.replica_gradients.layout, gradients)
            return update_params(
                self.replica_gradients.layout, optimizer, gradients, lambda: opt_state, params, loss=loss
            )

        update = jax.vmap(update_replica, spmd_axis_name=AXIS) if self.exchange.replicas_differ else update_replica
        params, opt_state, norm = update(gradients, on_device(state.optimizer), state.params, total / count)
        return State(state.step + 1, params, opt_state, model_state, exchange_state), {"sums": sums, "grad_norm": norm}

    def sync_round(self, step: int) -> int:
        """Returns the number of the exchange's sync round that ends a step; 0 for none."""
        return self.exchange.sync_round(step)

    def synchronize(self, state: State, step_metrics: dict[str, Any], sync_round: int) -> tuple[State, dict[str, Any]]:
        """Synchronizes the replicas; returns the state, and the metrics unchanged."""
        replicas = self.exchange.synchronize(*self.trained_state.read(state, sync_round))
        return self.trained_state.write(state, replicas), step_metrics

    def axes_without_traffic(self, *, sync_round: int) -> tuple[str, ...]:
        """Returns `data` for steps without a sync round."""
        return () if sync_round or not self.exchange.replicas_differ else (AXIS,)

    def scalar_metrics(self, raw_metrics: dict[str, Any]) -> dict[str, jax.Array]:
        """Returns means over the examples of all replicas, and the mean of their gradient norms.

        They are computed in a separate program, so that a step without a sync round sends nothing over `data`.
        """
        return self._scalars(raw_metrics)


def _weight_by_tokens(gradients: Tree, tokens: jax.Array, *, differ: bool) -> Tree:
    """Weights replicas' gradients of mean losses by their numbers of `tokens` [replica]."""
    share = jnp.ones_like(tokens) if differ else tokens / jnp.mean(tokens)

    def weight(x: jax.Array) -> jax.Array:
        weights, counts = (factor.reshape(-1, *(1,) * (x.ndim - 1)) for factor in (share, tokens > 0))
        return jnp.where(counts, x * weights.astype(x.dtype), 0)  # a mean over no tokens is nan

    return jax.tree.map(weight, gradients)


def _scalars(raw_metrics: dict[str, Any]) -> dict[str, jax.Array]:
    sums = jax.tree.map(partial(jnp.sum, axis=0), raw_metrics["sums"])
    extras = {name: value for name, value in raw_metrics.items() if name not in ("sums", "grad_norm")}
    return metrics(sums, jnp.mean(raw_metrics["grad_norm"])) | extras
