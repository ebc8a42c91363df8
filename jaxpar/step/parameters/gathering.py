"""Gathers parameters over fsdp once per step, in ZeRO stages 1 and 2, which store shards between steps.

    stored ─► cast ─► gathered over fsdp ─► read by every microbatch
              └───── once per step ─────┘

A parameter is sent in the matmul dtype if the model only casts it to that dtype, and as stored if the model also reads
it otherwise, e.g. in a weight penalty. If the model casts it in several places, or in every turn of a loop, it becomes
float32 again after the gather, so that its gradient is summed in float32. Stage 3 gathers where a layer runs
(`Layout.use`), and pipelines gather before their table (`Shardings`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var

from jaxpar.jaxprs.dataflow import Scan, Traced, needed_equations, variables
from jaxpar.parallel.gather import reshard_padded
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import SCOPE, Tree, path_of


@dataclass(frozen=True)
class Reads:
    """Counts of a parameter's uses in a program.

    Attributes:
      casts: Casts to the matmul dtype; a cast in every turn of a loop counts 2.
      other_reads: Other reads.
    """

    casts: int = 0
    other_reads: int = 0


def gather_params(layout: Layout, params: Tree, forward: Callable, *inputs: Any, dtype: Any) -> Tree:
    """Gathers the parameters over `fsdp`, for ZeRO stages 1 and 2.

    Args:
      layout: Their shardings, stored and used.
      params: The stored parameters.
      forward: A function of (params, *known) that reads the parameters as the step does.
      *known: Its other arguments.
      dtype: The matmul dtype, or None for the stored dtype.
    """
    uses = {} if dtype is None else count_reads(forward, params, *inputs, dtype=dtype)

    def one(keys, value: jax.Array) -> jax.Array:
        path = path_of(keys)
        place, use = layout.placements[path], uses.get(path, Reads(other_reads=1))
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            floats = jnp.issubdtype(value.dtype, jnp.floating)  # 8-bit integers are sent as stored
            wire_value = value.astype(dtype) if use.casts and not use.other_reads and floats else value
            # otherwise XLA may gather float32 and cast afterwards
            wire_value = jax.lax.with_sharding_constraint(wire_value, layout.sharding(place.stored))
            read_as = reshard_padded(wire_value, layout.sharding(place.used), layout.sharding(place.whole))
            return read_as if use.casts < 2 else read_as.astype(value.dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def count_reads(forward: Callable, params: Tree, *inputs: Any, dtype: Any) -> dict[str, Reads]:
    """Counts the uses of each parameter in a function of (params, *known)."""
    traced = Traced(forward, params, *inputs)
    jaxpr = traced.flat.jaxpr
    counts = _count(jaxpr, jaxpr.outvars, jnp.dtype(dtype))
    keys, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(traced.inputs, jaxpr.invars)[0])
    return {path_of(key): Reads(counts[var, True], counts[var, False]) for key, var in keys}


def _count(jaxpr: Jaxpr, outs: Iterable, dtype: Any) -> Counter[tuple[Var, bool]]:
    """Counts reads of (variable, whether it is a cast to `dtype`) in the equations that these outputs depend on."""
    counts: Counter = Counter((var, False) for var in variables(outs))
    eqns, live = needed_equations(jaxpr.eqns, outs)
    for eqn in eqns:
        name = eqn.primitive.name
        if name == "scan":
            scan = Scan(eqn)
            live_outs = [var for i, var in enumerate(eqn.outvars) if i < scan.carry or var in live]
            inner = [scan.body.outvars[eqn.outvars.index(var)] for var in live_outs]
            inner_counts = _count(scan.body, inner, dtype)
            for i, (outer_var, inner_var) in enumerate(zip(eqn.invars, scan.body.invars, strict=True)):
                if isinstance(outer_var, Literal):
                    continue
                carried = scan.consts <= i < scan.consts + scan.carry
                counts[outer_var, True] += inner_counts[inner_var, True] * (2 if i < scan.consts else 1) * (not carried)
                counts[outer_var, False] += inner_counts[inner_var, False] + carried
        else:
            cast = name == "convert_element_type" and eqn.params["new_dtype"] == dtype
            counts.update((var, cast) for var in variables(eqn.invars))
    return counts
