"""Stochastic losses, `loss(model, batch, key)`, recognized by their signature, and their gradients.

    seed ─► step ─► microbatch ─► key     in training
    seed ───────────────────────► key     in evaluation: the same key for every batch, after every step

On any layout and any number of processes, the key draws the same numbers for the rows of a microbatch as on one device.
Each microbatch has its own key, in a pipeline and with `accumulate`. Replicas that compute separately (in a pipeline,
and between sync rounds) fold their number into the key, as for dropout.

    {"model": model_state, "key": key} ─► each microbatch, replica and stage, like the model state

The wrapped `Gradients` needs no change: the key is part of the model state, which microbatches pass on. To pass a loss
another value that changes between steps: add an entry in `carry_key`, like the key.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import PartitionSpec

from jaxpar.exchange.base import NO_MODEL
from jaxpar.jaxprs.dataflow import Traced, is_key, shapes
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Compute, Tree, Use
from jaxpar.step.gradients import Gradients
from jaxpar.step.losses import Sums
from jaxpar.step.state import State, replicate_model_state

AFTER = 0x7FFF  # folded into a microbatch's key to make the next one's, as for Linen's own keys


def key_parameter(loss: Callable) -> inspect.Parameter | None:
    """Returns the parameter of a loss that takes a random key, or None.

    It is the parameter named `key`, or the third required parameter, if there are exactly three.

    >>> key_parameter(lambda model, batch: 0), str(key_parameter(lambda model, batch, z_rng: 0))
    (None, 'z_rng')
    """
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a C function without a signature
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if "key" in parameters and parameters["key"].kind not in variadic:
        return parameters["key"]
    required = [p for p in parameters.values() if p.default is p.empty and p.kind not in variadic]
    return required[2] if len(required) == 3 else None


def with_key(loss: Callable, key: jax.Array) -> Callable[[Any, Any], Any]:
    """Returns a loss of (model, batch), with the key bound if the loss takes one."""
    parameter = key_parameter(loss)
    if parameter is None:
        return loss
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return lambda model, batch: loss(model, batch, key)
    return partial(loss, **{parameter.name: key})


@dataclass(frozen=True)
class StochasticLoss:
    """A loss of (model, batch) that gets its key from the bound model.

    Attributes:
      loss: Maps (model, batch, key) to sums and counts.
    """

    loss: Callable

    def __call__(self, bound: Any, batch: Mapping[str, Any]) -> Any:
        """Calls the loss with the model and the key in `bound`."""
        return with_key(self.loss, bound.key)(bound.model, batch)


def traceable_loss(loss: Callable) -> Callable[[Any, Any], Any]:
    """Returns a loss of (model, batch) for tracing only, with an arbitrary key."""
    return with_key(loss, jax.random.key(0))


# Shards the random numbers that a loss draws for its examples over the batch axes, as the examples are.
#
#     key ─► jax.random.normal(key, [rows, ...]) ─► a generator ─► images ─► ...
#                                                └─► split over the rows, here
#
# No other constraint does: noise depends only on a key, which every device has. Without it each device would compute
# everything derived from the noise unsharded; and an XLA bug makes a convolution of it wrong if `fsdp` and `tensor`
# both split its kernel (tests/hlo/test_xla_faults.py).


def split_over_examples(function: Callable, layout: Layout) -> Callable:
    """Wraps a function to shard its random draws over the batch axes if dim 0 is a multiple of the batch size.

    Args:
      function: A function of (parameters, model state, batch) that draws outside of loops.
      layout: The layout of the batch.
    """
    axes = tuple(axis for axis in layout.parallel.batch_axes if layout.sizes[axis] > 1)
    if not axes:
        return function

    def shard_draws(drawn: jax.Array) -> jax.Array:
        free = (PartitionSpec.UNCONSTRAINED,) * (drawn.ndim - 1)
        return jax.lax.with_sharding_constraint(drawn, layout.sharding(PartitionSpec(axes, *free)))

    def run(params: Any, model_state: Any, batch: Mapping[str, Any]) -> Any:
        traced = Traced(function, params, model_state, batch)
        rows = {value.shape[0] for value in batch.values() if value.shape}
        eqns = [new_eqn for eqn in traced.closed.jaxpr.eqns for new_eqn in _equations(eqn, rows, shard_draws)]
        rewritten = ClosedJaxpr(traced.closed.jaxpr.replace(eqns=eqns), traced.closed.consts)
        leaves = jax.tree.leaves((params, model_state, batch))
        return jax.tree.unflatten(traced.outputs, jaxpr_as_fun(rewritten)(*leaves))

    return run


def _equations(eqn: JaxprEqn, rows: set[int], shard_draws: Callable) -> Iterator[JaxprEqn]:
    """Yields an equation, followed by a sharding constraint if it draws numbers for examples."""
    if not any(map(is_key, eqn.invars)) or any(map(is_key, eqn.outvars)):
        yield eqn
        return
    outs, constraints = list(eqn.outvars), []
    for index, (var, shape) in enumerate(zip(eqn.outvars, shapes(eqn.outvars), strict=True)):
        if any(shape.shape[:1] and shape.shape[0] % count == 0 for count in rows):
            jaxpr = jax.make_jaxpr(shard_draws)(shape).jaxpr
            outs[index] = jaxpr.invars[0]
            constraint = jaxpr.eqns[-1]
            constraints += [*jaxpr.eqns[:-1], constraint.replace(outvars=[var], source_info=eqn.source_info)]
    yield eqn.replace(outvars=outs) if constraints else eqn
    yield from constraints


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
