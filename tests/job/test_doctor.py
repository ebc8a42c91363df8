"""Planted faults: each is found, named, and never waited for."""

import collections
import dataclasses
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxpar.cli.main import main
from jaxpar.cluster.environment import Cluster
from jaxpar.job.doctor import examine, network, packages, this_machine
from jaxpar.job.doctor.this_machine import Finding, with_time_limit

JOB = """
[mesh]
simulate = 2
[parallel]
data = 2
[model]
layers = 1
dim = 32
heads = 2
[data]
seq = 16
[train]
global_batch = 8
[checkpoint]
keep_last = 3
"""


@pytest.fixture
def job(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return str(file), f"run.dir='{tmp_path}/run'"


def doctor(*words, **changes):
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar", "doctor", *words],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | changes,
    )  # fmt: skip
    return done, time.monotonic() - begin


@pytest.mark.nightly
def test_a_machine_that_is_well_and_a_job_that_fits_it(job, tmp_path):
    done, seconds = doctor(*job, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert seconds < 15
    found = {each["what"]: each for each in json.loads((tmp_path / "found.json").read_text())["findings"]}
    assert found["devices"]["text"] == "2 x cpu (simulated)"
    assert found["job"]["state"] == "ok"
    assert "4 checkpoints of" in found["disk"]["text"]
    assert {"versions", "cuda", "processes", "run folder", "/dev/shm", "open files", "cores"} <= found.keys()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_flag_that_xla_does_not_know_is_found_though_it_ends_the_process(job):
    done, seconds = doctor(*job, XLA_FLAGS="--xla_no_such_flag=1")
    assert done.returncode == 1
    assert seconds < 15
    assert "problem  XLA_FLAGS    XLA ends the process: it does not know --xla_no_such_flag=1" in done.stdout


def test_a_driver_that_hangs_is_given_up():
    begin = time.monotonic()
    probe = examine.start_probe(os.environ, simulate=0, code="import time; time.sleep(60)")
    found, count = examine.finish_probe(probe, seconds=0.5)
    assert time.monotonic() - begin < 3
    assert (found.state, found.text, count) == ("problem", "no answer within 0.5 s", 0)
    assert probe.process.poll() is not None


def test_a_file_server_or_resolver_that_hangs_is_given_up():
    begin = time.monotonic()
    never = threading.Event()
    (found,) = with_time_limit("disk", lambda: [never.wait()], seconds=0.2, fix="another")
    assert time.monotonic() - begin < 2
    assert found == Finding("disk", "problem", "no answer within 0.2 s", "another")
    assert with_time_limit("disk", lambda: [found], seconds=2, fix="") == [found]


def test_a_process_that_dies_is_quoted():
    found, _ = examine.finish_probe(
        examine.start_probe(os.environ, simulate=0, code="raise OSError('no GPU')"), seconds=10
    )
    assert found.state == "problem"
    assert "OSError: no GPU" in found.text


@pytest.mark.nightly
def test_a_job_that_is_wrong_is_said_and_the_machine_looked_at(tmp_path, capsys):
    (tmp_path / "job.toml").write_text(JOB + "[train.x]\n")
    assert main(["doctor", str(tmp_path / "none.toml")]) == 1
    out = capsys.readouterr().out
    assert "problem  job          job file" in out
    assert "versions" in out


# versions


def test_versions_that_jaxpar_was_not_tested_with_are_named(monkeypatch):
    assert packages.versions().state == "ok"
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.1" if name == "jax" else real(name))
    found = packages.versions()
    assert found.state == "problem"
    assert "jax 0.9.1, not " in found.text
    assert "pip install 'jax" in found.fix


def test_a_plugin_of_another_version_is_named(monkeypatch):
    have = {"jaxlib": "0.12.0", "jax": "0.12.0", "jax-cuda13-plugin": "0.11.2"}
    monkeypatch.setattr(packages, "installed", lambda name: have.get(name, ""))
    assert packages.plugin() == Finding(
        "cuda", "problem", "jax-cuda13-plugin 0.11.2 beside jaxlib 0.12.0", "pip install 'jax[cuda13]==0.12.0'"
    )
    have["jax-cuda13-plugin"] = "0.12.0"
    assert packages.plugin().state == "ok"


def test_the_toolkit_of_inspections_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "missing_plugin", lambda: None)
    monkeypatch.setattr(packages, "installed", lambda name: "0.12.0")
    assert "a stand-in" in packages.toolkit(tmp_path / "version").text
    (tmp_path / "version").write_text("NVRM version")
    assert "that XLA finds" in packages.toolkit(tmp_path / "version").text
    monkeypatch.setattr(packages, "missing_plugin", lambda: "the plugin is missing")
    assert "the plugin is missing" in packages.toolkit(tmp_path / "version").text


def test_a_gpu_without_a_plugin_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "installed", lambda name: {"jaxlib": "0.12.0"}.get(name, ""))
    (tmp_path / "version").touch()
    assert packages.plugin(tmp_path / "version").state == "warning"
    assert packages.plugin(tmp_path / "none").state == "ok"


@pytest.mark.parametrize(
    ("version", "wanted", "holds"),
    [
        ("0.10.2", ">=0.10.2,<0.13", True), ("0.10.10", ">=0.10.2,<0.13", True), ("0.10.1", ">=0.10.2,<0.13", False),
        ("0.13.0rc1", ">=0.10.2,<0.13", False), ("0.12.0.1", "<=0.12.0", False), ("3.12.4", ">=3.11,<3.14", True),
        ("1.0", "==1.0.0", True), ("1.0", "!=1.0.0", False), ("2", ">2", False), ("7", "", True),
    ],
)  # fmt: skip
def test_bounds_on_versions_are_numbers(version, wanted, holds):
    assert packages.satisfies(version, wanted) is holds


@pytest.mark.parametrize(
    ("variables", "simulate", "want"),
    [
        ({}, 0, []),
        ({"JAX_PLATFORMS": "cpu"}, 0, [("JAX_PLATFORMS", "warning")]),
        ({"JAX_PLATFORMS": "cuda"}, 4, [("JAX_PLATFORMS", "ok")]),
        ({"JAX_NUM_CPU_DEVICES": "8"}, 8, []),
        ({"JAX_NUM_CPU_DEVICES": "8"}, 4, [("CPU devices", "warning")]),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "1.5"}, 0, [("GPU memory", "problem")]),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "most"}, 0, [("GPU memory", "problem")]),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}, 0, [("GPU memory", "ok")]),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0, [("GPU memory", "warning")]),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 0, [("GPU memory", "warning")]),
        ({"JAX_DISABLE_JIT": "1"}, 0, [("JAX_DISABLE_JIT", "problem")]),
    ],
)
def test_variables_that_change_a_run_are_told(variables, simulate, want):
    assert [(found.what, found.state) for found in packages.variables(variables, simulate=simulate)] == want


# the machine

Space = collections.namedtuple("Space", "f_bavail f_frsize f_blocks")


@pytest.mark.parametrize(("free", "state"), [(2**20, "problem"), (350 * 2**20, "warning"), (2**40, "ok")])
def test_a_disk_is_measured_by_the_checkpoints(monkeypatch, tmp_path, free, state):
    monkeypatch.setattr(os, "statvfs", lambda _: Space(free // 4096, 4096, 2**30))
    found = this_machine.disk(tmp_path / "runs" / "mine", state=100 * 2**20, checkpoints=3)
    assert found.state == state
    assert f"in {tmp_path}, 3 checkpoints of 100 MiB take 300 MiB" in found.text


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    def full(**_):
        raise OSError(28, "No space left on device")

    assert this_machine.folder_clock(tmp_path).state == "ok"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(this_machine.tempfile, "NamedTemporaryFile", full)
    found = this_machine.folder_clock(tmp_path / "runs")
    assert found == Finding(
        "run folder", "problem", f"nothing can be written into {tmp_path}: No space left on device",
        "run.dir = a folder that you may write to",
    )  # fmt: skip


def test_a_clock_that_is_off_is_measured(monkeypatch, tmp_path):
    now = time.time()
    monkeypatch.setattr(this_machine.time, "time", lambda: now + 90)
    found = this_machine.folder_clock(tmp_path)
    assert found.state == "warning"
    assert "1:30 off" in found.text or "1:29 off" in found.text


def test_the_limits_of_a_container_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(this_machine.resource, "getrlimit", lambda _: (200, 2000))
    assert this_machine.open_files().state == "problem"
    assert this_machine.open_files().fix == "ulimit -n 2000"
    assert this_machine.threads(tmp_path, simulate=8).state == "problem"
    (tmp_path / "cpu.max").write_text("5000 100000\n")
    assert this_machine.cpu_quota(tmp_path) == 0.05
    assert this_machine.cores(tmp_path).state == "warning"
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert this_machine.cpu_quota(tmp_path) == 0
    (tmp_path / "pids.max").write_text("100\n")
    monkeypatch.setattr(this_machine.resource, "getrlimit", lambda _: (this_machine.resource.RLIM_INFINITY,) * 2)
    assert this_machine.open_files().state == this_machine.core_dumps().state == "ok"
    assert this_machine.threads(tmp_path).text == "at most 100, a run takes about 256"


def test_small_shared_memory_matters_to_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "statvfs", lambda _: Space(64 * 2**20 // 4096, 4096, 64 * 2**20 // 4096))
    assert this_machine.shared_memory(tmp_path, gpus=True).state == "problem"
    assert this_machine.shared_memory(tmp_path, gpus=False).state == "ok"
    assert this_machine.shared_memory(tmp_path / "none", gpus=True).state == "warning"


def test_huge_pages_that_are_off_slow_simulated_devices(tmp_path):
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert this_machine.huge_pages(tmp_path / "enabled", simulate=8).state == "warning"
    assert this_machine.huge_pages(tmp_path / "enabled").state == "ok"
    assert this_machine.huge_pages(tmp_path / "none").state == "ok"


# the others


@pytest.fixture
def cluster():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Cluster(coordinator=f"127.0.0.1:{port}", processes=2, process=1, source="JAXPAR")


def first(cluster):
    return dataclasses.replace(cluster, process=0)


def test_a_coordinator_that_does_not_answer_is_a_problem_in_time(cluster):
    begin = time.monotonic()
    (found,) = network.check_connection(cluster, seconds=0.5)
    assert time.monotonic() - begin < 2
    assert found.state == "problem"
    assert f"{cluster.coordinator} does not answer: Connection refused" in found.text


def test_a_port_that_is_taken_is_a_problem_of_process_0(cluster):
    with socket.socket() as other:
        other.bind((cluster.host, cluster.port))
        other.listen()
        (found,) = network.check_connection(first(cluster), seconds=0.5)
    assert found.state == "problem"
    assert "Address already in use" in found.text


def test_an_unknown_host_is_a_problem(cluster):
    (found,) = network.check_connection(dataclasses.replace(cluster, coordinator="no.such.host.invalid:1"), seconds=0.5)
    assert "no.such.host.invalid is no host known here" in found.text


def test_process_0_says_that_nobody_came(cluster):
    (found,) = network.check_connection(first(cluster), seconds=0.2)
    assert found.state == "warning"
    assert "0 of the 1 others came" in found.text


@pytest.mark.parametrize("off", [0.0, 40.0])
def test_two_processes_meet_and_compare_their_clocks(cluster, monkeypatch, off):
    waiting: list = []
    theirs = threading.Thread(target=lambda: waiting.extend(network.check_connection(first(cluster), seconds=5)))
    theirs.start()
    real, here = time.time, threading.current_thread()
    monkeypatch.setattr(network.time, "time", lambda: real() + off * (threading.current_thread() is here))
    reached, clock = network.check_connection(cluster, seconds=5)
    theirs.join(5)
    assert (reached.state, waiting[0].state) == ("ok", "ok")
    assert clock.state == ("warning" if off else "ok")
    assert ("40 s behind" in clock.text) is bool(off)


def test_half_a_cluster_is_a_problem():
    found, cluster = network.processes({"JAXPAR_PROCESSES": "2", "JAXPAR_PROCESS": "0"})
    assert cluster is None
    assert found[0].text.startswith("JAXPAR_PROCESSES and JAXPAR_PROCESS without JAXPAR_COORDINATOR")
