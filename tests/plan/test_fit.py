"""What is fitted to times that the planner's own formulas made is what made them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import JaxparError
from jaxpar.mesh.chips import Link
from jaxpar.plan.machine.fit_hardware import KINDS, Timing, fit_gemm, fit_link
from jaxpar.plan.machine.hardware import HARDWARE

SIZES = [1 << power for power in range(12, 29, 2)]
SIDES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)


def seconds_of(hardware, kind, group, size, stride=1):
    """What the planner says of a collective."""
    if kind == "collective-permute":
        return float(hardware.send(size, stride, 2))
    return float(hardware.gather(size, group, stride)) * (1 + (kind == "all-reduce"))


def timings(hardware, groups=(2, 4, 8), kinds=KINDS, stride=1):
    return [
        Timing(kind=kind, group=group, size=size, seconds=seconds_of(hardware, kind, group, size, stride))
        for kind in kinds
        for group in groups
        for size in SIZES
    ]


@settings(deadline=None, max_examples=40)
@given(
    latency=st.floats(1e-7, 1e-4),
    bandwidth=st.floats(1e9, 1e12),
    launch=st.floats(1e-6, 1e-4),
    kinds=st.sets(st.sampled_from(KINDS), min_size=1),
)
def test_a_link_is_recovered_from_the_times_the_planner_gives_it(latency, bandwidth, launch, kinds):
    link = Link(latency=latency, bandwidth=bandwidth)
    machine = replace(HARDWARE["h100"], inside=link, launch=launch)
    found = fit_link(timings(machine, kinds=sorted(kinds | {"all-gather"})))
    assert found.link.latency == pytest.approx(latency, rel=1e-4)
    assert found.link.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert found.launch == pytest.approx(launch, rel=1e-3)
    assert found.separable
    assert found.worst < 1e-6


def test_the_link_between_machines_is_recovered_with_the_launch_of_the_one_inside():
    machine = HARDWARE["h100"]
    found = fit_link(timings(machine, stride=machine.per_node), launch=machine.launch)
    assert found.link.latency == pytest.approx(machine.between.latency)
    assert found.link.bandwidth == pytest.approx(machine.between.bandwidth)
    assert found.launch == machine.launch


def test_two_devices_do_not_tell_launch_and_latency_apart_and_their_times_are_met_all_the_same():
    machine = HARDWARE["a100"]
    found = fit_link(timings(machine, groups=(2,)))
    assert not found.separable
    assert (found.link.latency, found.launch) == (0.0, pytest.approx(machine.launch + machine.inside.latency))
    assert found.worst < 1e-9


def test_launch_and_latency_are_never_negative():
    bare = replace(HARDWARE["h100"], inside=Link(latency=0.0, bandwidth=1e11), launch=0.0)
    some = [replace(t, seconds=t.seconds * (0.98 if t.size < 2**20 else 1.0)) for t in timings(bare)]
    found = fit_link(some)
    assert found.launch >= 0
    assert found.link.latency >= 0
    assert found.link.bandwidth == pytest.approx(1e11, rel=0.03)


def test_noise_of_a_few_percent_moves_the_constants_by_as_much():
    machine, random = HARDWARE["h100"], np.random.default_rng(0)
    noisy = [replace(t, seconds=t.seconds * random.lognormal(0, 0.03)) for t in timings(machine)]
    found = fit_link(noisy)
    assert found.link.bandwidth == pytest.approx(machine.inside.bandwidth, rel=0.03)
    assert found.link.latency == pytest.approx(machine.inside.latency, rel=0.15)
    assert found.launch == pytest.approx(machine.launch, rel=0.15)
    assert 0.005 < found.error < 0.05


@pytest.mark.parametrize("factor", [0.2, 10.0, 100.0])
def test_a_few_times_that_are_far_off_hardly_matter(factor):
    machine = HARDWARE["h100"]
    some = timings(machine)
    for i in range(3, len(some), 17):
        some[i] = replace(some[i], seconds=some[i].seconds * factor)
    found = fit_link(some)
    assert found.link.bandwidth == pytest.approx(machine.inside.bandwidth, rel=0.01)
    assert found.launch == pytest.approx(machine.launch, rel=0.05)
    assert found.worst > 0.5


@pytest.mark.parametrize("seconds", [0.0, -1e-6, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(JaxparError, match=r"(?s)above 0 and finite.*quiet"):
        fit_link([*timings(HARDWARE["h100"]), Timing(kind="all-gather", group=8, size=4096, seconds=seconds)])
    with pytest.raises(JaxparError, match="above 0 and finite"):
        fit_gemm([1e9, 1e10, 1e11], [1e-5, seconds, 1e-3], peak=1e15, source="")


@pytest.mark.parametrize("wrong", [{"kind": "scatter"}, {"group": 1}, {"size": 0}])
def test_what_is_no_collective_is_refused(wrong):
    with pytest.raises(JaxparError, match="a timing is of all-reduce"):
        Timing(**{"kind": "all-gather", "group": 8, "size": 4096, "seconds": 1.0} | wrong)


def test_too_few_sizes_are_refused():
    for some in ([], timings(HARDWARE["h100"])[:2]):
        with pytest.raises(JaxparError, match=f"times of {len(some)} sizes\n.*3 sizes or more, in bytes"):
            fit_link(some)
    with pytest.raises(JaxparError, match="3 sizes or more, in FLOP"):
        fit_gemm([1e9, 1e9, 2e9], [1e-5, 1e-5, 2e-5], peak=1e15, source="")


def test_times_that_do_not_grow_are_no_bandwidth():
    flat = [replace(t, seconds=1e-3 / (1 + i)) for i, t in enumerate(timings(HARDWARE["h100"], (8,), ("all-gather",)))]
    with pytest.raises(JaxparError, match="do not grow from 4096 to 268435456 bytes"):
        fit_link(flat)
    with pytest.raises(JaxparError, match="times that do not grow"):
        fit_gemm([1e9, 1e10, 1e11], [3e-3, 2e-3, 1e-3], peak=1e15, source="")


@pytest.mark.parametrize("key", sorted(HARDWARE))
def test_the_curve_of_products_is_recovered(key):
    machine = HARDWARE[key]
    flop = [2.0 * side**3 for side in SIDES]
    found = fit_gemm(flop, [float(machine.matmuls(f)) for f in flop], peak=machine.chip.bf16_flops, source="here")
    assert found.gemm.top == pytest.approx(machine.gemm.top)
    assert found.gemm.half == pytest.approx(machine.gemm.half)
    assert (found.gemm.source, found.worst < 1e-9) == ("here", True)


def test_a_chip_without_a_fixed_cost_has_half_zero():
    flop = [1e9, 1e10, 1e11]
    found = fit_gemm(flop, [f / 5e14 for f in flop], peak=1e15, source="")
    assert (found.gemm.top, found.gemm.half) == (pytest.approx(0.5), pytest.approx(0.0, abs=10.0))


def test_products_faster_than_the_peak_are_another_chips():
    flop = [1e9, 1e10, 1e11]
    with pytest.raises(JaxparError, match=r"2000 TFLOP/s in matmuls, 1000 TFLOP/s on the chip's sheet"):
        fit_gemm(flop, [f / 2e15 for f in flop], peak=1e15, source="")


def test_chips_nobody_measured_have_the_shares_of_the_h100_and_say_so():
    h100 = HARDWARE["h100"]
    for key in ("h200", "b200"):
        machine = HARDWARE[key]
        assert machine.gemm.source.startswith("assumed as on H100")
        assert machine.source.startswith("assumed as on H100")
        assert machine.gemm.top == h100.gemm.top
        assert machine.inside.bandwidth / machine.chip.nvlink == pytest.approx(h100.inside.bandwidth / h100.chip.nvlink)
        fixed = [each.gemm.half / each.chip.bf16_flops for each in (machine, h100)]
        assert fixed[0] == pytest.approx(fixed[1])
    assert replace(HARDWARE["h200"], chip=h100.chip, gemm=h100.gemm, source=h100.source) == h100
