"""Infers names of dims from their use in the model's program: follows the dims of its parameters through it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
)

from jaxpar.sharding.infer_names.dim_pieces import Dim, DimPiece, flat, fresh, join
from jaxpar.sharding.infer_names.from_words import InferredDims
from jaxpar.sharding.infer_names.operations import CALLS, OPERATIONS, TracedArray, elementwise

# A table with more rows than this, in multiples of its width, is split by rows even if no matmul produces them: that
# sends activations, while gathering would send the table itself. It is the size of a feed-forward matrix.
WIDE = 4


def follow_dims(jaxpr: Jaxpr, paths: Sequence[str]) -> dict[str, tuple[Dim, ...]]:
    """Returns the dims of every parameter, with their use in the program.

    Args:
      jaxpr: The model's program.
      paths: Paths of the parameters that are its first arguments.
    """
    inputs = [new_array(var, frozenset()) for var in jaxpr.invars]
    for index, path in enumerate(paths):
        inputs[index] = TracedArray(inputs[index].dims, frozenset({path}))
    _run(jaxpr, inputs)
    return {path: array.dims for path, array in zip(paths, inputs, strict=False)}


def new_array(var, source: frozenset[str] | None = None) -> TracedArray:
    """Returns an array with the shape of a variable, and without facts."""
    return TracedArray(tuple(fresh(size) for size in getattr(var.aval, "shape", ())), source)


def _run(jaxpr: Jaxpr, inputs: Sequence[TracedArray]) -> list[TracedArray]:
    arrays: dict[Var, TracedArray] = dict(zip(jaxpr.invars, inputs, strict=True))
    arrays |= {var: new_array(var, frozenset()) for var in jaxpr.constvars}

    def read_var(var) -> TracedArray:
        return new_array(var, frozenset()) if isinstance(var, Literal) else arrays[var]

    for eqn in jaxpr.eqns:
        arrays.update(zip(eqn.outvars, _equation(eqn, [read_var(var) for var in eqn.invars]), strict=True))
    return [read_var(var) for var in jaxpr.outvars]


def _equation(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scan(eqn, arrays)
    if name == "while":
        first = params["cond_nconsts"]
        body, consts = params["body_jaxpr"].jaxpr, params["body_nconsts"]
        carry = [TracedArray(array.dims, None) for array in arrays[first + consts :]]
        return _join_carry(_run(body, [*arrays[first : first + consts], *carry]), carry)
    if name == "cond":
        results = [_run(branch.jaxpr, arrays[1:]) for branch in params["branches"]]
        return [_join_branches(result) for result in zip(*results, strict=True)]
    if name not in ("reduce", "reduce_window") and (key := next((key for key in CALLS if key in params), None)):
        return _run(_open(params[key]), arrays)
    return OPERATIONS.get(name, elementwise)(eqn, arrays)


def _scan(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    # by ranks, as releases of JAX name the equation's parameters differently: a stacked array has one more dim
    body = _open(eqn.params["jaxpr"])
    scanned = sum(_is_stack(*pair) for pair in zip(eqn.invars, body.invars, strict=True))
    carried = sum(not _is_stack(*pair) for pair in zip(eqn.outvars, body.outvars, strict=True))
    consts = len(arrays) - scanned - carried
    carry = [TracedArray(array.dims, None) for array in arrays[consts : consts + carried]]
    stacks = arrays[consts + carried :]
    for array in stacks:
        for piece in flat(array.dims[0]):
            piece.facts.scanned = True
    out = _run(body, [*arrays[:consts], *carry, *(TracedArray(array.dims[1:], array.source) for array in stacks)])
    stacked = [TracedArray((fresh(eqn.params["length"]), *array.dims), array.source) for array in out[carried:]]
    return [*_join_carry(out[:carried], carry), *stacked]


def _is_stack(outer, inner) -> bool:
    return len(outer.aval.shape) > len(inner.aval.shape)


def _join_carry(out: list[TracedArray], carry: list[TracedArray]) -> list[TracedArray]:
    """Joins the dims of a loop's carry: the result of an iteration is the input of the next."""
    return [_join_branches(pair) for pair in zip(carry, out, strict=True)]


def _join_branches(arrays: Sequence[TracedArray]) -> TracedArray:
    for array in arrays[1:]:
        for first, dim in zip(arrays[0].dims, array.dims, strict=True):
            join(first, dim)
    return arrays[0]


def _open(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def infer_by_use(jaxpr: Jaxpr, paths: Sequence[str]) -> dict[str, InferredDims]:
    """Infers the dims of all parameters of a traced model; they are the first arguments of its jaxpr."""
    params = {path: tuple(tuple(flat(dim)) for dim in dims) for path, dims in follow_dims(jaxpr, paths).items()}
    names, of_param = _pairs(params)
    return {path: _infer(path, dims, names, of_param.get(path)) for path, dims in params.items()}


def _pairs(params: Mapping[str, Sequence[Dim]]) -> tuple[dict[DimPiece, str], dict[str, DimPiece]]:
    """Names the pieces that one parameter produces and another contracts, at most one per parameter.

    Batch dims of attention come first, then the pieces that the fewest parameters use: otherwise the residual stream,
    which every layer reads and adds to, would be chosen for every parameter. A convolution that is in no pair gets its
    output channels named, because otherwise every device would compute all of it.

    Returns:
      The names of pieces, and the piece of each parameter that is in a pair.
    """
    order = {piece: n for n, piece in enumerate(p for dims in params.values() for dim in dims for p in dim)}
    candidates = [piece for piece in order if _is_hidden_dim(piece)]
    candidates.sort(key=lambda p: (-p.facts.batched_count, len(p.facts.produced_by | p.facts.contracted_by), order[p]))
    chosen: dict[DimPiece, str] = {}
    assigned: dict[str, DimPiece] = {}
    for piece in candidates:
        owners = [path for path in piece.facts.produced_by | piece.facts.contracted_by if path in params]
        flattened = piece.facts.convolved and any(piece in dim[1:] for path in owners for dim in params[path])
        if not flattened and all(
            path not in assigned or _follows(params[path], assigned[path], piece) for path in owners
        ):
            chosen[piece] = "heads" if piece.facts.batched_count else "channels" if piece.facts.convolved else "mlp"
            assigned |= dict.fromkeys(owners, piece)
    for path, dims in params.items():
        outputs = [dim[0] for dim in dims if dim and path in dim[0].facts.produced_by and dim[0].facts.convolved]
        if path not in assigned and outputs and not outputs[0].facts.mixed:
            chosen[outputs[0]], assigned[path] = "channels", outputs[0]
    return chosen, assigned


def _is_hidden_dim(piece: DimPiece) -> bool:
    facts = piece.facts
    used = facts.produced_by and facts.contracted_by and facts.produced_by.isdisjoint(facts.contracted_by)
    return bool(used) and not (facts.mixed or facts.looked_up or facts.scanned)


def _follows(dims: Sequence[Dim], first: DimPiece, piece: DimPiece) -> bool:
    """Whether a piece comes right after another in a dim, with the same use, as head groups after the kv heads."""
    return first.facts.batched_count == piece.facts.batched_count and any(
        pair == (first, piece) for dim in dims for pair in pairwise(dim)
    )


def _infer(path: str, dims: Sequence[Dim], names: Mapping[DimPiece, str], assigned: DimPiece | None) -> InferredDims:
    pairs = names  # a kernel between two pairs of channels is split along the dim of its own
    if assigned is not None and assigned.facts.convolved:
        pairs = {piece: name for piece, name in names.items() if piece is assigned}
    rows = [_row(path, index, dims, pairs) for index in range(len(dims))]
    cut = [piece for dim in dims for piece in dim if piece in pairs]
    return InferredDims(
        names=tuple(name for name, _ in rows),
        pieces=tuple(count for _, count in rows),
        why="use: " + (_explain(path, cut[0], pairs[cut[0]]) if cut else ", ".join(_plain(rows)) or "no dim to be cut"),
        followed=not any("not followed" in piece.facts.mixed for dim in dims for piece in dim),
    )


def _row(path: str, index: int, dims: Sequence[Dim], pairs: Mapping[DimPiece, str]) -> tuple[str | None, int]:
    """Returns the name of a parameter's dim `index`, and its largest number of shards."""
    dim = dims[index]
    size = math.prod(piece.size for piece in dim)
    if not dim:
        return None, 1
    if any(piece.facts.scanned for piece in dim):
        return "layers", size
    leading = [piece for piece in dim if piece in pairs]
    if leading:
        # the first pieces of the dim may be the parts of a fused matrix (q, k, v): contiguous shards divide these first
        last = max(n for n, piece in enumerate(dim) if piece in pairs)
        return pairs[leading[0]], math.prod(piece.size for piece in dim[: last + 1])
    other_entries = math.prod(piece.size for n, other_dim in enumerate(dims) if n != index for piece in other_dim)
    facts = dim[0].facts
    if _is_expert_dim(path, dims, index):
        return "expert", size
    tied = facts.looked_up and facts.produced_by
    read_out = facts.produced_by and not facts.contracted_by and not facts.looked_up and len(dims) > 1
    head = (
        read_out and path in facts.produced_by and size >= other_entries
    )  # if it were unsplit, every device would compute all logits
    if tied or head or (path in facts.looked_up and size > WIDE * other_entries):
        return "vocab", size
    if any(piece.facts.batched_count or "contracted between activations" in piece.facts.mixed for piece in dim):
        return "head_dim", size
    return "embed" if facts.produced_by or facts.contracted_by else None, size


def _is_expert_dim(path: str, dims: Sequence[Dim], index: int) -> bool:
    """Whether the entries of a dim are experts: matrices, or biases, each of which is applied to other tokens.

    Matmuls may compute the tokens of all experts from the same input: then the dim is batched in the next matmul only.
    """
    facts = dims[index][0].facts
    if len(dims) > 2 and path in facts.batched_by:
        return True
    # more batched matmuls than those by parameters are of two activations: heads of attention
    if not facts.batched_by or facts.batched_count > len(facts.batched_by):
        return False
    own = [n for n, dim in enumerate(dims) if not any(piece.facts.scanned for piece in dim)]
    if len(own) > 2:
        return index == own[0] and path in facts.produced_by
    every = [piece.facts for dim in dims for piece in dim]
    multiplied = any(path in f.produced_by | f.contracted_by | f.batched_by for f in every)
    return len(own) == 2 and index == own[0] and not multiplied


def _explain(path: str, piece: DimPiece, name: str) -> str:
    made, taken = piece.facts.produced_by, piece.facts.contracted_by
    if path in made:
        return f"{name} are made here and contracted by {_short(taken) or 'no parameter'}"
    if path in taken:
        return f"{name} are contracted here and made by {_short(made) or 'no parameter'}"
    return f"{name} are made by {_short(made)}"


def _plain(rows: Iterable[tuple[str | None, int]]) -> list[str]:
    return ["rows are looked up, or read out" for name, _ in rows if name == "vocab"]


def _short(paths: Iterable[str]) -> str:
    ends = sorted({_end(path.split("/")) for path in paths})
    return ", ".join(ends[:3]) + (", ..." if len(ends) > 3 else "")


def _end(parts: list[str]) -> str:
    """Returns the last two parts of a path, and the name of a list before its index: grow/0/kernel."""
    return "/".join(parts[-3:] if len(parts) > 2 and parts[-2].isdigit() else parts[-2:])
