"""The protocol of gradients: what a step asks of whatever differentiates its model.

    whole         layers all on every device
    pipelined/    layers spread over stages, one update a step, or several in the middle of its table
    keyed/        any of them, for a loss that wants a random key

To add a kind: a class that is a `Gradients`, and the layouts that it is for in `kinds.py`. A kind that makes one update
of the gradients of the whole batch hands these to `one_update`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import users_code
from jaxpar.optim import extra
from jaxpar.optim.injected import naming_static_arguments
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Tree
from jaxpar.step.checks.updates import CHAIN, TRACED, check_update
from jaxpar.step.losses import Sums
from jaxpar.step.norm.known import with_norm
from jaxpar.step.norm.of_shards import norm as norm_of
from jaxpar.step.state import State

Batch = Mapping[str, jax.Array]


class Gradients(Protocol):
    """A model and its loss, differentiated where the arrays of a layout are. Every method is traced.

    Attributes:
      layout: Where arrays live.
      updates: How often the weights change in a step.
      every: Steps from one `agree` to the next, at least; 0 for none.
      notes: What the reader of an inspection should know of it.
    """

    layout: Layout
    updates: int = 1
    every: int = 0
    notes: tuple[str, ...] = ()

    def gradients(self, params: Tree, model_state: Tree, batch: Batch) -> tuple[Tree, Sums, Tree]:
        """Returns gradients of the mean loss of a batch, the sums of its loss, and the model state afterwards."""
        ...

    def global_model(self, params: Tree, model_state: Tree, own: Tree) -> tuple[Tree, Tree]:
        """Returns parameters and model state that are evaluated: those of the one model that replicas train.

        Args:
          params: As the optimizer says that they are evaluated.
          model_state: Of the state.
          own: The state of the exchange.
        """
        return params, model_state

    def evaluate(self, params: Tree, model_state: Tree, batch: Batch) -> Sums:
        """Returns the sums of a batch by what `global_model` returns: forward alone, without dropout."""
        ...

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Batch, on_device: Callable[[Any], Any]
    ) -> tuple[State, dict[str, jax.Array]]:
        """Makes a step: one update by the gradients of the whole batch (`one_update`), or as many as there are.

        Args:
          optimizer: The optax chain.
          state: Before the step.
          batch: Name to array, dim 0 the examples.
          on_device: Brings an optimizer state that may be in host memory to where updates are made.

        Returns:
          The state after it, and its metrics.
        """
        ...

    def meeting(self, step: int) -> int:
        """Returns which meeting of replicas a step of this number ends with, from 1; 0 for none."""
        return 0

    def agree(self, state: State, found: dict[str, Any], meeting: int) -> tuple[State, dict[str, Any]]:
        """Returns a state whose replicas have come to agree at such a meeting, and the metrics of its step."""
        return state, found

    def silent(self, *, exchanges: int) -> tuple[str, ...]:
        """Returns the mesh axes over which a step sends nothing, one that ends with such a meeting, or 0 for none."""
        return ()

    def told(self, found: dict[str, Any]) -> dict[str, jax.Array]:
        """Returns the metrics of an update as scalars. Called outside of the compiled step, unless that guards."""
        return found

    def scored(self, means: dict[str, float]) -> dict[str, float]:
        """Returns what an evaluation says, of the means over its examples."""
        return means


def one_update(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    state: State,
    made: tuple[Tree, Sums, Tree],
    on_device: Callable[[Any], Any],
) -> tuple[State, dict[str, jax.Array]]:
    """Returns a state after one update by what `Gradients.gradients` made of it, and the metrics of that."""
    gradients, sums, model_state = made
    held, (total, count) = (lambda: on_device(state.optimizer)), sums["loss"]
    params, kept, norm = updated(layout, optimizer, gradients, held, state.params, loss=total / count)
    return State(state.step + 1, params, kept, model_state), metrics(sums, norm)


def updated(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    gradients: Tree,
    held: Callable[[], Any],
    params: Tree,
    *,
    loss: jax.Array,
) -> tuple[Tree, Any, jax.Array]:
    """Returns parameters and optimizer state after an update, and the norm of the gradients.

    Args:
      layout: Where arrays live.
      optimizer: The optax chain.
      gradients: As they were made.
      held: Returns the optimizer state where updates are made.
      params: As stored.
      loss: The mean loss that they are of, for an optimizer that takes it.
    """
    if layout.parallel.stage in (1, 2):  # the optimizer works on the shards that are stored
        gradients = constrained(layout, gradients, layout.updated)
    if layout.devices > 1:
        # sums of squares for a norm wait for the last gradient: else XLA sends the head's together with the gradient of
        # the stream, which all layers' backward pass then waits for, and which waits for the head's sum over `data`
        gradients = jax.lax.optimization_barrier(gradients)
    norm, kept = norm_of(layout, gradients), held()

    def update(gradients: Tree) -> tuple[Tree, Any]:
        refused = users_code("the optimizer's update", rule=CHAIN, fix=TRACED)
        with refused, naming_static_arguments(), extra.refusing_what_is_missing():
            updates, after = extra.update(optimizer, gradients, kept, params, loss)
        # a number of Python's is an array of the state, too
        after = jax.tree.map(lambda x: x if hasattr(x, "shape") else jnp.asarray(x), after)
        check_update(updates, after, params=params, held=kept)
        return updates, after

    updates, kept = with_norm(update, gradients, norm)
    return optax.apply_updates(params, updates), kept, norm


def metrics(sums: Sums, norm: jax.Array) -> dict[str, jax.Array]:
    """Returns what a step says of itself: each sum by its count, how many tokens counted, the norm of the gradients.

    Where nothing counts the loss is 0/0, which is nan, `tokens` is 0, and the update was made by gradients of zero.
    """
    means = {name: total / count for name, (total, count) in sums.items()}
    return means | {"tokens": sums["loss"][1], "grad_norm": norm}


def constrained(layout: Layout, tree: Tree, specs: Tree) -> Tree:
    """Returns a tree of gradients or parameters where the specs say, but where the layout splits none of them."""
    if layout.parallel.stage == 0 and layout.sizes["tensor"] == 1:
        return tree
    return jax.tree.map(lambda x, spec: jax.lax.with_sharding_constraint(x, layout.sharding(spec)), tree, specs)
