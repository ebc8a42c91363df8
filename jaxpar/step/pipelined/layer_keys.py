"""Random keys for layers of a list that store none: each layer draws with the keys of its own position.

    on one device   layer 3 draws with keys that Linen derives from the model's key and the layer's name, `h_3`
    on a stage      layer 3 runs layer 0's program ──► with the keys that layer 3's own program makes

Keys depend only on the model state. So they are computed before the layers, and passed to the stages as per-layer
values.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpar.jaxprs.dataflow import Traced, is_key, needed_equations, subfunction


def compute_keys(layers: Callable, *args: Any) -> list[jax.Array]:
    """Returns the keys that the layers draw with, in the order in which a layer reads them. Shape [layers] each.

    Args:
      layers: A function of args that returns the list of layer outputs.
      *args: Trees of arrays.
    """
    traced = Traced(layers, *args)
    jaxpr = traced.flat.jaxpr
    outs = jax.tree.unflatten(traced.outputs, jaxpr.outvars)
    layer_keys = [_read(jaxpr, jax.tree.leaves(out))[1] for out in outs]
    key_vars = [var for keys in layer_keys for var in keys]
    eqns, _ = needed_equations(jaxpr.eqns, key_vars)
    keys = subfunction(jaxpr, traced.flat.consts, jaxpr.invars, eqns, key_vars)(*jax.tree.leaves(args))
    return [jnp.stack(keys[i :: len(layer_keys[0])]) for i in range(len(layer_keys[0]))]


def run_with_keys(keys: Sequence[jax.Array], layer: Callable[[Any], Any], x: Any) -> Any:
    """Runs a layer on x with these keys in place of those that it would make."""
    if not keys:
        return layer(x)
    traced = Traced(layer, x)
    jaxpr = traced.flat.jaxpr
    eqns, key_vars = _read(jaxpr, jaxpr.outvars)
    run = subfunction(jaxpr, traced.flat.consts, [*jaxpr.invars, *key_vars], eqns, jaxpr.outvars)
    return jax.tree.unflatten(traced.outputs, run(*jax.tree.leaves(x), *keys))


def makes_keys(eqn: JaxprEqn) -> bool:
    """Whether all outputs of an equation are random keys."""
    return all(map(is_key, eqn.outvars))


def _read(jaxpr: Jaxpr, outs: Sequence[Any]) -> tuple[list[JaxprEqn], list[Var]]:
    """Returns the equations that compute these outputs from given keys, and these keys in order."""
    eqns, _ = needed_equations([eqn for eqn in jaxpr.eqns if not makes_keys(eqn)], outs)
    key_vars = dict.fromkeys(var for eqn in eqns for var in eqn.invars if not isinstance(var, Literal) and is_key(var))
    return eqns, list(key_vars)
