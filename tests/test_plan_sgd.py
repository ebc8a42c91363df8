"""The synchronous-SGD model keeps its identities."""

import closed_forms
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxpar.errors import JaxparError
from jaxpar.mesh.links import Link
from jaxpar.plan.rules import scaling
from jaxpar.plan.rules.scaling import Sync

SECONDS = st.floats(1e-6, 1e3)
WORKERS = st.integers(1, 10_000)
SYNCS = st.builds(
    Sync, workers=WORKERS, compute=SECONDS, sync=SECONDS, overlap=st.floats(0, 1), backward=st.floats(0, 1)
)


def test_a_fifth_of_the_time_in_communication_leaves_an_efficiency_of_four_fifths():
    """As reported for 1024 GPUs."""
    step = 1.0
    at_1024 = Sync(workers=1024, compute=0.8 * step, sync=0.2 * step)
    assert at_1024.efficiency == pytest.approx(0.80)
    assert at_1024.speedup == pytest.approx(819.2)


@given(workers=WORKERS, compute=SECONDS, sync=SECONDS)
def test_without_overlap_the_published_formulas_hold(workers, compute, sync):
    found = Sync(workers=workers, compute=compute, sync=sync)
    assert found.step == pytest.approx(compute + sync)
    assert found.efficiency == pytest.approx(1 / (1 + sync / compute))
    assert found.speedup == pytest.approx(workers * compute / (compute + sync))
    assert found.speedup == pytest.approx(found.efficiency * workers)
    assert found.pays == (sync < (workers - 1) * compute)


@given(one=SYNCS)
def test_workers_pay_exactly_where_an_epoch_is_shorter(one):
    alone = Sync(workers=1, compute=one.compute, sync=0.0)
    assume(abs(one.speedup - 1) > 1e-9)
    assert one.pays == (one.speedup > 1) == (one.epoch(10**6, batch=32) < alone.epoch(10**6, batch=32))
    assert alone.epoch(10**6, batch=32) / one.epoch(10**6, batch=32) == pytest.approx(one.speedup)
    assert one.pays == (one.exposed < scaling.most_sync(one.workers, compute=one.compute))


@given(one=SYNCS)
def test_overlap_lies_between_the_sum_and_the_longer_of_the_two(one):
    none, all_of_it = (Sync(workers=one.workers, compute=one.compute, sync=one.sync, overlap=x) for x in (0.0, 1.0))
    assert none.step == pytest.approx(one.compute + one.sync)
    assert all_of_it.step == pytest.approx(max(one.compute, one.sync))
    assert all_of_it.step * (1 - 1e-12) <= one.step <= none.step
    half = Sync(workers=one.workers, compute=one.compute, sync=one.sync, overlap=0.5)
    assert half.step == pytest.approx((none.step + all_of_it.step) / 2)


def test_only_the_backward_pass_hides_what_travels():
    """Gradients begin to travel after the forward pass: a third of the computing stays before them."""
    found = Sync(workers=8, compute=3.0, sync=2.5, overlap=1.0, backward=2 / 3)
    assert found.step == pytest.approx(3.5)  # 1 forward, then the longer of 2 and 2.5
    assert found.exposed == pytest.approx(0.5)


@given(one=SYNCS, factor=st.floats(1, 100))
def test_larger_batches_cheaper_syncs_and_fewer_of_them_help(one, factor):
    again = {"workers": one.workers, "overlap": one.overlap, "backward": one.backward}
    larger = Sync(compute=one.compute * factor, sync=one.sync, **again)
    cheaper = Sync(compute=one.compute, sync=one.sync / factor, **again)
    assert larger.efficiency >= one.efficiency * (1 - 1e-9)
    assert cheaper.efficiency >= one.efficiency * (1 - 1e-9)


def test_the_best_number_of_workers_is_where_more_cost_more_than_they_compute():
    """A ring's latencies grow with the workers: past the knee an epoch gets longer."""
    link = Link(latency=1e-3, bandwidth=1e9)
    sizes = [2**power for power in range(14)]
    found = scaling.best(sizes, lambda r: closed_forms.ring(link, 1e8, r), compute=0.1)
    assert found is not None
    each = {r: Sync(workers=r, compute=0.1, sync=closed_forms.ring(link, 1e8, r)).speedup for r in sizes}
    assert found.speedup == max(each.values())
    assert found.workers == min(r for r in sizes if each[r] == max(each.values()))
    frugal = scaling.best(sizes, lambda r: closed_forms.ring(link, 1e8, r), compute=0.1, least=0.5)
    assert frugal is not None
    assert frugal.workers < found.workers
    assert frugal.efficiency >= 0.5
    assert scaling.best([8], lambda r: 1e6, compute=0.1, least=0.5) is None


@given(compute=SECONDS, per=SECONDS, at=st.lists(st.floats(0, 100), min_size=2, max_size=8, unique=True))
def test_a_fit_finds_what_made_the_steps(compute, per, at):
    assume(max(at) - min(at) > 1e-3)
    found = scaling.fit([(x, compute + per * x) for x in at])
    largest = compute + per * max(at)
    assert found[1] * max(at) == pytest.approx(per * max(at), abs=1e-4 * largest)
    assert found[0] == pytest.approx(compute, abs=1e-4 * largest)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Sync(workers=0, compute=1.0, sync=0.0), "workers = 0"),
        (lambda: Sync(workers=2.5, compute=1.0, sync=0.0), r"workers=2\.5"),  # pyright: ignore
        (lambda: Sync(workers=2, compute=0.0, sync=0.0), r"compute = 0\.0"),
        (lambda: Sync(workers=2, compute=1.0, sync=-1.0), r"sync = -1\.0"),
        (lambda: Sync(workers=2, compute=1.0, sync=1.0, overlap=1.5), r"overlap = 1\.5"),
        (lambda: scaling.fit([(1.0, 2.0), (1.0, 3.0)]), "2 measured steps"),
        (lambda: scaling.fit([]), "0 measured steps"),
    ],
)
def test_what_is_no_step_is_refused(call, said):
    with pytest.raises(JaxparError, match=said) as caught:
        call()
    assert len(caught.value.problems) == 1
