"""The integer program is exact: no set of dims and strategies costs less, as trying all of them shows."""

from dataclasses import replace
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specs.programs import Exhaustive, equal_branches, random_costs, random_program
from specs.two_axes import ExhaustivePairs

from jaxpar.errors import JaxparError
from jaxpar.specs.integer_program import GAP
from jaxpar.specs.optimize import TIE, SpecsSolver
from jaxpar.specs.program import follow_dims

MOST = 1_000  # sets of dims that are tried
MOST_PAIRS = 300  # pairs of sets, of two axes


def compare(seed):
    """Returns whether a random program was compared with the best of all its cuts: has it few enough?"""
    rng = np.random.default_rng(seed)
    program, devices, examples = random_program(rng), int(rng.choice([2, 4])), bool(rng.integers(2))
    solver = SpecsSolver(program, devices, random_costs(rng), examples=examples)
    tried = Exhaustive(solver, examples=examples)
    sets = []
    for cut in tried.cuts():
        sets.append(cut)
        if len(sets) > MOST:
            return False
    priced = [(tried.seconds(cut), tried.memory(cut), cut) for cut in filter(tried.cuts_groups_alike, sets)]
    priced = [each for each in priced if np.isfinite(each[0])]
    _assert_best(solver, tried, priced, None)
    sizes = sorted({memory for _, memory, _ in priced})
    if len(sizes) > 2:
        _assert_best(solver, tried, priced, sizes[len(sizes) // 2] + 0.5)
    with pytest.raises(JaxparError, match="any choice of dims needs at least"):
        solver.solve(memory=0.999 * sizes[0] - 1)
    assert solver.solve(least=True).memory == pytest.approx(sizes[0])
    return True


def compare_two(seed):
    """As `compare`, over two axes at once."""
    rng = np.random.default_rng(seed)
    program, examples = random_program(rng, operations=6), bool(rng.integers(2))
    sizes = ((2, 2), (2, 3), (4, 2), (2, 4))[int(rng.integers(4))]
    costs, slow = random_costs(rng), float(10 ** rng.uniform(-1, 1)) if rng.random() < 0.7 else 1.0
    solver = SpecsSolver(program, sizes, replace(costs, link=(costs.link * slow, costs.link)), examples=examples)
    tried = ExhaustivePairs(solver, examples=examples)
    pairs = list(islice(tried.cuts(), MOST_PAIRS + 1))
    if not 2 < len(pairs) <= MOST_PAIRS:
        return False
    priced = [(tried.seconds(cut), tried.memory(cut), cut) for cut in filter(tried.cuts_groups_alike, pairs)]
    priced = [each for each in priced if np.isfinite(each[0])]
    _assert_best(solver, tried, priced, None)
    sizes = sorted({memory for _, memory, _ in priced})
    if len(sizes) > 2:
        _assert_best(solver, tried, priced, sizes[len(sizes) // 2] + 0.5)
    assert solver.solve(least=True).memory == pytest.approx(sizes[0])
    return True


def _cut(solution, axes):
    """Returns the classes that are cut; of two axes the classes of each."""
    if axes == 1:
        return solution.cut
    return tuple(frozenset(state for state, on in solution.axes.items() if axis in on) for axis in range(axes))


def _assert_best(solver, tried, priced, memory):
    solution = solver.solve(memory=memory)
    best = min(seconds for seconds, size, _ in priced if memory is None or size <= memory)
    assert solution.best == pytest.approx(best, rel=GAP)
    assert solution.relaxed <= best * (1 + 1e-6)
    assert solution.bound <= best * (1 + 1e-6)
    assert solution.gap >= -1e-6
    cut = _cut(solution, len(solver.sizes))
    assert tried.seconds(cut) <= solution.cost * (1 + 1e-6) <= best * (1 + TIE + 1e-5)
    assert solution.memory == pytest.approx(tried.memory(cut))
    if memory is not None:
        assert solution.memory <= memory * (1 + 1e-6)


@pytest.mark.nightly
def test_no_cut_of_a_random_program_costs_less_than_the_solution():
    assert sum(compare(seed) for seed in range(60)) > 40


@pytest.mark.full
@pytest.mark.parametrize("start", range(60, 2060, 200))
def test_no_cut_of_2000_random_programs_costs_less_than_the_solution(start):
    assert sum(compare(seed) for seed in range(start, start + 200)) > 130


@pytest.mark.nightly
def test_no_cut_of_a_random_program_over_two_axes_costs_less_than_the_solution():
    assert sum(compare_two(seed) for seed in range(30)) >= 10


@pytest.mark.full
@pytest.mark.parametrize("start", range(30, 2030, 100))
def test_no_cut_of_2000_random_programs_over_two_axes_costs_less_than_the_solution(start):
    assert sum(compare_two(seed) for seed in range(start, start + 100)) > 15


@pytest.mark.parametrize("seed", range(4))
def test_cuts_that_differ_between_equal_layers_do_not_cost_less_than_the_bound(seed):
    solver = SpecsSolver(equal_branches(), 2, random_costs(np.random.default_rng(seed)))
    alike, apart = Exhaustive(solver), Exhaustive(solver, alike=False)
    assert len(apart.labels) == 2 * len(alike.labels)
    priced = [(apart.seconds(cut), apart.memory(cut)) for cut in apart.cuts()]
    sizes = sorted({memory for _, memory in priced})
    for limit in (None, sizes[0] + 0.5, sizes[len(sizes) // 2] + 0.5):
        solution = solver.solve(memory=limit)
        best = min(seconds for seconds, memory in priced if limit is None or memory <= limit)
        assert solution.relaxed <= best * (1 + 1e-6)
        assert solution.bound <= best * (1 + 1e-6)


def test_a_program_without_parameters_has_nothing_to_cut():
    solver = SpecsSolver(
        follow_dims(jax.make_jaxpr(jnp.sin)(1.0).jaxpr, [], [], []), 2, random_costs(np.random.default_rng(0))
    )
    solution = solver.solve()
    assert solution.cut == frozenset()
    assert solution.cost == solution.bound == solution.gap == 0
