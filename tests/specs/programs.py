"""Random small programs, and their best cuts by trying all of them: what the integer program is held to.

    a seed ──► matmuls, elementwise ops, reshapes, sums ──► jaxpr of loss and gradients ──► TracedProgram
    dims to cut (all sets of them) × strategies of operations ──► seconds, by the formulas of StepCosts

Given the dims, strategies meet only in shared collectives; those already paid are the state of a dynamic program.
"""

import math
from collections import Counter
from functools import partial
from itertools import chain

import jax
import jax.numpy as jnp

from jaxpar.sharding.infer_names.dim_pieces import flat
from jaxpar.specs.activation_marks import mark_activations
from jaxpar.specs.collectives import PARTIAL, StepCosts
from jaxpar.specs.line_keys import groups_cut_alike
from jaxpar.specs.program import ELEMENTWISE, follow_dims

SIZES = (2, 4, 4, 6, 8)
KINDS = "dense dense gate gate again scale wave add split merge swap sum pair".split()


def random_costs(rng):
    """Returns costs under which work and traffic of such programs are of one order."""
    power = lambda low, high: float(10 ** rng.uniform(low, high))  # noqa: E731
    return StepCosts(
        flops=power(6, 8), link=power(6, 8), launch=power(-7, -5), memory=power(7, 9), parameter=power(-8, -6),
        replicas=int(rng.choice([1, 2])),
    )  # fmt: skip


def random_program(rng, *, operations=8):
    """Returns the program of a random model's loss and gradients; dim 0 of its only input is examples."""
    params, steps = [], []
    shape = (int(rng.choice(SIZES)), int(rng.choice(SIZES)), int(rng.choice(SIZES)))
    shapes = [shape]
    for _ in range(rng.integers(2, operations + 1)):
        if (step := _random_step(rng, shapes, params)) is not None:
            steps.append(step)
            with_result = jax.eval_shape(
                lambda ps, xs, step=step: step(ps, xs),
                [jax.ShapeDtypeStruct(s, "float32") for s in params],
                [jax.ShapeDtypeStruct(s, "float32") for s in shapes],
            )
            shapes.append(with_result.shape)

    def loss(params, x):
        arrays = [x]
        for step in steps:
            arrays.append(step(params, arrays))
        return sum(jnp.sum(jnp.tanh(array)) for array in arrays[-2:])

    arguments = [jax.ShapeDtypeStruct(s, "float32") for s in params]
    marked = mark_activations(loss, ELEMENTWISE)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(marked))(arguments, jax.ShapeDtypeStruct(shape, "float32")).jaxpr
    paths = [f"w{number}" for number in range(len(params))]
    program = follow_dims(jaxpr, paths, [len(params)], range(1, len(params) + 1))
    if rng.integers(2):  # no line names an array: each may be cut along dims of its own
        for array in program.arrays:
            array.line = None
    return program


def equal_branches(count=2):
    """Returns the program of a sum of equal branches, each a pair of matmuls with a nonlinearity between them."""

    def loss(params, x):
        return jnp.sum(jnp.tanh(sum(jnp.tanh(x @ up) @ down for up, down in params)))

    pairs = [tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in ((5, 8), (8, 5))) for _ in range(count)]
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(pairs, jax.ShapeDtypeStruct((3, 5), "float32")).jaxpr
    return follow_dims(jaxpr, [f"w{number}" for number in range(2 * count)], [2 * count], range(1, 2 * count + 1))


def _random_step(rng, shapes, params):
    """Returns a function of (params, arrays); None where the draw does not suit the shapes."""
    at = int(rng.integers(len(shapes))) if rng.random() < 0.3 else len(shapes) - 1
    shape, rank, width = shapes[at], len(shapes[at]), int(rng.choice(SIZES))
    axis, pick = int(rng.integers(max(1, rank))), lambda several: int(rng.choice(several))
    kind = rng.choice(KINDS)
    if kind in ("dense", "scale") and rank:
        params.append((shape[-1], width) if kind == "dense" else (shape[-1],))
        return partial(_dense if kind == "dense" else _scale, at, len(params) - 1)
    if kind == "again" and rank and (alike := [n for n, p in enumerate(params) if len(p) == 2 and p[0] == shape[-1]]):
        return partial(_dense, at, pick(alike))
    if kind == "gate" and rank:
        params += [(shape[-1], width)] * 2
        return partial(_gate, at, len(params) - 2)
    if kind == "wave":
        return lambda ps, xs: jnp.sin(xs[at])
    if kind == "add" and len(alike := [n for n, other in enumerate(shapes) if other == shape]) > 1:
        return partial(_add, at, pick(alike))
    if kind == "split" and 0 < rank < 4 and shape[-1] % 2 == 0:
        return lambda ps, xs: xs[at].reshape(*shape[:-1], 2, shape[-1] // 2)
    if kind == "merge" and rank > 2:
        return lambda ps, xs: xs[at].reshape(*shape[:-2], shape[-2] * shape[-1])
    if kind == "swap" and rank > 1:
        return lambda ps, xs: jnp.swapaxes(xs[at], -1, -2)
    if kind == "sum" and rank > 1:
        return lambda ps, xs: xs[at].sum(axis)
    fits = [n for n, s in enumerate(shapes) if len(s) == rank and s[:-2] == shape[:-2] and s[-1:] == shape[-1:]]
    return partial(_scores, at, pick(fits)) if kind == "pair" and rank > 2 and fits else None


def is_computed_whole(made, target):
    """Whether XLA computes a result whole, though a strategy cuts it: if the names of its line leave it whole."""
    return made not in (None, PARTIAL) and target is None


def is_exchanged(made, target):
    """Whether the names of a result cut another dim than a strategy."""
    return made not in (None, PARTIAL) and target not in (None, made)


def _dense(at, param, params, arrays):
    return arrays[at] @ params[param]


def _gate(at, param, params, arrays):
    return arrays[at] @ params[param] * jnp.sin(arrays[at] @ params[param + 1])


def _scale(at, param, params, arrays):
    return arrays[at] * params[param]


def _add(at, other, params, arrays):
    return arrays[at] + arrays[other]


def _scores(at, other, params, arrays):
    return jnp.einsum("...ij,...kj->...ik", arrays[at], arrays[other])


class Exhaustive:
    """All cuts of one program, priced one by one.

    Args:
      solver: The `SpecsSolver` whose program, candidates, costs and number of devices are used.
      alike: Whether members of a class have one decision, as in `SpecsSolver`; otherwise each piece and operation has
        its own.
    """

    def __init__(self, solver, *, examples=False, alike=True):
        self.n, self.sizes, self.costs, self.program = solver.n, solver.sizes, solver.costs, solver.program
        self.barred = set() if examples else solver.program.rows
        self.candidates = self._candidates(solver)
        classes = solver.classes
        self.of_piece = (lambda piece: classes.pieces[piece]) if alike else (lambda piece: id(piece))
        self.of_array = (lambda array: classes.arrays[id(array)]) if alike else id
        self.of_operation = (lambda operation: classes.operations[operation]) if alike else id
        touched = [a.root for o in self.program.operations for a in (*o.operands, o.result) if not a.root.constant]
        self.touched = {id(array): array for array in touched}
        self.arrays = {**self.touched, **{id(a): a for a in self.program.params.values()}}
        self.states = {key: self._states(array) for key, array in self.arrays.items()}
        self.labels, self.groups = self._labels(), groups_cut_alike(self.program)
        self.sums = self._sums()
        operands = {id(a): a for o in self.program.operations for a in o.operands if not a.constant}
        self.counts = Counter(map(self.of_array, operands.values()))
        self.members = {}
        for operation in self.program.operations:
            self.members.setdefault(self.of_operation(operation), []).append(operation)
        self.options = [self._options(group[0]) for group in self.members.values()]

    def _candidates(self, solver):
        return solver.candidates

    def _labels(self):
        return sorted(set(chain(*self.states.values())))

    def _states(self, array):
        return {self.of_piece(p) for dim in array.root.dims for p in flat(dim) if p in self.candidates}

    def _sums(self):
        """Returns, for each operation's result that is only added to others, the total to which it belongs."""
        results = {id(operation.result) for operation in self.program.operations}
        leaves = {key: {key} for key in results}  # of each array that is a sum of results: those
        totals = {}
        for total, operands in self.program.additions:
            if all(operand.readers == 1 and id(operand) in leaves for operand in operands):
                leaves[id(total)] = set(chain(*(leaves[id(operand)] for operand in operands)))
                totals[id(total)] = total
        inner = {
            id(operand) for total, operands in self.program.additions if id(total) in totals for operand in operands
        }
        return {
            leaf: (total, len(leaves[key]))
            for key, total in totals.items() if key not in inner for leaf in leaves[key]
        }  # fmt: skip

    def _options(self, operation):
        """Returns the states of operands and result under each strategy."""
        options = [([None] * len(operation.operands), None)]
        arrays = [*operation.operands, operation.result]
        for operands, result in operation.loops:
            pieces = [*operands, result]
            size = next(piece.size for piece in pieces if piece is not None)
            first = all(
                piece is None or array.constant or any(piece is next(flat(dim), None) for dim in array.dims)
                for piece, array in zip(pieces, arrays, strict=True)
            )
            if size % self.n == 0 and first and not any(piece in self.barred for piece in pieces):
                states = [None if piece is None else self.of_piece(piece) for piece in operands]
                options.append((states, PARTIAL if result is None else self.of_piece(result)))
        return options

    def cuts(self):
        """Yields every set of dims that cuts no array twice."""
        conflicts = [states for states in self.states.values() if len(states) > 1]

        def extend(chosen, rest):
            yield chosen
            for index, label in enumerate(rest):
                more = chosen | {label}
                if all(len(states & more) < 2 for states in conflicts):
                    yield from extend(more, rest[index + 1 :])

        return extend(frozenset(), self.labels)

    def cuts_groups_alike(self, cut):
        """Whether the same dims of all arrays of each group are cut."""
        return self._cuts_alike(cut, self.candidates)

    def _cuts_alike(self, cut, candidates):
        marked = lambda piece: piece in candidates and self.of_piece(piece) in cut  # noqa: E731
        return all(
            len({tuple(marked(next(flat(dim), None)) for dim in array.dims) for array in group}) == 1
            for group in self.groups
        )

    def memory(self, cut):
        """Returns the bytes of parameters, their state and kept activations."""
        kept = {
            id(a.root) for o in self.program.operations if o.backward for a in o.operands
            if not (a.root.constant or a.root.path or a.root.backward)
        }  # fmt: skip
        total = 0.0
        for key, array in self.arrays.items():
            stored = math.prod(array.shape) * self.costs.state if array.path else array.bytes * (key in kept)
            total += stored / (self.n if self.states[key] & cut else 1)
        return total

    def seconds(self, cut):
        """Returns the seconds of the best strategies for the dims that are cut."""
        total = 0.0
        for key, array in self.arrays.items():
            spent = 2 * array.bytes / self.costs.memory if key in self.touched else 0.0
            spent += math.prod(array.shape) * self.costs.parameter if array.path else 0.0
            total += spent / (self.n if self.states[key] & cut else 1)
        labels = {*self.labels}
        for result, pieces in self.program.reductions:
            marked = [p for p in pieces if p in self.candidates and self.of_piece(p) in labels & cut]
            total += len(marked) * self._sent(2 * result.bytes)
        return total + self._strategies(cut)

    def _strategies(self, cut):
        groups = [*self.members.values()]
        last = {}  # the last operation that may use a shared collective
        choices = []
        for number, (group, options) in enumerate(zip(groups, self.options, strict=True)):
            allowed = self._allowed(group[0], options, cut)
            choices.append([self._choice(group, options[index], index, cut) for index in allowed])
            for _, shared in choices[-1]:
                last |= dict.fromkeys(shared, number)
        paid = {frozenset(): 0.0}
        for number, options in enumerate(choices):
            after = {}
            for before, cost in paid.items():
                for own, shared in options:
                    spent = cost + own + sum(price for key, price in shared.items() if key not in before)
                    state = frozenset(key for key in before | {*shared} if last[key] > number)
                    after[state] = min(spent, after.get(state, math.inf))
            paid = after
        return min(paid.values(), default=math.inf)

    def _allowed(self, operation, options, cut):
        """Returns the strategies: if an operand is cut along a loop and no other one otherwise, that loop alone."""
        states = [None if operand.constant else self._state(operand, cut) for operand in operation.operands]
        if len(states) != 2:
            return range(len(options))
        followed = {
            number
            for number, (asked, _) in enumerate(options)
            for index, state in enumerate(states)
            if state is not None and asked[index] == state and states[1 - index] in (None, asked[1 - index])
        }
        return range(len(options)) if not followed else [*followed] if len(followed) == 1 else []

    def is_made_twice(self, operation, state):
        """Whether two dims of a result are one piece: of which operand it is a dim is then not known."""
        return sum(self.of_piece(p) == state for dim in operation.result.dims for p in [*flat(dim)][:1]) > 1

    def _choice(self, group, option, index, cut):
        """Returns the seconds of an operation alone, and those of collectives that others may share."""
        operation, (asked, made) = group[0], option
        ways = self.n if index and not is_computed_whole(made, self._state(operation.result, cut)) else 1
        own = len(group) * operation.flop / self.costs.flops / ways
        shared = {}
        for operand, target in zip(operation.operands, asked, strict=True):
            if operand.constant:
                continue
            source = self._state(operand, cut)
            if source not in (None, target):
                merged = any(len([*flat(dim)]) > 1 for dim in operand.dims)
                exchanged = target is not None and not merged
                price = self._sent(operand.sent_bytes / (self.n if exchanged else 1))
                view = self.of_array(operand)
                shared["gather", view, source, target, exchanged, self.is_apart(operation)] = self.counts[view] * price
        target = self._state(operation.result, cut)
        read = [None if operand.constant else self._state(operand, cut) for operand in operation.operands]
        if operation.flop and is_exchanged(made, target) and not self.may_exchange(operation, asked, made, read):
            return math.inf, {}
        candidates = [
            (operand, state) for operand, state in zip(operation.operands, asked, strict=True)
            if not operand.constant and state in self.states[id(operand.root)]
        ]  # fmt: skip
        split = [pair for pair in candidates if self._state(pair[0], cut) == pair[1]]
        whole = is_computed_whole(made, target) and not self.is_made_twice(operation, made)
        if operation.flop and whole and (len(candidates) == 1 or len(split) == 1):
            # XLA gathers the operand that is cut, and the result only if another one may be cut too
            operand, state = (split or candidates)[0]
            view = self.of_array(operand)
            shared["gather", view, state, None, False, self.is_apart(operation)] = self.counts[view] * self._sent(
                operand.bytes
            )
            if len(candidates) == 1:
                return own, shared
        if made not in (None, target):
            merged = any(len([*flat(dim)]) > 1 for dim in operation.result.dims)
            factor = (2 if target is None else 1) if made == PARTIAL else 1 if target is None or merged else 1 / self.n
            price = self._sent(factor * operation.result.bytes)
            if made == PARTIAL and id(operation.result) in self.sums:
                total, terms = self.sums[id(operation.result)]
                key = self.of_array(total), terms
                totals = {id(t): (self.of_array(t), m) for t, m in self.sums.values()}
                shared["sum", *key, target] = price * sum(other == key for other in totals.values())
            else:
                own += len(group) * price
        return own, shared

    def is_apart(self, operation):
        """Whether an operation shares no gather with others: it sums over examples, which another axis splits."""
        summed = {piece for operands, result in operation.loops if result is None for piece in operands}
        return self.costs.replicas > 1 and not self.program.rows.isdisjoint(summed)

    def may_exchange(self, operation, asked, made, states):
        """Whether both operands are cut as a strategy reads them: else XLA takes a strategy that the names ask for."""
        both = len(asked) == 2 and None not in asked and [*asked] == states
        return both and not self.is_made_twice(operation, made)

    def _state(self, array, cut):
        return next(iter(self.states[id(array.root)] & cut), None)

    def _sent(self, size):
        return (1 - 1 / self.n) * size / self.costs.link + self.costs.launch if size else 0.0
