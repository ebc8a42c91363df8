"""Collectives over nodes take what messages over NVLink and NICs take, and use the NICs that the group has."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import JaxparError
from jaxpar.exchange import algorithms, cost, two_level
from jaxpar.exchange.replay import deliver
from jaxpar.exchange.two_level import Place
from jaxpar.mesh.collective import KINDS
from jaxpar.mesh.links import Link

NVLINK, NIC = Link(latency=2e-6, bandwidth=450e9), Link(latency=5e-6, bandwidth=50e9)
GAMMA = st.integers(0, 8).map(lambda n: n / 64)


@st.composite
def places(draw, most=6):
    def link(combine):
        latency = draw(st.integers(0, 64)) / 64
        return Link(latency=latency, bandwidth=float(2 ** draw(st.integers(0, 10))), combine=combine)

    combine = draw(GAMMA)
    nodes = draw(st.integers(1, most))
    return Place(inside=link(combine), between=link(combine), per_node=draw(st.sampled_from([1, 2, 4])), nodes=nodes)


def numbers(devices, elements):
    return np.random.default_rng(0).integers(-99, 99, (devices, elements))


def wires(where):
    """The link of two members: a NIC of their own, and where a whole node's are used, those of all its members."""
    nics = Link(
        latency=where.between.latency,
        bandwidth=where.between.bandwidth * where.per_node,
        combine=where.between.combine,
    )
    node = lambda rank: rank // where.per_node  # noqa: E731
    inside = ("NVLink", where.inside)
    own = lambda a, b: inside if node(a) == node(b) else ("NIC", where.between)  # noqa: E731
    spread = lambda a, b: inside if node(a) == node(b) else ("NICs", nics)  # noqa: E731
    return own, spread


def inside_then_between(where, whole, inside, across, after=None):
    """An exchange in every node, then of every index between nodes on its piece, then in every node."""
    k, count = where.per_node, where.group
    nodes = [range(start, start + k) for start in range(0, count, k)]
    pieces = algorithms.cut(whole, k)
    return [
        *algorithms.together(*(inside(node, whole) for node in nodes)),
        *algorithms.together(*(across(range(i, count, k), pieces[i]) for i in range(k))),
        *(algorithms.together(*(after(node, whole) for node in nodes)) if after else ()),
    ]


@given(where=places())
@settings(max_examples=80, deadline=None)
def test_an_all_reduce_over_nodes_takes_what_its_messages_take(where):
    data = numbers(where.group, 16 * where.group * 15)
    whole, size = (0, data.shape[1]), data[0].nbytes
    own, spread = wires(where)
    found = two_level.all_reduce(where, size)
    took = {}
    took["ring"] = deliver(algorithms.ring(range(where.group), whole), data, spread)
    for name in cost.ALL_REDUCE:
        rounds = inside_then_between(
            where, whole, algorithms.reduce_scatter, getattr(algorithms, name), algorithms.all_gather
        )
        took[f"hierarchical {name}"] = deliver(rounds, data, own)
        if where.only:
            took[name] = deliver(getattr(algorithms, name)(range(where.group), whole), data, own)
    took["flat ring"] = took["ring"]
    assert all((done.data == data.sum(0)).all() for done in took.values())
    assert found.seconds == min(done.seconds for done in took.values()) == took[found.algorithm].seconds


@given(where=places())
@settings(max_examples=60, deadline=None)
def test_gathering_and_scattering_over_nodes_take_what_their_messages_take(where):
    data = numbers(where.group, where.group)
    whole, size = (0, where.group), data[0].nbytes
    own, spread = wires(where)
    for call, exchange in (
        (two_level.reduce_scatter, algorithms.reduce_scatter),
        (two_level.all_gather, algorithms.all_gather),
    ):
        flat = deliver(exchange(range(where.group), whole), data, spread).seconds
        rounds = inside_then_between(where, whole, exchange, exchange)
        if call is two_level.all_gather:  # the other way round
            rounds = [*inside_then_between(where, whole, lambda *_: [], exchange, exchange)]
        layered = deliver(rounds, data, own).seconds
        assert call(where, size).seconds == min(flat, layered)


@given(where=places(4))
@settings(max_examples=40, deadline=None)
def test_an_all_to_all_over_nodes_takes_what_its_messages_take(where):
    count, k = where.group, where.per_node
    data = np.concatenate([numbers(count, count), np.zeros((count, count), int)], axis=1)
    own, _ = wires(where)
    shifts = [(x, y) for x in range(where.nodes) for y in range(k) if x or y]
    rounds = [
        [
            algorithms.Message(i, j, (j, j + 1), into=count + i)
            for i in range(count)
            for j in [(i + x * k) % count // k * k + (i % k + y) % k]
        ]
        for x, y in shifts
    ]
    done = deliver(rounds, data, own)
    received = done.data[:, count:] + np.diag(data.diagonal()[:count])
    assert (received == data[:, :count].T).all()
    size = 8 * count
    layered = cost.all_to_all(where.inside, size, k) + cost.all_to_all(where.between, size, where.nodes)
    assert two_level.all_to_all(where, size).seconds == min(done.seconds, layered)


@given(where=places(), chunks=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=40, deadline=None)
def test_a_broadcast_over_nodes_takes_what_its_messages_take(where, chunks):
    data = numbers(where.group, 32)
    done = deliver(algorithms.broadcast(range(where.group), (0, 32), chunks), data, wires(where)[1])
    assert (done.data == data[0]).all()
    assert two_level.broadcast(where, data[0].nbytes, chunks=chunks).seconds == done.seconds


def test_a_group_has_the_network_cards_of_its_members():
    """FSDP over 16 nodes of 8 uses 8 cards of a node, data parallelism around a tensor axis of 8 one."""
    fsdp = two_level.place(128, stride=1, domain=8, inside=NVLINK, between=NIC)
    data = two_level.place(16, stride=8, domain=8, inside=NVLINK, between=NIC)
    assert (fsdp.per_node, fsdp.nodes, data.per_node, data.nodes) == (8, 16, 1, 16)
    size = 1e10
    many = two_level.all_gather(fsdp, size).seconds
    assert many == pytest.approx(size * 127 / 128 / (8 * 50e9), rel=0.05)  # eight cards are slower than NVLink
    assert two_level.all_gather(data, size).seconds == pytest.approx(size * 15 / 16 / 50e9, rel=0.01)
    slow = Link(latency=2e-6, bandwidth=100e9)
    bound = two_level.all_gather(two_level.place(128, stride=1, domain=8, inside=slow, between=NIC), size).seconds
    assert bound == pytest.approx(size * 127 / 128 / 100e9, rel=0.02)  # now NVLink is


@given(
    group=st.integers(1, 40), stride=st.integers(1, 40), domain=st.integers(1, 16), repeats=st.integers(1, 4)
)  # fmt: skip
@settings(max_examples=300)
def test_a_placement_counts_the_members_of_every_group(group, stride, domain, repeats):
    counts = set()
    for outer in range(domain * repeats):  # enough for blocks and nodes to meet in every way
        for first in range(outer * group * stride, outer * group * stride + stride):
            nodes = (first + stride * np.arange(group)) // domain
            counts |= set(np.unique(nodes, return_counts=True)[1].tolist())
    try:
        found = two_level.place(group, stride=stride, domain=domain, inside=NVLINK, between=NIC)
    except JaxparError:
        found = None
    if found:
        assert (counts, group) == ({found.per_node}, found.group)
    else:
        assert len(counts) > 1


@given(where=places(), size=st.integers(0, 10**12))
def test_no_all_reduce_over_nodes_is_below_the_bound_of_its_faster_link(where, size):
    fast = Link(
        latency=min(where.inside.latency, where.between.latency),
        bandwidth=max(where.inside.bandwidth, where.between.bandwidth * where.per_node),
        combine=where.inside.combine,
    )
    assert two_level.all_reduce(where, size).seconds >= cost.lower_bound(fast, size, where.group) * (1 - 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_collective_has_a_price(kind):
    where = Place(inside=NVLINK, between=NIC, per_node=8, nodes=4)
    near = Place(inside=NVLINK, between=NIC, per_node=8)
    far, close = (two_level.collective(kind, at, 1e9) for at in (where, near))
    assert far.seconds > close.seconds > 0
    assert far.algorithm


def test_small_arrays_go_around_nodes_once_and_large_ones_over_all_cards():
    where = Place(inside=NVLINK, between=NIC, per_node=8, nodes=64)
    assert two_level.all_reduce(where, 1e4).algorithm == "hierarchical butterfly"
    assert two_level.all_reduce(where, 1e11).algorithm == "flat ring"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: two_level.collective("all-reduec", Place(inside=NVLINK, between=NIC, per_node=8), 1), "'all-reduec'"),
        (lambda: Place(inside=NVLINK, between=NIC, per_node=0), "per_node=0"),
        (lambda: two_level.place(3, stride=1, domain=8, inside=NVLINK, between=NIC), "an axis of 3 devices, 1 apart"),
        (lambda: two_level.place(8, stride=0, domain=8, inside=NVLINK, between=NIC), "stride=0"),
        (lambda: two_level.all_gather(Place(inside=NVLINK, between=NIC, per_node=2, nodes=2), -1.0), "-1.0 bytes"),
    ],
)
def test_what_is_no_placement_is_refused(call, said):
    with pytest.raises(JaxparError, match=said) as caught:
        call()
    assert len(caught.value.problems) == 1
