"""Which processes train together, by tables of environments; and two of them that find each other."""

import re
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.cluster.connect import host_rendezvous, join_rendezvous
from jaxpar.cluster.environment import Cluster, detect
from jaxpar.cluster.launchers import hosts
from jaxpar.errors import JaxparError

DEPLOY = Path(__file__).parents[2] / "deploy"
OWN = {"JAXPAR_COORDINATOR": "node01:1234", "JAXPAR_PROCESSES": "4", "JAXPAR_PROCESS": "3"}
TORCHRUN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0"}
SLURM = {
    "SLURM_JOB_ID": "4097", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[03-05]", "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "3",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MPI4 = MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
MPI5 = MPI | {"PMIX_NAMESPACE": "prterun-node-7-4100@1"}
PODS = {
    "JOB_COMPLETION_INDEX": "2", "JAXPAR_PROCESSES": "4", "JAXPAR_COORDINATOR": "service", "HOSTNAME": "train-a-2",
}  # fmt: skip

FOUND = {  # environment: coordinator, processes, process, local, devices, source
    "own": (OWN, ("node01:1234", 4, 3, None, None, "JAXPAR")),
    "own, a host alone": (OWN | {"JAXPAR_COORDINATOR": "node01"}, ("node01:8476", 4, 3, None, None, "JAXPAR")),
    "own, IPv6": (OWN | {"JAXPAR_COORDINATOR": "[fd00::1]:99"}, ("[fd00::1]:99", 4, 3, None, None, "JAXPAR")),
    "own, IPv6 alone": (OWN | {"JAXPAR_COORDINATOR": "fd00::1"}, ("[fd00::1]:8476", 4, 3, None, None, "JAXPAR")),
    "torch": (TORCHRUN, ("10.0.0.1:29500", 4, 2, 0, (0,), "torchrun")),
    "torch, a process per machine": (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "1"},
        ("10.0.0.1:29500", 4, 2, 0, None, "torchrun"),
    ),
    "torchrun holds its port": (
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_RANK": ""},
        ("10.0.0.1:29501", 4, 2, None, None, "torchrun"),
    ),
    "slurm": (SLURM, ("node03:61441", 3, 1, 0, None, "SLURM")),
    "slurm, second step": (SLURM | {"SLURM_STEP_ID": "1"}, ("node03:61962", 3, 1, 0, None, "SLURM")),
    "slurm, several on a node": (
        SLURM | {"SLURM_NTASKS": "24", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"},
        ("node03:61441", 24, 9, 1, (1,), "SLURM"),
    ),
    "slurm, one visible GPU each": (
        SLURM | {"SLURM_NTASKS": "24", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "5"},
        ("node03:61441", 24, 1, 1, None, "SLURM"),
    ),
    "slurm, nodes of the job": (
        {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"} | {"SLURM_JOB_NODELIST": "gpu5,node[1-2]"},
        ("gpu5:61441", 3, 1, 0, None, "SLURM"),
    ),
    "slurm, another coordinator": (
        SLURM | {"JAXPAR_COORDINATOR": "ib03:7"}, ("ib03:7", 3, 1, 0, None, "JAXPAR + SLURM"),
    ),
    "mpi 4": (MPI4, ("10.96.0.1:62624", 4, 1, 1, (1,), "Open MPI")),
    "mpi 4, IPv6": (
        MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fd00::2,fd00::3]:34911"},
        ("[fd00::2]:61441", 4, 1, 1, (1,), "Open MPI"),
    ),
    "mpi 5": (MPI5, ("node-7:61444", 4, 1, 1, (1,), "Open MPI")),
    "mpi 5, one machine": (
        MPI5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ("127.0.0.1:61444", 4, 1, 1, (1,), "Open MPI"),
    ),
    "mpi with its coordinator": (
        MPI | {"JAXPAR_COORDINATOR": "a:1"}, ("a:1", 4, 1, 1, (1,), "JAXPAR + Open MPI"),
    ),
    "pods": (PODS, ("train-a-0.service:8476", 4, 2, None, None, "JAXPAR + Kubernetes")),
    "pods, a whole name": (
        PODS | {"JAXPAR_COORDINATOR": "train-a-0.service:9"},
        ("train-a-0.service:9", 4, 2, None, None, "JAXPAR + Kubernetes"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_a_launcher_is_understood(case):
    environment, want = FOUND[case]
    found = detect(environment)
    assert found is not None
    got = (found.coordinator, found.processes, found.process, found.local_process, found.devices, found.source)
    assert got == want
    assert found.host in found.coordinator
    assert found.coordinator.endswith(f":{found.port}")


ALONE = {
    "nothing": {},
    "other variables": {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"},
    "one of one": {"JAXPAR_PROCESSES": "1"},
    "one of one, in a step": SLURM | {"JAXPAR_PROCESSES": "1"},
    "torch of one": TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
    "torch of one, half": {"WORLD_SIZE": "1", "RANK": "0"},
    "a step of one": SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    "a shell of an allocation": {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a"},
    "a shell that is a step": SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "mpirun -n 1": MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "a pod for itself": {"JOB_COMPLETION_INDEX": "3", "JAXPAR_PROCESSES": "1"},
}


@pytest.mark.parametrize("case", ALONE)
def test_a_process_that_is_alone_has_no_cluster(case):
    assert detect(ALONE[case]) is None


def without(environment, *names, **changes):
    return {name: value for name, value in environment.items() if name not in names} | changes


REFUSED = {  # environment: what each problem begins with
    "no coordinator": (without(OWN, "JAXPAR_COORDINATOR"), ["JAXPAR_PROCESSES and JAXPAR_PROCESS without JAXPAR_COOR"]),
    "no process": (without(OWN, "JAXPAR_PROCESS"), ["JAXPAR_COORDINATOR and JAXPAR_PROCESSES without JAXPAR_PROCESS"]),
    "only a process": (
        {"JAXPAR_PROCESS": "1"},
        ["JAXPAR_PROCESS without JAXPAR_COORDINATOR", "JAXPAR_PROCESS without JAXPAR_PROCESSES"],
    ),
    "no number": (OWN | {"JAXPAR_PROCESSES": "four"}, ["JAXPAR_PROCESSES='four'"]),
    "minus one": (OWN | {"JAXPAR_PROCESS": "-1"}, ["JAXPAR_PROCESS='-1'"]),
    "none at all": (OWN | {"JAXPAR_PROCESSES": "0"}, ["JAXPAR_PROCESSES='0'"]),
    "both wrong": (OWN | {"JAXPAR_PROCESSES": "x", "JAXPAR_PROCESS": "y"}, ["JAXPAR_PROCESSES", "JAXPAR_PROCESS="]),
    "one too many": (OWN | {"JAXPAR_PROCESS": "4"}, ["process 4 of 4 (says JAXPAR)"]),
    "a port too high": (OWN | {"JAXPAR_COORDINATOR": "a:70000"}, ["the coordinator 'a:70000'"]),
    "an address": (OWN | {"JAXPAR_COORDINATOR": "http://a:1"}, ["the coordinator 'http://a:1'"]),
    "no host": (OWN | {"JAXPAR_COORDINATOR": ":1"}, ["the coordinator ':1'"]),
    "torch without its rank": (without(TORCHRUN, "RANK"), ["no RANK"]),
    "torch without an address": (without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), ["no MASTER_ADDR", "no MASTER_PORT"]),
    "torch, rank of another world": (TORCHRUN | {"RANK": "7"}, ["process 7 of 4 (says torchrun)"]),
    "slurm, a bad list": (SLURM | {"SLURM_STEP_NODELIST": "node[3-1]"}, ["the node list 'node[3-1]': [3-1] is no"]),
    "slurm, no list": (without(SLURM, "SLURM_STEP_NODELIST"), ["no SLURM_STEP_NODELIST"]),
    "slurm, not by srun": (
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "a"},
        ["a SLURM job of 4 tasks, this process is none of them"],
    ),
    "mpi without a place": (MPI, ["mpirun, which does not say where process 0 is"]),
    "a pod that does not know how many": (
        {"JOB_COMPLETION_INDEX": "1"}, ["JOB_COMPLETION_INDEX without JAXPAR_PROCESSES and JAXPAR_COORDINATOR"],
    ),
    "a pod of another name": (PODS | {"HOSTNAME": "x"}, ["JAXPAR_COORDINATOR=service, HOSTNAME='x'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_half_said_or_cannot_be_is_refused(case):
    environment, wants = REFUSED[case]
    with pytest.raises(JaxparError) as caught:
        detect(environment)
    problems = caught.value.problems
    assert len(problems) == len(wants)
    for problem, want in zip(problems, wants, strict=True):
        assert problem.got.startswith(want)
        assert problem.rule
        assert problem.fix


def test_own_variables_win_over_a_launcher_and_say_so():
    found = detect(SLURM | TORCHRUN | OWN)
    assert (found.coordinator, found.processes, found.process) == ("node01:1234", 4, 3)
    assert found.ignored_launchers == ("torchrun", "SLURM")
    assert str(found) == "process 3 of 4, coordinator node01:1234 (says JAXPAR; torchrun and SLURM not asked)"


def test_the_innermost_launcher_is_asked():
    assert str(detect(SLURM | MPI4)).endswith("(says Open MPI; SLURM not asked)")


NAMES = st.from_regex(r"[a-z][a-z.-]{0,6}[a-z]", fullmatch=True)


@given(st.lists(st.tuples(NAMES, st.integers(0, 90), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_a_node_list_is_what_was_folded_into_it(groups):
    folded = ",".join(f"{name}[{low:0{width}}-{low + more:0{width}}]" for name, low, more, width in groups)
    want = [f"{name}{i:0{width}}" for name, low, more, width in groups for i in range(low, low + more + 1)]
    assert list(hosts(folded)) == want
    assert list(hosts(",".join(want))) == want


def test_the_first_of_a_list_of_many_is_found_at_once():
    assert next(hosts("n[0-999999999]")) == "n0"


@given(st.text(max_size=30))
def test_any_other_node_list_is_refused(text):
    try:
        found = next(hosts(text))
    except JaxparError:
        return
    assert re.fullmatch(r"[\w.-]+", found, re.ASCII)


@given(st.dictionaries(st.sampled_from(sorted(OWN | TORCHRUN | SLURM | MPI4 | MPI5 | PODS)), st.text(max_size=12)))
def test_any_environment_gives_a_cluster_none_or_a_refusal(environment):
    try:
        found = detect(environment)
    except JaxparError:
        return
    assert found is None or 0 <= found.process < found.processes


def test_to_detect_takes_no_jax():
    code = "import sys, jaxpar.cluster.environment as p; p.detect({}); print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_scripts_for_launchers_parse():
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"], check=True)
    yaml = pytest.importorskip("yaml", reason="PyYAML, which flax brings")
    service, job = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    said = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    name = job["metadata"]["name"]
    found = detect(said | {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": f"{name}-1"})
    assert found.processes == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert found.coordinator == f"{name}-0.{pod['subdomain']}:{service['spec']['ports'][0]['port']}"


TOGETHER = """
    import os, sys, jax
    from jaxpar.cluster.connect import connect
    from jaxpar.cluster.environment import detect
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    try:
        connect(detect(os.environ), timeout={timeout}, fingerprint={same!r})
    except ValueError as error:
        print(error, flush=True)
        os._exit(3)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    ours = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.make_array_from_callback((4,), ours, lambda at: jax.numpy.arange(4.0)[at])
    total = float(jax.jit(lambda x: x.sum())(x))
    print("said:", total, jax.process_index(), jax.device_count(), file=sys.stderr, flush=True)
    try:
        connect(detect(os.environ))
    except ValueError as error:
        print("said:", str(error).splitlines()[0][:21], file=sys.stderr, flush=True)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(process, *, processes=2, port, timeout=60, same=""):
    environment = {
        "JAXPAR_COORDINATOR": f"127.0.0.1:{port}", "JAXPAR_PROCESSES": str(processes), "JAXPAR_PROCESS": str(process),
        "PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    code = textwrap.dedent(TOGETHER).format(timeout=timeout, same=same)
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(*running):
    outs = [process.communicate(timeout=120) for process in running]
    return [(process.returncode, out, err) for process, (out, err) in zip(running, outs, strict=True)]


@pytest.mark.nightly
def test_two_processes_find_each_other_and_add_up():
    port = free_port()
    for number, (code, _, err) in enumerate(finish(*(start(i, port=port) for i in range(2)))):
        assert code == 0, err
        # Gloo prints to the other stream whatever it likes, wherever a line is
        lines = [line.removeprefix("said: ") for line in err.splitlines() if line.startswith("said: ")]
        assert lines == [f"6.0 {number} 4", "connect a second time"]


def met(cluster, same="", *, seconds=5.0):
    """Returns what a process is told at the meeting, "" where all came."""
    until = time.monotonic() + seconds
    try:
        if cluster.process == 0:
            host_rendezvous(cluster, bind=cluster.coordinator, until=until, fingerprint=same)
        else:
            join_rendezvous(cluster, until=until, fingerprint=same)
    except JaxparError as error:
        return error.problems[0].got.partition(": ")[2]
    return ""


def meeting(*guests, seconds=5.0):
    """Returns what each of (process, processes, same) is told."""
    port = free_port()
    clusters = [
        Cluster(coordinator=f"127.0.0.1:{port}", processes=count, process=number, source="")
        for number, count, _ in guests
    ]
    with ThreadPoolExecutor(len(guests)) as pool:
        return list(pool.map(lambda c, g: met(c, g[2], seconds=seconds), clusters, guests))


def test_all_who_come_to_the_meeting_go_on():
    assert meeting(*((number, 5, "job") for number in (3, 1, 0, 2, 4))) == [""] * 5


HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("guests", "told"),
    [
        pytest.param([(0, 4, ""), (2, 4, "")], "processes 1, 3 did not come", marks=pytest.mark.slow),
        pytest.param([(0, 2, "")], "process 1 did not come", marks=pytest.mark.slow),
        ([(0, 2, ""), (1, 3, "")], f"process 1 on {HERE} says there are 3 processes, process 0 says 2"),
        (
            [(0, 3, ""), (1, 3, ""), (1, 3, "")],
            f"process 1 on {HERE} and another on {HERE} both say they are process 1",
        ),
        ([(0, 2, "job a"), (1, 2, "job b")], f"process 1 on {HERE} runs job b, process 0 runs job a"),
    ],
)
def test_who_is_missing_or_does_not_fit_is_told_to_all(guests, told):
    begin = time.monotonic()
    assert meeting(*guests, seconds=0.7) == [told] * len(guests)
    assert time.monotonic() - begin < 3


def test_one_that_was_started_anew_takes_its_own_place():
    port = free_port()
    host, *others = (Cluster(coordinator=f"127.0.0.1:{port}", processes=3, process=i, source="") for i in range(3))
    with ThreadPoolExecutor(3) as pool:
        told = [pool.submit(met, host)]
        time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", port)) as killed:
            killed.sendall(b'{"process": 1, "processes": 3, "host": "x", "same": ""}\n')
        for other in others:  # the new one first: with the third, all would have come
            told.append(pool.submit(met, other))
            time.sleep(0.5)
        assert [each.result() for each in told] == [""] * 3


def test_nobody_is_found_where_nobody_listens():
    (told,) = meeting((1, 2, ""), seconds=0.5)
    assert re.fullmatch(r"no answer from the coordinator in 0\.\d s: Connection refused", told)


def test_strangers_do_not_disturb_a_meeting():
    port = free_port()
    first, second = (Cluster(coordinator=f"127.0.0.1:{port}", processes=2, process=i, source="") for i in range(2))
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(met, first)
        for word in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"process": []}\n', b"[1]\n", b"\xff\n"):
            while not host.done():  # it must not end before all came
                try:
                    with socket.create_connection(("127.0.0.1", port)) as stranger:
                        stranger.sendall(word)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
        assert met(second) == host.result() == ""


@pytest.mark.nightly
def test_a_process_that_is_missing_ends_the_others_with_an_error_not_an_abort():
    port = free_port()
    for code, out, _ in finish(*(start(number, processes=3, port=port, timeout=4) for number in range(2))):
        assert code == 3
        assert "process 2 did not come" in out


@pytest.mark.nightly
def test_a_coordinator_that_is_not_there_is_named_in_time():
    port = free_port()
    ((code, out, _),) = finish(start(1, port=port, timeout=1))
    assert code == 3
    assert f"process 1 of 2 on {socket.gethostname()}, coordinator 127.0.0.1:{port}: no answer from the coordi" in out


@pytest.mark.nightly
def test_a_port_that_is_taken_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ((code, out, _),) = finish(start(0, port=other.getsockname()[1]))
    assert code == 3
    assert "Address already in use" in out
