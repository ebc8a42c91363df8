"""The fewest bytes of a forward from which elementwise ops make again all that its backward reads.

    values that no elementwise op makes ──► elementwise ops ──► values that the backward reads
                                         └── the cut: kept, everything behind it is made again

A value of n bytes is an edge of that capacity, and what needs no keeping (parameters, and what they alone make) has
none: the smallest cut is what to keep, and the greatest flow finds it. Matmuls, reductions, kernels and collectives are
never made again, so none of the FLOP that a utilization counts is spent twice.

Sources: the idea is that of functorch's min-cut partitioner (PyTorch, `torch/_functorch/partitioners.py`); the flow is
Edmonds and Karp's (1972), Theoretical improvements in algorithmic efficiency for network flow problems.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var, jaxprs_in_params

from jaxpar.pipeline.jaxprs.dataflow import is_key, variables

# XLA fuses them into what reads their result, so to make them again costs no pass through memory of its own
ELEMENTWISE = frozenset(
    """
    abs add add_any and broadcast_in_dim cbrt ceil clamp concatenate convert_element_type copy copy_p cos div eq
    erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt
    max min mul ne neg nextafter not one_minus_square or pad pow reduce_precision rem reshape rsqrt select_n
    sharding_constraint sign sin slice split sqrt square squeeze stop_gradient sub tan tanh transpose xor
    """.split()
)
CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"))
_SOURCE, _SINK, _ENDLESS = "source", "sink", 1 << 62


def fewest_kept(
    eqns: Sequence[JaxprEqn], free: Collection[Var], wanted: Iterable[Var]
) -> tuple[list[Var], list[JaxprEqn]]:
    """Returns the variables to keep, and the equations that make all others that are wanted from them.

    Args:
      eqns: Of the forward.
      free: Variables that need no keeping.
      wanted: Those that the backward reads.
    """
    makes = {var: eqn for eqn in eqns for var in eqn.outvars if _elementwise(eqn)}
    nothing = set(free)  # what costs nothing: made of that alone
    for eqn in eqns:
        if _elementwise(eqn) and variables(eqn.invars) <= nothing:
            nothing.update(eqn.outvars)
    found: dict[Var, list[Var]] = {}  # every variable that a wanted one is made of, to those that it is made of itself
    wanted = list(dict.fromkeys(wanted))
    ahead = deque(wanted)
    while ahead:
        var = ahead.popleft()
        if var not in found and var not in nothing:
            found[var] = [one for one in _unique(makes[var].invars) if one not in nothing] if var in makes else []
            ahead.extend(found[var])
    edges: dict[Any, dict[Any, int]] = defaultdict(dict)
    for var, made_of in found.items():
        edges[var, "in"][var, "out"] = bytes_of(var)
        for one in made_of:
            edges[one, "out"][var, "in"] = _ENDLESS
        if not made_of:
            edges[_SOURCE][var, "in"] = _ENDLESS
    for var in found.keys() & set(wanted):
        edges[var, "out"][_SINK] = _ENDLESS
    behind = _behind_the_smallest_cut(edges)
    kept = [var for var in found if (var, "out") in behind and (var, "in") not in behind]
    return kept, _between(eqns, {*free, *kept}, wanted)


def bytes_of(var: Any) -> int:
    """Returns the bytes of a variable, of all devices that XLA splits it over."""
    return max(1, var.aval.size * (8 if is_key(var) else var.aval.dtype.itemsize))


def _unique(items: Iterable) -> list[Var]:
    """Returns the variables among these items in their order, which is that of what is kept in every trace."""
    return list(dict.fromkeys(item for item in items if not isinstance(item, Literal)))


def _elementwise(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name in CALLS:
        return all(_elementwise(each) for inner in jaxprs_in_params(eqn.params) for each in inner.eqns)
    # a barrier around one value is that value, for a matmul that XLA is to leave alone
    return name in ELEMENTWISE or (name == "optimization_barrier" and len(eqn.invars) == 1)


def _between(eqns: Sequence[JaxprEqn], there: set[Var], wanted: Iterable[Var]) -> list[JaxprEqn]:
    """Returns the equations that make what is wanted from what is there, in order."""
    reads, found = set(wanted) - there, []
    for eqn in reversed(eqns):
        if reads.intersection(eqn.outvars):
            found.append(eqn)
            reads |= variables(eqn.invars) - there
    return found[::-1]


def _behind_the_smallest_cut(edges: dict[Any, dict[Any, int]]) -> set[Any]:
    """Returns the nodes from which the sink is reached when the greatest flow is on its way: the cut nearest to it."""
    left: dict[Any, dict[Any, int]] = defaultdict(lambda: defaultdict(int))
    for one, ways in list(edges.items()):
        for other, room in ways.items():
            left[one][other] += room
    while path := _path(left):
        room = min(left[one][other] for one, other in path)
        for one, other in path:
            left[one][other] -= room
            left[other][one] += room
    back = defaultdict(list)
    for one, ways in left.items():
        for other, room in ways.items():
            if room > 0:
                back[other].append(one)
    behind, ahead = {_SINK}, deque([_SINK])
    while ahead:
        for one in back[ahead.popleft()]:
            if one not in behind:
                behind.add(one)
                ahead.append(one)
    return behind


def _path(left: dict[Any, dict[Any, int]]) -> list[tuple[Any, Any]]:
    """Returns the steps of a shortest way from source to sink that has room; none if there is no such way."""
    came: dict[Any, Any] = {_SOURCE: None}
    ahead = deque([_SOURCE])
    while ahead and _SINK not in came:
        one = ahead.popleft()
        for other, room in left[one].items():
            if room > 0 and other not in came:
                came[other] = one
                ahead.append(other)
    path, at = [], _SINK
    while at in came and came[at] is not None:
        path.append((came[at], at))
        at = came[at]
    return path
