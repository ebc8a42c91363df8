"""The best cuts over two axes by trying all of them: what the integer program of two axes is held to.

    for each axis a set of dims ──► the state of every array: over each axis a dim, or none
    strategies of operations    ──► collectives of the states, priced by hand; those that others share are paid once

Only classes, shapes and dims are taken from the product: candidates, strategies, moves and prices are written anew.
"""

import itertools
import math
from collections import Counter
from itertools import chain, product

from specs.programs import Exhaustive, is_computed_whole, is_exchanged

from jaxpar.sharding.infer_names.dim_pieces import flat

SUM = "partial sum"


class ExhaustivePairs(Exhaustive):
    """All cuts of one program over two axes, priced one by one.

    Args:
      solver: The `SpecsSolver` whose program, classes, costs and sizes of axes are used.
    """

    def __init__(self, solver, *, examples=False):
        super().__init__(solver, examples=examples)
        self.link = solver.costs.link
        self.entries = {state: piece.size for piece, state in solver.classes.pieces.items()}
        self.summed = self._summed()

    def _candidates(self, solver):
        return [self._fit(size) for size in self.sizes]

    def _labels(self):
        return [sorted(set(chain(*(states[axis] for states in self.states.values())))) for axis in (0, 1)]

    def _fit(self, size):
        fit, bad = set(), set(self.barred)
        for array in self.program.arrays:
            pieces = list(chain(*(flat(dim) for dim in array.dims)))
            first = [next(flat(dim), None) for dim in array.dims]
            bad |= {p for p in pieces if p not in first or pieces.count(p) > 1 or p.facts.mixed or p.size % size}
            fit |= {*pieces}
        return fit - bad

    def _states(self, array):
        pieces = list(chain(*(flat(dim) for dim in array.root.dims)))
        return tuple({self.of_piece(p) for p in pieces if p in fit} for fit in self.candidates)

    def _summed(self):
        """Returns each sum along dims: its result, and over each axis how many dims of a class are summed."""
        found = []
        for result, pieces in self.program.reductions:
            counts = [
                Counter(self.of_piece(p) for p in pieces if p in fit and self.of_piece(p) in labels)
                for fit, labels in zip(self.candidates, self.labels, strict=True)
            ]
            others = self._states(result)
            if any(counts):
                known = tuple({s for s in others[axis] if s in self.labels[axis]} for axis in (0, 1))
                found.append((result, counts, known))
        return found

    def _options(self, operation):
        """Returns, for each axis, the number of the loop, the states of operands and the result under each strategy."""
        of_axes = []
        for size in self.sizes:
            options = [(None, [None] * len(operation.operands), None)]
            arrays = [*operation.operands, operation.result]
            for number, (operands, result) in enumerate(operation.loops):
                pieces = [*operands, result]
                length = next(piece.size for piece in pieces if piece is not None)
                first = all(
                    piece is None or array.constant or any(piece is next(flat(dim), None) for dim in array.dims)
                    for piece, array in zip(pieces, arrays, strict=True)
                )
                if length % size == 0 and first and not any(piece in self.barred for piece in pieces):
                    states = [None if piece is None else self.of_piece(piece) for piece in operands]
                    options.append((number, states, SUM if result is None else self.of_piece(result)))
            of_axes.append(options)
        return of_axes

    def cuts(self):
        """Yields every pair of sets of dims with which no axis cuts an array twice, and both divide what both cut."""
        pairs = [self._sets(axis) for axis in (0, 1)]
        for first, second in product(*pairs):
            if all(self.entries[label] % math.prod(self.sizes) == 0 for label in self._twice(first, second)):
                yield first, second

    def _twice(self, first, second):
        """Returns the classes that both axes would cut in one array."""
        groups = [*self.states.values(), *(self._of_sum(counts, known) for _, counts, known in self.summed)]
        return {label for states in groups for label in states[0] & states[1] & first & second}

    def _of_sum(self, counts, known):
        return tuple({*counts[axis], *known[axis]} for axis in (0, 1))

    def _sets(self, axis):
        conflicts = [states[axis] for states in self.states.values()]
        conflicts += [self._of_sum(counts, known)[axis] for _, counts, known in self.summed]

        def extend(chosen, rest):
            yield chosen
            for index, label in enumerate(rest):
                more = chosen | {label}
                if all(len(states & more) < 2 for states in conflicts):
                    yield from extend(more, rest[index + 1 :])

        return list(itertools.islice(extend(frozenset(), self.labels[axis]), 2_000))

    def cuts_groups_alike(self, cut):
        return all(map(self._cuts_alike, cut, self.candidates))

    def ways(self, key, cut):
        """Returns the number of devices over which an array is split."""
        return math.prod(self.sizes[axis] for axis in (0, 1) if self.states[key][axis] & cut[axis])

    def memory(self, cut):
        kept = {
            id(a.root) for o in self.program.operations if o.backward for a in o.operands
            if not (a.root.constant or a.root.path or a.root.backward)
        }  # fmt: skip
        total = 0.0
        for key, array in self.arrays.items():
            stored = math.prod(array.shape) * self.costs.state if array.path else array.bytes * (key in kept)
            total += stored / self.ways(key, cut)
        return total

    def seconds(self, cut):
        total = 0.0
        for key, array in self.arrays.items():
            spent = 2 * array.bytes / self.costs.memory if key in self.touched else 0.0
            spent += math.prod(array.shape) * self.costs.parameter if array.path else 0.0
            total += spent / self.ways(key, cut)
        for result, counts, known in self.summed:
            here = [next(iter(self._of_sum(counts, known)[axis] & cut[axis]), None) for axis in (0, 1)]
            before = tuple(SUM if here[axis] in counts[axis] else here[axis] for axis in (0, 1))
            after = tuple(None if state == SUM else state for state in before)
            times = max(counts[axis][here[axis]] for axis in (0, 1))
            total += times * sum(seconds for _, seconds in self.moves(result.bytes, before, after))
        return total + self._strategies(cut)

    def _allowed(self, operation, options, cut):
        """Returns the pairs of numbers of strategies; an axis follows an operand that it cuts along a loop."""
        of_axes = []
        for axis in (0, 1):
            states = [None if o.constant else self._state(o, cut)[axis] for o in operation.operands]
            followed = {
                number
                for number, (_, asked, _) in enumerate(options[axis])
                for index, state in enumerate(states)
                if len(states) == 2 and state is not None and asked[index] == state
                and states[1 - index] in (None, asked[1 - index])
            }  # fmt: skip
            every = range(len(options[axis]))
            of_axes.append(every if not followed else [*followed] if len(followed) == 1 else [])
        for first, second in product(*of_axes):
            loop, other = options[0][first][0], options[1][second][0]
            if loop is None or loop != other:
                yield first, second
            else:
                operands, result = operation.loops[loop]
                length = next(piece.size for piece in (*operands, result) if piece is not None)
                if length % math.prod(self.sizes) == 0:
                    yield first, second

    def _strategies(self, cut):
        self.allowed = [
            [*self._allowed(group[0], options, cut)]
            for group, options in zip(self.members.values(), self.options, strict=True)
        ]
        last, choices = {}, []
        for number, (group, options, pairs) in enumerate(
            zip(self.members.values(), self.options, self.allowed, strict=True)
        ):
            choices.append([self._pair(group, options, pair, cut) for pair in pairs])
            for _, shared in choices[-1]:
                last |= dict.fromkeys(shared, number)
        paid = {frozenset(): 0.0}
        for number, options in enumerate(choices):
            after = {}
            for before, cost in paid.items():
                for alone, shared in options:
                    spent = cost + alone + sum(price for key, price in shared.items() if key not in before)
                    state = frozenset(key for key in before | {*shared} if last[key] > number)
                    after[state] = min(spent, after.get(state, math.inf))
            paid = after
        return min(paid.values(), default=math.inf)

    def _pair(self, group, options, pair, cut):
        operation = group[0]
        chosen = [options[axis][pair[axis]] for axis in (0, 1)]
        targets = self._state(operation.result, cut)
        share = math.prod(
            self.sizes[axis] for axis in (0, 1)
            if pair[axis] and not is_computed_whole(chosen[axis][2], targets[axis])
        )  # fmt: skip
        alone, shared = len(group) * operation.flop / self.costs.flops / share, {}
        for index, operand in enumerate(operation.operands):
            if not operand.constant:
                before, after = self._state(operand, cut), tuple(asked[index] for _, asked, _ in chosen)
                view = self.of_array(operand)
                for (kind, *states), seconds in self.moves(operand.sent_bytes, before, after, merged=_merged(operand)):
                    shared["gather", view, kind, *states, self.is_apart(operation)] = self.counts[view] * seconds
        before, after = tuple(made for *_, made in chosen), self._state(operation.result, cut)
        read = [(None, None) if o.constant else self._state(o, cut) for o in operation.operands]
        for axis in (axis for axis in (0, 1) if operation.flop and is_exchanged(before[axis], after[axis])):
            if not self.may_exchange(operation, chosen[axis][1], before[axis], [states[axis] for states in read]):
                return math.inf, {}
        whole = [axis for axis in (0, 1) if operation.flop and is_computed_whole(before[axis], after[axis])]
        for axis in (axis for axis in whole if not self.is_made_twice(operation, before[axis])):
            candidates = [
                (operand, state) for operand, state in zip(operation.operands, chosen[axis][1], strict=True)
                if not operand.constant and state in self.states[id(operand.root)][axis]
            ]  # fmt: skip
            split = [pair for pair in candidates if self._state(pair[0], cut)[axis] == pair[1]]
            if len(candidates) == 1 or len(split) == 1:
                operand, state = (split or candidates)[0]
                view, lost = self.of_array(operand), tuple(state if axis == one else None for one in (0, 1))
                for (kind, *states), seconds in self.moves(
                    operand.sent_bytes, lost, (None, None), merged=_merged(operand)
                ):
                    shared["gather", view, kind, *states, self.is_apart(operation)] = self.counts[view] * seconds
            if len(candidates) == 1:
                before = tuple(None if axis == one else state for one, state in enumerate(before))
        for (kind, *states), seconds in self.moves(
            operation.result.bytes, before, after, merged=_merged(operation.result)
        ):
            if kind in ("reduce", "scatter") and id(operation.result) in self.sums:
                total, terms = self.sums[id(operation.result)]
                key = self.of_array(total), terms
                totals = {id(t): (self.of_array(t), m) for t, m in self.sums.values()}
                shared["sum", *key, *states, seconds] = seconds * sum(other == key for other in totals.values())
            else:
                alone += len(group) * seconds
        return alone, shared

    def _state(self, array, cut):
        return tuple(next(iter(self.states[id(array.root)][axis] & cut[axis]), None) for axis in (0, 1))

    def moves(self, size, before, after, *, merged=False):
        """Returns the collectives between two states, and the seconds of each, by the cheaper order of the axes."""
        if not size:
            return []
        ways = [self._way(size, before, [(0, after[0]), (1, after[1])], merged)]
        ways.append(self._way(size, before, [(1, after[1]), (0, after[0])], merged))
        both = any(first == second and first not in (None, SUM) for first, second in (before, after))
        if both and before[0] != after[0]:
            ways = [way for way in ways if way is not None and all(kind != "exchange" for (kind, *_), _ in way)]
        ways = [way for way in ways if way is not None]
        if not ways:
            last = [(0, after[0]), (1, after[1])]
            ways = [
                self._way(size, before, [(0, None), (1, None), *last], merged),
                self._way(size, before, [(1, None), (0, None), *last], merged),
            ]
            ways = [way for way in ways if way is not None]
        totals = [sum(seconds for _, seconds in way) for way in ways]
        return ways[-1] if totals[-1] < totals[0] * (1 - 1e-9) else ways[0]

    def _way(self, size, before, changes, merged):
        way, states = [], list(before)
        for axis, after in changes:
            state, other = states[axis], states[1 - axis]
            if state == after:
                continue
            split = other not in (None, SUM)
            if axis == 0 and split and other in (state, after):
                return None  # the outer axis has chunks of the dim, which the inner axis cuts
            both_summed = state == SUM and after is None and before[1 - axis] == SUM and other is None
            local = size / (self.sizes[1 - axis] if split or both_summed else 1)
            came = tuple(states)
            states[axis] = after
            if state is None:
                continue  # a slice
            n, kind = self.sizes[axis], "gather"
            share = (n - 1) / n * local
            if state == SUM:
                kind, share = ("reduce", 2 * share) if after is None else ("scatter", share)
            elif after is not None and not merged:
                kind, share = "exchange", share / n
            way.append(((kind, came, tuple(states)), share / self.link[axis] + self.costs.launch))
        return way


def _merged(array):
    return any(len([*flat(dim)]) > 1 for dim in array.dims)
