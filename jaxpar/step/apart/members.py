"""Members of a population: each takes the steps that it would take alone, on all of the batch.

    batch ─► to all members ─► gradients and update of each, with its own settings ─► every so many steps agree

A member whose numbers are not finite stands still. What a step says of itself is what its best member says; that of
each is beside it, as `loss/0`, `loss/1`, ..., and its settings likewise.
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
from jaxpar.step.apart.replicas import Apart
from jaxpar.step.gradients import Batch, Gradients, metrics
from jaxpar.step.guard import are_finite
from jaxpar.step.losses import Sums
from jaxpar.step.state import State
from jaxpar.step.whole import Whole

BEST = "best"  # the member with the least loss, in a row of metrics


class Members(Apart):
    """The steps of the members of a population."""

    def __init__(self, layout: Layout, one: Whole, evaluated: Gradients):
        super().__init__(layout, one, evaluated)
        self._scalars = jax.jit(_scalars)

    @property
    def population(self) -> Population:
        """Who they are."""
        return self.exchange  # pyright: ignore[reportReturnType]

    def gradients(self, params: Tree, model_state: Tree, batch: Batch) -> tuple[Tree, Sums, Tree]:
        """Returns gradients, sums and model state of each member, of all examples: [member, ...]."""
        return self.each(self.one.gradients, rows=None)(params, model_state, batch)

    def evaluate(self, params: Tree, model_state: Tree, batch: Batch) -> Sums:
        """Returns the sums of each member, under names such as `loss/0`."""
        return _by_member(self.each(self.evaluated.evaluate, rows=None)(params, model_state, batch))

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Batch, on_device: Callable[[Any], Any]
    ) -> tuple[State, dict[str, Any]]:
        """Makes one update of each member."""
        made, found = super().update(optimizer, state, batch, on_device)
        good = jnp.isfinite(found["grad_norm"]) & jax.vmap(are_finite)(made.params)

        def stood(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(good.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        params, held, model_state = jax.tree.map(
            stood,
            (made.params, made.optimizer, made.model_state),
            (state.params, on_device(state.optimizer), state.model_state),
        )
        total, count = found["sums"]["loss"]
        watched = self.population.watched(made.exchange, total / count)
        # the loss of a step in which nothing counts is nan, and would be the worst for ever
        own = jax.tree.map(partial(jnp.where, jnp.all(count == 0)), made.exchange, watched)
        return State(made.step, params, held, model_state, own), found | {"settings": self.population.settings(held)}

    def agree(self, state: State, found: dict[str, Any], meeting: int) -> tuple[State, dict[str, Any]]:
        """Returns the state after a meeting, and the metrics with the settings of after it."""
        state, found = super().agree(state, found, meeting)
        said = self.population.settings(state.optimizer) | self.population.copies(state.exchange)
        return state, found | {"settings": said}

    def scored(self, means: dict[str, float]) -> dict[str, float]:
        """Returns what an evaluation says of each member, and first what it says of the best."""
        losses = {name: value for name, value in means.items() if name.startswith("loss/") and value == value}
        if not losses:
            return means
        best = min(losses, key=lambda name: losses[name]).removeprefix("loss")
        own = {name.removesuffix(best): value for name, value in means.items() if name.endswith(best)}
        return own | {BEST: float(best[1:])} | means


def _scalars(found: dict[str, Any]) -> dict[str, jax.Array]:
    sums, norms = found["sums"], found["grad_norm"]
    losses = sums["loss"][0] / sums["loss"][1]
    best = jnp.argmin(jnp.where(jnp.isnan(losses), jnp.inf, losses))
    means = {name: total / count for name, (total, count) in sums.items()}
    rest = {name: value for name, value in found.items() if name not in ("sums", "grad_norm", "settings")}
    own = metrics(jax.tree.map(lambda x: x[best], sums), norms[best])
    return own | {BEST: best} | rest | _by_member(means | found["settings"])


def _by_member(found: dict[str, Any]) -> dict[str, Any]:
    """Returns trees [member, ...] as one of each member, name to value."""

    def one(value: Any, member: int) -> Any:
        return jax.tree.map(lambda x: x[member], value)

    members = len(jax.tree.leaves(found)[0])
    return {f"{name}/{member}": one(value, member) for name, value in found.items() for member in range(members)}
