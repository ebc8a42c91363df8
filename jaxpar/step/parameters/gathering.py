"""The parameters that a step computes with, where ZeRO's stages 1 and 2 keep shards of them between steps.

    stored ─► cast ─► gathered over fsdp ─► read by every microbatch
              └───── once per step ─────┘

A parameter travels in the dtype that products run in if the model does nothing but cast it to that. One that the model
also reads otherwise, in a penalty on its size say, travels as it is stored. One that is cast in several places, or in
every turn of a loop, is float32 again after it has travelled: its gradient is a sum, and a sum is taken in float32.
Stage 3 gathers where a layer runs (`Layout.use`), and pipelines around their table (`Shardings`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var

from jaxpar.parallel.gather import cut
from jaxpar.parallel.layout import Layout
from jaxpar.pipeline.jaxprs.dataflow import Scan, Traced, needed, variables
from jaxpar.sharding.names import SCOPE, Tree, path_of


@dataclass(frozen=True)
class Reads:
    """Uses of a parameter in a program.

    Attributes:
      casts: How often it is cast to the dtype that products run in; 2 stands for every turn of a loop.
      others: How often it is read in another way.
    """

    casts: int = 0
    others: int = 0


def gathered(layout: Layout, params: Tree, forward: Callable, *known: Any, dtype: Any) -> Tree:
    """Returns the parameters as a step of ZeRO's stages 1 and 2 computes with them: whole over `fsdp`.

    Args:
      layout: Where they are stored and used.
      params: As stored.
      forward: A function of (params, *known): what the step does with them.
      *known: As it takes them.
      dtype: What products run in, or None for what the parameters are stored in.
    """
    found = {} if dtype is None else reads(forward, params, *known, dtype=dtype)

    def one(keys, value: jax.Array) -> jax.Array:
        path = path_of(keys)
        place, read = layout.placements[path], found.get(path, Reads(others=1))
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            floats = jnp.issubdtype(value.dtype, jnp.floating)  # 8 bits travel as they are
            light = value.astype(dtype) if read.casts and not read.others and floats else value
            # else XLA may gather float32 and cast what arrives
            light = jax.lax.with_sharding_constraint(light, layout.sharding(place.stored))
            read_as = cut(light, layout.sharding(place.used), layout.sharding(place.whole))
            return read_as if read.casts < 2 else read_as.astype(value.dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def reads(forward: Callable, params: Tree, *known: Any, dtype: Any) -> dict[str, Reads]:
    """Returns what a function of (params, *known) does with each of the parameters, for all that it returns."""
    traced = Traced(forward, params, *known)
    jaxpr = traced.flat.jaxpr
    counted = _count(jaxpr, jaxpr.outvars, jnp.dtype(dtype))
    keys, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(traced.inputs, jaxpr.invars)[0])
    return {path_of(key): Reads(counted[var, True], counted[var, False]) for key, var in keys}


def _count(jaxpr: Jaxpr, outs: Iterable, dtype: Any) -> Counter[tuple[Var, bool]]:
    """Returns how often each variable is (cast to a dtype or not) for what these outputs follow from."""
    found: Counter = Counter((var, False) for var in variables(outs))
    eqns, live = needed(jaxpr.eqns, outs)
    for eqn in eqns:
        name = eqn.primitive.name
        if name == "scan":
            scan = Scan(eqn)
            ends = [var for i, var in enumerate(eqn.outvars) if i < scan.carry or var in live]
            inner = [scan.body.outvars[eqn.outvars.index(var)] for var in ends]
            counted = _count(scan.body, inner, dtype)
            for i, (outer, own) in enumerate(zip(eqn.invars, scan.body.invars, strict=True)):
                if isinstance(outer, Literal):
                    continue
                carried = scan.consts <= i < scan.consts + scan.carry
                found[outer, True] += counted[own, True] * (2 if i < scan.consts else 1) * (not carried)
                found[outer, False] += counted[own, False] + carried
        else:
            cast = name == "convert_element_type" and eqn.params["new_dtype"] == dtype
            found.update((var, cast) for var in variables(eqn.invars))
    return found
