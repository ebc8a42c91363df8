"""A collective is a table of messages: its replay, its run on devices and its price are one and the same."""

from functools import partial

import closed_forms
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from pairwise import some

from jaxpar.errors import JaxparError
from jaxpar.exchange.collectives import algorithms
from jaxpar.exchange.collectives.algorithms import ALL_REDUCE, Message, padded_size, split_part
from jaxpar.exchange.collectives.executor import check_all_reduce, deliver, permutes, run_rounds
from jaxpar.mesh.chips import Link
from jaxpar.mesh.collective import wire_bytes

PLAIN = Link(latency=5e-6, bandwidth=12e9)  # of the published figures
LINKS = st.builds(  # powers of two, so that a float holds every sum of them exactly
    Link,
    latency=st.integers(0, 64).map(lambda n: n / 64),
    bandwidth=st.integers(0, 10).map(lambda n: float(2**n)),
    combine=st.integers(0, 8).map(lambda n: n / 64),
)
GROUPS = st.integers(1, 17)


def numbers(devices, elements, seed=0):
    return np.random.default_rng(seed).integers(-99, 99, (devices, elements)).astype(np.int32)


def sent(rounds, devices, item=1):
    """Bytes that each device sends."""
    found = np.zeros(devices, int)
    for message in (message for messages in rounds for message in messages):
        found[message.source] += item * message.size
    return found


@pytest.mark.parametrize("name", ALL_REDUCE)
@given(link=LINKS, group=GROUPS, times=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_every_all_reduce_is_one_and_its_price_is_its_formula(name, link, group, times):
    elements = times * padded_size(1, group)
    rounds, data = algorithms.all_reduce_rounds(name, group, elements), numbers(group, elements)
    assert (deliver(rounds, data) == data.sum(0)).all()
    assert algorithms.seconds(rounds, link, item=4) == closed_forms.ALL_REDUCE[name](link, 4 * elements, group)
    if name == "ring" or (name == "halving" and group & (group - 1) == 0):
        assert (sent(rounds, group, 4) == wire_bytes("all-reduce", 4 * elements, group)).all()


@given(link=LINKS, group=GROUPS)
@settings(max_examples=40, deadline=None)
def test_the_parts_of_a_ring_and_an_all_to_all_cost_what_their_formulas_say(link, group):
    elements = padded_size(1, group)
    whole, size = (0, elements), 4 * elements
    for kind in ("reduce_scatter", "all_gather", "all_to_all"):
        rounds = getattr(algorithms, kind)(range(group), whole)
        assert algorithms.seconds(rounds, link, item=4) == getattr(closed_forms, kind)(link, size, group)
        assert (sent(rounds, group, 4) == wire_bytes(kind.replace("_", "-"), size, group)).all()


def on_devices(rounds, data):
    """What a table does on simulated devices."""
    mesh = Mesh(np.array(jax.devices()[: len(data)]), ("data",))
    function = jax.shard_map(
        lambda x: run_rounds(rounds, x[0], "data")[None],
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    return np.asarray(jax.jit(function)(data))


@pytest.mark.spread(0)
@pytest.mark.parametrize("group", [8, 6, 3])
@pytest.mark.parametrize("name", some(ALL_REDUCE, ["tree"]))
def test_a_table_runs_on_devices_as_it_is_replayed_and_as_psum(name, group):
    data = numbers(group, 29)  # pieces of unequal length
    rounds = algorithms.all_reduce_rounds(name, group, 29)
    done = on_devices(rounds, data)
    assert (done == deliver(rounds, data)).all()
    mesh = Mesh(np.array(jax.devices()[:group]), ("data",))
    total = jax.shard_map(
        partial(jax.lax.psum, axis_name="data"), mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
    )
    assert (done == jax.jit(total)(data)).all()


def test_the_executor_runs_any_table():
    data = numbers(8, 24)
    whole = (0, 24)
    scattered = on_devices(algorithms.reduce_scatter(range(8), whole), data)
    gathered = on_devices(algorithms.all_gather(range(8), whole), data)
    for device, piece in enumerate(split_part(whole, 8)):
        assert (scattered[device, slice(*piece)] == data.sum(0)[slice(*piece)]).all()
        assert (gathered[:, slice(*piece)] == data[device, slice(*piece)]).all()
    twice = np.concatenate([data, np.zeros_like(data)], axis=1)
    received = on_devices(algorithms.all_to_all(range(8), whole), twice)[:, 24:].reshape(8, 8, 3)
    pieces = data.reshape(8, 8, 3).swapaxes(0, 1).copy()
    pieces[range(8), range(8)] = 0  # what a device keeps is not sent
    assert (received == pieces).all()
    hub = [[Message(0, 2, (0, 5)), Message(1, 2, (5, 9), add=True), Message(0, 3, (0, 5))]]  # one source, one target
    assert [len(each) for each in permutes(hub[0])] == [1, 1, 1]
    assert (on_devices(hub, data) == deliver(hub, data)).all()


def test_messages_of_a_round_carry_what_was_there_before_it():
    swap = [[Message(0, 1, (0, 1)), Message(1, 0, (0, 1))]]
    data = np.array([[1], [2]], np.int32)
    assert deliver(swap, data).tolist() == on_devices(swap, data).tolist() == [[2], [1]]


def test_a_table_that_is_no_all_reduce_is_refused():
    with pytest.raises(JaxparError, match="algorithm 'half a ring': device 0 of 4 ends without the sum of all"):
        check_all_reduce(algorithms.reduce_scatter(range(4), (0, 4)), 4, "half a ring")
    with pytest.raises(JaxparError, match="algorithm='rign'") as caught:
        algorithms.all_reduce_rounds("rign", 8, 8)
    assert "ring" in caught.value.problems[0].fix


REAL = st.builds(
    Link,
    latency=st.integers(0, 10**6).map(lambda n: n * 1e-9),
    bandwidth=st.floats(1e6, 1e12),
    combine=st.integers(0, 1000).map(lambda n: n * 1e-12),
)


@given(link=REAL, size=st.integers(0, 10**12), group=st.integers(2, 20))
@settings(deadline=None)
def test_the_cheapest_is_that_of_the_closed_forms_and_not_below_the_bound(link, size, group):
    each = {name: form(link, size, group) for name, form in closed_forms.ALL_REDUCE.items()}
    _, seconds = algorithms.cheapest(link, size, group)
    assert seconds == pytest.approx(min(each.values()))
    assert seconds >= closed_forms.lower_bound(link, size, group) * (1 - 1e-9)


def test_the_published_example():
    """100 MB at 64 devices, 5 us and 12 GB/s."""
    size = padded_size(1, 64)
    milliseconds = {
        name: round(1e3 * algorithms.seconds(algorithms.all_reduce_rounds(name, 64, size), PLAIN, item=1e8 / size), 1)
        for name in ALL_REDUCE
    }
    assert milliseconds == {"tree": 100.1, "butterfly": 50.0, "ring": 17.0, "halving": 16.5, "two_levels": 16.5}
    assert round(1e3 * closed_forms.lower_bound(PLAIN, 1e8, 64), 1) == 16.4


@pytest.mark.parametrize(("group", "kilobytes"), [(8, 144), (64, 89)])
def test_a_butterfly_is_faster_below_the_published_size(group, kilobytes):
    size = closed_forms.crossover(PLAIN, group)
    assert round(size / 1e3) == kilobytes
    assert algorithms.cheapest(PLAIN, 0.99 * size, group)[0] == "butterfly"
    assert algorithms.cheapest(PLAIN, 1.01 * size, group)[0] == "halving"
