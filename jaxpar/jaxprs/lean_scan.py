"""Scans over layers whose backward recomputes elementwise results, instead of saving a stack of each.

    as JAX differentiates them   forward scan ──► a stack of every residual ──► backward scan
    lean                         forward scan ──► stacks of the fewest bytes ──► backward scan that recomputes the rest

A stage of a pipeline saves these stacks for every microbatch in flight. The recomputed values equal JAX's residuals bit
for bit. A scan with `jax.checkpoint` inside has its own policy, and is unchanged.

Min-cut rematerialization saves the fewest bytes from which elementwise ops recompute all residuals:

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
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.jaxprs.dataflow import (
    REMAT,
    Env,
    Scan,
    dependent_variables,
    is_key,
    primitives,
    shapes,
    split_groups,
    variables,
)
from jaxpar.sharding.names import AGAIN

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
        edges[var, "in"][var, "out"] = variable_bytes(var)
        for x in operands:
            edges[x, "out"][var, "in"] = _ENDLESS
        if not operands:
            edges[_SOURCE][var, "in"] = _ENDLESS
    for var in sources.keys() & set(wanted):
        edges[var, "out"][_SINK] = _ENDLESS
    sink_side = _sink_side(edges)
    saved = [var for var in sources if (var, "out") in sink_side and (var, "in") not in sink_side]
    return saved, _equations_between(eqns, {*free, *saved}, wanted)


def variable_bytes(var: Any) -> int:
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


@dataclass(frozen=True, kw_only=True)
class ScanPair:
    """A forward scan, and the one backward scan that reads its stacked outputs.

    Attributes:
      forward: The equation of the forward scan.
      backward: The equation of the backward scan.
      dropped: Maps each variable of the forward's body that is no longer saved to its variables in the backward's body.
      saved: Variables of the forward's body that are saved instead.
      recomputed: Equations of the forward's body that the backward runs to compute the dropped from the saved values.
    """

    forward: JaxprEqn
    backward: JaxprEqn
    dropped: dict[Var, list[Var]]
    saved: list[Var]
    recomputed: list[JaxprEqn]


def lean_scans(closed: ClosedJaxpr, x: Collection[Var]) -> ClosedJaxpr:
    """Rewrites a joint jaxpr of forward and backward so that its scans save fewer bytes.

    Args:
      closed: The joint jaxpr, in which scans are top-level equations.
      x: Inputs that residuals may depend on; values independent of them need not be saved.
    """
    jaxpr = closed.jaxpr
    pairs = _pairs(jaxpr, x)
    if not pairs:
        return closed

    def run(*args):
        env = Env(jaxpr, closed.consts, zip(jaxpr.invars, args, strict=True))
        stacks: dict[int, list] = {}
        for eqn in jaxpr.eqns:
            index = next((n for n, pair in enumerate(pairs) if eqn in (pair.forward, pair.backward)), None)
            if index is None:
                env.run(eqn)
                continue
            with _scope(str(eqn.source_info.name_stack)):
                if eqn is pairs[index].forward:
                    stacks[index] = _run_forward(pairs[index], env)
                else:
                    _run_backward(pairs[index], env, stacks[index])
        return [env[var] for var in jaxpr.outvars]

    return jax.make_jaxpr(run)(*shapes(closed.in_avals))


def _pairs(jaxpr: Jaxpr, x: Collection[Var]) -> list[ScanPair]:
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    readers: dict[Var, list] = {}
    for eqn in jaxpr.eqns:
        for var in variables(eqn.invars):
            readers.setdefault(var, []).append(eqn)
    of_x, pairs = dependent_variables(jaxpr.eqns, x), []
    for forward in scans:
        scan, stacks = Scan(forward), {}
        free = {*scan.body.invars[: scan.consts], *scan.body.invars[scan.consts + scan.carry :]}  # never saved
        for outer, inner in zip(forward.outvars[scan.carry :], scan.body.outvars[scan.carry :], strict=True):
            reading_eqns = readers.get(outer, [])
            plain = isinstance(inner, Literal) or inner in free or outer in jaxpr.outvars
            if len(reading_eqns) == 1 and reading_eqns[0] in scans and not plain:
                stacks[outer] = (inner, reading_eqns[0])
        backwards = list({id(eqn): eqn for _, eqn in stacks.values()}.values())
        if len(backwards) == 1 and not any(backwards[0] is pair.backward for pair in pairs):
            pair = _pair(forward, backwards[0], {outer: inner for outer, (inner, _) in stacks.items()}, of_x)
            pairs += [] if pair is None else [pair]
    return pairs


def _pair(forward: JaxprEqn, backward: JaxprEqn, stacks: dict[Var, Var], of_x: Collection[Var]) -> ScanPair | None:
    fwd, bwd = Scan(forward), Scan(backward)
    if fwd.length != bwd.length or primitives([*fwd.body.eqns, *bwd.body.eqns]).intersection(REMAT):
        return None
    inner = list(zip(forward.invars, fwd.body.invars, strict=True))
    first = fwd.consts, fwd.consts + fwd.carry
    free = {var for n, (outer, var) in enumerate(inner) if not (_is_in(outer, of_x) or first[0] <= n < first[1])}
    free |= set(fwd.body.constvars)
    saved, recomputed = smallest_residuals(fwd.body.eqns, free, stacks.values())
    # a value that depends on x and is the same for all layers has no stack to be saved in
    if set(saved).intersection(fwd.body.invars[: fwd.consts]) or not _less(saved, stacks.values()):
        return None
    dropped: dict[Var, list[Var]] = {}
    for outer, var in zip(backward.invars, bwd.body.invars, strict=True):
        if not isinstance(outer, Literal) and outer in stacks:
            dropped.setdefault(stacks[outer], []).append(var)
    return ScanPair(forward=forward, backward=backward, dropped=dropped, saved=saved, recomputed=recomputed)


def _is_in(item: Var | Literal, some: Collection[Var]) -> bool:
    """Whether a variable is in a collection; False for a literal, which is not hashable."""
    return not isinstance(item, Literal) and item in some


def _less(kept: Collection[Var], before: Collection[Var]) -> bool:
    return sum(map(variable_bytes, kept)) < sum(map(variable_bytes, set(before)))


def _run_forward(pair: ScanPair, env: Env) -> list:
    """Runs the forward scan; returns the stacks of the saved variables."""
    scan = Scan(pair.forward)
    consts, first, xs = split_groups([env[var] for var in pair.forward.invars], [scan.consts, scan.carry, scan.xs])
    outs = list(zip(pair.forward.outvars, scan.body.outvars, strict=True))[scan.carry :]
    plain_outs = [(outer, inner) for outer, inner in outs if not _is_in(inner, pair.dropped)]

    def step(carry, xs):
        body_env = _body_env(scan, [*consts, *carry, *xs])
        for eqn in scan.body.eqns:
            body_env.run(eqn)
        carried = [body_env[var] for var in scan.body.outvars[: scan.carry]]
        return carried, ([body_env[var] for _, var in plain_outs], [body_env[var] for var in pair.saved])

    last, (ys, saved) = jax.lax.scan(step, first, xs, length=scan.length, reverse=scan.reverse)
    env.update(zip(pair.forward.outvars, last, strict=False))
    env.update(zip([outer for outer, _ in plain_outs], ys, strict=True))
    return saved


def _run_backward(pair: ScanPair, env: Env, kept: Sequence) -> None:
    """Runs the backward scan, which recomputes the dropped variables."""
    fwd, scan = Scan(pair.forward), Scan(pair.backward)
    dropped = {var for items in pair.dropped.values() for var in items}
    inputs = list(zip(pair.backward.invars, scan.body.invars, strict=True))
    consts, carry, xs = split_groups(inputs, [scan.consts, scan.carry, scan.xs])
    xs = [(outer, inner) for outer, inner in xs if inner not in dropped]
    # the inputs of the forward that need no saving: its constants, and its stacks of parameters
    reads = {var for eqn in pair.recomputed for var in variables(eqn.invars)} | set(pair.dropped)
    inputs_fwd = [(outer, inner) for outer, inner in zip(pair.forward.invars, fwd.body.invars, strict=True)]
    fixed = [(outer, inner) for outer, inner in inputs_fwd[: fwd.consts] if inner in reads]
    stacked = [(outer, inner) for outer, inner in inputs_fwd[fwd.consts + fwd.carry :] if inner in reads]

    def step(carried, items):
        xs_, stacked_, kept_ = items
        env_fwd = Env(fwd.body, fwd.body_consts, zip([inner for _, inner in stacked], stacked_, strict=True))
        env_fwd.update({inner: env[outer] for outer, inner in fixed})
        env_fwd.update(zip(pair.saved, kept_, strict=True))
        with jax.named_scope(AGAIN):
            for eqn in pair.recomputed:
                env_fwd.run(eqn)
        env_bwd = Env(scan.body, scan.body_consts, [(inner, env[outer]) for outer, inner in consts])
        env_bwd.update(zip([inner for _, inner in carry], carried, strict=True))
        env_bwd.update(zip([inner for _, inner in xs], xs_, strict=True))
        env_bwd.update({var: env_fwd[source] for source, items in pair.dropped.items() for var in items})
        for eqn in scan.body.eqns:
            env_bwd.run(eqn)
        out = [env_bwd[var] for var in scan.body.outvars]
        return out[: scan.carry], out[scan.carry :]

    first = [env[outer] for outer, _ in carry]
    stacks = [env[outer] for outer, _ in xs], [env[outer] for outer, _ in stacked], list(kept)
    last, ys = jax.lax.scan(step, first, stacks, length=scan.length, reverse=scan.reverse)
    env.update(zip(pair.backward.outvars, [*last, *ys], strict=True))


def _body_env(scan: Scan, values: Sequence) -> Env:
    return Env(scan.body, scan.body_consts, zip(scan.body.invars, values, strict=True))


def _scope(scope: str):
    return jax.named_scope(scope) if scope else jax.named_scope("lean")
