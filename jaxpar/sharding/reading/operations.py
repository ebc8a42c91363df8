"""The dims of what an operation of JAX returns, by the dims of what it is given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from jaxpar.sharding.reading.pieces import Dim, Facts, flat, fresh, join, mix, regroup


@dataclass(frozen=True, eq=False)
class Array:
    """An array of the program.

    Attributes:
      dims: Its dims.
      source: The parameters that it is made of, none for a constant or an input; None for an activation.
    """

    dims: tuple[Dim, ...]
    source: frozenset[str] | None


Rule = Callable[[JaxprEqn, list[Array]], list[Array]]
CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # parameters of equations that hold what they call


def otherwise(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    """Does what an elementwise operation does: dims of a size are one. Dims that no result has are not followed."""
    source, shapes = _source(arrays), [_shape(var) for var in eqn.outvars]
    made = [[fresh(size) for size in shape] for shape in shapes]
    for array, given in zip(arrays, eqn.invars, strict=True):
        alike = [dims for dims, shape in zip(made, shapes, strict=True) if _broadcasts(_shape(given), shape)]
        for at, dim in enumerate(array.dims):
            if not alike:
                mix(dim, "not followed")
            for dims in alike if dim else ():
                join(dim, dims[at])
    return [Array(tuple(dims), source) for dims in made]


def _broadcasts(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(given) == len(shape) and all(a in (b, 1) for a, b in zip(given, shape, strict=True))


def _shape(var) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))


def _reduce(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    axes = eqn.params["axes"]
    for array in arrays:
        # of parameters alone, as for a penalty or a norm of weights, the sums are small
        for axis in axes if not array.source else ():
            mix(array.dims[axis], "reduced")
    dims = tuple(dim for axis, dim in enumerate(arrays[0].dims) if axis not in axes)
    return [Array(dims, None if _source(arrays) != frozenset() else frozenset()) for _ in eqn.outvars]


def _along(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    """Does what sums or sorts along an axis, and keeps it."""
    axis = eqn.params.get("axis", eqn.params.get("dimension", -1))
    for array in arrays:
        if array.dims:
            mix(array.dims[axis], "reduced")
    return otherwise(eqn, arrays)


def _transpose(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    return [Array(tuple(arrays[0].dims[axis] for axis in eqn.params["permutation"]), arrays[0].source)]


def _reshape(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    return [Array(tuple(regroup(arrays[0].dims, _shape(eqn.outvars[0]))), arrays[0].source)]


def _broadcast(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    shape, kept = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    given = {to: arrays[0].dims[axis] for axis, to in enumerate(kept) if _shape(eqn.invars[0])[axis] == shape[to]}
    return [Array(tuple(given.get(axis, fresh(size)) for axis, size in enumerate(shape)), arrays[0].source)]


def _slice(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    """Does what keeps a part of an array: one of equal parts is a row of the dim reshaped to [parts, entries]."""
    shape, out = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    starts = eqn.params.get("start_indices", (0,) * len(shape))
    plain = eqn.primitive.name == "slice" and eqn.params.get("strides") is None
    dims = []
    for dim, start, size, kept in zip(arrays[0].dims, starts, shape, out, strict=True):
        equal = plain and size % kept == 0 and start % kept == 0
        dims.append(dim if size == kept else _part(dim, size, kept, equal))
    return [Array(tuple(dims), arrays[0].source)]


def _split(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    sizes, axis = eqn.params["sizes"], eqn.params["axis"]
    dims, equal = arrays[0].dims, len(set(sizes)) == 1
    parts = [_part(dims[axis], sum(sizes), size, equal) for size in sizes]
    return [Array((*dims[:axis], part, *dims[axis + 1 :]), arrays[0].source) for part in parts]


def _part(dim: Dim, size: int, kept: int, equal: bool) -> Dim:
    if equal:
        return regroup([dim], [size // kept, kept])[1]
    if kept > 1:  # an index alone mixes nothing
        mix(dim, "not followed")
    return fresh(kept)


def _concatenate(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    axis = eqn.params["dimension"]
    for other in arrays[1:]:
        for at, (one, dim) in enumerate(zip(arrays[0].dims, other.dims, strict=True)):
            if at != axis:
                join(one, dim)
    sizes = [_shape(var)[axis] for var in eqn.invars]
    if len({*sizes}) == 1:  # the halves of rotated heads
        for other in arrays[1:]:
            join(arrays[0].dims[axis], other.dims[axis])
        whole = (*fresh(len(sizes)), *arrays[0].dims[axis])
    else:
        for array in arrays:
            mix(array.dims[axis], "not followed")
        whole = fresh(sum(sizes))
    dims = arrays[0].dims
    return [Array((*dims[:axis], whole, *dims[axis + 1 :]), _source(arrays))]


def _update(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    """Writes a part of an array, as a cache: dims of a size are one."""
    shapes = [_shape(var) for var in eqn.invars[:2]]
    for one, dim, size, part in zip(arrays[0].dims, arrays[1].dims, *shapes, strict=True):
        if size == part:
            join(one, dim)
    return [Array(arrays[0].dims, _source(arrays[:2]))]


def _gather(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    """Looks rows up: the dims that are not indexed are those of the result."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, shape = arrays[0], _shape(eqn.invars[0])
    dims = [fresh(size) for size in _shape(eqn.outvars[0])]
    kept = [
        axis
        for axis in range(len(shape))
        if axis not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    for axis, to in zip(kept, numbers.offset_dims, strict=True):
        if sizes[axis] == shape[axis]:
            dims[to] = table.dims[axis]
    batch = [axis for axis in range(len(dims)) if axis not in numbers.offset_dims]
    for axis, dim in zip(batch, arrays[1].dims[:-1], strict=False):
        dims[axis] = dim
    for axis in numbers.start_index_map:
        for piece in flat(table.dims[axis]):
            piece.facts.looked_up |= table.source or frozenset()
    return [Array(tuple(dims), None)]


def _dot(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    (contracted, batch), (left, right) = eqn.params["dimension_numbers"], arrays
    for pairs in (contracted, batch):
        for one, other in zip(*pairs, strict=True):
            join(left.dims[one], right.dims[other])
    free = [
        [axis for axis in range(len(array.dims)) if axis not in (*contracted[side], *batch[side])]
        for side, array in enumerate(arrays)
    ]
    inner = [left.dims[axis] for axis in contracted[0]]
    kept = [left.dims[axis] for axis in batch[0]]
    outer = [[array.dims[axis] for axis in axes] for array, axes in zip(arrays, free, strict=True)]
    weights = [array.source or frozenset() for array in arrays]
    if all(weights):
        source = weights[0] | weights[1]  # a parameter made of others, as of low rank
    elif any(weights):
        side, source = (0 if weights[0] else 1), None
        for path in weights[side]:
            _note(inner, Facts(taken={path}))
            _note(outer[side], Facts(made={path}))
        _note(kept, Facts(met=1))  # each entry meets its own: heads of a learned query and of the keys
    else:
        source = None
        _note(inner, Facts(mixed={"contracted between activations"}))
        _note([*kept, *outer[0], *outer[1]], Facts(met=1))
    return [Array((*kept, *outer[0], *outer[1]), source)]


def _convolve(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    for array in arrays:
        for dim in array.dims:
            mix(dim, "not followed")
    return [Array(tuple(map(fresh, _shape(eqn.outvars[0]))), None)]


def _note(dims: Sequence[Dim], facts: Facts) -> None:
    for dim in dims:
        for piece in flat(dim):
            piece.facts.add(facts)


def _source(arrays: Sequence[Array]) -> frozenset[str] | None:
    if any(array.source is None for array in arrays):
        return None
    return frozenset().union(*(array.source or () for array in arrays))


_REDUCE = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin")
_ALONG = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "top_k")
OPERATIONS: dict[str, Rule] = {
    **dict.fromkeys(_REDUCE, _reduce),
    **dict.fromkeys(_ALONG, _along),
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "dynamic_slice": lambda eqn, arrays: _slice(eqn, arrays[:1]),
    "split": _split,
    "concatenate": _concatenate,
    "dynamic_update_slice": _update,
    "gather": _gather,
    "dot_general": _dot,
    "conv_general_dilated": _convolve,
}
