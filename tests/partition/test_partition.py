"""The partitioner gives the published plans, and what trying every plan gives."""

import time
from itertools import combinations, product
from math import ceil, inf, isfinite, prod
from pathlib import Path

import numpy as np
import pytest
from pairwise import some

from jaxpar.errors import JaxparError
from jaxpar.mesh.chips import Link
from jaxpar.partition.chain import Chain, Node, Profile, linearise, load
from jaxpar.partition.objective import COEFFICIENTS, Objective
from jaxpar.partition.partitioner import partition

DATA = Path(__file__).parents[1] / "partition" / "pipedream"
PROFILES = ("vgg16", "alexnet", "resnet50", "gnmt_large")
SLOW, FAST = 1.25e9, 12e9
HIDDEN = Objective(overlap=1.0)
ADDED = Objective(overlap=0.0)
RELEASED = Objective(overlap=0.0, coefficient="released")


@pytest.fixture(scope="module")
def chains():
    return {name: linearise(load(DATA / f"{name}.graph.txt")) for name in PROFILES}


@pytest.mark.parametrize(
    ("profile", "topology", "objective", "plan", "cut", "speedup"),
    [
        ("vgg16", ((16, SLOW),), HIDDEN, "15-1", "node33", 1.17),
        ("vgg16", ((8, SLOW),), HIDDEN, "7-1", "node26", 1.09),
        ("vgg16", ((4, 1e9),), Objective(overlap=1.0, margin=0.0), "3-1", "node19", 1.01),
        ("vgg16", ((4, 1e9),), RELEASED, "3-1", "node19", 2.84),
        ("vgg16", ((4, FAST), (4, SLOW)), HIDDEN, "3(4)-1(4)", "node33", 3.01),
        ("alexnet", ((16, SLOW),), HIDDEN, "15-1", "node15", 1.52),
        ("alexnet", ((8, SLOW),), HIDDEN, "7-1", "node15", 2.83),
        ("alexnet", ((4, 1e9),), HIDDEN, "3-1", "node15", 3.60),
        ("alexnet", ((4, 1e9),), RELEASED, "3-1", "node15", 5.98),
        ("resnet50", ((16, SLOW),), HIDDEN, "16", "node1", 1.00),
        ("resnet50", ((4, FAST), (4, SLOW)), HIDDEN, "4(4)", "node1", 1.00),
        ("resnet50", ((8, FAST), (2, SLOW)), HIDDEN, "2(8)", "node1", 1.00),
        ("gnmt_large", ((4, FAST),), HIDDEN, "4", "node1", 1.00),
        ("gnmt_large", ((4, FAST),), ADDED, "1-1-1-1", "node83", 1.20),
        ("gnmt_large", ((4, FAST),), RELEASED, "1-1-1-1", "node83", 1.455),
        ("gnmt_large", ((16, SLOW),), Objective(overlap=1.0, margin=0.0), "1-1-2-2-1-2-2-1-3-1", "node96", 2.48),
    ],
)
def test_plans_of_published_objectives(chains, profile, topology, objective, plan, cut, speedup):
    before = time.process_time()
    found = partition(chains[profile], topology, objective)
    assert time.process_time() - before < 2
    assert (found.name, found.stages[-1].layers[0]) == (plan, cut)
    assert found.speedup == pytest.approx(speedup, abs=0.005 if speedup != 1.455 else 0.0005)


@pytest.mark.parametrize("margin", [0.0, 0.01, 0.05])
@pytest.mark.parametrize(
    ("profile", "topology", "plan"),
    [
        ("vgg16", ((16, SLOW),), "15-1"),
        ("vgg16", ((8, SLOW),), "7-1"),
        ("vgg16", ((4, 1e9),), "3-1"),
        ("vgg16", ((4, FAST), (4, SLOW)), "3(4)-1(4)"),
        ("alexnet", ((16, SLOW),), "15-1"),
        ("alexnet", ((8, SLOW),), "7-1"),
        ("alexnet", ((4, 1e9),), "3-1"),
        ("resnet50", ((16, SLOW),), "16"),
        ("resnet50", ((8, SLOW),), "8"),
        ("resnet50", ((4, 1e9),), "4"),
    ],
)
def test_one_objective_gives_every_published_plan_whatever_the_margin(chains, profile, topology, plan, margin):
    found = partition(chains[profile], topology, Objective(margin=margin))
    assert found.name == plan
    if plan == "15-1":  # before the dense layers
        assert found.stages[-1].layers[0] == {"vgg16": "node33", "alexnet": "node15"}[profile]


def test_seconds_of_vgg_as_published(chains):
    found = partition(chains["vgg16"], ((16, SLOW),), HIDDEN)
    assert (round(found.seconds, 6), round(found.data_parallel, 6)) == (0.044159, 0.051884)
    assert found.noam == 2
    assert [(stage.replicas, stage.depth, stage.versions) for stage in found.stages] == [(15, 1, 2), (1, 0, 1)]
    assert sum(stage.parameters for stage in found.stages) / 4e6 == pytest.approx(138.36, abs=0.01)
    assert found.limit == "stage 0, which computes: 44.2 ms"
    assert found.why == ("2 stages: the fewest within 5.0% of the fastest plan, 44.2 ms; 1 would take 17.5% more")
    assert str(found).splitlines()[:3] == [
        "15-1 on 16 at 1.25 GB/s: 44.2 ms a minibatch, 1.17 x as fast as data parallel (51.9 ms); modelled",
        "  stage  layers          replicas  computes  all-reduces  sends    depth  versions  memory     limited by",
        "  0      node1..node32   15        44.2 ms   5.86 ms      20.6 ms  1      2         27.55 GiB  computes",
    ]


@pytest.mark.parametrize(("profile", "speedup"), [("vgg16", 2.35), ("alexnet", 3.03)])
def test_with_half_the_batch_data_parallelism_pays_less(chains, profile, speedup):
    assert partition(chains[profile].scale_batch(0.5), ((16, SLOW),), HIDDEN).speedup == pytest.approx(
        speedup, abs=0.005
    )


def test_counting_all_bytes_over_one_link_does_not_give_the_published_plan(chains):
    """Agreeing on the convolutions' weights is then so slow that fewer of them are replicated, and more bytes sent."""
    shared = Objective(coefficient="shared", overlap=1.0, margin=0.0)
    found = partition(chains["vgg16"], ((16, SLOW),), shared)
    assert found.stages[1].layers[0] == "node26"
    assert found.seconds == found.stages[0].sends == pytest.approx(0.0822, abs=5e-5)
    assert partition(chains["vgg16"], ((16, 1e9),), shared).name == "7-8-1"


def test_a_plan_with_more_stages_must_be_faster_by_the_margin(chains):
    topology = ((4, 1e9),)
    simple = partition(chains["vgg16"], topology, HIDDEN)  # 3-1 is 1.0 % faster
    assert (simple.name, simple.seconds_by_stages) == ("4", (simple.data_parallel,))
    assert simple.seconds / simple.least_seconds == pytest.approx(1.0098, abs=5e-5)
    assert simple.why.endswith("5.0% of the fastest plan, 206 ms; more stages could take 1.0% less time")
    assert partition(chains["vgg16"], topology, Objective(overlap=1.0, margin=0.0097)).name == "3-1"
    assert partition(chains["vgg16"], topology, Objective(overlap=1.0, margin=0.0099)).name == "4"


def test_a_straight_pipeline_stashes_one_version_fewer_per_stage(chains):
    found = partition(chains["gnmt_large"], ((4, FAST),), ADDED)
    assert [stage.versions for stage in found.stages] == [4, 3, 2, 1]
    assert [stage.depth for stage in found.stages] == [3, 2, 1, 0]
    assert found.noam == 4


def test_what_crosses_a_cut():
    """As the edges say: each output made before the cut that is needed after it, once."""
    profile = load(DATA / "resnet50.graph.txt")
    chain, at = linearise(profile), {node.name: index for index, node in enumerate(profile.nodes)}
    assert len(chain.names) == 177
    for cut, crossing in enumerate(chain.crossing):
        senders = {before for before, after in profile.edges if at[before] <= cut < at[after]}
        assert crossing == sum(profile.nodes[at[name]].activations for name in senders)
    nodes = tuple(Node(name, "", 1.0, 2.0, size, 0.0) for name, size in (("a", 8.0), ("b", 4.0), ("c", 2.0)))
    both = Profile(nodes, (("a", "b"), ("a", "c"), ("b", "c")))
    assert linearise(both).crossing == (8.0, 12.0, 0.0)


def test_latency_and_adding_count_where_a_link_has_them():
    chain = Chain(("a",), (1e-3,), (1e6,), (0.0,), (0.0,))
    link = Link(latency=1e-3, bandwidth=1e9, combine=1e-9)
    found = partition(chain, ((4, link),), Objective(overlap=1.0, margin=10.0))
    assert found.seconds == pytest.approx((6 * 1e-3 + 1.5 * 1e6 / 1e9 + 0.75 * 1e6 * 1e-9) / 4)
    assert found.limit.startswith("stage 0, which all-reduces its weights: ")


# Every plan, tried


def compositions(total, count):
    return [
        tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))
        for cuts in combinations(range(1, total), count - 1)
    ]


def every_plan(i, j, sizes):
    """All plans for layers i to j: parts (first, stop, replicas, plan of the level below)."""
    if not sizes:
        return [()]
    found = []
    for count in range(1, min(sizes[-1], j - i) + 1):
        for ends in ((i, *cuts, j) for cuts in combinations(range(i + 1, j), count - 1)):
            for replicas in compositions(sizes[-1], count):
                spans = zip(ends, ends[1:], replicas, strict=False)
                found += product(
                    *([(a, b, m, inner) for inner in every_plan(a, b, sizes[:-1])] for a, b, m in list(spans))
                )
    return found


def seconds_of(plan, chain, topology, objective):
    """By the text of the paper, from the outermost level inwards."""
    took, bandwidth = [], topology[-1][1]
    for a, b, m, inner in plan:
        compute = seconds_of(inner, chain, topology[:-1], objective) if inner else sum(chain.seconds[a:b])
        agree = COEFFICIENTS[objective.coefficient](m) * sum(chain.parameters[a:b]) / bandwidth
        long, short = max(compute, agree), min(compute, agree)
        took.append((long + (1 - objective.overlap) * short) / m)
        if b < plan[-1][1]:
            took.append(2 * chain.crossing[b - 1] / bandwidth)
    return max(took)


def flat(plan, times=1):
    for a, b, m, inner in plan:
        if inner:
            yield from flat(inner, times * m)
        else:
            yield a, b, times * m


def memory_of(plan, chain, total):
    before, most = 0, 0
    for a, b, m in flat(plan):
        warm_up = (total - 1 - before) // m
        most = max(most, (warm_up + 1) * (sum(chain.parameters[a:b]) + sum(chain.activations[a:b])))
        before += m
    return most


def a_case(random):
    sizes = [(2,), (3,), (4,), (5,), (2, 2), (3, 2), (2, 3), (3, 3), (2, 2, 2)][random.integers(9)]
    layers = int(random.integers(1, 7 if len(sizes) == 1 else 5))
    numbers = random.integers(0, [[20], [60], [200], [60]], (4, layers))
    numbers[0] += 1
    numbers[3, -1] = 0
    chain = Chain(tuple(map(str, range(layers))), *(tuple(map(float, row)) for row in numbers))
    topology = tuple((size, float(10 ** random.uniform(0, 2))) for size in sizes)
    objective = {
        "coefficient": str(random.choice(list(COEFFICIENTS))),
        "overlap": float(random.choice([0.0, 0.3, 1.0])),
        "margin": float(random.choice([0.0, 0.05, 0.5])),
    }
    return chain, topology, objective


@pytest.mark.spread(0)
@pytest.mark.parametrize("seed", some(range(4), [2]))
def test_equals_exhaustive_search(seed):
    """On 1,000 random chains, with and without a limit of memory: the same least, choice and refusals."""
    random, answered, refused = np.random.default_rng(seed), 0, {"use": 0, "fits": 0}
    for _ in range(250):
        chain, topology, given = a_case(random)
        total, layers = prod(size for size, _ in topology), len(chain.names)
        *lower, (most, bandwidth) = topology
        limit = float(random.choice([inf, random.integers(60, 3000)]))
        objective = Objective(**given, memory=limit)
        costs, least = {}, []
        for many in range(1, most + 1):
            tree = (*lower, (many, bandwidth))
            plans = every_plan(0, layers, [size for size, _ in tree])
            fit = [plan for plan in plans if memory_of(plan, chain, total // most * many) <= limit]
            costs = {plan: seconds_of(plan, chain, tree, objective) for plan in fit}
            least.append(min(costs.values(), default=inf))
        found = attempted(chain, topology, objective)
        if isinstance(found, JaxparError) and isfinite(least[-1]):
            assert least[-1] > min(least) * (1 + objective.margin)
            assert found.problems[0].fix.startswith(f"({least.index(min(least)) + 1}, ...)")
            refused["use"] += 1
            continue
        if isinstance(found, JaxparError):
            needed = min(memory_of(plan, chain, total) for plan in plans)
            assert found.problems[0].fix.startswith(f"memory = {ceil(needed)},")
            assert f"{needed - limit:,.0f} B" in found.problems[0].got
            refused["fits"] += 1
            continue
        answered += 1
        assert found.least_seconds == pytest.approx(least[-1], rel=1e-9)
        assert least[-1] <= min(least) * (1 + objective.margin) * (1 + 1e-9)
        bound = least[-1] * (1 + objective.margin) * (1 + 1e-9)
        fewest = min(len(list(flat(plan))) for plan, took in costs.items() if took <= bound)
        best = min(took for plan, took in costs.items() if len(list(flat(plan))) == fewest)
        assert (len(found.stages), found.seconds) == (fewest, pytest.approx(best, rel=1e-9))
        assert max(stage.memory for stage in found.stages) <= limit
        assert [(s.first, s.first + len(s.layers), s.replicas) for s in found.stages] == list(
            flat(as_plan(found.parts))
        )
        assert costs[as_plan(found.parts)] == pytest.approx(best, rel=1e-9)
        assert memory_of(as_plan(found.parts), chain, total) == max(stage.memory for stage in found.stages)
        assert -(-total // found.stages[0].replicas) == found.noam == found.stages[0].versions
    assert answered > 100
    assert min(refused.values()) > 5


def attempted(*args):
    try:
        return partition(*args)
    except JaxparError as error:
        return error


def as_plan(parts):
    return tuple((part.first, part.stop, part.replicas, as_plan(part.inner)) for part in parts)


# Memory


def test_a_plan_that_does_not_fit_gives_way(chains):
    found = partition(chains["vgg16"], ((16, SLOW),), Objective(overlap=1.0, memory=20 * 2**30))
    assert max(stage.memory for stage in found.stages) <= 20 * 2**30
    assert found.ruled_out.startswith("15-1 does not fit: its stage 0 (node1..node32) needs 2 x (weights 56.13 MiB +")
    assert "GiB) over 20 GiB" in found.ruled_out
    assert f"memory: {found.ruled_out}" in str(found)


def test_no_plan_fits_says_what_would(chains):
    topology, limit = ((4, SLOW),), 4 * 2**30
    with pytest.raises(JaxparError) as refusal:
        partition(chains["vgg16"], topology, Objective(overlap=1.0, memory=limit))
    problem = refusal.value.problems[0]
    enough = int(problem.fix.split(" = ")[1].split(",")[0])
    assert f"{enough - limit:,.0f} B" in problem.got
    assert partition(chains["vgg16"], topology, Objective(overlap=1.0, memory=enough))
    with pytest.raises(JaxparError):
        partition(chains["vgg16"], topology, Objective(overlap=1.0, memory=enough - 1))
    batch = float(problem.fix.split("; or ")[1].split(" ")[0])
    assert partition(chains["vgg16"].scale_batch(batch), topology, Objective(overlap=1.0, memory=limit))


# Refusals

ONE = Chain(("a",), (1.0,), (8.0,), (8.0,), (0.0,))


@pytest.mark.parametrize(
    ("make", "got", "fix"),
    [
        (lambda: Objective(coefficient="rign"), "coefficient = 'rign'", "did you mean 'ring'?"),
        (lambda: Objective(overlap=1.5), "overlap = 1.5", "overlap = 0.5"),
        (lambda: Objective(overlap=float("nan")), "overlap = nan", "overlap = 0.5"),
        (lambda: Objective(overlap=1.0, margin=-0.1), "margin = -0.1", "margin = 0.05"),
        (lambda: Objective(overlap=1.0, memory=0), "memory = 0", "memory = inf"),
        (lambda: linearise(Profile((), ())), "a profile without layers", "another profile"),
        (
            lambda: Chain(("a",), (0.0,), (1.0,), (1.0,), (0.0,)),
            "a profile whose layers take 0 s",
            "measure the layers",
        ),
        (lambda: Chain(("a",), (-1.0,), (1.0,), (1.0,), (0.0,)), "seconds = -1.0", "measure that layer again"),
        (lambda: Chain(("a",), (1.0,), (), (1.0,), (0.0,)), "0 parameters for 1 layers", "measure that layer again"),
        (lambda: ONE.scale_batch(0), "0 times the minibatch", "0.5 for half of it"),
        (
            lambda: linearise(Profile((Node("a", "", 1, 1, 1, 1), Node("b", "", 1, 1, 1, 1)), (("b", "a"),))),
            "edge b -- a",
            "sort the layers",
        ),
        (lambda: partition(ONE, ()), "topology ()", "((8, 12e9), (4, 1.25e9))"),
        (lambda: partition(ONE, ((4, 0),)), "level 1 has bandwidth 0", "1.25e9 for 10 Gb/s"),
        (lambda: partition(ONE, ((4, inf),)), "level 1 has bandwidth inf", "1.25e9 for 10 Gb/s"),
        (lambda: partition(ONE, ((8, 1e9), ((8, 8, 4), 1e9))), "level 2 has parts of sizes (8, 8, 4)", "(4, ...)"),
        (lambda: partition(ONE, ((2.5, 1e9),)), "level 1 has size 2.5", "((8, 12e9), (4, 1.25e9))"),
        (lambda: partition(ONE, (4, 1e9)), "level 1 is 4", "((8, 12e9), (4, 1.25e9))"),
        (lambda: partition(ONE, ((2, 1.0),)), "2 parts of the outermost level: 4.25 s a minibatch, 1 of them", "(1,"),
        (lambda: partition(ONE, ((10**6, 1e9),)), "1 layers on 1000000 parts of level 1", "levels of at most 20000"),
    ],
)
def test_refusals(make, got, fix):
    with pytest.raises(JaxparError) as refusal:
        make()
    assert refusal.value.problems[0].got.startswith(got)
    assert refusal.value.problems[0].fix.startswith(fix)
