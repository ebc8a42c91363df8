"""The protocol `Gradients`: a step's interface to the code that differentiates its model.

    unpipelined        every device has all layers
    pipelined/         layers spread over stages; one update per step, or asynchronous updates during it
    stochastic_loss    wraps any of them, for a loss that takes a random key

To add a kind: implement `Gradients`, and choose it for its layouts in `gradient_kinds.py`. A kind with one update per
batch passes its gradients to `apply_gradients`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import refuse, user_code_errors
from jaxpar.optim import step_inputs
from jaxpar.optim.step_inputs import explain_static_arguments
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.state_specs import update_specs
from jaxpar.sharding.names import Tree
from jaxpar.step.checks.updates import CHAIN, TRACE_FIX, check_update
from jaxpar.step.gradient_norm import norm as norm_of
from jaxpar.step.gradient_norm import with_norm
from jaxpar.step.losses import Sums
from jaxpar.step.state import State

Batch = Mapping[str, jax.Array]


class Gradients(Protocol):
    """Differentiates a model and its loss on the devices of a layout. Every method is traced.

    Attributes:
      layout: The sharding of all arrays.
      updates: Number of weight updates per step.
      sync_every: Minimum number of steps between sync rounds (`synchronize`); 0 for none.
      notes: Sentences for a report.
    """

    layout: Layout
    updates: int = 1
    sync_every: int = 0
    notes: tuple[str, ...] = ()

    def gradients(self, params: Tree, model_state: Tree, batch: Batch) -> tuple[Tree, Sums, Tree]:
        """Returns the gradients of a batch's mean loss, the sums of its loss, and the new model state."""
        ...

    def global_model(self, params: Tree, model_state: Tree, exchange_state: Tree) -> tuple[Tree, Tree]:
        """Returns parameters and model state of the global model, which is the one to evaluate.

        Args:
          params: The evaluation parameters, after the optimizer's transformation.
          model_state: The model state of the training state.
          exchange_state: The state of the exchange.
        """
        return params, model_state

    def evaluate(self, params: Tree, model_state: Tree, batch: Batch) -> Sums:
        """Returns a batch's loss sums for the results of `global_model`: forward only, without dropout."""
        ...

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Batch, on_device: Callable[[Tree], Tree]
    ) -> tuple[State, dict[str, jax.Array]]:
        """Runs a step: one update by the gradients of the whole batch (`apply_gradients`), or several updates.

        Args:
          optimizer: The optax chain.
          state: The state before the step.
          batch: Name to array; dim 0 is examples.
          on_device: Moves an offloaded optimizer state to device memory.

        Returns:
          The state after the step, and its metrics.
        """
        ...

    def sync_round(self, step: int) -> int:
        """Returns the number, from 1, of the sync round that ends this step; 0 for none."""
        return 0

    def synchronize(self, state: State, step_metrics: dict[str, Any], sync_round: int) -> tuple[State, dict[str, Any]]:
        """Synchronizes the replicas of a state; returns the state and the step's metrics."""
        return state, step_metrics

    def axes_without_traffic(self, *, sync_round: int) -> tuple[str, ...]:
        """Returns the mesh axes without traffic in a step that ends with this sync round (0: with none)."""
        return ()

    def scalar_metrics(self, raw_metrics: dict[str, Any]) -> dict[str, jax.Array]:
        """Converts the metrics of an update to scalars. Called outside of the compiled step, unless that is guarded."""
        return raw_metrics

    def evaluation_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Computes the evaluation metrics from the means over all examples."""
        return means


def check_sync_round(gradients: Gradients, sync_round: int) -> None:
    """Raises a `JaxparError` unless 0 or the number of one of the exchange's sync rounds is given."""
    if not sync_round:
        return
    # the kinds of sync rounds repeat with the period, after a first period that may differ
    kinds = sorted({gradients.sync_round(number) for number in range(1, 2 * gradients.sync_every + 2)} - {0})
    if sync_round not in kinds:
        known = f"this one has {', '.join(map(str, kinds))}" if kinds else "replicas of this step have none"
        fix = f"sync_round={kinds[0]}" if kinds else 'leave sync_round out, or jp.Exchange("diloco", every=20)'
        raise refuse(
            f"sync_round={sync_round!r:.60}", rule=f"the number of a sync round of the exchange; {known}", fix=fix
        )


def apply_gradients(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    state: State,
    results: tuple[Tree, Sums, Tree],
    on_device: Callable[[Tree], Tree],
) -> tuple[State, dict[str, jax.Array]]:
    """Applies the results of `Gradients.gradients`; returns the new state and the metrics."""
    gradients, sums, model_state = results
    opt_state, (total, count) = (lambda: on_device(state.optimizer)), sums["loss"]
    params, new_opt_state, norm = update_params(
        layout, optimizer, gradients, opt_state, state.params, loss=total / count
    )
    return State(state.step + 1, params, new_opt_state, model_state), metrics(sums, norm)


def update_params(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    gradients: Tree,
    read_opt_state: Callable[[], Any],
    params: Tree,
    *,
    loss: jax.Array,
) -> tuple[Tree, Any, jax.Array]:
    """Updates the parameters; returns them, the optimizer state, and the gradient norm.

    Args:
      layout: The sharding of all arrays.
      optimizer: The optax chain.
      gradients: The gradients of all parameters, in the dtype of each or in fewer bits.
      read_opt_state: Returns the optimizer state in device memory.
      params: The stored parameters.
      loss: The mean loss, for an optimizer that takes it.
    """
    if layout.parallel.stage in (1, 2):  # the optimizer updates the stored shards
        gradients = constrain_tree(layout, gradients, update_specs(layout))
    if layout.devices > 1:
        # the norm waits for the last gradient: otherwise XLA sends the head's together with that of the residual
        # stream, for which the whole backward pass then waits, and which waits for the head's sum over `data`
        gradients = jax.lax.optimization_barrier(gradients)
    # after the barrier, which stores its operands: the norm and the optimizer read gradients of 16 bits, and cast them
    gradients = jax.tree.map(lambda gradient, param: gradient.astype(param.dtype), gradients, params)
    norm, opt_state = norm_of(layout, gradients), read_opt_state()

    def update(gradients: Tree) -> tuple[Tree, Any]:
        code_guard = user_code_errors("the optimizer's update", rule=CHAIN, fix=TRACE_FIX)
        with code_guard, explain_static_arguments(), step_inputs.explain_missing_arguments():
            updates, after = step_inputs.update(optimizer, gradients, opt_state, params, loss)
        # Python numbers in the state become arrays
        after = jax.tree.map(lambda x: x if hasattr(x, "shape") else jnp.asarray(x), after)
        check_update(updates, after, params=params, old_state=opt_state)
        return updates, after

    updates, opt_state = with_norm(update, gradients, norm)
    return optax.apply_updates(params, updates), opt_state, norm


def metrics(sums: Sums, norm: jax.Array) -> dict[str, jax.Array]:
    """Returns the metrics of a step: each sum divided by its count, the number of tokens, the gradient norm.

    If no token counts, the loss is nan (0/0), `tokens` is 0, and gradients are zero.
    """
    means = {name: total / count for name, (total, count) in sums.items()}
    return means | {"tokens": sums["loss"][1], "grad_norm": norm}


def constrain_tree(layout: Layout, tree: Tree, specs: Tree) -> Tree:
    """Constrains a tree of gradients or parameters to specs, unless the layout shards no parameter."""
    if layout.parallel.stage == 0 and layout.sizes["tensor"] == 1:
        return tree
    return jax.tree.map(lambda x, spec: jax.lax.with_sharding_constraint(x, layout.sharding(spec)), tree, specs)
