"""Data parallelism: replicas of the parameters with different examples, synchronized by an exchange.

If XLA all-reduces gradients in every step, `sharding.py` prices that together with `fsdp`, as both overlap with the
same computation. The traffic and state of any other exchange are priced here: the traffic of a sync round is fully
exposed, and averaged over the steps between rounds.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxpar.mesh.collective import ShardShape
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Style
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.layer_bytes import stage_parameters
from jaxpar.plan.model.shape import CountedModel, Shape
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.techniques.base import PlanTechnique, Work


def overlapped_seconds(
    work: Work, candidate: Candidate, hardware: Hardware, software: SoftwareModel
) -> Mapping[str, Any]:
    """Returns the average seconds per step of the traffic between replicas."""
    exchange = software.exchange
    if not exchange.per_replica:
        return {}

    def seconds(parameters: float, replicas: int, stride: int) -> float:
        total = 0.0
        for send in exchange.traffic(_part(parameters), replicas):
            source = send.collective
            if source.kind == "collective-permute":
                time = hardware.send(source.payload, stride, replicas)
            else:
                time = hardware.gather(source.payload, replicas, stride) * (2 if source.kind == "all-reduce" else 1)
            total += (source.times or 1) * float(time) / send.every
        return total

    return {
        "exchange": _price_each(seconds, work.parameters / candidate.fsdp, candidate.data, candidate.stride("data"))
    }


def exchange_state(
    model: CountedModel, candidate: Candidate, software: SoftwareModel, recipe: Recipe
) -> Mapping[str, Any]:
    """Returns a device's bytes of the exchange's state. Of arrays with a replica dim, it holds its replica's entry."""
    exchange = software.exchange
    if not exchange.per_replica:
        return {}
    import jax

    count = stage_parameters(model, candidate, "last") if isinstance(model, Shape) else model.parameters

    def size(parameters: float, replicas: int) -> float:
        part = {path: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for path, entry in _part(parameters).items()}
        leaves = jax.tree.leaves(jax.eval_shape(lambda params: exchange.init(params, replicas), part))
        per_replica = (replicas, *part["parameters"].shape)
        return sum(leaf.size * leaf.dtype.itemsize / (replicas if leaf.shape == per_replica else 1) for leaf in leaves)

    return {"exchange": _price_each(size, count / candidate.fsdp, candidate.data)}


def _part(parameters: float) -> dict[str, ShardShape]:
    """Returns the parameters of a device as one float32 array, for the methods of an exchange."""
    count = max(int(parameters), 1)
    return {"parameters": ShardShape((count,), np.dtype("float32"), total_size=count)}


def _price_each(price: Callable[..., float], *numbers: Any) -> Any:
    """Evaluates a price for each of many layouts, once per distinct set of numbers."""
    columns = np.broadcast_arrays(*numbers)
    distinct, indices = np.unique(np.stack([np.ravel(column) for column in columns]), axis=1, return_inverse=True)
    prices = np.array([price(float(first), *map(int, counts)) for first, *counts in distinct.T])
    return prices[np.ravel(indices)].reshape(columns[0].shape)


DATA = PlanTechnique(
    axis="data",
    bytes=exchange_state,
    overlapped_seconds=overlapped_seconds,
    styles={"exchange": Style(letter="X", shade=203, light="#d1495b", dark="#ee7d8c")},
    complexity=1.0,
)
