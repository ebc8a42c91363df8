"""The integer program that chooses the dims to cut over one mesh axis, or over two at once.

    x[a, c]    whether axis a cuts the dims of class c; an axis cuts at most one such dim of an array
    y[s]       for two axes: the pair of classes that they cut; arrays with the same classes share it
    v[o, k]    the loop of operation o that each axis cuts, or none: its devices then do the same work
    e[i, s, t] the state s of operand i, and the state t in which the loops read it: after a gather or an all-to-all
    f[o, r, s] the state r in which an operation computes its result (a shard, replicated, or a partial sum), and the
               state s that the result then gets
    w[a, s, t] whether array a is resharded from s to t over one axis, once for all its readers

Flows e and f have the states as marginals: this form is tighter than products of x and v, and its linear relaxation is
nearly always integral. A state has an entry for each axis, since the bytes that one axis sends depend on whether the
other one cuts the array. The costs are seconds: FLOP at the chip's rate, bytes over the link and a launch for each
collective, bytes of device memory for arrays that operations read or compute, and sums along a dim that is cut.

Source of the formulation: edge flows over strategies of operations, as in Alpa (Zheng et al. 2022, arXiv:2201.12023,
section 4), with shared collectives and partial sums as states.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from jaxpar.sharding.infer_names.dim_pieces import DimPiece, flat
from jaxpar.specs.classes import Classes
from jaxpar.specs.collectives import PARTIAL, Links, RepeatedCollective, Resharding, State, States, StepCosts, is_cut
from jaxpar.specs.integer_program import IntegerProgram
from jaxpar.specs.partial_sums import sums_of_results
from jaxpar.specs.program import Array, Operation, TracedProgram


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to split an operation: the loop of it that each axis cuts, or none.

    Attributes:
      loops: For each axis the index of the loop, or None.
      operands: The states in which the operation reads each operand.
      result: The states of the result before any collective: a partial sum where a loop contracts.
      devices: Number of devices that share the work.
    """

    loops: tuple[int | None, ...]
    operands: tuple[States, ...]
    result: States
    devices: int


@dataclass(frozen=True, kw_only=True)
class Gather:
    """A gather of an activation.

    Attributes:
      array: The class of the array.
      share: The share of the array that a device then has.
      backward: For the operations that read it, whether they belong to the backward pass.
    """

    array: int
    share: float
    backward: set[bool] = field(default_factory=set)


class Formulation(IntegerProgram):
    """The integer program of one traced program and one axis, or two."""

    def __init__(
        self, program: TracedProgram, devices: int | tuple[int, ...], costs: StepCosts, *, examples: bool = False,
        both: bool = True,
    ):  # fmt: skip
        """Builds the columns and rows.

        Args:
          program: The program.
          devices: Size of the axis, or of each of two, outermost first.
          costs: Seconds of work and traffic.
          examples: Whether the axes may split examples too.
          both: Whether two axes may cut one dim together.
        """
        super().__init__()
        self.program, self.costs = program, costs
        self._both = both
        self.sizes = devices if isinstance(devices, tuple) else (devices,)
        self.n = math.prod(self.sizes)
        self.links = Links(self.sizes, costs)
        # examples, which the axes may not split, and dims that another axis splits
        self._whole: set[DimPiece] = {*program.name_of_piece, *(() if examples else program.rows)}
        self.classes = Classes(program)
        self._size_of = {state: piece.size for piece, state in self.classes.pieces.items()}
        self._w: dict[Any, int] = {}
        self._gathers: dict[int, Gather] = {}  # of activations, by column
        self._memory: defaultdict[int, float] = defaultdict(float)
        self._memory_whole = self._constant = 0.0
        self._collectives: list[tuple[int, RepeatedCollective]] = []
        self._flop: list[tuple[dict[int, int], float]] = []
        self._repeated: defaultdict[int, float] = defaultdict(float)  # column to FLOP of a device beyond those of v
        self._kept: defaultdict[int, float] = defaultdict(float)
        self._kept_whole = 0.0
        self._complexity: dict[int, float] = {}
        self._whole_work: list[dict[int, float]] = [{} for _ in self.sizes]
        self._cuts: list[list[int]] = [[] for _ in self.sizes]  # for each axis, the columns of v whose loop it cuts
        self.x: dict[tuple[int, int], int] = {}
        self._pairs: dict[States, int] = {}
        self._joint_columns: dict[Any, dict[States, int]] = {}
        self._cuttable = [self._candidates(size) for size in self.sizes]
        self.candidates: set[DimPiece] = set().union(*self._cuttable)
        self._arrays()
        self._reductions()
        self._operations()
        self._row({self._column(): 1.0}, 0, 0)  # a program without operations has no other column: HiGHS wants one

    # states of arrays

    def _candidates(self, devices: int) -> set[DimPiece]:
        """Returns the pieces that may be cut: the devices divide their size, and they are first in every dim."""
        found: set[DimPiece] = set()
        barred: set[DimPiece] = set(self._whole)
        for array in self.program.arrays:
            seen: set[DimPiece] = set()
            for dim in array.dims:
                for depth, piece in enumerate(flat(dim)):
                    found.add(piece)
                    if depth or piece.facts.mixed or piece.size % devices or piece in seen:
                        barred.add(piece)
                    seen.add(piece)
        return found - barred

    def _states(self, array: Array, axis: int) -> list[int]:
        """Returns the classes of the pieces along which an axis may cut an array."""
        pieces = [piece for dim in array.root.dims for piece in flat(dim) if piece in self._cuttable[axis]]
        return sorted({self.classes.pieces[piece] for piece in pieces})

    def _cut_columns(self, array: Array) -> Mapping[States, int]:
        """Returns the column of each state in which some axis cuts the array."""
        return self._state_columns(
            tuple(tuple(self._states(array, axis)) for axis in range(len(self.sizes))), exclusive=True
        )

    def _state_columns(self, states: tuple[tuple[int, ...], ...], *, exclusive: bool = False) -> Mapping[States, int]:
        """Returns the column of each joint state of the axes, and adds it if there is none.

        Args:
          states: For each axis, the classes that it may cut.
          exclusive: Whether an axis may cut at most one of the classes; with two axes that is always so.
        """
        key = states, exclusive or len(states) > 1
        if key not in self._joint_columns:
            columns = self._joint_columns[key] = self._pair_columns(states) if all(states) else {}
            if not columns:  # there is one axis, or only one of two may cut such an array
                alone = [axis for axis, given in enumerate(states) if given]
                for axis in alone:
                    columns |= {self._one_axis_state(axis, state): self.x[axis, state] for state in states[axis]}
            if key[1] and len(columns) > 1:
                self._row(dict.fromkeys(columns.values(), 1.0), 0, 1)
        return self._joint_columns[key]

    def _one_axis_state(self, axis: int, state: State) -> States:
        return tuple(state if number == axis else None for number in range(len(self.sizes)))

    def _pair_columns(self, states: tuple[tuple[int, ...], ...]) -> dict[States, int]:
        """Adds a column per pair of classes, shared by all arrays, and one per class cut by one axis alone.

        The columns with a class sum to its x.
        """
        if len(states) == 1:
            return {}
        columns: dict[States, int] = {}
        for pair in product(*states):
            if pair[0] != pair[1] or (self._both and self._size_of[pair[0]] % self.n == 0):
                if pair not in self._pairs:
                    self._pairs[pair] = self._column()
                columns[pair] = self._pairs[pair]
        both = dict(columns)
        for axis, given in enumerate(states):
            for state in given:
                columns[self._one_axis_state(axis, state)] = alone = self._column()
                terms = {column: 1.0 for pair, column in both.items() if pair[axis] == state}
                self._row(terms | {alone: 1.0, self.x[axis, state]: -1.0}, 0, 0)
        return columns

    def _devices(self, states: States) -> int:
        """Returns the number of shards of an array in these states."""
        return math.prod(size for size, state in zip(self.sizes, states, strict=True) if is_cut(state))

    def _arrays(self) -> None:
        """Adds x, and subtracts the memory traffic and the bytes that a cut of each array saves."""
        touched = {
            id(array.root): array.root
            for operation in self.program.operations
            for array in (*operation.operands, operation.result)
            if not array.root.constant
        }
        everything = {**touched, **{id(array): array for array in self.program.params.values()}}
        for array in everything.values():
            for axis in range(len(self.sizes)):
                for state in self._states(array, axis):
                    self.x.setdefault((axis, state), -1)
        for key in self.x:
            self.x[key] = self._column(binary=True)
        kept = _saved_activations(self.program)
        for key, array in everything.items():
            seconds = 2 * array.times * array.bytes / self.costs.memory if key in touched else 0.0
            stored = array.bytes * array.times if key in kept else 0.0
            if array.path:
                seconds += array.bytes / array.itemsize * self.costs.parameter
                stored = array.bytes / array.itemsize * self.costs.state
            self._memory_whole += stored
            self._kept_whole += 0.0 if array.path else stored
            self._constant += seconds
            for states, column in self._cut_columns(array).items():
                share = 1 - 1 / self._devices(states)
                self._cost[column] -= share * seconds
                self._memory[column] -= share * stored
                self._kept[column] -= 0.0 if array.path else share * stored

    def _reductions(self) -> None:
        """Adds the all-reduces of sums along dims that are cut."""
        for result, pieces in self.program.reductions:
            summed = [
                Counter(
                    state for piece in pieces
                    if piece in cuttable and (axis, state := self.classes.pieces[piece]) in self.x
                )
                for axis, cuttable in enumerate(self._cuttable)
            ]  # fmt: skip
            kept = [[] if len(self.sizes) == 1 else self._states(result, axis) for axis in range(len(self.sizes))]
            states = tuple(
                tuple(sorted({*summed[axis], *(state for state in kept[axis] if (axis, state) in self.x)}))
                for axis in range(len(self.sizes))
            )
            for joint, column in (self._state_columns(states) if any(summed) else {}).items():
                partial = tuple(PARTIAL if state in summed[axis] else state for axis, state in enumerate(joint))
                whole = tuple(None if state == PARTIAL else state for state in partial)
                times = result.times * max(summed[axis].get(state, 0) for axis, state in enumerate(joint))  # type: ignore[call-overload]
                for move in self.links.moves(result.bytes, partial, whole, False):
                    self._add_traffic(column, move, times, of_examples=self._has_examples(result))

    def _add_traffic(self, column: int, move: Resharding, times: float, *, of_examples: bool) -> None:
        """Adds the seconds of a collective, run `times` times in a step, to the cost of a column."""
        self._cost[column] += times * self.links.seconds(move.axis, move.bytes)
        sent = RepeatedCollective(
            axis=move.axis, kind=move.kind, bytes=move.bytes, times=times, of_examples=of_examples
        )
        self._collectives.append((column, sent))

    def _has_examples(self, array: Array) -> bool:
        return any(piece in self.program.rows for dim in array.dims for piece in flat(dim))

    # operations

    def _operations(self) -> None:
        groups = sums_of_results(self.program)
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
        flop = count * operation.times * operation.flop
        v = [self._column(flop / self.costs.flops / strategy.devices, binary=True) for strategy in strategies]
        self._row(dict.fromkeys(v, 1.0), 1, 1)
        self._flop.append(({column: each.devices for column, each in zip(v, strategies, strict=True)}, flop))
        for axis, whole in enumerate(self._whole_work):
            alone = [column for column, each in zip(v, strategies, strict=True) if each.loops[axis] is None]
            self._cuts[axis] += [column for column in v if column not in alone]
            if len(alone) < len(v) and flop:
                whole.update(dict.fromkeys(alone, flop))
        for axis in range(len(self.sizes)):
            self._follow_operands(operation, axis, strategies, v)
        for index, operand in enumerate(operation.operands):
            if not operand.constant:
                self._flow(operation, operand, [strategy.operands[index] for strategy in strategies], v)
        self._result_flow(operation, [strategy.result for strategy in strategies], v, count, group)

    def _follow_operands(
        self, operation: Operation, axis: int, strategies: Sequence[Strategy], v: Sequence[int]
    ) -> None:
        """If an axis cuts an operand, it also cuts that loop, as in XLA, unless it cuts the other operand differently.

        XLA does not gather a sharded operand if the other one is replicated: it slices that one, and sums the results.
        """
        if len(operation.operands) != 2:
            return
        cuttable = [set() if operand.constant else set(self._states(operand, axis)) for operand in operation.operands]
        columns: dict[tuple[int, tuple[State, ...]], list[int]] = {}
        for strategy, column in zip(strategies, v, strict=True):
            if (loop := strategy.loops[axis]) is not None:
                columns.setdefault((loop, tuple(states[axis] for states in strategy.operands)), []).append(column)
        for (_, states), users in columns.items():
            for index, state in enumerate(states):
                if state not in cuttable[index]:
                    continue
                others = cuttable[1 - index] - {states[1 - index]}
                if state not in others:  # else a cut of this operand cuts the other along another loop
                    terms = dict.fromkeys(users, 1.0) | {self.x[axis, state]: -1.0}  # type: ignore[index]
                    self._row(terms | {self.x[axis, other]: 1.0 for other in others}, 0, np.inf)

    def _strategies(self, operation: Operation) -> list[Strategy]:
        """Returns all ways to split an operation, with the states of its operands and its result."""
        whole = (None, (None,) * len(operation.operands), None)
        options = [[whole, *self._loops(operation, axis)] for axis in range(len(self.sizes))]
        strategies = []
        for chosen in product(*options):
            loops = tuple(loop for loop, _, _ in chosen)
            devices = math.prod(size for size, loop in zip(self.sizes, loops, strict=True) if loop is not None)
            if None not in loops and len({*loops}) < len(loops) and _size_of(operation, loops[0]) % devices:
                continue
            operands = tuple(zip(*(states for _, states, _ in chosen), strict=True))
            result = tuple(made for _, _, made in chosen)
            strategies.append(Strategy(loops=loops, operands=operands, result=result, devices=devices))
        return strategies

    def _loops(self, operation: Operation, axis: int) -> Iterable[tuple[int, tuple[State, ...], State]]:
        """Yields each loop that an axis may cut: its number, its operands' states, and its result's state."""
        arrays = (*operation.operands, operation.result)
        for number, (operands, result) in enumerate(operation.loops):
            pieces = (*operands, result)
            if _size_of(operation, number) % self.sizes[axis] or any(piece in self._whole for piece in pieces):
                continue
            leading = all(
                piece is None or array.constant or piece in array.pieces()
                for piece, array in zip(pieces, arrays, strict=True)
            )
            if leading:
                made = PARTIAL if result is None else self.classes.pieces[result]
                yield number, tuple(map(self.classes.of_piece, operands)), made

    def _flow(self, operation: Operation, operand: Array, targets: Sequence[States], v: Sequence[int]) -> None:
        """Adds the flow from the states of an operand's array to the states in which strategies read it."""
        given, root = self._cut_columns(operand), operand.root
        columns = self._flow_columns([*given, self._one_axis_state(0, None)], targets, v)
        if operation.in_island:
            self._forbid_exchange(columns)
        for source, y in given.items():
            self._row({columns[source, t]: 1.0 for t in dict.fromkeys(targets)} | {y: -1.0}, 0, 0)
        times, merged = max(operation.times, root.times), _is_merged(operand)
        of_array = self.classes.of_array(root)
        for move, users in self._flow_collectives(operand.bytes, columns, merged).items():
            # XLA gathers the last dim of an activation in two layouts, for the forward and the backward pass
            second_layout = operation.backward and not root.path and self._is_last_dim(root, move)
            key = (of_array, move.source, move.target, second_layout)
            if key not in self._w:
                self._w[key] = self._column()
                count = self._array_counts[of_array] * times
                self._add_traffic(self._w[key], move, count, of_examples=self._has_examples(root))
                self._complexity[self._w[key]] = 1.0 if root.path else 0.5 if move.kind == "all-to-all" else 0.0
                if move.kind == "all-gather" and not root.path:
                    self._gathers[self._w[key]] = Gather(array=of_array, share=1 / self._devices(move.target))
            if self._w[key] in self._gathers:
                self._gathers[self._w[key]].backward.add(operation.backward)
            self._row({self._w[key]: 1.0} | dict.fromkeys(users, -1.0), 0, np.inf)

    def _flow_columns(
        self, others: Sequence[States], of_strategies: Sequence[States], v: Sequence[int]
    ) -> dict[tuple[States, States], int]:
        """Adds a column per pair (state of an array, state of a strategy); a strategy's columns sum to its variable."""
        users = dict.fromkeys(of_strategies)
        columns = {(other, state): self._column() for other in others for state in users}
        for state in users:
            terms = {columns[other, state]: 1.0 for other in others}
            terms |= {column: -1.0 for column, each in zip(v, of_strategies, strict=True) if each == state}
            self._row(terms, 0, 0)
        return columns

    def _is_last_dim(self, array: Array, move: Resharding) -> bool:
        """Whether a collective gathers the last dim of an array."""
        last = next(flat(array.dims[-1]), None) if array.dims else None
        return move.kind == "all-gather" and last is not None and self.classes.pieces[last] == move.source[move.axis]

    def _forbid_exchange(self, columns: Mapping[tuple[States, States], int]) -> None:
        """Forbids that an axis cuts one dim before and another one after a flow inside of an island.

        No line of the model names the arrays there, so XLA chooses where it exchanges them: for jp.attention it
        exchanged the scores, 26 times the bytes of the heads.
        """
        for (array, operation), column in columns.items():
            if any(is_cut(one) and is_cut(other) and one != other for one, other in zip(array, operation, strict=True)):
                self._row({column: 1.0}, 0, 0)

    def _flow_collectives(
        self, size: float, columns: Mapping[tuple[States, States], int], merged: bool
    ) -> dict[Resharding, list[int]]:
        """Returns the collectives of a flow, each with the columns that need it."""
        users: dict[Resharding, list[int]] = {}
        for (source, target), column in columns.items():
            for move in self.links.moves(size, source, target, merged):
                users.setdefault(move, []).append(column)
        return users

    def _result_flow(
        self, operation: Operation, made: Sequence[States], v: Sequence[int], count: int, group: Any
    ) -> None:
        """Adds the flow from the states in which an operation computes its result to the states of that array."""
        given = self._cut_columns(operation.result)
        columns = self._flow_columns([*given, self._one_axis_state(0, None)], made, v)
        if operation.in_island:
            self._forbid_exchange(columns)
        for target, y in given.items():
            self._row({columns[target, s]: 1.0 for s in dict.fromkeys(made)} | {y: -1.0}, 0, 0)
        flows = {(source, target): column for (target, source), column in columns.items()}
        for (source, target), column in flows.items():
            self._repeat(column, count * operation.times * operation.flop, source, target)
        of_examples = self._has_examples(operation.result)
        for move, users in self._flow_collectives(operation.result.bytes, flows, _is_merged(operation.result)).items():
            if move.kind in ("all-reduce", "reduce-scatter") and group is not None:
                result, members = group
                key = ("sum", self.classes.of_array(result), len(members), move.source, move.target)
                if key not in self._w:
                    self._w[key] = self._column()
                    times = self._group_counts[key[1], key[2]] * operation.times
                    self._add_traffic(self._w[key], move, times, of_examples=of_examples)
                self._row({self._w[key]: 1.0} | dict.fromkeys(users, -1.0), 0, np.inf)
            else:
                for column in users:
                    self._add_traffic(column, move, count * operation.times, of_examples=of_examples)

    def _repeat(self, column: int, flop: float, source: States, target: States) -> None:
        """Adds the work that devices repeat for a result that a strategy cuts but whose names do not split it.

        XLA does not gather such a result: a constraint holds for the operation itself, whose operands XLA gathers.
        """
        before = [size for size, state in zip(self.sizes, source, strict=True) if state is not None]
        after = [
            size
            for size, state, stored in zip(self.sizes, source, target, strict=True)
            if state == PARTIAL or (state is not None and stored is not None)
        ]
        repeated = flop * (1 / math.prod(after) - 1 / math.prod(before))
        self._cost[column] += repeated / self.costs.flops
        self._repeated[column] += repeated


def _size_of(operation: Operation, loop: int | None) -> int:
    operands, result = operation.loops[loop or 0]
    return next(piece.size for piece in (*operands, result) if piece is not None)


def _is_merged(array: Array) -> bool:
    return any(len(list(flat(dim))) > 1 for dim in array.dims)


def _saved_activations(program: TracedProgram) -> set[int]:
    """Returns the ids of arrays that the forward pass computes and an operation of the backward pass reads."""
    return {
        id(array.root)
        for operation in program.operations
        if operation.backward
        for array in operation.operands
        if not array.root.constant and not array.root.path and not array.root.backward
    }
