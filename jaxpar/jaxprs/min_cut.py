"""Min-cut rematerialization: saves the fewest bytes from which elementwise ops recompute all residuals.

    results of other ops ──► elementwise ops ──► values that the backward reads
                          └── the cut: saved; everything behind it is recomputed

A value of n bytes is an edge of capacity n; free values (parameters, and values computed only from them) have no edge.
The values to save are the minimum cut, which the maximum flow finds. Matmuls, reductions, kernels and collectives are
never recomputed, so FLOP that count for utilization run only once.

Sources: the idea is that of functorch's min-cut partitioner (PyTorch, `torch/_functorch/partitioners.py`); the flow is
Edmonds and Karp's (1972), Theoretical improvements in algorithmic efficiency for network flow problems.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var, jaxprs_in_params

from jaxpar.jaxprs.dataflow import is_key, variables

# XLA fuses them into the readers of their results, so recomputing them costs no extra pass through memory
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


def smallest_residuals(
    eqns: Sequence[JaxprEqn], free: Collection[Var], wanted: Iterable[Var]
) -> tuple[list[Var], list[JaxprEqn]]:
    """Finds the variables to save, and the equations that recompute the other wanted variables from them.

    Args:
      eqns: Equations of the forward.
      free: Variables that need not be saved.
      wanted: Variables that the backward reads.
    """
    makes = {var: eqn for eqn in eqns for var in eqn.outvars if _elementwise(eqn)}
    free_set = set(free)  # with the values that elementwise ops compute only from free values
    for eqn in eqns:
        if _elementwise(eqn) and variables(eqn.invars) <= free_set:
            free_set.update(eqn.outvars)
    sources: dict[Var, list[Var]] = {}  # every variable behind a wanted one, to the inputs of its equation
    wanted = list(dict.fromkeys(wanted))
    queue = deque(wanted)
    while queue:
        var = queue.popleft()
        if var not in sources and var not in free_set:
            sources[var] = [x for x in _unique(makes[var].invars) if x not in free_set] if var in makes else []
            queue.extend(sources[var])
    edges: dict[Any, dict[Any, int]] = defaultdict(dict)
    for var, operands in sources.items():
        edges[var, "in"][var, "out"] = bytes_of(var)
        for x in operands:
            edges[x, "out"][var, "in"] = _ENDLESS
        if not operands:
            edges[_SOURCE][var, "in"] = _ENDLESS
    for var in sources.keys() & set(wanted):
        edges[var, "out"][_SINK] = _ENDLESS
    sink_side = _sink_side(edges)
    saved = [var for var in sources if (var, "out") in sink_side and (var, "in") not in sink_side]
    return saved, _equations_between(eqns, {*free, *saved}, wanted)


def bytes_of(var: Any) -> int:
    """Returns the bytes of a variable, on all devices that XLA splits it over together."""
    return max(1, var.aval.size * (8 if is_key(var) else var.aval.dtype.itemsize))


def _unique(items: Iterable) -> list[Var]:
    """Returns the distinct variables among the items, in order, so that every trace saves them in the same order."""
    return list(dict.fromkeys(item for item in items if not isinstance(item, Literal)))


def _elementwise(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name in CALLS:
        return all(_elementwise(sub) for inner in jaxprs_in_params(eqn.params) for sub in inner.eqns)
    # a barrier around a single value is an identity, which protects a matmul from XLA's rewrites
    return name in ELEMENTWISE or (name == "optimization_barrier" and len(eqn.invars) == 1)


def _equations_between(eqns: Sequence[JaxprEqn], available: set[Var], wanted: Iterable[Var]) -> list[JaxprEqn]:
    """Returns, in order, the equations that compute the wanted variables from the available ones."""
    reads, needed_eqns = set(wanted) - available, []
    for eqn in reversed(eqns):
        if reads.intersection(eqn.outvars):
            needed_eqns.append(eqn)
            reads |= variables(eqn.invars) - available
    return needed_eqns[::-1]


def _sink_side(edges: dict[Any, dict[Any, int]]) -> set[Any]:
    """Returns the nodes that reach the sink in the maximum flow's residual graph: the minimum cut nearest to it."""
    residual: dict[Any, dict[Any, int]] = defaultdict(lambda: defaultdict(int))
    for node, edges_out in list(edges.items()):
        for neighbor, capacity in edges_out.items():
            residual[node][neighbor] += capacity
    while path := _path(residual):
        capacity = min(residual[node][neighbor] for node, neighbor in path)
        for node, neighbor in path:
            residual[node][neighbor] -= capacity
            residual[neighbor][node] += capacity
    predecessors = defaultdict(list)
    for node, edges_out in residual.items():
        for neighbor, capacity in edges_out.items():
            if capacity > 0:
                predecessors[neighbor].append(node)
    sink_side, queue = {_SINK}, deque([_SINK])
    while queue:
        for node in predecessors[queue.popleft()]:
            if node not in sink_side:
                sink_side.add(node)
                queue.append(node)
    return sink_side


def _path(residual: dict[Any, dict[Any, int]]) -> list[tuple[Any, Any]]:
    """Returns the edges of a shortest augmenting path from source to sink; none if there is no such path."""
    previous: dict[Any, Any] = {_SOURCE: None}
    queue = deque([_SOURCE])
    while queue and _SINK not in previous:
        node = queue.popleft()
        for neighbor, capacity in residual[node].items():
            if capacity > 0 and neighbor not in previous:
                previous[neighbor] = node
                queue.append(neighbor)
    path, end = [], _SINK
    while end in previous and previous[end] is not None:
        path.append((previous[end], end))
        end = previous[end]
    return path
