"""Processes that meet: which attempt they begin, whether they share a folder, and strangers who hold nobody up."""

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from supervised_runs import rows, start, started_by, wait_until, write

from jaxpar.cluster.connect import host_rendezvous, join_rendezvous
from jaxpar.cluster.environment import Cluster
from jaxpar.errors import JaxparError
from jaxpar.job.doctor import network
from jaxpar.supervisor import free_port

pytestmark = pytest.mark.xdist_group("supervisor")


def clusters(count):
    port = free_port()
    return [Cluster(coordinator=f"127.0.0.1:{port}", processes=count, process=i, source="") for i in range(count)]


def met(cluster, *, seconds=5.0, word="", check=None):
    """Returns (word, what a process is told, seconds)."""
    begin_attempt = time.monotonic()
    more: dict = {"word": word} if word else {}
    if check and cluster.process:
        more["check"] = check
    try:
        if cluster.process == 0:
            host_rendezvous(cluster, bind=cluster.coordinator, until=begin_attempt + seconds, fingerprint="", **more)
        else:
            word = join_rendezvous(cluster, until=begin_attempt + seconds, fingerprint="", **more)
    except JaxparError as error:
        return "", error.problems[0], time.monotonic() - begin_attempt
    return word, None, time.monotonic() - begin_attempt


class Stranger(threading.Thread):
    """Who connects as soon as somebody listens, and then says a byte now and then, or nothing."""

    def __init__(self, cluster, *, every=0.0):
        super().__init__(daemon=True)
        self.cluster, self.every, self.gone = cluster, every, threading.Event()

    def run(self):
        while not self.gone.is_set():
            try:
                with socket.create_connection((self.cluster.host, self.cluster.port)) as there:
                    while not self.gone.wait(self.every or 60):
                        there.sendall(b"a")
            except OSError:
                time.sleep(0.02)


@contextmanager
def strangers(cluster, *, count=1, every):
    there = [Stranger(cluster, every=every) for _ in range(count)]
    for each in there:
        each.start()
    try:
        yield
    finally:
        for each in there:
            each.gone.set()


@pytest.mark.parametrize(("count", "every"), [(4, 0.0), (1, 0.3)], ids=["silent", "slow"])
def test_strangers_hold_nobody_up(count, every):
    """Four who say nothing, or one that says a byte now and then."""
    first, second = clusters(2)
    with ThreadPoolExecutor(1) as pool, strangers(first, count=count, every=every):
        host = pool.submit(met, first, seconds=4.0)
        time.sleep(0.5)  # the strangers are there first
        _, problem, seconds = met(second, seconds=4.0)
        assert (problem, host.result()[1]) == (None, None)
        assert seconds < 2.0


def test_a_slow_stranger_does_not_move_the_deadline():
    first, _ = clusters(2)
    with strangers(first, every=0.3):
        _, problem, seconds = met(first, seconds=1.0)
    assert "process 1 did not come" in problem.got
    assert seconds < 2.0


def test_all_begin_the_attempt_that_process_0_names():
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda cluster: met(cluster, word="" if cluster.process else "monday"), clusters(3)))
    assert [word for word, _, _ in found] == ["monday"] * 3


def test_who_leaves_during_the_meeting_is_waited_for_again():
    first, second, third = clusters(3)
    with ThreadPoolExecutor(3) as pool:
        told = [pool.submit(met, first, word="monday")]
        time.sleep(0.2)
        left = socket.create_connection((first.host, first.port))
        left.sendall(b'{"process": 1, "processes": 3, "host": "x", "same": ""}\n')
        told.append(pool.submit(met, third))
        assert left.recv(64)  # all had come
        left.close()
        told.append(pool.submit(met, second))
        assert [each.result()[:2] for each in told] == [("monday", None)] * 3


def test_a_run_folder_that_is_not_shared_is_named_to_all(tmp_path):
    from jaxpar.train.watchdog.beat import begin_attempt, find_attempt

    folders = [tmp_path / str(i) for i in range(3)]
    folders[1] = folders[0]  # two hosts share one, the third has its own
    attempt = begin_attempt(folders[0])

    def meet(cluster):
        check = lambda word: find_attempt(folders[cluster.process], word, process=cluster.process, seconds=0.3)  # noqa: E731
        return met(cluster, word="" if cluster.process else attempt, check=check)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(meet, clusters(3)))
    for _, problem, _ in found:
        assert f"process 2 on {socket.gethostname()} does not see what process 0 writes into" in problem.got
        assert problem.rule.startswith("all processes of a run share its folder")
        assert "run.dir" in problem.fix


@pytest.mark.parametrize("shared", [True, False])
def test_doctor_says_whether_the_run_folder_is_shared(shared, tmp_path):
    folders = [tmp_path / "0", tmp_path / ("0" if shared else "1")]
    for folder in set(folders):
        folder.mkdir()
    with ThreadPoolExecutor(2) as pool:

        def meet(cluster):
            return list(network.check_connection(cluster, seconds=5, folder=folders[cluster.process] / "run"))

        _, found = pool.map(meet, clusters(2))
    states = {each.what: each.state for each in found}
    assert states == {"coordinator": "ok", "clock": "ok", "shared": "ok" if shared else "problem"}
    assert list(tmp_path.glob("*/*")) == []


@pytest.mark.full
def test_a_node_that_comes_back_with_its_supervisor_joins_again(tmp_path):
    port, run = free_port(), tmp_path / "run"
    shardings = [tmp_path / "0", tmp_path / "1"]
    for home in shardings:
        home.mkdir()
        write(home, steps=60, seconds=0.05, every=5)

    def launch(node):
        words = ["--nodes", "2", "--node", str(node), "--coordinator", f"127.0.0.1:{port}", "--restarts", "1"]
        with open(shardings[node] / "output", "ab") as output:
            return start(
                shardings[node], "launch", "-n", "1", *words, "train", "job.toml", f"run.dir='{run}'",
                stdout=output, stderr=output,
            )  # fmt: skip

    nodes = [launch(0), launch(1)]
    try:
        assert wait_until(lambda: len(rows(tmp_path)) > 10, seconds=60)
        for each in started_by(shardings[1]):  # the node is lost, with all that runs there
            os.kill(each, signal.SIGKILL)
        nodes[1].wait()
        nodes[1] = launch(1)
        assert [node.wait(60) for node in nodes] == [0, 0], [(home / "output").read_text() for home in shardings]
        assert len(rows(tmp_path)) == 60
    finally:
        for home in shardings:
            for each in started_by(home):
                os.kill(each, signal.SIGKILL)
        for node in nodes:
            node.wait()
