"""Chooses the dims to cut over one mesh axis of n devices: an integer program, solved exactly, with a lower bound.

    x[c]       whether the dims of class c are cut; an array has at most one such dim
    v[o, k]    the loop of operation o that is cut, or none: it then does all of its work on every device
    e[i, s, t] the state s of operand i, and the state t that the loop asks for: gathered, or exchanged all to all
    f[o, r, s] the state r of a result as made (a shard, whole, or a partial sum), and its state s
    w[a, s, t] whether array a is brought from s to t: once for all that read it

Flows e and f have the states as marginals: this form is tighter than products of x and v, and its linear relaxation is
nearly always integral. The costs are seconds: FLOP at the chip's rate, bytes over the link and a launch for each
collective, bytes of device memory for arrays that operations read or make, and sums along a dim that is cut.

Source of the formulation: edge flows over strategies of operations, as in Alpa (Zheng et al. 2022, arXiv:2201.12023,
section 4), with shared collectives and partial sums as states.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy import optimize, sparse

from jaxpar.errors import JaxparError, refuse
from jaxpar.sharding.infer_names.dim_pieces import DimPiece, flat
from jaxpar.specs.classes import Classes
from jaxpar.specs.program import Array, Operation, TracedProgram
from jaxpar.units import show_bytes

PARTIAL = "partial sum"
WHOLE = 0.1  # share of the FLOP that may stay whole where matmuls have to be split
NODES = 500  # of the search tree, and not seconds: processes of one job must find the same specs
GAP = 5e-4  # the search ends once the best choice is proven to be within this share of the best possible
TIE = 0.02  # of choices that cost at most this share more than the best one, the simplest is taken
Row = tuple[dict[int, float], float, float]  # coefficients of columns, and the limits of their sum
State = int | str | None  # a class of pieces, a partial sum, or None: whole
Strategy = tuple[tuple[State, ...], State]  # the states of operands, and of the result as made


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of the work and the traffic of one device.

    Attributes:
      flops: FLOP per second of matmuls.
      link: Bytes per second over the axis.
      launch: Seconds of a collective before its first byte.
      memory: Bytes per second of device memory.
      parameter: Seconds per element of a parameter for its update, and for its gathers and sums over other axes.
      state: Bytes per element of a parameter of parameters, gradients and optimizer state.
    """

    flops: float
    link: float
    launch: float
    memory: float
    parameter: float
    state: float = 16.0


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The dims to cut.

    Attributes:
      cut: The classes of pieces that are cut.
      cost: Seconds of the modelled step.
      best: Seconds of the best choice, of which this one is the simplest within `TIE`.
      bound: No choice of dims costs less, in seconds, by the linear relaxation and the solver's own search.
      relaxed: The optimum of the linear relaxation, in seconds.
      seconds: Seconds that building and solving took.
      memory: Bytes of parameters, gradients, optimizer state and kept activations on a device.
      collectives: Collectives of a step over the axis.
      work: Share of the FLOP of one device without the axis that each device does: 1 / n if all operations are cut.
      kept: Share of the bytes of kept activations that each device keeps.
      size: Numbers of columns and rows of the program.
    """

    cut: frozenset[int]
    cost: float
    best: float
    bound: float
    relaxed: float
    seconds: float
    memory: float
    collectives: tuple["Sent", ...]
    work: float
    kept: float
    size: tuple[int, int]

    @property
    def traffic(self) -> dict[str, float]:
        """Kind of collective to the bytes that a device sends over the axis in a step."""
        totals: defaultdict[str, float] = defaultdict(float)
        for sent in self.collectives:
            totals[sent.kind] += sent.times * sent.bytes
        return dict(totals)

    @property
    def gap(self) -> float:
        """The share of the best choice's cost by which it may be above that of an unknown one."""
        return (self.best - self.bound) / self.best if self.best else 0.0


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Equal collectives of a step over the axis.

    Attributes:
      kind: all-gather, reduce-scatter, all-reduce or all-to-all.
      bytes: Bytes that a device sends in one.
      times: Number of them in a step.
      of_parameters: Whether a parameter is gathered, so that the bytes do not depend on the examples.
    """

    kind: str
    bytes: float
    times: float
    of_parameters: bool


class Cuts:
    """The integer program of one program and one axis."""

    def __init__(self, program: TracedProgram, devices: int, costs: StepCosts, *, examples: bool = False):
        """Builds the columns and rows.

        Args:
          program: The program.
          devices: Size of the axis.
          costs: Seconds of work and traffic.
          examples: Whether the axis may split examples too.
        """
        self.program, self.n, self.costs = program, devices, costs
        self._whole: set[DimPiece] = set() if examples else program.rows  # examples that the axis may not split
        self.classes = Classes(program)
        self._cost: list[float] = []
        self._binary: list[bool] = []
        self._rows: list[Row] = []
        self._w: dict[Any, int] = {}
        self._memory: defaultdict[int, float] = defaultdict(float)
        self._memory_whole = self._constant = 0.0
        self._sent: list[tuple[int, Sent]] = []
        self._flop: list[tuple[list[int], float]] = []
        self._kept: defaultdict[int, float] = defaultdict(float)
        self._kept_whole = 0.0
        self._complexity: dict[int, float] = {}
        self._whole_work: dict[int, float] = {}
        self.x: dict[int, int] = {}
        self.candidates = self._candidates()
        self._arrays()
        self._operations()
        self._row({self._column(): 1.0}, 0, 0)  # a program without operations has no other column: HiGHS wants one

    # columns

    def _column(self, cost: float = 0.0, *, binary: bool = False) -> int:
        self._cost.append(cost)
        self._binary.append(binary)
        return len(self._cost) - 1

    def _row(self, terms: dict[int, float], low: float, high: float) -> None:
        self._rows.append((terms, low, high))

    def _candidates(self) -> set[DimPiece]:
        """Returns the pieces that may be cut: of a size that the devices divide, and first in every dim."""
        found: set[DimPiece] = set()
        barred: set[DimPiece] = set(self._whole)
        for array in self.program.arrays:
            seen: set[DimPiece] = set()
            for dim in array.dims:
                for depth, piece in enumerate(flat(dim)):
                    found.add(piece)
                    if depth or piece.facts.mixed or piece.size % self.n or piece in seen:
                        barred.add(piece)
                    seen.add(piece)
        return found - barred

    def _states(self, array: Array) -> list[int]:
        """Returns the classes of the pieces along which an array may be cut."""
        pieces = [piece for dim in array.root.dims for piece in flat(dim) if piece in self.candidates]
        return sorted({self.classes.pieces[piece] for piece in pieces})

    def _arrays(self) -> None:
        """Adds x, at most one of which is 1 per array; and the traffic and memory that a cut saves."""
        share, seen = 1 - 1 / self.n, set()
        touched = {
            id(array.root): array.root
            for operation in self.program.operations
            for array in (*operation.operands, operation.result)
            if not array.root.constant
        }
        everything = {**touched, **{id(array): array for array in self.program.params.values()}}
        for array in everything.values():
            for state in self._states(array):
                self.x.setdefault(state, -1)
        for state in self.x:
            self.x[state] = self._column(binary=True)
        kept = _kept_activations(self.program)
        for key, array in everything.items():
            states = self._states(array)
            seconds = 2 * array.times * array.bytes / self.costs.memory if key in touched else 0.0
            stored = array.bytes * array.times if key in kept else 0.0
            if array.path:
                seconds += array.bytes / array.itemsize * self.costs.parameter
                stored = array.bytes / array.itemsize * self.costs.state
            self._memory_whole += stored
            self._kept_whole += 0.0 if array.path else stored
            self._constant += seconds
            for state in states:
                self._cost[self.x[state]] -= share * seconds
                self._memory[self.x[state]] -= share * stored
                self._kept[self.x[state]] -= 0.0 if array.path else share * stored
            if len(states) > 1 and (row := tuple(states)) not in seen:
                seen.add(row)
                self._row({self.x[state]: 1.0 for state in states}, 0, 1)
        for result, pieces in self.program.reductions:
            for piece in pieces:
                if piece in self.candidates and (state := self.classes.pieces[piece]) in self.x:
                    self._add_traffic(self.x[state], "all-reduce", 2 * share * result.bytes, result.times)

    def _add_traffic(self, column: int, kind: str, sent: float, times: float, *, of_parameters: bool = False) -> None:
        """Adds the seconds of `times` collectives, in which a device sends `sent` bytes each, to a column."""
        self._cost[column] += times * (sent / self.costs.link + self.costs.launch)
        self._sent.append((column, Sent(kind=kind, bytes=sent, times=times, of_parameters=of_parameters)))

    def _move(self, size: float, source: State, target: State, *, merged: bool) -> tuple[str, float]:
        """Returns the collective that brings an array from one state to another, and the bytes that a device sends.

        An exchange all to all from or to a dim that a reshape merged with another is a gather in XLA.
        """
        sent = (1 - 1 / self.n) * size
        if source == target or source is None or not size:
            return "", 0.0
        if source == PARTIAL:
            return ("all-reduce", 2 * sent) if target is None else ("reduce-scatter", sent)
        if target is None or merged:
            return "all-gather", sent
        return "all-to-all", sent / self.n

    def _operations(self) -> None:
        groups = _sums(self.program)
        counts, first = Counter(self.classes.operations[o] for o in self.program.operations), {}
        for operation in self.program.operations:
            first.setdefault(self.classes.operations[operation], operation)
        self._array_counts = Counter(
            self.classes.of_array(a) for a in self.program.arrays if a.root is a and id(a) in self.classes.arrays
        )
        self._group_counts = Counter(
            (self.classes.of_array(result), len(members)) for result, members in groups.values()
        ) if groups else Counter()  # fmt: skip
        group_of = {id(member): key for key, (_, members) in groups.items() for member in members}
        for number, operation in first.items():
            self._operation(operation, counts[number], groups.get(group_of.get(id(operation.result), -1)))

    def _operation(self, operation: Operation, count: int, group: Any) -> None:
        strategies = self._strategies(operation)
        seconds = count * operation.times * operation.flop / self.costs.flops
        v = [self._column(seconds / self.n if index else seconds, binary=True) for index in range(len(strategies))]
        self._row(dict.fromkeys(v, 1.0), 1, 1)
        self._flop.append((v, count * operation.times * operation.flop))
        if len(v) > 1 and operation.flop:
            self._whole_work[v[0]] = count * operation.times * operation.flop
        self._follow_operands(operation, strategies, v)
        for index, operand in enumerate(operation.operands):
            if not operand.constant:
                self._flow(operation, index, operand, [strategy[0][index] for strategy in strategies], v, count)
        self._result_flow(operation, [strategy[1] for strategy in strategies], v, count, group)

    def _follow_operands(self, operation: Operation, strategies: Sequence[Strategy], v: Sequence[int]) -> None:
        """Cuts the loop along which an operand is cut, unless another operand is cut otherwise, as XLA does.

        XLA moves no operand to do more of the work on every device: it cuts the whole operand and sums the parts.
        """
        if len(operation.operands) != 2:
            return
        cuttable = [set(self._states(operand)) if not operand.constant else set() for operand in operation.operands]
        for (states, _), column in zip(strategies[1:], v[1:], strict=True):
            for index, state in enumerate(states):
                if state not in cuttable[index]:
                    continue
                others = cuttable[1 - index] - {states[1 - index]}
                if state not in others:  # else the other operand is cut otherwise whenever this one is cut
                    terms = {column: 1.0, self.x[state]: -1.0}  # type: ignore[index]
                    self._row(terms | {self.x[other]: 1.0 for other in others}, 0, np.inf)

    def _strategies(self, operation: Operation) -> list[Strategy]:
        """Returns the states of operands and result for no cut, and for each loop that may be cut."""
        arrays = (*operation.operands, operation.result)
        strategies: list[Strategy] = [((None,) * len(operation.operands), None)]
        for operands, result in operation.loops:
            pieces = (*operands, result)
            size = next(piece.size for piece in pieces if piece is not None)
            if size % self.n or any(piece in self._whole for piece in pieces):
                continue
            leading = all(
                piece is None or array.constant or piece in array.pieces()
                for piece, array in zip(pieces, arrays, strict=True)
            )
            if leading:
                made = PARTIAL if result is None else self.classes.pieces[result]
                strategies.append((tuple(map(self.classes.of_piece, operands)), made))
        return strategies

    def _flow(
        self, operation: Operation, index: int, operand: Array, asked: list[State], v: list[int], count: int
    ) -> None:
        """Adds the flow from the states of an operand's array to the states that strategies ask for."""
        sources: list[State] = [*self._states(operand), None]
        targets = list(dict.fromkeys(asked))
        root, merged = operand.root, any(len(list(flat(dim))) > 1 for dim in operand.dims)
        times = max(operation.times, root.times)
        columns = {(s, t): self._column() for s in sources for t in targets}
        for source in sources[:-1]:
            terms = {columns[source, t]: 1.0 for t in targets}
            terms[self.x[source]] = -1.0  # type: ignore[index]
            self._row(terms, 0, 0)
        for target in targets:
            terms = {columns[s, target]: 1.0 for s in sources}
            terms |= {v[k]: -1.0 for k, state in enumerate(asked) if state == target}
            self._row(terms, 0, 0)
        for (source, target), column in columns.items():
            kind, sent = self._move(operand.bytes, source, target, merged=merged)
            if not kind:
                continue
            key = (self.classes.of_array(root), source, target)
            if key not in self._w:
                self._w[key] = self._column()
                self._add_traffic(
                    self._w[key], kind, sent, self._array_counts[key[0]] * times, of_parameters=root.learned
                )
                self._complexity[self._w[key]] = 1.0 if root.path else 0.5 if kind == "all-to-all" else 0.0
            self._row({self._w[key]: 1.0, column: -1.0}, 0, np.inf)

    def _result_flow(self, operation: Operation, made: list[State], v: list[int], count: int, group: Any) -> None:
        """Adds the flow from the states in which a result is made to the state of its array."""
        sources, targets = list(dict.fromkeys(made)), [*self._states(operation.result), None]
        merged = any(len(list(flat(dim))) > 1 for dim in operation.result.dims)
        columns = {(s, t): self._column() for s in sources for t in targets}
        for source in sources:
            terms = {columns[source, t]: 1.0 for t in targets}
            terms |= {v[k]: -1.0 for k, state in enumerate(made) if state == source}
            self._row(terms, 0, 0)
        for target in targets[:-1]:
            terms = {columns[s, target]: 1.0 for s in sources}
            terms[self.x[target]] = -1.0  # type: ignore[index]
            self._row(terms, 0, 0)
        for (source, target), column in columns.items():
            kind, sent = self._move(operation.result.bytes, source, target, merged=merged)
            if not kind:
                continue
            if source == PARTIAL and group is not None:
                result, members = group
                key = ("sum", self.classes.of_array(result), len(members), target)
                if key not in self._w:
                    self._w[key] = self._column()
                    times = self._group_counts[key[1], key[2]] * operation.times
                    self._add_traffic(self._w[key], kind, sent, times)
                self._row({self._w[key]: 1.0, column: -1.0}, 0, np.inf)
            else:
                self._add_traffic(column, kind, sent, count * operation.times)

    # solving

    def solve(
        self,
        *,
        memory: float | None = None,
        least: bool = False,
        split: bool = False,
    ) -> Solution:
        """Solves the program exactly, and takes the simplest choice within `TIE` of the best.

        Args:
          memory: Bytes that parameters, state and kept activations may take on a device.
          least: Minimizes memory instead of seconds.
          split: Whether at most a tenth of the FLOP of matmuls that can be cut may stay whole, and half of the bytes of
            parameters that can be cut.

        Raises:
          JaxparError: If no choice fits in `memory`; the message has the least that is possible.
        """
        start, columns = time.perf_counter(), len(self._cost)
        rows, upper = self._limited(memory, split=split), np.where(np.array(self._binary), 1.0, np.inf)
        scale, cost = (1e-6, _vector(self._memory, columns)) if least else (1e6, np.array(self._cost))
        run = partial(_minimize, upper=upper, binary=np.array(self._binary), nodes=NODES)
        found = run(cost * scale, rows)
        if found.x is None:
            raise self._impossible(memory)
        relaxed = _minimize(cost * scale, rows, upper=upper, binary=np.zeros(columns))
        constant = self._memory_whole if least else self._constant
        best = found.fun / scale + constant
        bound = relaxed.fun if found.mip_dual_bound is None else max(found.mip_dual_bound, relaxed.fun)
        values = found.x
        if not least:
            rows.append((dict(enumerate(cost * scale)), -np.inf, ((1 + TIE) * best - constant) * scale))
            simplest = run(_vector(self._complexity, columns) + cost / (best or 1.0), rows, nodes=NODES // 10)
            values = values if simplest.x is None else simplest.x
        total = lambda amounts: sum(amount * values[column] for column, amount in amounts.items())  # noqa: E731
        done = sum(flop * (values[columns[0]] + (1 - values[columns[0]]) / self.n) for columns, flop in self._flop)
        return Solution(
            cut=frozenset(state for state, column in self.x.items() if values[column] > 0.5),
            cost=float(cost @ values) + constant,
            best=best,
            bound=min(bound, found.fun) / scale + constant,
            relaxed=relaxed.fun / scale + constant,
            seconds=time.perf_counter() - start,
            memory=self._memory_whole + total(self._memory),
            collectives=tuple(
                replace(sent, times=sent.times * float(values[column]))
                for column, sent in self._sent
                if values[column] > 1e-6 and sent.bytes
            ),
            work=done / max(sum(flop for _, flop in self._flop), 1.0),
            kept=(self._kept_whole + total(self._kept)) / max(self._kept_whole, 1.0),
            size=(columns, len(self._rows)),
        )

    def least_without(self, states: Iterable[int], *, memory: float | None = None, split: bool = False) -> float:
        """Returns the seconds below which no choice costs that leaves these classes whole: the relaxed optimum.

        It is infinite if there is no such choice.
        """
        columns = len(self._cost)
        rows, upper = self._limited(memory, split=split), np.where(np.array(self._binary), 1.0, np.inf)
        upper[[self.x[state] for state in states]] = 0.0
        relaxed = _minimize(np.array(self._cost) * 1e6, rows, upper=upper, binary=np.zeros(columns))
        return np.inf if relaxed.x is None else relaxed.fun / 1e6 + self._constant

    def _limited(self, memory: float | None, *, split: bool) -> list[Row]:
        """Returns the rows, with limits of memory and of work that stays whole."""
        rows = list(self._rows)
        if memory is not None:
            rows.append((dict(self._memory), -np.inf, memory - self._memory_whole))
        if split:
            rows.append((dict(self._whole_work), -np.inf, WHOLE * sum(self._whole_work.values())))
            sizes: defaultdict[int, float] = defaultdict(float)
            params = [array for array in self.program.params.values() if self._states(array)]
            for array in params:
                for state in self._states(array):
                    sizes[self.x[state]] += array.bytes
            rows.append((dict(sizes), sum(array.bytes for array in params) / 2, np.inf))
        return rows

    def splits_parameters(self, solution: Solution) -> bool:
        """Whether a solution cuts any parameter."""
        return any(solution.cut & {*self._states(array)} for array in self.program.params.values())

    def _impossible(self, memory: float | None) -> JaxparError:
        least = self.solve(least=True).memory
        if memory is None or least <= memory:
            return refuse(
                f"specs over {self.n} devices of the axis",
                rule="an axis splits the matmuls of a model; no dims of this one can be cut so",
                fix="a smaller axis, whose size divides heads and hidden dims; or the axis left out",
            )
        return refuse(
            f"{show_bytes(int(memory or 0))} per device over {self.n} devices of the axis",
            rule="parameters, their state and kept activations fit; the least that any choice of dims needs is "
            f"{show_bytes(int(least))}",
            fix=f"memory of {math.ceil(least / 2**20)} MiB, more devices, fewer rows per device, or remat",
        )


def _vector(amounts: Mapping[int, float], size: int) -> np.ndarray:
    vector = np.zeros(size)
    vector[list(amounts)] = list(amounts.values())
    return vector


def _minimize(
    cost: np.ndarray, rows: Sequence[Row], *, upper: np.ndarray, binary: np.ndarray, nodes: int = 1
) -> optimize.OptimizeResult:
    entries = [(number, column, value) for number, (terms, _, _) in enumerate(rows) for column, value in terms.items()]
    numbers, columns, values = (np.array(each) for each in zip(*entries, strict=True))
    matrix = sparse.csr_matrix((values, (numbers, columns)), shape=(len(rows), len(cost)))
    low, high = (np.array([row[side] for row in rows], float) for side in (1, 2))
    limits: Any = optimize.LinearConstraint(matrix, low, high)  # pyright: ignore[reportArgumentType]
    options = {"node_limit": nodes, "mip_rel_gap": GAP}
    bounds = optimize.Bounds(0, upper)  # pyright: ignore[reportArgumentType]
    return optimize.milp(cost, constraints=limits, bounds=bounds, integrality=binary, options=options)


def _kept_activations(program: TracedProgram) -> set[int]:
    """Returns the arrays that the forward pass makes and an operation of the backward pass reads."""
    return {
        id(array.root)
        for operation in program.operations
        if operation.backward
        for array in operation.operands
        if not array.root.constant and not array.root.path and not array.root.backward
    }


def _sums(program: TracedProgram) -> dict[int, tuple[Array, list[Array]]]:
    """Returns the groups of results that are only added to each other: (the sum, its terms) by the sum's identity.

    A partial sum that is added to an array which is none costs its collective first; so every reader of a term is the
    addition.
    """
    results = {id(operation.result) for operation in program.operations}
    terms: dict[int, list[Array]] = {}
    for total, operands in program.additions:
        parts = []
        for operand in operands:
            if operand.readers != 1:
                break
            if id(operand) in terms:
                parts += terms[id(operand)]
            elif id(operand) in results:
                parts.append(operand)
            else:
                break
        else:
            for operand in operands:
                terms.pop(id(operand), None)
            terms[id(total)] = parts
    totals = {id(array): array for array, _ in program.additions}
    return {key: (totals[key], members) for key, members in terms.items()}
