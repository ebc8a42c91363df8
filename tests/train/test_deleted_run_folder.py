"""A run folder that is deleted while processes train: said once, made anew, and they watch each other as before."""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from supervised_runs import rows, start, started_by, wait_until, write

from jaxpar.train import lock
from jaxpar.train.watchdog.beat import Files
from jaxpar.train.watchdog.thread import WatchdogThread
from jaxpar.train.watchdog.watchdog import Watchdog

LIMIT = 1.0  # seconds of silence


class Pair:
    """The watchdogs of two processes, and the problems for which they would end."""

    def __init__(self, folder):
        self.problems = []
        self.threads = [
            WatchdogThread(folder, "a", process=i, count=2, limit=LIMIT, end=self.problems.append) for i in range(2)
        ]

    def beats(self, folder):
        return all((folder / "processes" / "a" / f"{i}.json").exists() for i in range(2))

    def silence(self, process):
        """Lets a process be stopped: it writes no heartbeat any more, not even a last one."""
        self.threads[process]._closed.set()

    def close(self):
        for thread in self.threads:
            thread._closed.set()
            thread._thread.join()


@pytest.fixture
def pair(tmp_path):
    made = Pair(tmp_path / "runs" / "run")
    yield made
    made.close()


def delete(folder):
    shutil.rmtree(folder, ignore_errors=True)  # a process may write meanwhile
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    "gone",
    [
        "runs/run/processes/a",
        pytest.param("runs/run/processes", marks=pytest.mark.full),
        pytest.param("runs/run", marks=pytest.mark.full),
        pytest.param("runs", marks=pytest.mark.full),
    ],
)
def test_a_deleted_folder_is_said_once_and_a_silent_process_is_found_after_it(gone, pair, tmp_path, capfd):
    run = tmp_path / "runs" / "run"
    assert wait_until(lambda: pair.beats(run), seconds=10)
    delete(tmp_path / gone)
    assert wait_until(lambda: pair.beats(run), seconds=10)
    assert not wait_until(lambda: pair.problems, seconds=2 * LIMIT)
    _, err = capfd.readouterr()
    assert 1 <= len(err.splitlines()) <= 2, err  # one a process at most
    assert all("was deleted, and is made anew: training goes on" in line for line in err.splitlines())
    pair.silence(1)
    assert wait_until(lambda: pair.problems, seconds=10 * LIMIT)
    assert "process 1" in pair.problems[0].got
    assert "no sign of life" in pair.problems[0].got


def test_processes_agree_in_a_folder_that_was_deleted(pair, tmp_path):
    delete(tmp_path / "runs")
    threads = [threading.Thread(target=each.agree, args=("job", "the same"), daemon=True) for each in pair.threads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.slow
def test_a_folder_that_is_gone_with_its_file_system_is_waited_for_with_few_words(pair, tmp_path, capfd):
    """Below the empty mount point lies another disk: nothing is made there."""
    run = tmp_path / "runs" / "run"
    for each in pair.threads:
        each._watchdog.files._device = -1
    delete(run)
    assert not wait_until(run.exists, seconds=2 * LIMIT)
    assert pair.problems == []
    (run / "processes" / "a").mkdir(parents=True)
    assert wait_until(lambda: pair.beats(run), seconds=10)
    assert not wait_until(lambda: pair.problems, seconds=2 * LIMIT)
    _, err = capfd.readouterr()
    for each in pair.threads:
        assert err.count("no process of the run is watched until it can be written") == len(pair.threads), each
    assert err.count("can be written again, after ") == len(pair.threads)
    assert len(err.splitlines()) <= 8, err


def test_a_day_without_a_file_server_is_a_few_lines(capfd):
    from jaxpar.train.watchdog.thread import FolderOutage

    now = [0.0]
    away = FolderOutage(Path("run"), clock=lambda: now[0])
    for turn in range(2 * 24 * 3600):
        now[0] = turn / 2
        away.note(OSError(5, "Input/output error"))
    away.end()
    away.end()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) <= 20
    assert lines[-1] == "warning: run: can be written again, after 86400 s"


@pytest.mark.parametrize("first", [0, 1])
def test_who_is_back_first_after_a_file_server_was_away_blames_nobody(first, tmp_path):
    now = [0.0]
    both = [Watchdog(Files(tmp_path), process=i, count=2, limit=30.0, clock=lambda: now[0]) for i in range(2)]
    for _ in range(4):
        now[0] += 0.5
        assert [each.turn() for each in both] == [None, None]
    away, back = tmp_path.with_name("away"), tmp_path
    tmp_path.rename(away)
    for each in both:
        each.files._device = -1
    for _ in range(200):
        now[0] += 0.5
        for each in both:
            with pytest.raises(OSError, match="No such file"):
                each.turn()
    away.rename(back)
    now[0] += 0.5
    assert both[first].turn() is None


def test_the_lock_of_a_deleted_folder_is_taken_again(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    folder = tmp_path / "run"
    with lock.Lock(folder, lambda text: None) as held:
        delete(folder)
        folder.mkdir()  # by the watchdog, or the next checkpoint
        assert wait_until(lambda: lock.read(folder / "lock") == held.holder, seconds=10)
    assert not (folder / "lock").exists()


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="no /proc to find processes in")
@pytest.mark.xdist_group("supervisor")
def test_launched_processes_train_on_and_are_watched(tmp_path):
    write(tmp_path, timeout=3)
    run = start(tmp_path, "launch", "-n", "2", "--restarts", "0", "train", "job.toml")
    try:
        assert wait_until(lambda: len(rows(tmp_path)) > 2, seconds=90)
        delete(tmp_path / "run")
        assert wait_until(lambda: list((tmp_path / "run" / "processes").glob("*/1.json")), seconds=10)
        assert not wait_until(lambda: run.poll() is not None, seconds=5), "it ended"
        second = next(each for each in started_by(tmp_path) if b"JAXPAR_PROCESS=1" in environment(each))
        os.kill(second, signal.SIGSTOP)
        _, err = run.communicate(timeout=30)
    finally:
        for left in started_by(tmp_path):
            os.kill(left, signal.SIGKILL)
    assert "no sign of life" in err, err
    assert 1 <= err.count("was deleted, and is made anew") <= 2
    assert len(err.splitlines()) < 20, err


def environment(pid):
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
