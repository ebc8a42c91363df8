"""The state at step 0 from parameters that exist already; each device's shard is read or made on its own."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Sharding

from jaxpar.errors import JaxparError, Problem, refuse, shape_differences
from jaxpar.models.low_rank import QuantizedMatrix
from jaxpar.optim.patterns import has_prefix
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import ROOM as ADAPTERS
from jaxpar.sharding.adapters import SCALES, checkpoint_leaves
from jaxpar.sharding.names import Leaf, format_path
from jaxpar.step.state import State, abstract, shardings, state_from_params


def flat_params(params: Mapping[str, object], above: str = "") -> dict[str, Any]:
    """Flattens a nested dict of parameters to paths (`a/b`); None stays a leaf.

    Raises:
      JaxparError: If it is no dict, or a value is neither an array, nor a dict, nor None.
    """
    rule = "params maps each path of a parameter to an array, or to None if it is to be initialized"
    if not isinstance(params, Mapping):
        raise refuse(f"params={params!r:.80}", rule=rule, fix="params=jp.from_huggingface(folder, model, rules)")
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= flat_params(value, f"{above}{key}/")
        elif value is None or (hasattr(value, "shape") and hasattr(value, "__getitem__")):
            flat[f"{above}{key}"] = value
        else:
            raise refuse(f"params[{above}{key}] = {value!r:.80}", rule=rule, fix="np.asarray(value)")
    return flat


def split_params(layout: Layout, params: Mapping[str, object]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Splits `params` of `jp.init_state`: the given ones by path, and the paths to initialize (adapters too)."""
    flat, leaves = flat_params(params), checkpoint_leaves(layout.blueprint)
    fresh = [path for path, value in flat.items() if value is None and path in leaves]
    given = {path: value for path, value in flat.items() if path not in fresh}
    adapters = [path for path in leaves if has_prefix(path, ADAPTERS)] if layout.blueprint.adapters else []
    return given, (*fresh, *adapters)


def start_from_params(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    params: Mapping[str, object],
    *,
    fresh: Collection[str] = (),
    seed: int = 0,
    offload: bool = False,
) -> State:
    """Builds the state at step 0 from these parameters.

    Args:
      layout: The sharding of all arrays.
      optimizer: Any optax chain.
      params: Path to parameter, such as `Pretrained.params`: an object with `shape` that is indexed by slices and holds
        floats. If the job stores a matrix in 8 bits, it is read and rounded layer by layer.
      fresh: Paths of parameters to initialize as `init_state` does.
      seed: Seed of these parameters, and of dropout.
      offload: Whether to place the optimizer state in host memory.

    Raises:
      JaxparError: If parameters are missing, unexpected or of another shape; the message has all of them.
    """
    like = abstract(layout, optimizer)
    if problems := _differences(layout, params, fresh):
        raise JaxparError(*problems)
    placed = shardings(layout, like, offload=offload)
    parts = {path: part for path in params if path not in fresh for path, part in _parts(layout, path, params[path])}
    placed_params = {
        path: _place_param(parts[path], place.leaf, layout.sharding(place.stored))
        for path, place in layout.placements.items()
        if path in parts
    }

    def begin(given, key) -> State:
        made, model_state = layout.blueprint.init(key)
        params = jax.tree_util.tree_map_with_path(lambda keys, leaf: given.get(format_path(keys), leaf), made)
        return state_from_params(layout, optimizer, params, model_state)

    given = () if layout.parallel.exchange.replicas_differ else (0,)  # the arrays of one model are no replica's
    return jax.jit(begin, out_shardings=placed, donate_argnums=given)(placed_params, jax.random.key(seed))


def _parts(layout: Layout, path: str, value: Any) -> Iterator[tuple[str, Callable]]:
    """Yields the arrays of a parameter (in 8 bits also its scales), each with a function that reads a part of it."""
    each = layout.blueprint.adapters.get(path)
    if each is None or each.float_dtype is None:
        yield path, value.__getitem__
        return
    made = QuantizedMatrix(path, value, each.lead, each.inputs)
    yield path, made.int8_values
    yield f"{SCALES}/{path}", made.scales


def _place_param(read: Callable, leaf: Leaf, sharding: Sharding) -> jax.Array:
    """Places a parameter on its devices; reads a part only once if several devices hold it."""
    parts: dict[str, np.ndarray] = {}

    def read_part(index):
        key = str(index)
        if key not in parts:
            parts[key] = np.asarray(read(index), leaf.dtype)
        return parts[key]

    return jax.make_array_from_callback(leaf.shape, sharding, read_part)


def _differences(layout: Layout, params: Mapping[str, object], fresh: Collection[str]) -> list[Problem]:
    shapes = {path: leaf.shape for path, leaf in checkpoint_leaves(layout.blueprint).items() if path not in fresh}
    found = shape_differences(params, shapes, owner="the model")
    rule = "training begins with all parameters of the model"
    fix = "[model] as the settings that were loaded; in jp.init_state None for each parameter to initialize"
    return [Problem(f"parameters {what}: {', '.join(names)}", rule, fix) for what, names in found.items()]
