"""Several real processes: the same losses as one, the same step to stop at, and another start after a fault."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from bench.faults.planted import FAULTS
from bench.faults.run import started
from pairwise import some

from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import loads
from jaxpar.job.shrink import fit_processes
from jaxpar.supervisor import Launch

STEPS, ALL = 16, 24  # of a run, and of the longest that goes on from one
JOB = """\
[model]
name = "decoder"
layers = 2
dim = 16
heads = 2
[train]
steps = {steps}
global_batch = 16
[parallel]
data = 2
fsdp = 2
[mesh]
simulate = 4
[data]
source = "text"
path = "text.txt"
seq = 16
[optimizer]
warmup = 2
decay = "constant"
[checkpoint]
every = {every}
[run]
dir = "{run}"
timeout = 10
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return folder


def job(folder, run, *, steps=STEPS, every=0):
    (folder / f"{run}.toml").write_text(JOB.format(run=run, steps=steps, every=every))
    return f"{run}.toml"


def start(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "jaxpar", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(child, *, status=0):
    out, err = child.communicate(timeout=240)
    assert child.returncode == status, err[-2000:]
    return out, err


def rows(folder, run):
    file = folder / run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def losses(folder, run):
    return [row["loss"] for row in rows(folder, run)]


def wait_for(folder, run, step):
    begin = time.monotonic()
    while len(rows(folder, run)) < step:
        assert time.monotonic() - begin < 120
        time.sleep(0.02)


def pid(folder, run, process):
    latest = max((folder / run / "processes").iterdir(), key=lambda path: path.stat().st_mtime)
    return json.loads((latest / f"{process}.json").read_text())["pid"]


@pytest.fixture(scope="module")
def launched(folder):
    """Returns a function: the folder's run on so many processes, its output and errors; each runs once."""

    @cache
    def run(count):
        return f"p{count}", *end(start(folder, "launch", "-n", str(count), "train", job(folder, f"p{count}")))

    return run


@pytest.fixture(scope="module")
def alone(folder):
    end(start(folder, "train", job(folder, "alone", steps=ALL)))
    return losses(folder, "alone")


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.xdist_group("launch")
def test_processes_have_the_losses_of_one(folder, alone, launched, count):
    name, out, err = launched(count)
    np.testing.assert_allclose(losses(folder, name), alone[:STEPS], rtol=1e-6)
    assert out.count(f"step {STEPS}/{STEPS}") == 1  # one of them speaks
    assert "launch:" not in err


@pytest.mark.full
@pytest.mark.xdist_group("launch")
def test_as_many_devices_give_the_same_bits_on_any_number_of_processes(folder, launched):
    found = [[(row["loss"], row["grad_norm"]) for row in rows(folder, launched(count)[0])] for count in (1, 2, 4)]
    assert found[0] == found[1] == found[2]


@pytest.mark.nightly
@pytest.mark.xdist_group("launch")
def test_a_run_goes_on_with_another_number_of_processes(folder, alone, launched):
    """On four processes, then on two, then on one: the losses of a run that nobody stopped."""
    shutil.copytree(folder / launched(4)[0], folder / "changing")
    end(start(folder, "launch", "-n", "2", "train", job(folder, "changing", steps=20)))
    end(start(folder, "train", job(folder, "changing", steps=ALL)))
    np.testing.assert_allclose(losses(folder, "changing"), alone, rtol=2e-6)


@pytest.mark.nightly
@pytest.mark.xdist_group("launch")
def test_a_killed_process_starts_all_again_from_the_newest_checkpoint(folder, launched):
    child = start(folder, "launch", "-n", "2", "train", job(folder, "killed", every=4))
    wait_for(folder, "killed", 6)
    os.kill(pid(folder, "killed", 1), signal.SIGKILL)
    _, err = end(child)
    assert "launch: process 1 (host " in err
    assert "was killed by SIGKILL" in err
    assert "launch: attempt 2, from step " in err
    assert losses(folder, "killed") == losses(folder, launched(2)[0])


@pytest.mark.full
@pytest.mark.xdist_group("launch")
def test_without_a_process_that_is_gone_for_good_the_others_go_on(folder):
    (folder / "gone.py").write_text(
        "import os\nfrom jaxpar.step.losses import next_token_loss\n"
        "def loss(model, batch):\n    return next_token_loss(model, batch)\n"
        "if os.environ.get('JAXPAR_PROCESS') == '1':\n    os._exit(9)\n"
    )
    _, err = end(start(folder, "launch", "-n", "2", "train", job(folder, "gone", steps=2), "train.loss=gone:loss"))
    assert "on with 1, mesh.simulate=2 parallel.fsdp=2 parallel.data=1" in err
    assert len(losses(folder, "gone")) == 2


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("sizes", "processes", "found"),
    [
        pytest.param(
            "data = 2\nfsdp = 2",
            4,
            (2, ["mesh.simulate=2", "parallel.fsdp=2", "parallel.data=1"]),
            marks=pytest.mark.slow,
        ),  # 3 do not divide 16
        ("data = 2\ntensor = 2", 4, (2, ["mesh.simulate=2", "parallel.fsdp=1", "parallel.data=1"])),
        ("fsdp = -1", 2, (1, ["mesh.simulate=2"])),
    ],
)
def test_fewer_processes_keep_what_cuts_the_model(folder, sizes, processes, found):
    text = (
        JOB.format(run="r", steps=1, every=0)
        .replace("data = 2\nfsdp = 2", sizes)
        .replace("text.txt", str(folder / "text.txt"))
    )
    assert fit_processes(loads(text), processes=processes, most=processes - 1) == found


def test_a_model_that_needs_all_processes_says_so(folder):
    text = (
        JOB.format(run="r", steps=1, every=0)
        .replace("data = 2\nfsdp = 2", "tensor = 4")
        .replace("heads = 2", "heads = 4")
    )
    with pytest.raises(JaxparError, match="1 processes with 2 devices: tensor=4 on 2 devices"):
        fit_processes(loads(text.replace("text.txt", str(folder / "text.txt"))), processes=2, most=1)


def listening(pid):
    """Returns the addresses, in hex, on which a process listens for TCP."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(words[1].split(":")[0])
    return found


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc/net/tcp to look for open ports")
@pytest.mark.xdist_group("launch")
def test_nothing_listens_on_other_than_the_given_address():
    with started(10.0) as run:
        run.wait_for_training()
        found = {process: listening(child.pid) for process, child in run.children.items()}
    assert found[0]
    local = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, and the same among addresses of version 6
    assert set.union(*found.values()) <= local


@pytest.mark.nightly
@pytest.mark.xdist_group("launch")
def test_a_signal_to_one_stops_all_after_the_same_step(folder):
    child = start(folder, "launch", "-n", "2", "train", job(folder, "told", steps=5000))
    wait_for(folder, "told", 10)
    os.kill(pid(folder, "told", 1), signal.SIGTERM)
    out, _ = end(child, status=143)
    assert "stopped by SIGTERM, saved step " in out
    last = rows(folder, "told")[-1]["step"]
    assert f"saved step {last};" in out
    assert [path.name for path in (folder / "told" / "checkpoints").iterdir() if path.name.isdigit()] == [f"{last:06d}"]


@pytest.mark.full
@pytest.mark.xdist_group("launch")
def test_a_refused_job_is_said_once_and_not_started_again(folder):
    _, err = end(start(folder, "launch", "-n", "3", "train", job(folder, "thirds")), status=1)
    assert err.count("error: 4 simulated devices on 3 processes") >= 1
    assert "not started again" in err
    _, err = end(start(folder, "launch", "-n", "2", "train", "missing.toml"), status=1)
    assert err.count("error:") == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"processes": 0}, "processes = 0"),
        ({"processes": 1, "restarts": -1}, "restarts = -1"),
        ({"processes": 1, "nodes": 2}, "2 nodes without a coordinator"),
        ({"processes": 1, "nodes": 2, "node": 2, "coordinator": "a:1"}, "node 2 of 2"),
    ],
)
def test_a_wrong_launch_is_refused(wrong, said):
    with pytest.raises(JaxparError, match=said):
        Launch(command=["train", "x.toml"], **wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("name", some(FAULTS, [], ["killed", "coordinator killed", "nan", "other job"]))
@pytest.mark.xdist_group("launch")
def test_a_fault_is_found_in_time_and_named(name):
    try:
        found = FAULTS[name](8.0)
    except JaxparError as error:
        if not error.problems[0].got.startswith("mount:"):
            raise
        pytest.skip(f"mounting a small disk takes root: {error.problems[0].got}")
    assert found.named, found
    assert found.seconds <= found.within


@pytest.mark.full
@pytest.mark.xdist_group("launch")
def test_two_hosts_are_two_network_namespaces(folder, tmp_path):
    if os.geteuid() != 0 or not Path("/sbin/ip").exists() or not can_make_namespaces():
        pytest.skip("network namespaces: not root, or no ip command, or the kernel does not allow them")
    names, links = ([f"jp{os.getpid()}{what}{node}" for node in range(2)] for what in ("n", "v"))
    files = [Path(f"/etc/netns/{name}/hosts") for name in names]  # each host's own name is its address
    name, words = job(folder, "hosts", steps=2), ["--nodes", "2", "--coordinator", "10.231.7.1:7788"]
    try:
        for node, file in enumerate(files):
            ip("netns", "add", names[node])
            file.parent.mkdir(parents=True)
            file.write_text(f"10.231.7.{node + 1} {socket.gethostname()}\n127.0.0.1 localhost\n")
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for node, link in enumerate(links):
            ip("link", "set", link, "netns", names[node])
            ip("-n", names[node], "addr", "add", f"10.231.7.{node + 1}/24", "dev", link)
            ip("-n", names[node], "link", "set", link, "up")
            ip("-n", names[node], "link", "set", "lo", "up")
        children = [
            subprocess.Popen(
                ["/sbin/ip", "netns", "exec", names[node], sys.executable, "-m", "jaxpar",
                 "launch", "-n", "1", *words, "--node", str(node), "train", name],
                cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for node in range(2)
        ]  # fmt: skip
        for child in children:
            end(child)
        assert len(losses(folder, "hosts")) == 2
    finally:
        for node in range(2):
            subprocess.run(["/sbin/ip", "netns", "del", names[node]], check=False, capture_output=True)
            shutil.rmtree(files[node].parent, ignore_errors=True)


def ip(*words):
    subprocess.run(["/sbin/ip", *words], check=True, capture_output=True)


def can_make_namespaces():
    made = subprocess.run(["/sbin/ip", "netns", "add", "jaxpar-try"], check=False, capture_output=True)
    subprocess.run(["/sbin/ip", "netns", "del", "jaxpar-try"], check=False, capture_output=True)
    return made.returncode == 0
