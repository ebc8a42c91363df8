"""Computes the dims of the results of JAX operations from the dims of their operands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from jaxpar.sharding.infer_names.dim_pieces import Dim, DimFacts, flat, fresh, join, mix, regroup


@dataclass(frozen=True, eq=False)
class TracedArray:
    """An array of the program.

    Attributes:
      dims: Its dims.
      source: The parameters that it is computed from; empty for a constant or an input, None for an activation.
    """

    dims: tuple[Dim, ...]
    source: frozenset[str] | None


Rule = Callable[[JaxprEqn, list[TracedArray]], list[TracedArray]]
CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # parameters of equations that hold an inner jaxpr


def elementwise(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    """Handles an operation as elementwise: joins dims of equal size, and marks dims that no result has as unknown."""
    source, shapes = _source(arrays), [_shape(var) for var in eqn.outvars]
    results = [[fresh(size) for size in shape] for shape in shapes]
    for array, operand in zip(arrays, eqn.invars, strict=True):
        matches = [dims for dims, shape in zip(results, shapes, strict=True) if _broadcasts(_shape(operand), shape)]
        for axis, dim in enumerate(array.dims):
            if not matches:
                mix(dim, "not followed")
            for dims in matches if dim else ():
                join(dim, dims[axis])
    return [TracedArray(tuple(dims), source) for dims in results]


def _broadcasts(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(given) == len(shape) and all(a in (b, 1) for a, b in zip(given, shape, strict=True))


def _shape(var) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))


def _reduce(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    axes = eqn.params["axes"]
    for array in arrays:
        # sums over only parameters, as in a penalty or a norm of weights, are small
        for axis in axes if not array.source else ():
            mix(array.dims[axis], "reduced")
    dims = tuple(dim for axis, dim in enumerate(arrays[0].dims) if axis not in axes)
    return [TracedArray(dims, None if _source(arrays) != frozenset() else frozenset()) for _ in eqn.outvars]


def _along(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    """Handles cumulative sums, sorts and other operations along an axis that the result still has."""
    axis = eqn.params.get("axis", eqn.params.get("dimension", -1))
    for array in arrays:
        if array.dims:
            mix(array.dims[axis], "reduced")
    return elementwise(eqn, arrays)


def _transpose(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    return [TracedArray(tuple(arrays[0].dims[axis] for axis in eqn.params["permutation"]), arrays[0].source)]


def _reshape(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    return [TracedArray(tuple(regroup(arrays[0].dims, _shape(eqn.outvars[0]))), arrays[0].source)]


def _broadcast(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    dims = {dim: arrays[0].dims[axis] for axis, dim in enumerate(places) if _shape(eqn.invars[0])[axis] == shape[dim]}
    return [TracedArray(tuple(dims.get(axis, fresh(size)) for axis, size in enumerate(shape)), arrays[0].source)]


def _slice(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    """Handles a slice: one of several equal parts is a row of the dim reshaped to [parts, entries].

    Every n-th entry, as of gates that lie between others, is a column of the dim reshaped to [entries, n].
    """
    shape, result = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    starts, static = eqn.params.get("start_indices", (0,) * len(shape)), eqn.primitive.name == "slice"
    strides = (eqn.params.get("strides") if static else None) or (1,) * len(shape)
    dims = []
    for dim, start, stride, size, part in zip(arrays[0].dims, starts, strides, shape, result, strict=True):
        if stride > 1 and part * stride == size:
            dims.append(regroup([dim], [part, stride])[0])
        else:
            equal = static and stride == 1 and part > 0 and size % part == 0 and start % part == 0
            dims.append(dim if size == part else _part(dim, size, part, equal))
    return [TracedArray(tuple(dims), arrays[0].source)]


def _split(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    sizes, axis = eqn.params["sizes"], eqn.params["axis"]
    dims, equal = arrays[0].dims, len(set(sizes)) == 1
    parts = [_part(dims[axis], sum(sizes), size, equal) for size in sizes]
    return [TracedArray((*dims[:axis], part, *dims[axis + 1 :]), arrays[0].source) for part in parts]


def _part(dim: Dim, size: int, length: int, equal: bool) -> Dim:
    if equal:
        return regroup([dim], [size // length, length])[1]
    if length > 1:  # an index mixes no entries
        mix(dim, "not followed")
    return fresh(length)


def _concatenate(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    axis = eqn.params["dimension"]
    for operand in arrays[1:]:
        for dim_index, (first, dim) in enumerate(zip(arrays[0].dims, operand.dims, strict=True)):
            if dim_index != axis:
                join(first, dim)
    sizes = [_shape(var)[axis] for var in eqn.invars]
    if len({*sizes}) == 1:  # the halves of rotated heads
        for operand in arrays[1:]:
            join(arrays[0].dims[axis], operand.dims[axis])
        joined = (*fresh(len(sizes)), *arrays[0].dims[axis])
    else:
        for array in arrays:
            mix(array.dims[axis], "not followed")
        joined = fresh(sum(sizes))
    dims = arrays[0].dims
    return [TracedArray((*dims[:axis], joined, *dims[axis + 1 :]), _source(arrays))]


def _unstack(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    axis, dims = eqn.params["axis"], arrays[0].dims
    return [TracedArray((*dims[:axis], *dims[axis + 1 :]), arrays[0].source) for _ in eqn.outvars]


def _stack(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    axis, dims = eqn.params["axis"], arrays[0].dims
    for operand in arrays[1:]:
        for first, dim in zip(dims, operand.dims, strict=True):
            join(first, dim)
    return [TracedArray((*dims[:axis], fresh(len(arrays)), *dims[axis:]), _source(arrays))]


def _update(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    """Handles an update of a part of an array, as in a KV cache: joins dims of equal size."""
    shapes = [_shape(var) for var in eqn.invars[:2]]
    for whole, dim, size, part in zip(arrays[0].dims, arrays[1].dims, *shapes, strict=True):
        if size == part:
            join(whole, dim)
    return [TracedArray(arrays[0].dims, _source(arrays[:2]))]


def _gather(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    """Handles a lookup of rows: the result has the dims that are not indexed."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, shape = arrays[0], _shape(eqn.invars[0])
    dims = [fresh(size) for size in _shape(eqn.outvars[0])]
    sliced = [
        axis
        for axis in range(len(shape))
        if axis not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    for axis, target in zip(sliced, numbers.offset_dims, strict=True):
        if sizes[axis] == shape[axis]:
            dims[target] = table.dims[axis]
    batch = [axis for axis in range(len(dims)) if axis not in numbers.offset_dims]
    for axis, dim in zip(batch, arrays[1].dims[:-1], strict=False):
        dims[axis] = dim
    for axis in numbers.start_index_map:
        for piece in flat(table.dims[axis]):
            piece.facts.looked_up |= table.source or frozenset()
    return [TracedArray(tuple(dims), None)]


def _dot(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    (contracted, batch), (left, right) = eqn.params["dimension_numbers"], arrays
    for pairs in (contracted, batch):
        for left_axis, right_axis in zip(*pairs, strict=True):
            join(left.dims[left_axis], right.dims[right_axis])
    free = [
        [axis for axis in range(len(array.dims)) if axis not in (*contracted[side], *batch[side])]
        for side, array in enumerate(arrays)
    ]
    contracted_dims = [left.dims[axis] for axis in contracted[0]]
    batch_dims = [left.dims[axis] for axis in batch[0]]
    free_dims = [[array.dims[axis] for axis in axes] for array, axes in zip(arrays, free, strict=True)]
    weights = [array.source or frozenset() for array in arrays]
    if all(weights):
        source = weights[0] | weights[1]  # a parameter that is computed from others, such as a low-rank sum
    elif any(weights):
        side, source = (0 if weights[0] else 1), None
        for path in weights[side]:
            _note(contracted_dims, DimFacts(contracted_by={path}))
            _note(free_dims[side], DimFacts(produced_by={path}))
        # batched: heads of a learned query and of the keys, or experts
        _note(batch_dims, DimFacts(batched_count=1, batched_by=set(weights[side])))
    else:
        source = None
        _note(contracted_dims, DimFacts(mixed={"contracted between activations"}))
        _note([*batch_dims, *free_dims[0], *free_dims[1]], DimFacts(batched_count=1))
    return [TracedArray((*batch_dims, *free_dims[0], *free_dims[1]), source)]


def _ragged_dot(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    """Handles the matmuls of tokens that are sorted by expert, each group with its own matrix."""
    numbers, (left, right) = eqn.params["ragged_dot_dimension_numbers"], arrays[:2]
    ((left_axes, right_axes), (batch, _)), groups = numbers.dot_dimension_numbers, numbers.rhs_group_dimensions
    if batch or len(groups) != 1 or not right.source or left.source:
        return elementwise(eqn, arrays)
    for pair in zip(left_axes, right_axes, strict=True):
        join(left.dims[pair[0]], right.dims[pair[1]])
    free = [right.dims[axis] for axis in range(len(right.dims)) if axis not in (*right_axes, *groups)]
    for path in right.source:
        _note([right.dims[axis] for axis in right_axes], DimFacts(contracted_by={path}))
        _note(free, DimFacts(produced_by={path}))
    _note([right.dims[groups[0]]], DimFacts(batched_by=set(right.source)))
    tokens = [dim for axis, dim in enumerate(left.dims) if axis not in left_axes]
    return [TracedArray((*tokens, *free), None)]


def _convolve(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    """Follows the channels of a convolution by a parameter; in a depthwise one each meets its own kernel alone."""
    (images, kernel), shape, numbers = arrays, _shape(eqn.outvars[0]), eqn.params["dimension_numbers"]
    groups, channels = eqn.params["feature_group_count"], images.dims[numbers.lhs_spec[1]]
    depthwise = groups == _shape(eqn.invars[0])[numbers.lhs_spec[1]] == shape[numbers.out_spec[1]]
    plain = kernel.source and not images.source and eqn.params["batch_group_count"] == 1
    if not plain or (groups > 1 and not depthwise):
        for dim in (*images.dims, *kernel.dims):
            mix(dim, "not followed")
        return [TracedArray(tuple(map(fresh, shape)), None)]
    dims = [fresh(size) for size in shape]
    dims[numbers.out_spec[0]] = images.dims[numbers.lhs_spec[0]]
    outputs = dims[numbers.out_spec[1]] = kernel.dims[numbers.rhs_spec[0]]
    if depthwise:
        join(channels, outputs)
    else:
        join(channels, kernel.dims[numbers.rhs_spec[1]])
        for path in kernel.source or ():
            _note([channels], DimFacts(contracted_by={path}, convolved=True))
            _note([outputs], DimFacts(produced_by={path}, convolved=True))
    return [TracedArray(tuple(dims), None)]


def _note(dims: Sequence[Dim], facts: DimFacts) -> None:
    for dim in dims:
        for piece in flat(dim):
            piece.facts.add(facts)


def _source(arrays: Sequence[TracedArray]) -> frozenset[str] | None:
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
    "unstack": _unstack,
    "stack": _stack,
    "dynamic_update_slice": _update,
    "gather": _gather,
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolve,
}
