"""Computes the global model of replicas that differ: the one to evaluate, sample, export and start from.

exchange               global model
diloco, streaming      the anchor, which the outer optimizer updates
easgd                  the center
local, gossip          the mean of the replicas
ensemble, sweeps       none: they are several models
"""

import jax
import jax.numpy as jnp

from jaxpar.errors import JaxparError, refuse
from jaxpar.exchange.base import MEAN, NO_MODEL, Exchange, Tree, flatten_by_path


def merge_replicas(x: jax.Array) -> jax.Array:
    """Merges an array [replica, ...]: returns the mean of floating-point and complex numbers, else the first entry.

    Arrays of other dtypes, such as counts, are equal on all replicas; for random keys, any entry will do.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    return jnp.mean(x, axis=0, dtype=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)


def global_params(exchange: Exchange, params: Tree, exchange_state: Tree) -> Tree:
    """Returns the parameters of the global model.

    Args:
      exchange: The exchange of the replicas.
      params: The replicas' parameters; [replica, ...] if replicas differ.
      exchange_state: The state of the exchange. It omits frozen parameters, which are equal on all replicas.

    Raises:
      JaxparError: If each replica trains a model of its own.
    """
    if not exchange.replicas_differ:
        return params
    if exchange.global_model == NO_MODEL:
        raise several_models(exchange.name)
    shared, _ = ({}, None) if exchange.global_model == MEAN else flatten_by_path(exchange_state[exchange.global_model])
    flat, structure = flatten_by_path(params)
    return structure.unflatten([shared.get(path, merge_replicas(x)) for path, x in flat.items()])


def merge_replicas_of_model(
    exchange: Exchange, params: Tree, model_state: Tree, exchange_state: Tree
) -> tuple[Tree, Tree]:
    """Returns the parameters and the other state of the global model.

    Args:
      exchange: The exchange of the replicas; each replica has a state of its own.
      params: As for `global_params`.
      model_state: Other state of the replicas. [replica, ...].
      exchange_state: As for `global_params`.

    Raises:
      JaxparError: If each replica trains a model of its own.
    """
    return global_params(exchange, params, exchange_state), jax.tree.map(merge_replicas, model_state)


def several_models(name: str) -> JaxparError:
    """Returns the error for an exchange whose replicas train several models.

    Args:
      name: Name of the exchange.
    """
    return refuse(
        f"replicas of exchange {name!r}, which are several models",
        rule="a run exports one model only if its replicas train one model; several models are evaluated together",
        fix="another exchange: with diloco, easgd, local and gossip replicas train one model; "
        "or a run of its own with the settings of the best member",
    )
