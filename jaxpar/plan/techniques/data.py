"""Data parallelism: replicas of the parameters, each with other examples, that agree by an exchange.

Where XLA sums their gradients in every step, that is one sum with those of `fsdp`, for both hide behind the same
computation: `sharding.py`. Any other exchange says what it sends and keeps, and that is priced here: nothing hides what
is sent when replicas meet, and a step has its share of it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxpar.exchange.part import Part
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Look
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.dims import Counted
from jaxpar.plan.model.layer_bytes import stage_parameters
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.techniques.base import Technique, Work


def around(work: Work, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> Mapping[str, Any]:
    """Returns the seconds of what replicas send each other, of one step on average."""
    exchange = software.exchange
    if not exchange.apart:
        return {}

    def seconds(parameters: float, replicas: int, stride: int) -> float:
        total = 0.0
        for each in exchange.sends(_part(parameters), replicas):
            found = each.collective
            if found.kind == "collective-permute":
                once = hardware.send(found.payload, stride, replicas)
            else:
                once = hardware.gather(found.payload, replicas, stride) * (2 if found.kind == "all-reduce" else 1)
            total += (found.times or 1) * float(once) / each.every
        return total

    return {"exchange": _each(seconds, work.parameters / candidate.fsdp, candidate.data, candidate.stride("data"))}


def kept(model: Counted, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Mapping[str, Any]:
    """Returns the bytes of the exchange's own state on a device; of arrays with a dim of replicas, its own entry."""
    exchange = software.exchange
    if not exchange.apart:
        return {}
    import jax

    held = stage_parameters(model, candidate, "last") if isinstance(model, Shape) else model.parameters

    def size(parameters: float, replicas: int) -> float:
        part = {path: jax.ShapeDtypeStruct(each.shape, each.dtype) for path, each in _part(parameters).items()}
        own = jax.tree.leaves(jax.eval_shape(lambda params: exchange.init(params, replicas), part))
        alone = (replicas, *part["parameters"].shape)
        return sum(leaf.size * leaf.dtype.itemsize / (replicas if leaf.shape == alone else 1) for leaf in own)

    return {"exchange": _each(size, held / candidate.fsdp, candidate.data)}


def _part(parameters: float) -> dict[str, Part]:
    """Returns the parameters that a device holds as one array, which is how an exchange is asked about them."""
    count = max(int(parameters), 1)
    return {"parameters": Part((count,), np.dtype("float32"), whole=count)}


def _each(price: Callable[..., float], *numbers: Any) -> Any:
    """Returns a price for each of many layouts, asked once for those that are alike."""
    every = np.broadcast_arrays(*numbers)
    alike, where = np.unique(np.stack([np.ravel(one) for one in every]), axis=1, return_inverse=True)
    found = np.array([price(float(first), *map(int, others)) for first, *others in alike.T])
    return found[np.ravel(where)].reshape(every[0].shape)


DATA = Technique(
    axis="data",
    bytes=kept,
    around=around,
    looks={"exchange": Look(letter="X", shade=203, light="#d1495b", dark="#ee7d8c")},
    complexity=1.0,
)
