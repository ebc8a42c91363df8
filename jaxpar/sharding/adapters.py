"""Low-rank adapters for matrices of any Flax model, which needs no changes.

    params: blocks/attention/query                  W  [layers, embed, heads, head_dim]     as the model made it
            adapters/blocks/attention/query/first   A  [layers, embed, rank]                split as W is
            adapters/blocks/attention/query/second  B  [layers, rank, heads, head_dim]

The model gets W, A and B as one value of three arrays: a scan over stacked layers slices all three. Where the model
reads the value, it gets W + alpha / rank A B; see `models/low_rank.py`. With base = "int8", W is int8, and
`scales/blocks/attention/query` [layers, heads, head_dim] is the fourth array.
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
from jaxpar.models.low_rank import INT8, dequantize, low_rank_sum, quantize_matrix
from jaxpar.models.settings.fine_tuning import Adapters
from jaxpar.optim.patterns import matching, unmatched
from jaxpar.sharding.names import Blueprint, Compute, Leaf, Tree, Use, leaves_by_path, nest
from jaxpar.sharding.rules import AxisChoice, count_layer_dims, name_stacks

ROOM = "adapters"  # the first word of the paths of all A and B
FLOAT = jnp.dtype(jnp.float32)
SCALES = "scales"  # the first word of the paths of output scales of 8-bit matrices


@dataclass(frozen=True, slots=True)
class Adapter:
    """The dims and the scale of one adapter.

    Attributes:
      lead: Number of leading dims that stack the matrices of several layers.
      inputs: Number of the remaining dims that a matmul with activations contracts.
      scale: alpha / rank.
      float_dtype: The dtype that the model declares for the matrix, if it is stored in 8 bits; else None.
    """

    lead: int
    inputs: int
    scale: float
    float_dtype: Any = None

    def dims(self, part: str, rank: int) -> tuple[int | None, ...]:
        """Returns, for each dim of A (`first`), B (`second`) or `scales`, the matching dim of the matrix, or None."""
        end = self.lead + self.inputs
        if part == SCALES:
            return (*range(self.lead), *range(end, rank))
        return (*range(end), None) if part == "first" else (*range(self.lead), None, *range(end, rank))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix with its A, its B and any scales, passed as one value until the model reads it."""

    base: Any
    first: Any
    second: Any
    scales: Any = None


def with_adapters(blueprint: Blueprint, adapters: Adapters) -> Blueprint:
    """Adds adapters to some matrices of a model; with rank 0 returns the model itself.

    A starts as in the paper's code, uniform within 1 / sqrt(inputs), and B with zeros: at first the model is unchanged.

    Raises:
      JaxparError: If a pattern matches no matrix, or the model already has adapters or other parameters of that name.
    """
    if not adapters.rank:
        return blueprint
    rooms = (ROOM, SCALES) if adapters.base == "int8" else (ROOM,)
    if conflicts := [path for path in blueprint.leaves if path.split("/")[0] in rooms]:
        raise refuse(
            f"{blueprint.name} has the parameter {conflicts[0]}",
            rule=f"parameters of adapters are called {'/... or '.join(rooms)}/..., and a model has adapters once",
            fix="jp.add_lora once, with all paths, or another name of that module",
        )
    leaves = name_stacks(blueprint.leaves)
    matrices = [path for path, leaf in leaves.items() if _layer_rank(path, leaf) > 1]
    problems = unmatched("train.adapters.paths", adapters.paths, matrices, noun="matrix of the model")
    problems += unmatched("train.adapters.also", adapters.also, list(leaves))
    placed = {path: _adapter(path, leaves[path], adapters) for path in matching(matrices, adapters.paths)}
    if problems or (problems := _double_training_problems(adapters, list(placed))):
        raise JaxparError(*problems)
    parts = {
        f"{ROOM}/{path}/{part}": _part(leaves[path], adapter.dims(part, len(leaves[path].shape)), adapters.rank)
        for path, adapter in placed.items()
        for part in ("first", "second")
    }
    quantized = {
        path: replace(blueprint.leaves[path], dtype=INT8) for path, adapter in placed.items() if adapter.float_dtype
    }
    scales = {
        f"{SCALES}/{path}": replace(_part(leaf, placed[path].dims(SCALES, len(leaf.shape)), 0), dtype=FLOAT)
        for path, leaf in quantized.items()
    }

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        params, rest = blueprint.init(key)
        initial = {tuple(path.split("/")): _initial_value(path, leaf, placed, key) for path, leaf in parts.items()}
        return quantize(placed, params | nest(initial)), rest

    return replace(
        blueprint,
        leaves={**blueprint.leaves, **quantized, **parts, **scales},
        init=init,
        bind=partial(_bind, blueprint, placed),
        adapters=placed,
        base=blueprint,
    )


def without_adapters(blueprint: Blueprint) -> Blueprint:
    """Returns the model without its adapters and its reference."""
    return blueprint.base or blueprint


def find_base(blueprint: Blueprint, path: str) -> tuple[str, tuple[int | None, ...]] | None:
    """Returns the path of the parameter that an A, a B or a copy is split like, with the dim for each of its dims.

    None for all other parameters.
    """
    words = path.split("/")
    if path in blueprint.copies:
        base = blueprint.copies[path]
        return base, tuple(range(len(blueprint.leaves[base].shape)))
    if is_scales(blueprint, path):
        base, part = "/".join(words[1:]), SCALES
    elif blueprint.adapters and words[0] == ROOM:
        base, part = "/".join(words[1:-1]), words[-1]
    else:
        return None
    return base, blueprint.adapters[base].dims(part, len(blueprint.leaves[base].shape))


def is_scales(blueprint: Blueprint, path: str) -> bool:
    """Whether a parameter is the scales of a matrix in 8 bits."""
    room, _, base = path.partition("/")
    return room == SCALES and base in blueprint.adapters and blueprint.adapters[base].float_dtype is not None


def checkpoint_leaves(blueprint: Blueprint) -> dict[str, Leaf]:
    """Returns the parameters in the form of a checkpoint without quantization: no scales, all matrices in float.

    The copies of a frozen reference are left out too: a run makes them.
    """
    model_dtypes = {path: adapter.float_dtype for path, adapter in blueprint.adapters.items() if adapter.float_dtype}
    return {
        path: replace(leaf, dtype=model_dtypes.get(path, leaf.dtype))
        for path, leaf in blueprint.leaves.items()
        if not is_scales(blueprint, path) and path not in blueprint.copies
    }


def adapter_choice(choice: AxisChoice, base: str, dims: tuple[int | None, ...]) -> AxisChoice:
    """Shards each dim of an adapter like the matching dim of its matrix."""
    return AxisChoice(
        names=tuple(None if dim is None else choice.names[dim] for dim in dims),
        axes=tuple(() if dim is None else choice.axes[dim] for dim in dims),
        why=f"as {base}",
    )


def merge_adapters(blueprint: Blueprint, params: Tree) -> Tree:
    """Merges adapters: returns the base model's parameters, W + alpha / rank A B for each adapted matrix.

    Args:
      blueprint: The model with adapters, a reference, both or neither; the copies of a reference are left out.
      params: Its parameters: nested dicts, or path to array.
    """
    flat = {path: value for path, value in leaves_by_path(params).items() if path not in blueprint.copies}
    for path, adapter in blueprint.adapters.items():
        first, second = (flat.pop(f"{ROOM}/{path}/{part}") for part in ("first", "second"))
        add, scales = partial(_merge, adapter), [flat.pop(f"{SCALES}/{path}")] if adapter.float_dtype else []
        for _ in range(adapter.lead):
            add = jax.vmap(add)
        flat[path] = add(flat[path], first, second, *scales)
    return nest({tuple(path.split("/")): value for path, value in flat.items()})


def quantize(adapters: Mapping[str, Adapter], params: Tree) -> Tree:
    """Quantizes the matrices that are stored in 8 bits, and adds their scales, in nested dicts of parameters."""
    if not any(adapter.float_dtype for adapter in adapters.values()):
        return params
    flat = dict(leaves_by_path(params))
    for path, adapter in adapters.items():
        if adapter.float_dtype:
            flat[path], flat[f"{SCALES}/{path}"] = quantize_matrix(flat[path], lead=adapter.lead, inputs=adapter.inputs)
    return nest({tuple(path.split("/")): value for path, value in flat.items()})


def _merge(adapter: Adapter, base: jax.Array, first: jax.Array, second: jax.Array, *scales: jax.Array) -> jax.Array:
    dtype = adapter.float_dtype or base.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    floats = dequantize(base, scales[0], wide) if scales else base.astype(wide)
    return (floats + adapter.scale * jnp.tensordot(first, second, axes=1).astype(wide)).astype(dtype)


def bind_base(blueprint: Blueprint, values: Tree, rest: Tree, use: Use, compute: Compute) -> Any:
    """Binds a model with adapters as it is without them; `values` are all of its parameters."""
    return _bind(blueprint.base, blueprint.adapters, values, rest, use, compute, corrected=False)


def _bind(
    blueprint: Any,
    adapters: Mapping[str, Adapter],
    values: Tree,
    rest: Tree,
    use: Use,
    compute: Compute,
    *,
    corrected: bool = True,
) -> Any:
    """Binds the model to its parameters; where the model reads a matrix, it gets the sum of matrix and adapter.

    If it is not `corrected`, it gets the matrix alone.
    """
    flat = dict(leaves_by_path(values))
    for path, adapter in adapters.items():
        names = [f"{ROOM}/{path}/first", f"{ROOM}/{path}/second", *[f"{SCALES}/{path}"] * bool(adapter.float_dtype)]
        flat[path] = AdaptedMatrix(flat[path], *(flat.pop(name) for name in names))

    def read_matrix(path: str, value: jax.Array | AdaptedMatrix) -> jax.Array:
        if not isinstance(value, AdaptedMatrix):
            return use(path, value)
        first, second = use(f"{ROOM}/{path}/first", value.first), use(f"{ROOM}/{path}/second", value.second)
        adapter = adapters[path]
        stacked = first.ndim - 1 - adapter.inputs  # dims of a stack that no scan has sliced
        scales = [use(f"{SCALES}/{path}", value.scales)] if adapter.float_dtype else []
        if not corrected:
            return _dequantize_stack(use(path, value.base), *scales, dtype=second.dtype, lead=stacked)
        return low_rank_sum(use(path, value.base), first, second * adapter.scale, *scales, lead=stacked)

    return blueprint.bind(
        nest({tuple(path.split("/")): value for path, value in flat.items()}), rest, read_matrix, compute
    )


def _dequantize_stack(base: jax.Array, *scales: jax.Array, dtype: Any, lead: int) -> jax.Array:
    """Returns a matrix, or the matrices of a stack, in floats; unchanged if it has no scales."""
    if not scales:
        return base
    convert = partial(dequantize, dtype=dtype)
    for _ in range(lead):
        convert = jax.vmap(convert)
    return convert(base, *scales)


def _layer_rank(path: str, leaf: Leaf) -> int:
    """Returns the number of a parameter's dims in one layer, without the leading dims of a stack."""
    if leaf.names is not None:
        return len(leaf.shape) - (leaf.names[:1] == ("layers",))
    return count_layer_dims(path, leaf)


def _adapter(path: str, leaf: Leaf, adapters: Adapters) -> Adapter:
    """Returns the adapter of a matrix; if it writes to the stream, its inputs are all dims but the last, else the
    first.

    If the model multiplies otherwise, the correction still has low rank, and is added where the matrix is read.
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


def _initial_value(path: str, leaf: Leaf, adapters: Mapping[str, Adapter], key: jax.Array) -> jax.Array:
    """Initializes an A or a B; the value depends only on the path and the key."""
    base, part = "/".join(path.split("/")[1:-1]), path.split("/")[-1]
    if part == "second":
        return jnp.zeros(leaf.shape, leaf.dtype)
    adapter = adapters[base]
    bound = 1 / math.sqrt(math.prod(leaf.shape[adapter.lead : adapter.lead + adapter.inputs]))
    path_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    return jax.random.uniform(path_key, leaf.shape, leaf.dtype, -bound, bound)


def _double_training_problems(adapters: Adapters, matrices: list[str]) -> list[Problem]:
    """Returns a problem for each matrix that has an adapter and is also trained directly."""
    return [
        Problem(f"{path} has an adapter and is trained itself", "what has an adapter is frozen", "paths or also")
        for path in matching(matrices, adapters.also)
    ]
