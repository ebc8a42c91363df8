"""Numbers that a loss draws for its examples, split over devices as the examples are.

    key ─► jax.random.normal(key, [rows, ...]) ─► a generator ─► images ─► ...
                                               └─► split over the rows, here

Nothing else says so: noise follows from a key alone, which every device has. Without it each device would compute all
of what is made of noise; and a convolution of that is wrong where `fsdp` and `tensor` both split its kernel, by a fault
of XLA's (tests/test_xla_faults.py).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import PartitionSpec

from jaxpar.parallel.layout import Layout
from jaxpar.pipeline.jaxprs.dataflow import Traced, is_key, shapes


def split_over_examples(function: Callable, layout: Layout) -> Callable:
    """Returns a function whose draws are split over the batch where their dim 0 is that of examples, or a multiple.

    Args:
      function: A function of (parameters, model state, batch), whose draws are not inside of loops.
      layout: Where examples live.
    """
    axes = tuple(axis for axis in layout.batch_axes if layout.sizes[axis] > 1)
    if not axes:
        return function

    def placed(drawn: jax.Array) -> jax.Array:
        free = (PartitionSpec.UNCONSTRAINED,) * (drawn.ndim - 1)
        return jax.lax.with_sharding_constraint(drawn, layout.sharding(PartitionSpec(axes, *free)))

    def run(params: Any, model_state: Any, batch: Mapping[str, Any]) -> Any:
        traced = Traced(function, params, model_state, batch)
        rows = {value.shape[0] for value in batch.values() if value.shape}
        eqns = [new for eqn in traced.closed.jaxpr.eqns for new in _equations(eqn, rows, placed)]
        changed = ClosedJaxpr(traced.closed.jaxpr.replace(eqns=eqns), traced.closed.consts)
        leaves = jax.tree.leaves((params, model_state, batch))
        return jax.tree.unflatten(traced.outputs, jaxpr_as_fun(changed)(*leaves))

    return run


def _equations(eqn: JaxprEqn, rows: set[int], placed: Callable) -> Iterator[JaxprEqn]:
    """Yields an equation, and where it draws numbers for examples, what places them."""
    if not any(map(is_key, eqn.invars)) or any(map(is_key, eqn.outvars)):
        yield eqn
        return
    outs, more = list(eqn.outvars), []
    for index, (var, drawn) in enumerate(zip(eqn.outvars, shapes(eqn.outvars), strict=True)):
        if any(drawn.shape[:1] and drawn.shape[0] % count == 0 for count in rows):
            jaxpr = jax.make_jaxpr(placed)(drawn).jaxpr
            outs[index] = jaxpr.invars[0]
            last = jaxpr.eqns[-1]
            more += [*jaxpr.eqns[:-1], last.replace(outvars=[var], source_info=eqn.source_info)]
    yield eqn.replace(outvars=outs) if more else eqn
    yield from more
