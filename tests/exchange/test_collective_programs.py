"""Collectives three times over: as a table of messages, as a formula, and as a program of `ppermute`s."""

from collections import Counter
from itertools import chain

import closed_forms
import jax
import numpy as np
import pytest
from lockstep import evaluated, messages, traced

from jaxpar.cli.main import main
from jaxpar.exchange.collectives import algorithms
from jaxpar.exchange.collectives.algorithms import padded_size, split_part
from jaxpar.exchange.collectives.executor import deliver
from jaxpar.exchange.collectives.programs import (
    OWN,
    PROGRAMS,
    ROWS,
    TABLES,
    all_reduce,
    broadcast,
    gather,
    reduce,
    scatter,
    send,
)
from jaxpar.mesh.chips import Link
from jaxpar.mesh.collective import wire_bytes

SLOW = pytest.mark.slow, pytest.mark.full  # odd and even, powers of two and not, in every run and in CI
GROUPS = [pytest.param(group, marks=() if group in (3, 8) else SLOW[group not in (2, 6)]) for group in range(2, 10)]
each_one = pytest.mark.parametrize("name", PROGRAMS)


def begun(name, group):
    """What devices begin with, of as many elements as all cut into equal pieces, and the table's size."""
    elements = padded_size(group, group)
    shape = (group, elements // group) if name in ROWS else (elements // group,) if name in OWN else (elements,)
    return np.random.default_rng(group).integers(-99, 99, (group, *shape)).astype(np.int32), elements


def ended(name, x):
    """What devices end with, in numpy."""
    group = len(x)
    if name == "send":
        return np.concatenate([x[:-1], x[:1]])
    if name == "broadcast":
        return np.stack([x[0]] * group)
    if name == "reduce":
        return np.concatenate([x.sum(0)[None], x[1:]])
    if name == "gather":
        return np.concatenate([x[None], np.zeros((group - 1, *x.shape), x.dtype)])
    if name == "scatter":
        return x[0]
    if name == "all_gather":
        return np.stack([x] * group)
    if name == "reduce_scatter":
        return x.sum(0)
    if name == "all_to_all":
        return x.swapaxes(0, 1)
    return np.stack([x.sum(0)] * group)


@pytest.mark.spread(5)
@pytest.mark.slow
@each_one
@pytest.mark.parametrize("group", GROUPS)
def test_a_table_a_formula_and_a_program_send_the_same_messages(name, group):
    x, elements = begun(name, group)
    table = TABLES[name](range(group), (0, elements))
    program = traced(PROGRAMS[name], x)
    sent = Counter((m.source, m.target, 4 * m.size) for messages in table for m in messages)
    assert Counter(messages(program)) == sent
    assert (sent.total(), sum(size * times for (_, _, size), times in sent.items())) == closed_forms.traffic(
        name, group, 4 * elements
    )
    np.testing.assert_array_equal(evaluated(program, x), ended(name, x))


@each_one
def test_a_table_does_on_numbers_what_its_program_does(name):
    group = 6
    x, elements = begun(name, group)
    held = np.zeros((group, 2 * elements), np.int32)  # past the array lies what comes in an all-to-all
    for device, (start, stop) in enumerate(split_part((0, elements), group)):
        if name in OWN:
            held[device, start:stop] = x[device]
        else:
            held[device, :elements] = x[device].reshape(-1)
    after = deliver(TABLES[name](range(group), (0, elements)), held)[:, :elements]
    want = ended(name, x).reshape(group, -1)
    pieces = list(enumerate(split_part((0, elements), group)))
    if name in ("reduce", "gather"):
        np.testing.assert_array_equal(after[0], want[0])
    elif name in ("scatter", "reduce_scatter"):
        np.testing.assert_array_equal([after[device, start:stop] for device, (start, stop) in pieces], want)
    elif name != "all_to_all":
        np.testing.assert_array_equal(after, want)


@pytest.mark.nightly
def test_any_device_may_be_the_root():
    x = np.arange(20, dtype=np.int32).reshape(5, 4)
    run = lambda program, x, **settings: evaluated(traced(lambda x, axis: program(x, axis, **settings), x), x)  # noqa: E731
    np.testing.assert_array_equal(run(send, x, source=3, target=1)[1], x[3])
    np.testing.assert_array_equal(run(broadcast, x, root=2), np.stack([x[2]] * 5))
    np.testing.assert_array_equal(run(reduce, x, root=4), [*x[:4], x.sum(0)])
    np.testing.assert_array_equal(run(gather, x, root=3)[3], x)
    rows = np.arange(50, dtype=np.int32).reshape(5, 5, 2)
    np.testing.assert_array_equal(run(scatter, rows, root=1), rows[1])


@pytest.mark.nightly
def test_three_ranks_add_up():
    """The sums of MPI's first lesson: ranks 0, 1 and 2 hold their numbers plus one."""
    x = np.array([[1], [2], [3]], np.int32)
    assert evaluated(traced(reduce, x), x).tolist() == [[6], [2], [3]]
    for name in algorithms.ALL_REDUCE:
        assert evaluated(traced(PROGRAMS[name], x), x).tolist() == [[6], [6], [6]]


def test_between_nodes_only_pieces_travel():
    """Of 8 devices in two nodes of 4, a quarter of the array leaves each device's node, twice."""
    table = algorithms.two_levels(range(8), (0, 8), inside=4)
    out = Counter(
        m.source for messages in table for m in messages for _ in range(m.size) if m.source // 4 != m.target // 4
    )
    assert out == dict.fromkeys(range(8), 2)


def test_programs_run_over_any_axis_of_a_mesh():
    """On simulated devices, over either axis, as XLA's own sum."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = np.random.default_rng(0).integers(-99, 99, (8, 5)).astype(np.int32)
    over = jax.P(("data", "tensor"))

    def both(x):
        return tuple(
            made
            for axis in mesh.axis_names
            for made in (all_reduce(x, axis, algorithm="two_levels"), jax.lax.psum(x, axis))
        )

    run = jax.shard_map(both, mesh=mesh, in_specs=over, out_specs=(over,) * 4, check_vma=False)
    for ours, theirs in np.asarray(jax.jit(run)(x)).reshape(2, 2, 8, 5):
        np.testing.assert_array_equal(ours, theirs)


def test_a_collective_is_shown_message_by_message(capsys):
    assert main(["exchange", "collective", "tree", "--devices", "8"]) == 0
    said = capsys.readouterr().out
    assert "round 1  1 -> 0 [0:8] added, 3 -> 2 [0:8] added, 5 -> 4 [0:8] added, 7 -> 6 [0:8] added" in said
    assert "14 messages in 6 rounds" in said
    assert "device 7  70 71 72 73 74 75 76 77  ->  280 288 296 304 312 320 328 336" in said
    assert main(["exchange", "collective", "trie", "--devices", "8"]) == 1
    assert "collective 'trie'" in capsys.readouterr().err


@pytest.mark.parametrize("group", [2, 4, 8])
def test_the_root_of_data_parallel_sends_r_times_what_a_device_of_ddp_does(group):
    """All passes through one device: (R - 1) (w + logits) each way, beside 2 (R - 1) / R w of a ring's devices."""
    weights, logits = 64, 3
    rounds = algorithms.data_parallel(range(group), (0, weights), (weights, weights + group * logits))
    held = np.random.default_rng(0).integers(-99, 99, (group, 2 * weights + group * logits))
    after = deliver(rounds, held)
    assert (after[:, :weights] == held[0, :weights]).all()
    assert (after[0, -weights:] == held[:, -weights:].sum(0)).all()  # gradients
    for device, piece in enumerate(split_part((weights, weights + group * logits), group)):
        assert (after[[0, device], slice(*piece)] == held[device, slice(*piece)]).all()
    sent, received = Counter(), Counter()
    for message in chain.from_iterable(rounds):
        sent[message.source] += message.size
        received[message.target] += message.size
    root = closed_forms.data_parallel_root(weights, logits, group)
    assert sent[0] == received[0] == root
    assert {sent[device] for device in range(1, group)} == {weights + logits}
    ring = Counter()
    for message in chain.from_iterable(algorithms.ring(range(group), (0, weights))):
        ring[message.source] += message.size
    assert {*ring.values()} == {wire_bytes("all-reduce", weights, group)}
    assert root / ring[0] == pytest.approx(group / 2 * (1 + logits / weights))
    # whoever waits for the root waits for all of it, one message after the other
    link = Link(latency=0.0, bandwidth=1.0)
    assert algorithms.seconds(rounds, link) == 2 * root
