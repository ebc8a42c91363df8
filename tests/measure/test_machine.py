"""The benches of this machine: what they time is what they say, and simulated devices have no speed.

No time is looked at here: the devices are simulated. `pytest tests/gpu` runs both benches on real ones.
"""

import contextlib
import re
import types

import jax
import numpy as np
import pytest
from bench.command import main as bench
from pairwise import some

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.measure import machine as measurement
from jaxpar.measure.record import REPEATS, Destination, measured_devices, once
from jaxpar.mesh.chip_file import load_chip
from jaxpar.mesh.target import missing_plugin
from jaxpar.plan.machine.fit_hardware import KINDS, Timing
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.hardware_file import load_hardware, write_table


@pytest.mark.parametrize("name", ["links", "gemm"])
def test_simulated_devices_have_no_speed_and_no_file(name, tmp_path, capsys):
    file = tmp_path / "mine.toml"
    assert main(["measure", name, "--write", str(file)]) == 1
    said = capsys.readouterr()
    assert f"measure {name} on 8 x cpu (simulated)" in said.err
    assert "GB/s" not in said.out + said.err
    assert not file.exists()


@pytest.mark.parametrize(("one", "connected", "got"), [(0, 0, "PMI_SIZE=2"), (1, 0, "cpu"), (0, 1, "cpu")])
def test_an_unread_launcher_stops_only_what_needs_processes_that_are_not_connected(one, connected, got, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: bool(connected))
    with pytest.raises(JaxparError, match=got):
        measured_devices("x", one=bool(one))


def test_no_rounds_are_refused(capsys):
    assert main(["measure", "links", "--rounds", "0"]) == 1
    assert "--rounds 0" in capsys.readouterr().err
    assert bench("overhead", ["--beside", "expert", "--rounds", "-1"]) == 1
    assert "a count is at least 0" in capsys.readouterr().err


def test_tiers_have_neighbours_inside_and_one_of_each_machine_between():
    found = measurement.tiers(range(8), per_node=4)
    assert [(tier.name, tier.devices.tolist()) for tier in found] == [
        ("inside", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("inside", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("between", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ]
    assert {tier.name for tier in measurement.tiers(range(8), per_node=8)} == {"inside"}
    assert {tier.name for tier in measurement.tiers(range(8), per_node=1)} == {"between"}


def test_machines_that_are_not_alike_and_devices_alone_have_no_tiers():
    for size in (0, 3, 16):
        with pytest.raises(JaxparError, match=f"--per-node {size} of 8 devices"):
            measurement.tiers(range(8), per_node=size)
    with pytest.raises(JaxparError, match="needs at least two devices"):
        measurement.tiers(jax.devices()[:1], per_node=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_is_as_many_collectives_as_it_says(kind):
    devices = np.array(jax.devices()).reshape(2, 4)
    x = jax.numpy.zeros(8 * measurement.entries(kind, 4, 1024), jax.numpy.float32)
    lowered = measurement.collective_program(kind, devices, 3).lower(x).as_text()
    assert lowered.count(f'"stablehlo.{kind.replace("-", "_")}"') == 3


@contextlib.contextmanager
def uncached():
    """The cache of compiled programs can't give back what was compiled for devices that are not there."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
@pytest.mark.parametrize("kind", some(KINDS, ["all-gather", "reduce-scatter", "collective-permute"]))
def test_gpus_run_them_one_after_another_over_all_bytes_and_copy_none(kind):
    """XLA neither merges them, nor makes a multiplication of an all-reduce, nor sends the one entry that is read."""
    devices = np.array(jp.target_devices("h100:1x8")).reshape(2, 4)
    size = 2**26
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(devices, ("rest", "ring"), axis_types=(jax.sharding.AxisType.Auto,) * 2),
        jax.sharding.PartitionSpec(("rest", "ring")),
    )
    x = jax.ShapeDtypeStruct((8 * measurement.entries(kind, 4, size),), np.float32, sharding=sharding)
    with uncached():
        lines = (measurement.collective_program(kind, devices, 3).lower(x).compile().as_text() or "").splitlines()
    made = [re.search(rf" = (.*?) {kind}(-start)?\(", line) for line in lines]
    sent = [4 * int(re.findall(r"f32\[(\d+)\]", each[1])[-1]) for each in made if each]
    assert sent == [size // 4 if kind == "reduce-scatter" else size] * 3
    assert not [line for line in lines if re.search(r"= f32\[\d{4,}\]\S* copy\(", line)]


@pytest.mark.spread(0)
@pytest.mark.parametrize("kind", some(KINDS, ["collective-permute"]))
def test_a_timing_says_what_was_sent(kind, monkeypatch):
    monkeypatch.setattr(measurement, "once", lambda build, x, rounds: float(sum(build(n)(x + 0).size for n in (1, 2))))
    devices = np.array(jax.devices()).reshape(2, 4)
    found = measurement.time_collective(kind, devices, 4100)
    assert (found.kind, found.group, found.size) == (kind, 4, 4096)
    assert measurement.time_collective(kind, devices, 1).size == 4 * 4
    assert found.seconds > 0


def test_the_clock_takes_the_difference_of_two_programs(monkeypatch):
    calls = []
    times = iter([0.0, 8.0, 21.0] * 3)  # 7 s to call, 0.5 s a repeat: 2 repeats take 8 s, 12 take 13
    monkeypatch.setattr("jaxpar.measure.record.time", types.SimpleNamespace(perf_counter=lambda: next(times)))
    found = once(lambda repeats: lambda x: calls.append(repeats) or x, 1.0, rounds=3)
    assert found == pytest.approx(0.5)
    assert calls == [*REPEATS] * 4


def test_products_are_chained_and_keep_their_size():
    weights = jax.numpy.eye(16, dtype=jax.numpy.bfloat16)
    run = measurement.matmul_program(weights, 3)
    assert run(jax.numpy.ones((16, 16), jax.numpy.bfloat16)).shape == (16, 16)
    assert isinstance(measurement.time_product(16, jax.devices()[0], rounds=1), float)


def fake(kind, count=2):
    return [types.SimpleNamespace(device_kind=kind, platform="gpu") for _ in range(count)]


def test_a_measurement_goes_into_the_file_of_its_chip(tmp_path):
    path = tmp_path / "mine.toml"
    found = Destination.for_devices(str(path), fake("NVIDIA H100 80GB HBM3"))
    found.write("gemm", {"top": 0.7, "half": 1e9, "source": "here"})
    assert load_chip(path).name == "NVIDIA H100 SXM"
    with pytest.raises(JaxparError, match="NVIDIA H100 SXM, on NVIDIA B200"):
        Destination.for_devices(str(path), fake("NVIDIA B200"))
    assert Destination.for_devices(str(path), fake("NVIDIA H100 80GB HBM3")).known_chip() == load_chip(path)
    assert Destination.for_devices("", fake("Acme One")).chip is None
    Destination.for_devices("", fake("Acme One")).write("gemm", {})


@pytest.mark.parametrize(("name", "said"), [("mine.toml", "not in jaxpar's table"), ("no/mine.toml", "folder"),
                                            ("mine.json", "a .toml file")])  # fmt: skip
def test_a_chip_that_is_not_known_and_a_file_that_cannot_be_are_refused_before_anything_is_measured(
    name, said, tmp_path
):
    with pytest.raises(JaxparError, match=said):
        Destination.for_devices(str(tmp_path / name), fake("Acme One"))


def synthetic(kind, devices, size, rounds):
    """A collective as the planner prices it on H100s; its devices are numbers."""
    machine, group = HARDWARE["h100"], devices.shape[1]
    stride = int(devices[0, 1] - devices[0, 0])
    once = machine.send(size, stride, group) if kind == "collective-permute" else machine.gather(size, group, stride)
    return Timing(kind=kind, group=group, size=size, seconds=float(once) * (1 + (kind == "all-reduce")))


def test_from_times_to_a_file_to_a_plan(tmp_path, monkeypatch, capsys):
    """The whole bench, on two machines of eight whose times the planner's own constants make."""
    machine, path = HARDWARE["h100"], tmp_path / "mine.toml"
    monkeypatch.setattr(measurement, "measured_devices", lambda what: fake("NVIDIA H100 80GB HBM3", 16))
    monkeypatch.setattr(measurement, "tiers", lambda devices, size, make=measurement.tiers: make(range(16), size))
    monkeypatch.setattr(measurement, "time_collective", synthetic)
    result = measurement.links(write=str(path), per_node=8)
    write_table(path, "gemm", {"top": 0.66, "half": 7.6e9, "source": "here"}, chip=machine.chip)
    found = load_hardware(path, devices=16)
    for tier in ("inside", "between"):
        mine, theirs = getattr(found, tier), getattr(machine, tier)
        assert mine.bandwidth == pytest.approx(theirs.bandwidth, rel=1e-6)
        assert mine.latency == pytest.approx(theirs.latency, rel=1e-4)
    assert found.launch == pytest.approx(machine.launch, rel=1e-4)
    assert (found.per_node, result["holds"]) == (8, True)
    said = capsys.readouterr().out
    assert "inside: 369 GB/s, 3 us a hop, 10 us to launch" in said
    assert "between: 46 GB/s, 10 us a hop" in said
    assert len(result["timings"]["inside"]) == 3 * len(KINDS) * len(measurement.SIZES)


def test_the_bench_of_products_writes_its_curve(tmp_path, monkeypatch, capsys):
    machine, path = HARDWARE["a100"], tmp_path / "mine.toml"
    monkeypatch.setattr(measurement, "measured_devices", lambda what, one: fake("NVIDIA A100-SXM4-80GB", 1))
    monkeypatch.setattr(measurement, "time_product", lambda side, device, rounds: float(machine.matmuls(2 * side**3)))
    assert measurement.gemm(write=str(path))["gemm"]["top"] == pytest.approx(machine.gemm.top)
    assert "81.7% of the peak x f / (f + 2.4 GFLOP)" in capsys.readouterr().out
    with pytest.raises(JaxparError, match=r"no table \[links\]"):
        load_hardware(path, devices=8)
