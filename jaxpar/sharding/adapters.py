"""Low-rank adapters beside matrices of any Flax model, which the model itself knows nothing of.

    params: blocks/attention/query                  W  [layers, embed, heads, head_dim]     as the model made it
            adapters/blocks/attention/query/first   A  [layers, embed, rank]                split as W is
            adapters/blocks/attention/query/second  B  [layers, rank, heads, head_dim]

W goes into the model together with its A and B, as one value of three arrays: a scan over stacked layers slices all
three. Where the model reads the value, it gets W + alpha / rank A B, of which `models/low_rank.py` says more.
With base = "int8", W is int8, and goes with `scales/blocks/attention/query` [layers, heads, head_dim] as the fourth.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.models.blocks.eight_bits import DTYPE, as_floats, rounded
from jaxpar.models.low_rank import low_rank_sum
from jaxpar.models.settings.adapters import Adapters
from jaxpar.optim.patterns import meant, unmatched
from jaxpar.sharding.names import Blueprint, Compute, Leaf, Tree, Use, by_path, nest
from jaxpar.sharding.rules import Choice, name_stacks, own_dims

ROOM = "adapters"  # the first word of the paths of all A and B
FLOAT = jnp.dtype(jnp.float32)
SCALES = "scales"  # of the paths of what the outputs of matrices in 8 bits are multiplied by


@dataclass(frozen=True, slots=True)
class Adapter:
    """The place of one adapter.

    Attributes:
      lead: Dims of the matrix before its own: the layers of a stack.
      inputs: Dims of its own that it multiplies an activation over.
      scale: alpha / rank.
      wide: The dtype in which the model has the matrix, where it is kept in 8 bits; else None.
    """

    lead: int
    inputs: int
    scale: float
    wide: Any = None

    def dims(self, part: str, rank: int) -> tuple[int | None, ...]:
        """Returns for each dim of A (`first`), B (`second`) or `scales` the dim of the matrix that it is, or None."""
        at = self.lead + self.inputs
        if part == SCALES:
            return (*range(self.lead), *range(at, rank))
        return (*range(at), None) if part == "first" else (*range(self.lead), None, *range(at, rank))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A matrix with its A and B, and its scales if it has any, on the way to where the model reads it."""

    base: Any
    first: Any
    second: Any
    scales: Any = None


def with_adapters(blueprint: Blueprint, adapters: Adapters) -> Blueprint:
    """Returns a model with adapters beside some of its matrices; with rank 0 the model itself.

    A begins as in the paper's code, uniform within 1 / sqrt(inputs), and B with zeros: at first the model is unchanged.

    Raises:
      JaxparError: If a pattern matches no matrix, or the model has adapters, or other parameters of that name, already.
    """
    if not adapters.rank:
        return blueprint
    rooms = (ROOM, SCALES) if adapters.base == "int8" else (ROOM,)
    if taken := [path for path in blueprint.leaves if path.split("/")[0] in rooms]:
        raise refuse(
            f"{blueprint.name} has the parameter {taken[0]}",
            rule=f"parameters of adapters are called {'/... or '.join(rooms)}/..., and a model has adapters once",
            fix="jp.adapted once, with all paths, or another name of that module",
        )
    leaves = name_stacks(blueprint.leaves)
    matrices = [path for path, leaf in leaves.items() if _own(path, leaf) > 1]
    problems = unmatched("train.adapters.paths", adapters.paths, matrices, what="matrix of the model")
    problems += unmatched("train.adapters.also", adapters.also, list(leaves))
    found = {path: _adapter(path, leaves[path], adapters) for path in meant(matrices, adapters.paths)}
    if problems or (problems := _both(adapters, list(found))):
        raise JaxparError(*problems)
    made = {
        f"{ROOM}/{path}/{part}": _part(leaves[path], each.dims(part, len(leaves[path].shape)), adapters.rank)
        for path, each in found.items()
        for part in ("first", "second")
    }
    kept = {path: replace(blueprint.leaves[path], dtype=DTYPE) for path, each in found.items() if each.wide}
    scales = {
        f"{SCALES}/{path}": replace(_part(leaf, found[path].dims(SCALES, len(leaf.shape)), 0), dtype=FLOAT)
        for path, leaf in kept.items()
    }

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        params, rest = blueprint.init(key)
        begun = {tuple(path.split("/")): _begun(path, leaf, found, key) for path, leaf in made.items()}
        return in_eight_bits(found, params | nest(begun)), rest

    return replace(
        blueprint,
        leaves={**blueprint.leaves, **kept, **made, **scales},
        init=init,
        bind=partial(_bind, blueprint, found),
        adapters=found,
        base=blueprint,
    )


def without_adapters(blueprint: Blueprint) -> Blueprint:
    """Returns the model itself, without its adapters."""
    return blueprint.base or blueprint


def base_of(blueprint: Blueprint, path: str) -> tuple[str, tuple[int | None, ...]] | None:
    """Returns the matrix that a parameter is an adapter of, and which of its dims each dim is; None for any other."""
    words = path.split("/")
    if is_scales(blueprint, path):
        base, part = "/".join(words[1:]), SCALES
    elif blueprint.adapters and words[0] == ROOM:
        base, part = "/".join(words[1:-1]), words[-1]
    else:
        return None
    return base, blueprint.adapters[base].dims(part, len(blueprint.leaves[base].shape))


def is_scales(blueprint: Blueprint, path: str) -> bool:
    """Returns whether a parameter is the scales of a matrix in 8 bits."""
    room, _, base = path.partition("/")
    return room == SCALES and base in blueprint.adapters and blueprint.adapters[base].wide is not None


def begun_with(blueprint: Blueprint) -> dict[str, Leaf]:
    """Returns the parameters as another run or folder has them: those in 8 bits as the model has them, no scales."""
    wide = {path: each.wide for path, each in blueprint.adapters.items() if each.wide}
    return {
        path: replace(leaf, dtype=wide.get(path, leaf.dtype))
        for path, leaf in blueprint.leaves.items()
        if not is_scales(blueprint, path)
    }


def as_base(choice: Choice, base: str, dims: tuple[int | None, ...]) -> Choice:
    """Returns where an adapter goes: each dim as that of its matrix."""
    return Choice(
        names=tuple(None if dim is None else choice.names[dim] for dim in dims),
        axes=tuple(() if dim is None else choice.axes[dim] for dim in dims),
        why=f"as {base}",
    )


def merged(blueprint: Blueprint, params: Tree) -> Tree:
    """Returns the parameters of the model itself, W + alpha / rank A B where it has adapters.

    Args:
      blueprint: The model with adapters; another's parameters are returned as they are.
      params: Its parameters: nested dicts, or path to array.
    """
    flat = dict(by_path(params))
    for path, each in blueprint.adapters.items():
        first, second = (flat.pop(f"{ROOM}/{path}/{part}") for part in ("first", "second"))
        add, scales = partial(_merge, each), [flat.pop(f"{SCALES}/{path}")] if each.wide else []
        for _ in range(each.lead):
            add = jax.vmap(add)
        flat[path] = add(flat[path], first, second, *scales)
    return nest({tuple(path.split("/")): value for path, value in flat.items()})


def in_eight_bits(adapters: Mapping[str, Adapter], params: Tree) -> Tree:
    """Returns parameters in nested dicts with the matrices that are kept in 8 bits rounded, and their scales."""
    if not any(each.wide for each in adapters.values()):
        return params
    flat = dict(by_path(params))
    for path, each in adapters.items():
        if each.wide:
            flat[path], flat[f"{SCALES}/{path}"] = rounded(flat[path], lead=each.lead, inputs=each.inputs)
    return nest({tuple(path.split("/")): value for path, value in flat.items()})


def _merge(each: Adapter, base: jax.Array, first: jax.Array, second: jax.Array, *scales: jax.Array) -> jax.Array:
    made = each.wide or base.dtype
    wide = jnp.promote_types(made, jnp.float32)
    held = as_floats(base, scales[0], wide) if scales else base.astype(wide)
    return (held + each.scale * jnp.tensordot(first, second, axes=1).astype(wide)).astype(made)


def _bind(
    blueprint: Blueprint, adapters: Mapping[str, Adapter], values: Tree, rest: Tree, use: Use, compute: Compute
) -> Any:
    """Returns the model with these values, that reads a matrix with what its adapter adds."""
    flat = dict(by_path(values))
    for path, each in adapters.items():
        names = [f"{ROOM}/{path}/first", f"{ROOM}/{path}/second", *[f"{SCALES}/{path}"] * bool(each.wide)]
        flat[path] = Adapted(flat[path], *(flat.pop(name) for name in names))

    def read(path: str, value: Any) -> jax.Array:
        if not isinstance(value, Adapted):
            return use(path, value)
        first, second = use(f"{ROOM}/{path}/first", value.first), use(f"{ROOM}/{path}/second", value.second)
        each = adapters[path]
        whole = first.ndim - 1 - each.inputs  # dims of a stack that a scan has not taken away
        scales = [use(f"{SCALES}/{path}", value.scales)] if each.wide else []
        return low_rank_sum(use(path, value.base), first, second * each.scale, *scales, lead=whole)

    return blueprint.bind(nest({tuple(path.split("/")): value for path, value in flat.items()}), rest, read, compute)


def _own(path: str, leaf: Leaf) -> int:
    """Returns how many dims a parameter has of its own, those of a stack not counted."""
    if leaf.names is not None:
        return len(leaf.shape) - (leaf.names[:1] == ("layers",))
    return own_dims(path, leaf)


def _adapter(path: str, leaf: Leaf, adapters: Adapters) -> Adapter:
    """Returns the adapter of a matrix. Of more than two dims, the last are the inputs of what writes to the stream.

    Where that is not how the model multiplies, the correction is of low rank all the same, and read as a sum.
    """
    lead = int(leaf.names is not None and leaf.names[:1] == ("layers",))
    own = len(leaf.shape) - lead
    names = leaf.names or (None,) * len(leaf.shape)
    writes = names[-1] == "embed" or (names[-1] is None and path.split("/")[-2:-1] in (["out"], ["o_proj"]))
    if own == 3 and leaf.names is None and not writes and path.split("/")[-2:-1] not in (["query"], ["key"], ["value"]):
        lead, own = lead + 1, 2  # an unnamed stack of matrices
    inputs = own - 1 if writes and names[lead] != "embed" else 1
    return Adapter(lead, inputs, adapters.scale, leaf.dtype if adapters.base == "int8" else None)


def _part(leaf: Leaf, dims: tuple[int | None, ...], rank: int) -> Leaf:
    return Leaf(tuple(rank if dim is None else leaf.shape[dim] for dim in dims), leaf.dtype, None)


def _begun(path: str, leaf: Leaf, adapters: Mapping[str, Adapter], key: jax.Array) -> jax.Array:
    """Returns the first value of an A or a B; the numbers depend on the path and the key alone."""
    base, part = "/".join(path.split("/")[1:-1]), path.split("/")[-1]
    if part == "second":
        return jnp.zeros(leaf.shape, leaf.dtype)
    each = adapters[base]
    most = 1 / math.sqrt(math.prod(leaf.shape[each.lead : each.lead + each.inputs]))
    own = jax.random.fold_in(key, zlib.crc32(path.encode()))
    return jax.random.uniform(own, leaf.shape, leaf.dtype, -most, most)


def _both(adapters: Adapters, found: list[str]) -> list[Problem]:
    """Returns the matrices that would have an adapter and be trained themselves."""
    return [
        Problem(f"{path} has an adapter and is trained itself", "what has an adapter is frozen", "paths or also")
        for path in meant(found, adapters.also)
    ]
