"""The one model that replicas which differ have trained: what is evaluated, sampled, exported and started from.

exchange               global model
diloco, streaming      the anchor, which the outer optimizer updates
easgd                  the center
local, gossip          the mean of the replicas
ensemble, sweeps       none: they are several models
"""

import jax
import jax.numpy as jnp

from jaxpar.errors import JaxparError, refuse
from jaxpar.exchange.base import MEAN, NO_MODEL, Exchange, Tree, by_path


def merge_replicas(x: jax.Array) -> jax.Array:
    """Returns one array of those of replicas [replica, ...]: the mean of floating-point numbers, else the first.

    What is no floating-point number, such as a count, is equal on all replicas; of random keys any one will do.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x[0]
    return jnp.mean(x, axis=0, dtype=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)


def global_params(exchange: Exchange, params: Tree, own: Tree) -> Tree:
    """Returns the parameters of the global model.

    Args:
      exchange: By which replicas meet.
      params: Their parameters: [replica, ...] each where replicas differ.
      own: The state of the exchange. A parameter that it lacks, as it is frozen, is equal on all replicas.

    Raises:
      JaxparError: If replicas are several models.
    """
    if not exchange.differ:
        return params
    if exchange.global_model == NO_MODEL:
        raise several_models(exchange.name)
    shared, _ = ({}, None) if exchange.global_model == MEAN else by_path(own[exchange.global_model])
    flat, structure = by_path(params)
    return structure.unflatten([shared.get(path, merge_replicas(x)) for path, x in flat.items()])


def several_models(name: str) -> JaxparError:
    """Returns the refusal to take one model of several.

    Args:
      name: Of the exchange.
    """
    return refuse(
        f"replicas of exchange {name!r}, which are several models",
        rule="one model leaves a run of one model: these are evaluated together, or beside each other",
        fix="another exchange: with diloco, easgd, local and gossip replicas train one model; "
        "or a run of its own with the settings of the best member",
    )
