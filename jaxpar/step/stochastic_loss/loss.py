"""Recognizes losses that take a random key, and passes them a key."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import PartitionSpec

from jaxpar.jaxprs.dataflow import Traced, is_key, shapes
from jaxpar.parallel.layout import Layout


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
