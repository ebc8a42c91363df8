"""Formulas of collectives are what messages take that really carry data, and keep to their order."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import JaxparError
from jaxpar.exchange import algorithms, cost
from jaxpar.exchange.replay import Message, deliver
from jaxpar.mesh.collective import wire_bytes
from jaxpar.mesh.links import Link

PLAIN = Link(latency=5e-6, bandwidth=12e9)  # of the published figures
LINKS = st.builds(  # powers of two, so that a float holds every sum of them exactly
    Link,
    latency=st.integers(0, 64).map(lambda n: n / 64),
    bandwidth=st.integers(0, 10).map(lambda n: float(2**n)),
    combine=st.integers(0, 8).map(lambda n: n / 64),
)
GROUPS = st.integers(1, 17)
EXCHANGES = {name: getattr(algorithms, name) for name in cost.ALL_REDUCE}


def numbers(devices, elements, seed=0):
    return np.random.default_rng(seed).integers(-99, 99, (devices, elements))


def small(group):
    """Elements that every algorithm cuts evenly in a group of so many."""
    return math.lcm(group, 1 << (group.bit_length() - 1))


@pytest.mark.parametrize("name", EXCHANGES)
@given(link=LINKS, group=GROUPS, times=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_every_all_reduce_is_one_and_takes_what_its_formula_says(name, link, group, times):
    data = numbers(group, times * small(group))
    done = deliver(EXCHANGES[name](range(group), (0, data.shape[1])), data, link)
    assert (done.data == data.sum(0)).all()
    assert done.seconds == cost.ALL_REDUCE[name](link, data[0].nbytes, group)
    if name == "ring" or (name == "halving" and group & (group - 1) == 0):
        assert (done.sent == wire_bytes("all-reduce", data[0].nbytes, group)).all()


@given(link=LINKS, share=st.integers(1, 4), servers=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_parameter_server_sums_and_takes_what_its_formula_says(link, share, servers):
    workers = share * servers
    data = numbers(workers + servers, 3 * servers)
    data[workers:] = 0
    rounds = algorithms.parameter_server(range(workers), range(workers, workers + servers), (0, data.shape[1]))
    done = deliver(rounds, data, link)
    assert (done.data[:workers] == data.sum(0)).all()
    assert done.seconds == cost.parameter_server(link, data[0].nbytes, workers, servers)


@given(link=LINKS, group=GROUPS)
@settings(max_examples=40, deadline=None)
def test_the_parts_of_a_ring_take_what_their_formulas_say(link, group):
    data = numbers(group, small(group))
    whole, size = (0, data.shape[1]), data[0].nbytes
    pieces = algorithms.cut(whole, group)
    scattered = deliver(algorithms.reduce_scatter(range(group), whole), data, link)
    for rank, piece in enumerate(pieces):
        assert (scattered.data[rank, slice(*piece)] == data.sum(0)[slice(*piece)]).all()
    gathered = deliver(algorithms.all_gather(range(group), whole), data, link)
    assert (gathered.data == np.concatenate([data[i, slice(*piece)] for i, piece in enumerate(pieces)])).all()
    twice = np.concatenate([data, np.zeros_like(data)], axis=1)
    exchanged = deliver(algorithms.all_to_all(range(group), whole), twice, link)
    sent = data.reshape(group, group, -1)
    received = exchanged.data[:, data.shape[1] :].reshape(sent.shape)
    received[range(group), range(group)] = sent[range(group), range(group)]  # what a device keeps
    assert (received == sent.swapaxes(0, 1)).all()
    for kind, done in {"reduce-scatter": scattered, "all-gather": gathered, "all-to-all": exchanged}.items():
        assert done.seconds == getattr(cost, kind.replace("-", "_"))(link, size, group)
        assert (done.sent == wire_bytes(kind, size, group)).all()
    ring = cost.ring(link, size, group)
    assert ring == scattered.seconds + gathered.seconds
    assert wire_bytes("all-reduce", size, group) == sum(
        wire_bytes(k, size, group) for k in ("reduce-scatter", "all-gather")
    )


@given(link=LINKS, group=st.integers(2, 9), chunks=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=40, deadline=None)
def test_a_broadcast_takes_what_its_formula_says(link, group, chunks):
    data = numbers(group, 24)
    done = deliver(algorithms.broadcast(range(group), (0, 24), chunks), data, link)
    assert (done.data == data[0]).all()
    assert done.seconds == cost.broadcast(link, data[0].nbytes, group, chunks=chunks)
    assert done.sent.mean() == wire_bytes("collective-broadcast", data[0].nbytes, group)
    assert cost.broadcast(link, data[0].nbytes, group) <= done.seconds


REAL = st.builds(
    Link,
    latency=st.integers(0, 10**6).map(lambda n: n * 1e-9),
    bandwidth=st.floats(1e6, 1e12),
    combine=st.integers(0, 1000).map(lambda n: n * 1e-12),
)
SIZES = st.integers(0, 10**12)


@given(link=REAL, size=SIZES, group=st.integers(1, 5000))
def test_no_all_reduce_is_below_the_lower_bound(link, size, group):
    bound = cost.lower_bound(link, size, group)
    for name, algorithm in cost.ALL_REDUCE.items():
        assert algorithm(link, size, group) >= bound * (1 - 1e-9), name
    best = cost.cheapest(link, size, group)
    assert best.seconds == min(algorithm(link, size, group) for algorithm in cost.ALL_REDUCE.values())


@given(link=REAL, size=SIZES, servers=st.integers(1, 70), share=st.integers(1, 70))
def test_a_parameter_server_sends_no_less_than_the_lower_bound(link, size, servers, share):
    unlatent = Link(latency=0.0, bandwidth=link.bandwidth, combine=link.combine)
    bound = cost.lower_bound(unlatent, size, servers * share)
    assert cost.parameter_server(link, size, servers * share, servers) >= bound * (1 - 1e-9)


def test_a_parameter_server_is_below_the_bound_of_single_messages_only_by_its_latencies():
    assert cost.parameter_server(PLAIN, 800, 64, 64) < cost.lower_bound(PLAIN, 800, 64)
    assert cost.parameter_server(PLAIN, 1e8, 64, 64) > cost.lower_bound(PLAIN, 1e8, 64)


def test_the_published_example():
    """100 MB at 64 devices, 5 us and 12 GB/s."""
    milliseconds = {name: 1e3 * algorithm(PLAIN, 1e8, 64) for name, algorithm in cost.ALL_REDUCE.items()}
    assert {name: round(took, 1) for name, took in milliseconds.items()} == {
        "tree": 100.1, "butterfly": 50.0, "ring": 17.0, "halving": 16.5,
    }  # fmt: skip
    assert round(1e3 * cost.lower_bound(PLAIN, 1e8, 64), 1) == 16.4


@pytest.mark.parametrize(("group", "kilobytes"), [(8, 144), (64, 89), (256, 80)])
def test_a_butterfly_is_faster_below_the_published_size(group, kilobytes):
    size = cost.crossover(PLAIN, group)
    assert round(size / 1e3) == kilobytes
    assert cost.cheapest(PLAIN, 0.99 * size, group).algorithm == "butterfly"
    assert cost.cheapest(PLAIN, 1.01 * size, group).algorithm == "halving"


@given(link=LINKS, group=st.integers(4, 300))
def test_both_take_as_long_at_the_crossover(link, group):
    size = cost.crossover(link, group)
    assert cost.butterfly(link, size, group) == pytest.approx(cost.halving(link, size, group))


def test_a_group_of_three_never_needs_halving():
    assert cost.crossover(PLAIN, 3) == math.inf
    assert cost.crossover(PLAIN, 1) == math.inf


@given(link=REAL, size=SIZES, group=st.integers(3, 5000))
def test_halving_is_never_worse_than_a_ring_at_powers_of_two(link, size, group):
    group = 1 << (group.bit_length() - 1)
    assert cost.halving(link, size, group) <= cost.ring(link, size, group) * (1 + 1e-12)


def test_sharded_servers_as_many_as_workers_send_what_a_ring_sends_and_one_share_more():
    """2 n against 2 n (P-1)/P."""
    link = Link(latency=0.0, bandwidth=1.0)
    assert cost.parameter_server(link, 64, 8, 8) * 7 / 8 == cost.ring(link, 64, 8)


def test_ports_take_one_message_at_a_time_and_posted_ones_share_the_latency():
    link = Link(latency=1.0, bandwidth=8.0)
    data = np.arange(4).reshape(4, 1)  # 8 bytes: a second
    blocking = [[Message(1, 0, (0, 1), add=True), Message(2, 0, (0, 1), add=True), Message(2, 3, (0, 1))]]
    assert deliver(blocking, data, link).seconds == 6  # 1 to 0, then 2 to 0, then 2 to 3: two seconds each
    posted = [[Message(source, 0, (0, 1), add=True, posted=True) for source in (1, 2, 3)]]
    assert deliver(posted, data, link).seconds == 4  # one latency, three messages
    assert deliver(posted, data, link).data[0, 0] == 6


def test_messages_of_a_round_carry_what_was_there_before_it():
    swapped = deliver([[Message(0, 1, (0, 1)), Message(1, 0, (0, 1))]], np.array([[1], [2]]), PLAIN)
    assert swapped.data.tolist() == [[2], [1]]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: cost.ring(PLAIN, -1, 8), "a collective of -1 bytes"),
        (lambda: cost.ring(PLAIN, math.nan, 8), "a collective of nan bytes"),
        (lambda: cost.tree(PLAIN, 8, 0), "a collective of 0 devices"),
        (lambda: cost.cheapest(PLAIN, 8, 2.0), "a collective of 2.0 devices"),  # pyright: ignore
        (lambda: cost.parameter_server(PLAIN, 8, 8, 3), "3 parameter servers for 8 workers"),
        (lambda: cost.parameter_server(PLAIN, 8, 8, 16), "16 parameter servers for 8 workers"),
        (lambda: Link(latency=0.0, bandwidth=0.0), "bandwidth = 0.0"),
    ],
)
def test_what_is_no_collective_is_refused(call, said):
    with pytest.raises(JaxparError, match=said.replace(".", r"\.")) as caught:
        call()
    assert len(caught.value.problems) == 1
