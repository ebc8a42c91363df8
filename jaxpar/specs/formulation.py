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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.sharding.infer_names.dim_pieces import DimPiece, flat
from jaxpar.specs.classes import Classes
from jaxpar.specs.collectives import PARTIAL, Links, RepeatedCollective, Resharding, States, StepCosts, is_cut
from jaxpar.specs.cut_columns import CutColumns, cuttable_pieces
from jaxpar.specs.followed_cuts import follow_operands, follow_parts, part_exchanges
from jaxpar.specs.integer_program import IntegerProgram
from jaxpar.specs.line_keys import groups_cut_alike
from jaxpar.specs.partial_sums import sums_of_results
from jaxpar.specs.program import Array, Operation, TracedProgram
from jaxpar.specs.strategies import Strategy, strategies_of
from jaxpar.specs.whole_results import cuts_of_exchange, gathered_operands


@dataclass(frozen=True, kw_only=True)
class ActivationGather:
    """A gather of an activation.

    Attributes:
      array: The number of the array's class.
      view: The number of the class of the view (a reshape or transpose of the array) that operations read.
      share: The share of the array that a device has after the gather.
      users: The columns whose operations read the gathered array, by pass: "forward" and "backward".
    """

    array: int
    view: int
    share: float
    users: dict[str, list[int]] = field(default_factory=lambda: {"forward": [], "backward": []})


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
        self.sizes = devices if isinstance(devices, tuple) else (devices,)
        self.n = math.prod(self.sizes)
        self.links = Links(self.sizes, costs)
        self.classes = Classes(program)
        # examples, which the axes may not split, and dims that another axis splits
        self._uncut: set[DimPiece] = {*program.name_of_piece, *(() if examples else program.rows)}
        cuttable = [cuttable_pieces(program, size, self._uncut) for size in self.sizes]
        self.candidates: set[DimPiece] = set().union(*cuttable)
        self._touched = _touched_arrays(program)
        self._all_arrays = {**self._touched, **{id(array): array for array in program.params.values()}}
        self.cut_columns = CutColumns(self, self.classes, self.sizes, cuttable, self._all_arrays.values(), both=both)
        self._w: dict[Any, int] = {}
        self._gathers: dict[int, ActivationGather] = {}  # of activations, by column
        self._memory: defaultdict[int, float] = defaultdict(float)
        self._memory_whole = self._constant = 0.0
        self._collectives: list[tuple[int, RepeatedCollective]] = []
        self._flop: list[tuple[dict[int, int], float]] = []
        self._repeated: defaultdict[int, float] = defaultdict(float)  # column to FLOP of a device beyond those of v
        self._kept: defaultdict[int, float] = defaultdict(float)
        self._kept_whole = 0.0
        self._complexity: dict[int, float] = {}
        self._whole_work: list[dict[int, float]] = [{} for _ in self.sizes]
        self._cuts: list[list[int]] = [
            [] for _ in self.sizes
        ]  # for each axis, the columns of strategies in which it cuts a loop
        self._arrays()
        self._reductions()
        self._operations()
        for group in groups_cut_alike(program):
            self.cut_columns.cut_alike(group)
        self.add_row({self.add_column(): 1.0}, 0, 0)  # HiGHS needs a column; without operations there is no other

    def _arrays(self) -> None:
        """Adds the memory traffic and the bytes of all arrays, and subtracts those that a cut of each saves."""
        kept = _saved_activations(self.program)
        for key, array in self._all_arrays.items():
            seconds = 2 * array.times * array.bytes / self.costs.memory if key in self._touched else 0.0
            stored = array.bytes * array.times if key in kept else 0.0
            if array.path:
                seconds += array.bytes / array.itemsize * self.costs.parameter
                stored = array.bytes / array.itemsize * self.costs.state
            self._memory_whole += stored
            self._kept_whole += 0.0 if array.path else stored
            self._constant += seconds
            for states, column in self.cut_columns.of_array(array).items():
                share = 1 - 1 / _shards(states, self.sizes)
                self._cost[column] -= share * seconds
                self._memory[column] -= share * stored
                self._kept[column] -= 0.0 if array.path else share * stored

    def _reductions(self) -> None:
        """Adds the all-reduces of sums along dims that are cut."""
        for result, pieces in self.program.reductions:
            summed = [
                Counter(
                    state for piece in pieces
                    if piece in cuttable and (axis, state := self.classes.pieces[piece]) in self.cut_columns.x
                )
                for axis, cuttable in enumerate(self.cut_columns.cuttable)
            ]  # fmt: skip
            kept = [
                [] if len(self.sizes) == 1 else self.cut_columns.states(result, axis) for axis in range(len(self.sizes))
            ]
            states = tuple(
                tuple(sorted({*summed[axis], *(state for state in kept[axis] if (axis, state) in self.cut_columns.x)}))
                for axis in range(len(self.sizes))
            )
            for joint, column in (self.cut_columns.of_states(states) if any(summed) else {}).items():
                partial = tuple(PARTIAL if state in summed[axis] else state for axis, state in enumerate(joint))
                whole = tuple(None if state == PARTIAL else state for state in partial)
                times = result.times * max(summed[axis].get(state, 0) for axis, state in enumerate(joint))  # type: ignore[call-overload]
                for move in self.links.moves(result.bytes, partial, whole, False):
                    self._add_traffic(column, move, times, result, result)

    def _add_traffic(
        self,
        column: int,
        move: Resharding,
        times: float,
        array: Array,
        cause: Operation | Array,
        *,
        is_recomputed: bool = False,
    ) -> None:
        """Adds the seconds of a collective of an array, run `times` times in a step, to the cost of a column.

        `cause` is the operation, or the sum, that needs it.
        """
        self._cost[column] += times * self.links.seconds(move.axis, move.bytes)
        sent = RepeatedCollective(
            axis=move.axis, kind=move.kind, bytes=move.bytes, times=times,
            of_examples=_has_examples(self.program, array), is_recomputed=is_recomputed, backward=cause.backward,
            iterations=cause.times,
        )  # fmt: skip
        self._collectives.append((column, sent))

    def _operations(self) -> None:
        groups = sums_of_results(self.program)
        counts, first = Counter(self.classes.operations[o] for o in self.program.operations), {}
        for operation in self.program.operations:
            first.setdefault(self.classes.operations[operation], operation)
        views = {id(view): view for operation in self.program.operations for view in operation.operands}
        self._view_counts = Counter(self.classes.of_array(view) for view in views.values())
        self._group_counts = Counter(
            (self.classes.of_array(result), len(members)) for result, members in groups.values()
        ) if groups else Counter()  # fmt: skip
        group_of = {id(member): key for key, (_, members) in groups.items() for member in members}
        for number, operation in first.items():
            self._operation(operation, counts[number], groups.get(group_of.get(id(operation.result), -1)))

    def _operation(self, operation: Operation, count: int, group: Any) -> None:
        strategies = strategies_of(operation, self.classes, self.sizes, self._uncut)
        flop = count * operation.times * operation.flop
        v = [self.add_column(flop / self.costs.flops / strategy.devices, binary=True) for strategy in strategies]
        self.add_row(dict.fromkeys(v, 1.0), 1, 1)
        self._flop.append(({column: each.devices for column, each in zip(v, strategies, strict=True)}, flop))
        for axis, whole in enumerate(self._whole_work):
            alone = [column for column, each in zip(v, strategies, strict=True) if each.loops[axis] is None]
            self._cuts[axis] += [column for column in v if column not in alone]
            if len(alone) < len(v) and flop:
                whole.update(dict.fromkeys(alone, flop))
        for axis in range(len(self.sizes)):
            follow_operands(self, self.cut_columns, operation, axis, strategies, v)
            follow_parts(self, self.cut_columns, operation, axis, strategies, v)
            for column, move, array in part_exchanges(operation, axis, self.sizes[axis], strategies, v):
                self._add_traffic(column, move, count * operation.times, array, operation)
        for index, operand in enumerate(operation.operands):
            if not operand.constant:
                self._flow(operation, operand, [strategy.operands[index] for strategy in strategies], v)
        self._result_flow(operation, strategies, v, count, group)

    def _gather_operands(
        self, operation: Operation, strategies: Sequence[Strategy], source: States, target: States, column: int
    ) -> States:
        """Adds the gathers of operands whose result the names leave whole, if a column has that flow.

        Returns:
          The states of the result that remain to be resharded to `target`.
        """
        x, states = self.cut_columns.x, source
        for gather in gathered_operands(operation, strategies, source, target, self.cut_columns.states):
            user, before = column, tuple(gather.state if axis == gather.axis else None for axis in range(len(source)))
            if gather.other is not None:  # only if the axis cuts this operand, and not the other one
                user = self.add_column()
                terms = {x[gather.axis, gather.state]: -1.0, x[gather.axis, gather.other]: 1.0}  # type: ignore[index]
                self.add_row({user: 1.0, column: -1.0} | terms, -1, np.inf)
            else:
                states = tuple(None if axis == gather.axis else state for axis, state in enumerate(states))
            self._reshard(operation, gather.operand, [((before, (None,) * len(source)), user)])
        return states

    def _flow(self, operation: Operation, operand: Array, targets: Sequence[States], v: Sequence[int]) -> None:
        """Adds the flow from the states of an operand's array to the states in which strategies read it."""
        given = self.cut_columns.of_array(operand)
        columns = _flow_columns(self, operation, given, targets, v)
        for source, y in given.items():
            self.add_row({columns[source, t]: 1.0 for t in dict.fromkeys(targets)} | {y: -1.0}, 0, 0)
        self._reshard(operation, operand, columns.items())

    def _reshard(
        self, operation: Operation, operand: Array, columns: Iterable[tuple[tuple[States, States], int]]
    ) -> None:
        """Adds the collectives between two states of an operand.

        All that read the same array share them. For another view of it, e.g. its transpose or a copy of other
        precision, XLA gathers once more. So it does for an operation that sums over examples, as gradients of
        parameters do, if another axis splits these.
        """
        root, view = operand.root, self.classes.of_array(operand)
        is_apart = _gathers_apart(self.program, operation, self.costs.replicas)
        times = max(operation.times, root.times)
        for move, users in _collectives(self.links, operand, columns).items():
            key = (view, move.source, move.target, is_apart)
            if key not in self._w:
                self._w[key] = self.add_column()
                count = self._view_counts[view] * times
                is_recomputed = not (root.path or root.backward or is_apart)
                self._add_traffic(self._w[key], move, count, root, operation, is_recomputed=is_recomputed)
                self._complexity[self._w[key]] = 1.0 if root.path else 0.5 if move.kind == "all-to-all" else 0.0
                if move.kind == "all-gather" and not root.path:
                    self._gathers[self._w[key]] = ActivationGather(
                        array=self.classes.of_array(root), view=view, share=1 / _shards(move.target, self.sizes)
                    )
            if self._w[key] in self._gathers:
                self._gathers[self._w[key]].users["backward" if operation.backward else "forward"] += users
            self.add_row({self._w[key]: 1.0} | dict.fromkeys(users, -1.0), 0, np.inf)

    def _result_flow(
        self, operation: Operation, strategies: Sequence[Strategy], v: Sequence[int], count: int, group: Any
    ) -> None:
        """Adds the flow from the states in which an operation computes its result to the states of that array."""
        given, made = self.cut_columns.of_array(operation.result), [strategy.result for strategy in strategies]
        columns = _flow_columns(self, operation, given, made, v)
        for target, y in given.items():
            self.add_row({columns[target, s]: 1.0 for s in dict.fromkeys(made)} | {y: -1.0}, 0, 0)
        flows = []
        for (target, source), column in columns.items():
            cut = cuts_of_exchange(operation, strategies, source, target, self.cut_columns.states)
            if cut is None:
                self.add_row({column: 1.0}, 0, 0)
            for axis, state in cut or ():
                self.cut_columns.require(column, axis, state)
            repeated = count * operation.times * operation.flop * _repeated_share(source, target, self.sizes)
            self._cost[column] += repeated / self.costs.flops
            self._repeated[column] += repeated
            flows.append(((self._gather_operands(operation, strategies, source, target, column), target), column))
        for move, users in _collectives(self.links, operation.result, flows).items():
            if move.kind in ("all-reduce", "reduce-scatter") and group is not None:
                result, members = group
                key = ("sum", self.classes.of_array(result), len(members), move.source, move.target, move.bytes)
                if key not in self._w:
                    self._w[key] = self.add_column()
                    times = self._group_counts[key[1], key[2]] * operation.times
                    self._add_traffic(self._w[key], move, times, operation.result, operation)
                self.add_row({self._w[key]: 1.0} | dict.fromkeys(users, -1.0), 0, np.inf)
            else:
                for column in users:
                    self._add_traffic(column, move, count * operation.times, operation.result, operation)


def _touched_arrays(program: TracedProgram) -> dict[int, Array]:
    """Returns the arrays that operations read or compute, by their ids."""
    return {
        id(array.root): array.root
        for operation in program.operations
        for array in (*operation.operands, operation.result)
        if not array.root.constant
    }


def _saved_activations(program: TracedProgram) -> set[int]:
    """Returns the ids of arrays that the forward pass computes and an operation of the backward pass reads."""
    return {
        id(array.root)
        for operation in program.operations
        if operation.backward
        for array in operation.operands
        if not array.root.constant and not array.root.path and not array.root.backward
    }


def _has_examples(program: TracedProgram, array: Array) -> bool:
    return any(piece in program.rows for dim in array.dims for piece in flat(dim))


def _gathers_apart(program: TracedProgram, operation: Operation, replicas: int) -> bool:
    """Whether an operation sums over examples that another axis splits, while no axis splits sequences."""
    summed = (program.rows & {*operands} for operands, result in operation.loops if result is None)
    return replicas > 1 and not program.name_of_piece and any(summed)


def _shards(states: States, sizes: Sequence[int]) -> int:
    """Returns the number of shards of an array in these states."""
    return math.prod(size for size, state in zip(sizes, states, strict=True) if is_cut(state))


def _flow_columns(
    program: IntegerProgram,
    operation: Operation,
    cuts: Iterable[States],
    of_strategies: Sequence[States],
    v: Sequence[int],
) -> dict[tuple[States, States], int]:
    """Adds a column per pair (state of an array, state of a strategy); a strategy's columns sum to its variable.

    An array has one of the states `cuts`, or is replicated. If the operation is in an island, an axis that cuts the
    array cuts the same dim in the operation: no line of the model names the arrays there, so XLA would choose which
    array to exchange. For jp.attention it chose the scores, 26 times the bytes of the heads.
    """
    users, states = dict.fromkeys(of_strategies), [*cuts, (None,) * len(of_strategies[0])]
    columns = {(state, user): program.add_column() for state in states for user in users}
    for user in users:
        terms = {columns[state, user]: 1.0 for state in states}
        terms |= {column: -1.0 for column, each in zip(v, of_strategies, strict=True) if each == user}
        program.add_row(terms, 0, 0)
    for pair, column in columns.items() if operation.in_island else ():
        if any(is_cut(one) and is_cut(other) and one != other for one, other in zip(*pair, strict=True)):
            program.add_row({column: 1.0}, 0, 0)
    return columns


def _collectives(
    links: Links, array: Array, columns: Iterable[tuple[tuple[States, States], int]]
) -> dict[Resharding, list[int]]:
    """Returns the collectives of a flow of an array, each with the columns that need it."""
    merged = any(len(list(flat(dim))) > 1 for dim in array.dims)
    users: dict[Resharding, list[int]] = {}
    for (source, target), column in columns:
        for move in links.moves(array.sent_bytes, source, target, merged):
            users.setdefault(move, []).append(column)
    return users


def _repeated_share(source: States, target: States, sizes: Sequence[int]) -> float:
    """Returns the share of its FLOP that each device repeats for a result whose names do not split it as a strategy.

    XLA does not gather such a result: a constraint holds for the operation itself, whose operands XLA gathers.
    """
    before = [size for size, state in zip(sizes, source, strict=True) if state is not None]
    after = [
        size
        for size, state, stored in zip(sizes, source, target, strict=True)
        if state == PARTIAL or (state is not None and stored is not None)
    ]
    return 1 / math.prod(after) - 1 / math.prod(before)
