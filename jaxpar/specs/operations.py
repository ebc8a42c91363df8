"""Matmuls, convolutions and lookups as loops over dims, like the letters of an einsum.

A loop runs over at most one dim of each operand and of the result. If n devices split a loop, each does 1/n of the
operation's work: it reads shards of the operands that have the dim, whole copies of the others, and computes a shard
of the result, or a partial sum if the result lacks the dim.

    dot_general   batch dims, free dims of either side, contracted dims
    convolution   examples, channels in (contracted), channels out; rows and columns are not cut where windows overlap:
                  devices would exchange their edges
    gather        dims of the indices, dims that are taken whole, and the looked-up dim: each device looks up the rows
                  of its own shard and takes zeros for all others, which gives a partial sum
    scatter-add   dims of the updates (a partial sum), dims that are added whole, and the dim that is looked up
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

Loop = tuple[tuple[int | None, ...], int | None]  # the dim of each operand, and of the result, that a loop runs over


def loops_of(eqn: JaxprEqn) -> list[Loop] | None:
    """Returns the loops of an equation, as indices of dims; None if it is no matmul, convolution or lookup."""
    name = eqn.primitive.name
    if name == "dot_general":
        return list(_dot(eqn))
    if name == "conv_general_dilated":
        return _convolution(eqn)
    if name == "gather":
        return list(_gather(eqn))
    if name == "scatter-add":
        return list(_scatter(eqn))
    return None


def overlapping_dims(eqn: JaxprEqn) -> tuple[tuple[int, ...], ...]:
    """Returns the dims of each operand and of the result along which the windows of a convolution overlap."""
    if eqn.primitive.name != "conv_general_dilated":
        return tuple(() for _ in range(len(eqn.invars) + 1))
    numbers, shapes = eqn.params["dimension_numbers"], [_shape(var) for var in (*eqn.invars, *eqn.outvars)]
    specs = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    places = [place for place in range(len(shapes[0]) - 2) if not _is_disjoint(eqn, place, shapes, specs)]
    return tuple(tuple(spec[2 + place] for place in places) for spec in specs)


def _is_disjoint(eqn: JaxprEqn, place: int, shapes: Sequence[tuple[int, ...]], specs: Sequence[Any]) -> bool:
    """Whether the windows along a spatial dim do not overlap, as those of patches, in either pass."""
    params = eqn.params
    _, window, out = (shape[spec[2 + place]] for shape, spec in zip(shapes, specs, strict=True))
    stride, padding = params["window_strides"][place], tuple(params["padding"][place])
    dilations = params["lhs_dilation"][place], params["rhs_dilation"][place]
    forward = window == stride and dilations == (1, 1) and padding == (0, 0)
    of_kernel = stride == 1 and dilations == (1, out) and padding == (0, 0)  # the gradient of the kernel
    of_input = stride == 1 and dilations == (window, 1) and padding == (window - 1,) * 2
    return forward or of_kernel or of_input


def flop_of(eqn: JaxprEqn) -> float:
    """Returns the FLOP of a matmul or convolution; 0 for a lookup."""
    out = math.prod(_shape(eqn.outvars[0]))
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * out * math.prod(_shape(eqn.invars[0])[dim] for dim in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = _shape(eqn.invars[1])
        return 2.0 * out * math.prod(kernel) / kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 0.0


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _dot(eqn: JaxprEqn) -> Iterator[Loop]:
    (contracted, batch), ranks = eqn.params["dimension_numbers"], [len(_shape(var)) for var in eqn.invars]
    for index, pair in enumerate(zip(*batch, strict=True)):
        yield pair, index
    result = len(batch[0])
    for side, rank in enumerate(ranks):
        for dim in range(rank):
            if dim not in contracted[side] and dim not in batch[side]:
                yield ((dim, None) if side == 0 else (None, dim)), result
                result += 1
    for pair in zip(*contracted, strict=True):
        yield pair, None


def _convolution(eqn: JaxprEqn) -> list[Loop]:
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    images, kernel, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    if eqn.params["batch_group_count"] > 1:
        return []
    examples: Loop = (images[0], None), out[0]
    if groups == 1:
        return [examples, ((images[1], kernel[1]), None), ((None, kernel[0]), out[1])]
    depthwise = groups == _shape(eqn.invars[0])[images[1]] == _shape(eqn.outvars[0])[out[1]]
    return [examples, *([((images[1], kernel[0]), out[1])] if depthwise else [])]


def _gather(eqn: JaxprEqn) -> Iterator[Loop]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, (rank, index_rank) = (
        _shape(eqn.invars[0]),
        (len(_shape(var)) for var in (eqn.outvars[0], eqn.invars[1])),
    )
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole = [dim for dim in range(len(table)) if dim not in dropped]
    for dim, out in zip(whole, numbers.offset_dims, strict=True):
        if sizes[dim] == table[dim]:
            yield (dim, None), out
    others = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    of_index = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for dim, out in zip(range(index_rank - 1), others, strict=True):
        yield (of_index.get(dim), dim), out
    if len(numbers.start_index_map) == 1 and numbers.start_index_map[0] in numbers.collapsed_slice_dims:
        yield (numbers.start_index_map[0], None), None


def _scatter(eqn: JaxprEqn) -> Iterator[Loop]:
    numbers: Any = eqn.params["dimension_numbers"]
    table, indices, updates = (len(_shape(var)) for var in eqn.invars)
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    whole = [dim for dim in range(table) if dim not in dropped]
    for dim, update in zip(whole, numbers.update_window_dims, strict=True):
        if _shape(eqn.invars[0])[dim] == _shape(eqn.invars[2])[update]:
            yield (dim, None, update), dim
    others = [dim for dim in range(updates) if dim not in numbers.update_window_dims]
    of_index = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for dim, update in zip(range(indices - 1), others, strict=True):
        yield (of_index.get(dim), dim, update), of_index.get(dim)
    if len(numbers.scatter_dims_to_operand_dims) == 1:
        looked_up = numbers.scatter_dims_to_operand_dims[0]
        if looked_up in numbers.inserted_window_dims:
            yield (looked_up, None, None), looked_up
