"""Random keys of the layers of a list that keep none themselves: each layer draws with those of its own place.

    on one device   layer 3 draws with keys that Linen makes of the model's key and of the layer's name, `h_3`
    on a stage      layer 3 runs by layer 0's program ──► with the keys that layer 3's own program makes

Keys follow from the model's state alone. So they are made before the layers, and go to the stages as what each layer
has of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpar.pipeline.jaxprs.dataflow import Traced, function, is_key, needed


def made(layers: Callable, *args: Any) -> list[jax.Array]:
    """Returns the keys that layers draw with, in the order in which a layer reads them. Shape [layers] each.

    Args:
      layers: A function of args that returns a list: what each layer returns.
      *args: Trees of arrays.
    """
    traced = Traced(layers, *args)
    jaxpr = traced.flat.jaxpr
    outs = jax.tree.unflatten(traced.outputs, jaxpr.outvars)
    each = [_read(jaxpr, jax.tree.leaves(out))[1] for out in outs]
    wanted = [var for keys in each for var in keys]
    eqns, _ = needed(jaxpr.eqns, wanted)
    keys = function(jaxpr, traced.flat.consts, jaxpr.invars, eqns, wanted)(*jax.tree.leaves(args))
    return [jnp.stack(keys[i :: len(each[0])]) for i in range(len(each[0]))]


def drawing_with(keys: Sequence[jax.Array], layer: Callable[[Any], Any], x: Any) -> Any:
    """Returns a layer of x that draws with these keys in place of those that it would make."""
    if not keys:
        return layer(x)
    traced = Traced(layer, x)
    jaxpr = traced.flat.jaxpr
    eqns, own = _read(jaxpr, jaxpr.outvars)
    run = function(jaxpr, traced.flat.consts, [*jaxpr.invars, *own], eqns, jaxpr.outvars)
    return jax.tree.unflatten(traced.outputs, run(*jax.tree.leaves(x), *keys))


def makes_keys(eqn: JaxprEqn) -> bool:
    """Returns whether all that an equation makes are random keys."""
    return all(map(is_key, eqn.outvars))


def _read(jaxpr: Jaxpr, outs: Sequence[Any]) -> tuple[list[JaxprEqn], list[Var]]:
    """Returns the equations that make these outputs of keys that are there, and these keys in order."""
    eqns, _ = needed([eqn for eqn in jaxpr.eqns if not makes_keys(eqn)], outs)
    read = dict.fromkeys(var for eqn in eqns for var in eqn.invars if not isinstance(var, Literal) and is_key(var))
    return eqns, list(read)
