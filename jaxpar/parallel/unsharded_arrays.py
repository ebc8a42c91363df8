"""The size check of all arrays of a training state: a large one that an axis should shard is not left whole in silence.

An axis of ZeRO that divides no dim of an array leaves it whole on all of its devices. `Parallel.replicate_above` bounds
the bytes of such an array, whether it is a parameter, other state of the model, optimizer state, or an exchange's
state. Parameters and other state are checked when a layout is composed; the other arrays are known once there is an
optimizer.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpar.errors import JaxparError, Problem
from jaxpar.models.dim_names import spec_axes
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import LARGE, Tree, format_path, is_float, shard_bytes
from jaxpar.units import show_bytes


def unsharded_problem(
    array: Any, name: str, spec: PartitionSpec, layout: Layout, axes: Sequence[str], rule: str, ways_out: str
) -> Problem | None:
    """Returns the problem of an array that stays whole on the devices of `axes`; None if it is small enough for that.

    Args:
      array: Its shape and dtype.
      name: Its path.
      spec: How the other axes split it.
      layout: Has the limit, `replicate_above`.
      axes: The axes that should shard it and do not.
      rule: The start of the rule; the limit is appended.
      ways_out: What the user can do besides changing a dim or the limit.
    """
    size, limit = shard_bytes(array, spec, layout.sizes), layout.parallel.replicate_above
    if size <= limit:
        return None
    ways = math.prod(layout.sizes[axis] for axis in axes)
    return Problem(
        f"{name} of {list(array.shape)} ({show_bytes(size)}) stays whole on all {ways} devices of {' x '.join(axes)}",
        f"{rule} above {show_bytes(limit)}",
        f"a dim that {ways} divides, {ways_out}, or replicate_above = {size}",
    )


def model_problems(layout: Layout) -> list[Problem]:
    """Returns the problems of parameters and other state that ZeRO does not shard."""
    problems = []
    for path, place in {**layout.placements, **layout.other_state}.items():
        # experts are sharded over `expert` already
        axes = _zero_axes_without(layout, place.used)
        if axes and place.used == place.sharded:
            kind = "parameter" if path in layout.placements else "array of other state"
            problems.append(_zero_problem(place.leaf, path, kind, place.sharded, layout, axes))
    return [problem for problem in problems if problem]


def check_optimizer_arrays(layout: Layout, arrays: Tree, specs: Tree, kind: str) -> None:
    """Checks the arrays of an optimizer's or an exchange's state.

    Scalars are whole by intent, and so are small arrays of other dtypes than floating point: see `state_spec`.

    Args:
      layout: The layout of the model.
      arrays: Shapes and dtypes.
      specs: A spec for each array.
      kind: The kind of state, for the error.

    Raises:
      JaxparError: With all arrays that are too large to stay whole.
    """
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    pairs = zip(leaves, jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)), strict=True)
    problems = [problem for (keys, leaf), spec in pairs for problem in _array_problems(layout, keys, leaf, spec, kind)]
    if problems:
        raise JaxparError(*problems)


def _array_problems(layout: Layout, keys: Any, leaf: Any, spec: PartitionSpec, kind: str) -> Iterable[Problem]:
    axes = _zero_axes_without(layout, spec)
    is_split = len(axes) < len(_zero_axes_without(layout, PartitionSpec()))
    if not axes or is_split or not leaf.shape or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
        return ()
    if leaf.size * leaf.dtype.itemsize < LARGE and not is_float(leaf):
        return ()
    problem = _zero_problem(leaf, format_path(keys), f"array of {kind}", spec, layout, axes)
    return (problem,) if problem else ()


def _zero_axes_without(layout: Layout, spec: PartitionSpec) -> list[str]:
    """Returns the axes over which ZeRO shards, without those of a spec."""
    split = {axis for entry in spec for axis in spec_axes(entry)}
    axes = layout.parallel.zero_axes if layout.parallel.stage else ()
    return [axis for axis in axes if layout.sizes[axis] > 1 and axis not in split]


def _zero_problem(
    array: Any, path: str, kind: str, spec: PartitionSpec, layout: Layout, axes: Sequence[str]
) -> Problem | None:
    rule = f"zero={layout.parallel.stage} shards every {kind}"
    return unsharded_problem(array, path, spec, layout, axes, rule, f"another {axes[0]}")
