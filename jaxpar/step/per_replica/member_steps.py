"""The steps of population members: each member trains on the whole batch, as it would alone.

    batch ─► to all members ─► gradients and update of each, with its own settings ─► every few steps: exchange.agree

A member whose numbers are not finite is not updated. The step's metrics are those of the best member; the metrics and
settings of each member are added as `loss/0`, `loss/1`, ...
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.exchange.population.population import Population
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Tree
from jaxpar.step.gradients import Batch, Gradients, metrics
from jaxpar.step.losses import Sums
from jaxpar.step.numerics import are_finite
from jaxpar.step.per_replica.replicas import PerReplica
from jaxpar.step.state import State
from jaxpar.step.unpipelined import Unpipelined

BEST = "best"  # metrics key: the index of the member with the lowest loss


class PopulationMembers(PerReplica):
    """Gradients and updates of the members of a population."""

    def __init__(self, layout: Layout, replica_gradients: Unpipelined, evaluator: Gradients):
        super().__init__(layout, replica_gradients, evaluator)
        self._scalars = jax.jit(_scalars)

    @property
    def population(self) -> Population:
        """The exchange, as a population."""
        return self.exchange  # pyright: ignore[reportReturnType]

    def gradients(self, params: Tree, model_state: Tree, batch: Batch) -> tuple[Tree, Sums, Tree]:
        """Returns gradients, sums and model state of each member, over all examples: [member, ...]."""
        return self.replica_map.on_batch(self.replica_gradients.gradients, params, model_state, batch)

    def evaluate(self, params: Tree, model_state: Tree, batch: Batch) -> Sums:
        """Returns the sums of each member, with names such as `loss/0`."""
        return _split_members(self.replica_map.on_batch(self.evaluator.evaluate, params, model_state, batch))

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Batch, on_device: Callable[[Tree], Tree]
    ) -> tuple[State, dict[str, Any]]:
        """Updates each member once."""
        new_state, raw_metrics = super().update(optimizer, state, batch, on_device)
        is_valid = jnp.isfinite(raw_metrics["grad_norm"]) & jax.vmap(are_finite)(new_state.params)

        def keep_valid(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(is_valid.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        params, opt_state, model_state = jax.tree.map(
            keep_valid,
            (new_state.params, new_state.optimizer, new_state.model_state),
            (state.params, on_device(state.optimizer), state.model_state),
        )
        total, count = raw_metrics["sums"]["loss"]
        watched = self.population.observe(new_state.exchange, total / count)
        # if nothing counts the loss is nan, which would rank worst for ever
        exchange_state = jax.tree.map(partial(jnp.where, jnp.all(count == 0)), new_state.exchange, watched)
        return State(new_state.step, params, opt_state, model_state, exchange_state), raw_metrics | {
            "settings": self.population.settings(opt_state)
        }

    def synchronize(self, state: State, step_metrics: dict[str, Any], sync_round: int) -> tuple[State, dict[str, Any]]:
        """Synchronizes the members; returns the state, and the metrics with the new settings."""
        state, step_metrics = super().synchronize(state, step_metrics, sync_round)
        settings = self.population.settings(state.optimizer) | self.population.round_metrics(state.exchange)
        return state, step_metrics | {"settings": settings}

    def evaluation_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Returns the means of the best member, its index, and the means of all members."""
        losses = {name: value for name, value in means.items() if name.startswith("loss/") and value == value}
        if not losses:
            return means
        best = min(losses, key=lambda name: losses[name]).removeprefix("loss")
        best_means = {name.removesuffix(best): value for name, value in means.items() if name.endswith(best)}
        return best_means | {BEST: float(best[1:])} | means


def _scalars(raw_metrics: dict[str, Any]) -> dict[str, jax.Array]:
    sums, norms = raw_metrics["sums"], raw_metrics["grad_norm"]
    losses = sums["loss"][0] / sums["loss"][1]
    best = jnp.argmin(jnp.where(jnp.isnan(losses), jnp.inf, losses))
    means = {name: total / count for name, (total, count) in sums.items()}
    extras = {name: value for name, value in raw_metrics.items() if name not in ("sums", "grad_norm", "settings")}
    best_metrics = metrics(jax.tree.map(lambda x: x[best], sums), norms[best])
    return best_metrics | {BEST: best} | extras | _split_members(means | raw_metrics["settings"])


def _split_members(stacked: dict[str, Any]) -> dict[str, Any]:
    """Splits trees [member, ...] into one entry per member, named `name/0`, `name/1`, ..."""

    def select_member(value: object, member: int) -> Any:
        return jax.tree.map(lambda x: x[member], value)

    members = len(jax.tree.leaves(stacked)[0])
    return {
        f"{name}/{member}": select_member(value, member) for name, value in stacked.items() for member in range(members)
    }
