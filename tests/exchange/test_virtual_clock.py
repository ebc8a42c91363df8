"""Staleness on a virtual clock: what comes when, and that what is computed is what was said."""

from collections import Counter
from functools import cache
from itertools import pairwise, repeat
from math import pi, sin

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.exchange.base import flatten_by_path
from jaxpar.exchange.clock import base
from jaxpar.exchange.clock.base import (
    Constant,
    Exponential,
    Lognormal,
    MeasuredDelays,
    Pareto,
    WorkerTimes,
    mean_staleness,
    parse,
)
from jaxpar.exchange.clock.methods import Backup, Stale
from jaxpar.exchange.clock.parameter_servers import AsynchronousEasgd, Downpour, TwoLevels
from jaxpar.mesh.chips import Link
from jaxpar.mesh.collective import Collective, Traffic
from jaxpar.train import virtual_clock

EXPONENTIAL = WorkerTimes(law=Exponential())


# what comes when


@pytest.mark.parametrize(
    "law",
    [Constant(), Exponential(), Lognormal(0.7), Pareto(3.0), MeasuredDelays((1.0, 2.0, 9.0))],
    ids=lambda law: str(law)[:9],
)
def test_a_law_has_a_mean_of_one_and_a_worker_its_own_times(law):
    times = WorkerTimes(law=law, compute=0.5, seed=3)
    found = times.matrix(2, 20_000)
    assert found.mean() == pytest.approx(0.5, rel=0.03)
    np.testing.assert_array_equal(times.matrix(3, 5)[:, :2], found[:5])


def test_without_a_lead_all_wait_for_the_slowest():
    updates = Stale(bound=0).updates(4, 20, EXPONENTIAL)
    np.testing.assert_allclose([each.seconds for each in updates], EXPONENTIAL.matrix(4, 20).max(1).cumsum())
    assert [[push.share for push in each.pushes] for each in updates] == np.arange(80).reshape(20, 4).tolist()
    assert mean_staleness(updates) == 0
    assert Backup(extra=0).updates(4, 20, EXPONENTIAL) == updates


@given(bound=st.integers(0, 6), workers=st.integers(1, 6), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_the_fastest_leads_the_slowest_by_no_more_than_the_bound(bound, workers, seed):
    updates = Stale(bound=bound).updates(workers, 12, WorkerTimes(law=Pareto(1.5), seed=seed))
    pushes = [push for each in updates for push in each.pushes]
    assert sorted(push.share for push in pushes) == list(range(12 * workers))
    made = [0] * workers
    # a gradient of version v was begun after v updates: then its worker led nobody by more
    by_start = sorted(pushes, key=lambda push: push.share)
    applied = [{push.share for push in each.pushes} for each in updates]
    owner = {push.share: push.worker for push in pushes}
    for push in by_start:
        done = [0] * workers
        for shares in applied[: push.versions[0]]:
            for share in shares:
                done[owner[share]] += 1
        assert made[push.worker] - min(done) <= bound
        made[push.worker] += 1


def test_without_a_bound_workers_wait_for_nobody_and_are_as_stale_as_there_are_others():
    for workers in (2, 8):
        updates = Stale().updates(workers, 20_000 // workers, EXPONENTIAL)
        assert all(len(each.pushes) == 1 for each in updates)
        assert mean_staleness(updates) == pytest.approx(workers - 1, rel=0.02)


def test_one_worker_is_never_stale():
    for method in (Stale(), Stale(bound=3), Downpour(shards=1)):
        assert mean_staleness(method.updates(1, 9, EXPONENTIAL)) == 0


def test_backup_workers_save_less_than_order_statistics_say_as_who_is_late_stays_late():
    """96 workers of exponential times and 4 backups; if all began each step anew, it would take H_100 - H_4."""
    with_backups, without = (
        method.updates(workers, 1000, EXPONENTIAL)[-1].seconds / 1000
        for method, workers in ((Backup(extra=4), 100), (Backup(extra=0), 96))
    )
    harmonic = lambda n: sum(1 / i for i in range(1, n + 1))  # noqa: E731
    assert without == pytest.approx(harmonic(96), rel=0.02)
    assert harmonic(100) - harmonic(4) < with_backups < harmonic(96) / 1.5


def test_a_worker_that_is_late_sends_its_gradient_in_vain_and_then_reads_again(tmp_path):
    """Three workers of 2, 4 and 5 seconds, of which two are waited for."""

    class Fixed(WorkerTimes):
        def stream(self, worker):
            return repeat((2.0, 4.0, 5.0)[worker])

    updates = Backup(extra=1).updates(3, 4, Fixed())
    # version 0: worker 0 at 2, 1 at 4, 2 at 5, too late; version 1: 0 at 6, 1 at 8, and 2, which read at 5, at 10
    assert [(each.seconds, [push.worker for push in each.pushes]) for each in updates] == [
        (4.0, [0, 1]), (8.0, [0, 1]), (12.0, [0, 1]), (16.0, [0, 1]),
    ]  # fmt: skip
    assert [push.share for each in updates for push in each.pushes] == [0, 1, 3, 4, 6, 7, 9, 10]


def test_one_shard_to_which_messages_take_no_time_is_asynchronous():
    assert Downpour(shards=1).updates(4, 50, EXPONENTIAL) == Stale().updates(4, 50, EXPONENTIAL)
    split = Downpour(shards=3).updates(4, 50, WorkerTimes(law=Exponential(), travel=0.3))
    assert [len([each for each in split if each.shard == shard]) for shard in range(3)] == [200] * 3
    assert any(len({*push.versions}) > 1 for each in split for push in each.pushes)  # copies of mixed versions


@pytest.mark.parametrize(("workers", "servers"), [(8, 2), (12, 4), (6, 6)])
def test_a_server_in_two_levels_has_the_traffic_and_the_staleness_of_its_servers(workers, servers):
    """Its root has 2 g w of traffic in a step of all workers, not 2 N w, and gradients are g - 1 updates stale."""
    under, steps = workers // servers, 4000 // workers
    updates = TwoLevels(servers=servers).updates(workers, steps, EXPONENTIAL)
    assert len(updates) == steps * servers  # each is a push to the root, which answers with parameters
    assert all(len(each.pushes) == under for each in updates)
    assert len({push.share for each in updates for push in each.pushes}) == steps * workers
    assert {tuple(push.worker // under for push in each.pushes) for each in updates} == {
        (server,) * under for server in range(servers)
    }
    assert mean_staleness(updates) == pytest.approx(servers - 1, rel=0.02)
    even = TwoLevels(servers=servers).updates(workers, steps, WorkerTimes(compute=1.0, travel=0.25))
    assert {each.staleness[0] for each in even[servers:]} == {servers - 1}
    assert even[-1].seconds == pytest.approx(steps * (1.0 + 4 * 0.25))


def test_one_server_is_synchronous_and_one_for_each_worker_asynchronous():
    assert TwoLevels(servers=1).updates(4, 50, EXPONENTIAL) == Stale(bound=0).updates(4, 50, EXPONENTIAL)
    assert TwoLevels(servers=4).updates(4, 50, EXPONENTIAL) == Stale().updates(4, 50, EXPONENTIAL)


def test_replicas_that_meet_seldom_wait_seldom():
    sent = Collective(kind="all-reduce", axes=("data",), dtype="f32", group=4, times=1, payload=4_000_000)
    link = Link(latency=0.0, bandwidth=1e9)
    each = {every: base.seconds([Traffic(collective=sent, every=every)], 4, 40, EXPONENTIAL, link) for every in (1, 20)}
    travel, matrix = 6e-3, EXPONENTIAL.matrix(4, 40)
    np.testing.assert_allclose(each[1], matrix.max(1).cumsum() + travel * np.arange(1, 41))
    assert each[20][-1] == pytest.approx(sum(matrix[i : i + 20].sum(0).max() for i in (0, 20)) + 2 * travel)
    assert base.seconds([], 4, 40, EXPONENTIAL, link)[-1] == pytest.approx(matrix.sum(0).max())


@pytest.mark.parametrize("tau", [1, 2, 4, 8])
def test_a_constant_delay_is_stable_below_the_published_rate(tau):
    """Delayed gradient descent on w^2/2 is stable exactly below 2 sin(pi / (2 (2 tau + 1)))."""
    updates = Stale().updates(tau + 1, 3000 // (tau + 1), WorkerTimes())
    assert {each.staleness[0] for each in updates[tau:]} == {tau}

    def grows(rate):
        w = [1.0]
        for each in updates:
            w.append(w[-1] - rate * w[each.pushes[0].versions[0]])
        return max(map(abs, w[-100:])) > max(map(abs, w[:100]))

    edge = 2 * sin(pi / (2 * (2 * tau + 1)))
    assert not grows(0.99 * edge)
    assert grows(1.01 * edge)


# what is computed


class Line(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.outer = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.tanh(self.inner(x)))


def loss(model, batch):
    error = (model(batch["x"]) - batch["y"])[:, 0] ** 2
    return jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"])


SGD = optax.sgd(0.1)
CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-2))


def rows(index, count=12):
    rng = np.random.default_rng(index)
    x = rng.normal(size=(count, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1, keepdims=True)), "mask": (np.arange(count) % 3 > 0).astype(np.float32)}


def share_of(workers):
    return lambda share: {key: value.reshape(workers, -1, *value.shape[1:])[share % workers]
                          for key, value in rows(share // workers).items()}  # fmt: skip


@cache
def step_on(data=1, chain=CHAIN):
    layout = jp.compose(lambda rngs: Line(rngs), jp.Parallel(data=data), jax.devices()[:data])
    return jp.train_step(layout, loss, chain)


def on_the_clock(method, workers, steps=6, times=EXPONENTIAL, chain=CHAIN):
    step, losses = step_on(chain=chain), []
    updates = method.updates(workers, steps, times)
    state = virtual_clock.run(step, updates, share_of(workers), lambda _, loss: losses.append(loss))
    return state, losses, updates


def same(one, other, tolerance=1e-6):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def synchronous(data, steps=6):
    step = step_on(data)
    state, losses = jp.init_state(step.layout, CHAIN), []
    for index in range(steps):
        state, metrics = step(state, rows(index))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_without_a_lead_a_run_on_the_clock_is_a_synchronous_one(workers):
    """With one worker it is plain training. Examples of workers count unequally."""
    want, expected = synchronous(workers)
    state, losses, _ = on_the_clock(Stale(bound=0), workers)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    same(state.params, want.params)
    again, exact, _ = on_the_clock(Backup(extra=0), workers)
    assert exact == losses
    same(again.params, state.params, 0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 4]
)
def test_without_a_lead_and_with_as_many_examples_each_it_is_synchronous_to_the_bit(workers):
    """Of gradients that are taken on as many devices at once, where updates are made by the same program.

    What a whole step makes differs from this in the last bit of some parameters, for two reasons that have nothing to
    do with who waits for whom. A step is one program with its update in it, which XLA may fuse, and round, otherwise
    than an update that is a program of its own. And where workers' examples count unequally, or their number is no
    power of two, a mean of means is divided, and rounded, twice: w (g / n), where a step has the sum of g / N.
    """
    every = lambda index: rows(index, 4 * workers) | {"mask": np.ones(4 * workers, np.float32)}  # noqa: E731
    share = lambda i: {key: x.reshape(workers, 4, -1)[i % workers].reshape(4, *x.shape[1:])  # noqa: E731
                       for key, x in every(i // workers).items()}  # fmt: skip
    step, together = step_on(), step_on(workers)
    state = virtual_clock.run(step, Stale(bound=0).updates(workers, 4, EXPONENTIAL), share, lambda *_: None)
    begun = jp.init_state(step.layout, CHAIN)
    (params, structure), kept = flatten_by_path(begun.params), CHAIN.init(flatten_by_path(begun.params)[0])

    @jax.jit
    def apply(params, kept, gradients):
        changes, kept = CHAIN.update(gradients, kept, params)
        return optax.apply_updates(params, changes), kept

    for index in range(4):
        tree = jax.device_put(structure.unflatten(params.values()), together.shardings.params)
        found = together.compute_gradients(tree, begun.model_state, every(index))[0]
        params, kept = apply(params, kept, flatten_by_path(jax.device_get(found))[0])
    same(state.params, structure.unflatten(params.values()), 0)


@pytest.mark.nightly
def test_a_late_gradient_is_of_the_parameters_that_its_worker_had_read():
    """Beside the recursion w_{t+1} = w_t - update(g(w_read)) in plain JAX."""
    state, losses, updates = on_the_clock(Stale(), 3, steps=4)
    assert max(each.staleness[0] for each in updates) > 1
    step = step_on()
    begun, update = jp.init_state(step.layout, CHAIN), jax.jit(CHAIN.update)
    held, kept, model_state = [begun.params], CHAIN.init(begun.params), begun.model_state
    for each, found in zip(updates, losses, strict=True):
        (push,) = each.pushes
        gradient, sums, _ = step.compute_gradients(held[push.versions[0]], model_state, share_of(3)(push.share))
        assert found == pytest.approx(float(sums["loss"][0] / sums["loss"][1]), rel=1e-6)
        changes, kept = update(gradient, kept, held[-1])
        held.append(optax.apply_updates(held[-1], changes))
    same(state.params, held[-1])


@pytest.mark.nightly
def test_shards_of_a_server_have_versions_of_their_own():
    """With SGD, whose elements have nothing to do with each other, and one worker, shards change nothing."""
    chain = SGD
    whole, losses, _ = on_the_clock(Stale(), 1, chain=chain)
    split, found, _ = on_the_clock(Downpour(shards=3), 1, chain=chain)
    same(split.params, whole.params)
    assert [loss for loss in found[::3]] == pytest.approx(losses)
    late, *_ = on_the_clock(Downpour(shards=3), 3, times=WorkerTimes(law=Exponential(), travel=0.5), chain=chain)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(late.params))


@pytest.mark.parametrize("every", [1, 3])
def test_workers_meet_the_center_at_their_own_pace(every):
    table = AsynchronousEasgd(every=every).local_steps(4, 30, EXPONENTIAL)
    by_worker = [[each for each in table if each.worker == worker] for worker in range(4)]
    assert [each.share for each in table] == list(range(120))
    for steps in by_worker:
        assert [each.meets for each in steps] == [number % every == 0 for number in range(len(steps))]
        assert all(one.seconds < other.seconds for one, other in pairwise(steps))
    assert len({len(steps) for steps in by_worker}) > 1  # nobody waits: the fast make more steps
    meetings = [each for each in table if each.meets]
    for number, each in enumerate(meetings):
        before = [place for place, one in enumerate(meetings[:number]) if one.worker == each.worker]
        assert each.staleness == number - (before[-1] + 1 if before else 0)
    late = AsynchronousEasgd(every=2).local_steps(1, 4, WorkerTimes(law=Constant(), compute=1.0, travel=0.25))
    assert [each.seconds for each in late] == [1.5, 2.5, 4.0, 5.0]  # two ways of a quarter at every other step


def test_asynchronous_elastic_averaging_is_algorithm_1_of_its_paper():
    """Zhang, Choromanska, LeCun 2015: beside the lines of algorithm 1 in numpy, on least squares."""
    step, losses = step_on(chain=SGD), []
    table = AsynchronousEasgd(every=2, beta=0.6).local_steps(3, 5, EXPONENTIAL)
    state = virtual_clock.run_elastic(step, table, 0.2, share_of(3), lambda _, loss: losses.append(loss))
    begun = jp.init_state(step.layout, SGD)
    structure = jax.tree.structure(begun.params)
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])  # noqa: E731
    sizes = np.cumsum([np.size(x) for x in jax.tree.leaves(begun.params)])[:-1]
    tree = lambda vector: structure.unflatten(  # noqa: E731
        [
            piece.reshape(x.shape)
            for piece, x in zip(np.split(vector, sizes), jax.tree.leaves(begun.params), strict=True)
        ]
    )
    center, workers, clocks = flat(begun.params), {}, Counter()
    for each in table:
        x = workers.get(each.worker, flat(begun.params))
        gradient = flat(step.compute_gradients(tree(x), begun.model_state, share_of(3)(each.share))[0])
        if clocks[each.worker] % 2 == 0:
            way = 0.2 * (x - center)
            moved, center = x - way, center + way
        else:
            moved = x
        workers[each.worker] = moved - 0.1 * gradient
        clocks[each.worker] += 1
    np.testing.assert_allclose(flat(state.params), center, rtol=1e-5, atol=1e-7)
    assert len(losses) == 15
    assert np.isfinite(losses).all()


# what is refused


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: parse("exponental"), "delays 'exponental'"),
        (lambda: parse("pareto:1"), "pareto:1"),
        (lambda: parse("lognormal:nan"), "sigma = nan"),
        (lambda: parse("lognormal:wide"), "delays 'lognormal:wide'"),
        (lambda: parse("constant:2"), "delays 'constant:2'"),
        (lambda: parse("missing.csv"), "delays 'missing.csv'"),
        (lambda: WorkerTimes(compute=0.0), "compute = 0.0"),
        (lambda: Stale(bound=-1), "bound = -1"),
        (lambda: Backup(extra=2).shares(4), "2 backups of 4 workers"),
        (lambda: Downpour(shards=0), "shards = 0"),
        (lambda: AsynchronousEasgd(every=0), "every = 0"),
        (lambda: TwoLevels(servers=3).shares(8), "3 servers of 8 workers"),
        (lambda: on_the_clock(Downpour(shards=9), 1, 1), "9 shards of a model of 4 parameters"),
    ],
)
def test_what_is_no_law_and_no_method_is_refused(make, said):
    with pytest.raises(JaxparError) as caught:
        make()
    assert said in str(caught.value)
