"""Training begins with parameters that are there already, each device's part read or made on its own."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from jaxpar.errors import JaxparError, Problem, shape_differences
from jaxpar.models.blocks.int8 import QuantizedMatrix
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import SCALES, checkpoint_leaves
from jaxpar.sharding.names import Leaf, path_of
from jaxpar.step.state import State, abstract, shardings, state_from_params


def start(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    params: Mapping[str, Any],
    *,
    fresh: Collection[str] = (),
    seed: int = 0,
    offload: bool = False,
) -> State:
    """Returns the state at step 0 with these parameters.

    Args:
      layout: Where arrays go.
      optimizer: Any optax chain.
      params: Path to parameter: what has `shape` and is indexed by slices, such as `Pretrained.params`. In floats; what
        is kept in 8 bits is read and rounded layer by layer.
      fresh: Paths of parameters that begin anew, as `init_state` makes them.
      seed: Of these, and of dropout.
      offload: Keep the optimizer state in host memory.

    Raises:
      JaxparError: With every parameter that is missing, unexpected or of another shape.
    """
    like = abstract(layout, optimizer)
    if problems := _differences(layout, params, fresh):
        raise JaxparError(*problems)
    placed = shardings(layout, like, offload=offload)
    parts = {path: part for path in params if path not in fresh for path, part in _parts(layout, path, params[path])}
    born = {
        path: _born(parts[path], place.leaf, layout.sharding(place.stored))
        for path, place in layout.placements.items()
        if path in parts
    }

    def begin(given, key) -> State:
        made, model_state = layout.blueprint.init(key)
        params = jax.tree_util.tree_map_with_path(lambda keys, leaf: given.get(path_of(keys), leaf), made)
        return state_from_params(layout, optimizer, params, model_state)

    given = () if layout.parallel.exchange.replicas_differ else (0,)  # the arrays of one model are no replica's
    return jax.jit(begin, out_shardings=placed, donate_argnums=given)(born, jax.random.key(seed))


def _parts(layout: Layout, path: str, value: Any) -> Iterator[tuple[str, Callable]]:
    """Yields what a parameter becomes, each with what reads a part of it: of a matrix in 8 bits its scales too."""
    each = layout.blueprint.adapters.get(path)
    if each is None or each.float_dtype is None:
        yield path, value.__getitem__
        return
    made = QuantizedMatrix(path, value, each.lead, each.inputs)
    yield path, made.int8_values
    yield f"{SCALES}/{path}", made.scales


def _born(read: Callable, leaf: Leaf, on: Any) -> jax.Array:
    """Returns a parameter on its devices; a part that several devices keep is read once."""
    parts: dict[str, np.ndarray] = {}

    def part(index):
        key = str(index)
        if key not in parts:
            parts[key] = np.asarray(read(index), leaf.dtype)
        return parts[key]

    return jax.make_array_from_callback(leaf.shape, on, part)


def _differences(layout: Layout, params: Mapping[str, Any], fresh: Collection[str]) -> list[Problem]:
    shapes = {path: leaf.shape for path, leaf in checkpoint_leaves(layout.blueprint).items() if path not in fresh}
    found = shape_differences(params, shapes, owner="the model")
    rule, fix = "training begins with all parameters of the model", "[model] as the settings that were loaded"
    return [Problem(f"parameters {what}: {', '.join(names)}", rule, fix) for what, names in found.items()]
