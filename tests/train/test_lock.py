"""Two runs on one folder: the second is refused by name, and a lock that nobody holds any more stops nobody."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import hooks
import pytest

from jaxpar.errors import JaxparError
from jaxpar.train import lock


def put(folder, holder, quiet=0.0):
    """Leaves a lock as of somebody who was heard of so many seconds ago."""
    folder.mkdir(exist_ok=True)
    (folder / "lock").write_text(json.dumps(asdict(holder)))
    os.utime(folder / "lock", (time.time() - quiet,) * 2)


def gone():
    """Returns the pid of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def elsewhere():
    return replace(lock.Holder(), host="far", machine="another boot", pid=7)


@pytest.mark.nightly
def test_a_second_run_on_a_folder_is_refused_and_spoils_nothing(tmp_path):
    refused = []

    def second(index):
        if index == 5:
            with pytest.raises(JaxparError) as caught:
                hooks.job_run.train(hooks.loads(hooks.JOB, [f"run.dir={tmp_path}", "train.steps=3"]))
            refused.append(caught.value.problems[0].got)

    _, said = hooks.run(tmp_path, "checkpoint.every=1", "checkpoint.keep_last=9", batch=second)
    assert re.search(rf"another run is at work in {tmp_path}: host \S+, pid {os.getpid()}, for ", refused[0])
    assert hooks.saved(tmp_path) == list(range(1, 9))
    assert [row["step"] for row in hooks.rows(tmp_path)] == list(range(1, 9))
    assert not (tmp_path / "lock").exists()
    assert "lock" not in said


@pytest.mark.slow
def test_a_lock_of_a_process_that_is_gone_is_broken_with_a_word(tmp_path):
    put(tmp_path, replace(lock.Holder(), pid=gone()))
    outcome, said = hooks.run(tmp_path, "train.steps=1")
    assert outcome["step"] == 1
    assert re.search(r"was held by host \S+, pid \d+, for .*, which is gone: its lock is broken", said)


def test_a_pid_that_another_process_has_by_now_holds_nothing(tmp_path):
    put(tmp_path, replace(lock.Holder(), started="1"))
    said = []
    with lock.Lock(tmp_path, said.append):
        assert lock.read(tmp_path / "lock") == lock.Holder(since=lock.read(tmp_path / "lock").since)
    assert len(said) == 1


def test_a_lock_of_another_host_counts_by_its_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 0.4)
    for quiet in (0.0, 900.0):  # still for so long already, or to be watched for it
        put(tmp_path, elsewhere(), quiet)
        said = []
        with lock.Lock(tmp_path, said.append):
            pass
        assert "host far, pid 7" in said[-1]
        assert re.search(r"no sign of life for \d+ s: its lock is broken", said[-1])
        assert len(said) == (1 if quiet else 2)
    put(tmp_path, elsewhere())
    alive = threading.Timer(0.15, lambda: os.utime(tmp_path / "lock", (1, 1)))
    alive.start()
    with pytest.raises(JaxparError, match=r"another run is at work in .*: host far, pid 7"), lock.Lock(tmp_path, print):
        pass
    alive.join()


@pytest.fixture
def threads_switch_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("attempt", range(8))  # a race shows in one of three
def test_of_many_that_break_one_lock_one_holds_it(tmp_path, monkeypatch, threads_switch_often, attempt):
    monkeypatch.setattr(lock, "STALE", 5.0)  # longer than a thread may wait between taking a lock and writing its name
    put(tmp_path, elsewhere(), 900)
    held, most, refused, guard = [], [], [], threading.Lock()

    def take(number):
        mine = lock.Lock(tmp_path, lambda text: None)
        mine.holder = replace(mine.holder, since=float(number))  # as of processes of their own
        try:
            with mine:
                with guard:
                    held.append(number)
                    most.append(len(held))
                time.sleep(0.05)
                with guard:
                    held.remove(number)
        except JaxparError:
            refused.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) + len(refused) == 16
    assert not list(tmp_path.iterdir())


def test_who_dies_while_it_breaks_a_lock_stops_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 0.4)
    put(tmp_path, elsewhere(), 900.0)
    (tmp_path / "lock.breaking").touch()
    said = []
    with lock.Lock(tmp_path, said.append):
        assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    assert len(said) == 1


def test_a_run_whose_lock_was_taken_over_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    ended = threading.Event()

    def end(status, last_words):
        ended.set()
        raise OSError(0, "ended")  # in place of the end of this process

    monkeypatch.setattr(lock, "exit_process", end)
    with lock.Lock(tmp_path, lambda text: None):
        put(tmp_path, elsewhere())
        assert ended.wait(10)
    assert (tmp_path / "lock").exists()  # it is another's


def test_a_job_that_is_refused_leaves_no_folder(tmp_path):
    with pytest.raises(JaxparError):
        hooks.run(tmp_path / "run", "parallel.data=3")
    assert not (tmp_path / "run").exists()
