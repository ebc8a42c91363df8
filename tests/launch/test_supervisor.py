"""A supervisor that dies, output that nobody reads, a node that comes back: no process waits for ever."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from supervised_runs import rows, start, started_by, wait_until, write

TIMEOUT = 5
ENDINGS = {
    "lost": "from jaxpar.train.watchdog import thread; from jaxpar.errors import Problem; thread._end(Problem(*'abc'))",
    "crash": "from jaxpar.cli.main import _exit_after_crash; _exit_after_crash(ValueError, ValueError('a'), None)",
}

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="no /proc to find processes in"),
    pytest.mark.xdist_group("supervisor"),
]


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    for left in started_by(tmp_path):
        os.kill(left, signal.SIGKILL)


@pytest.fixture(scope="module")
def supervisors(tmp_path_factory):
    """Two supervisors of two processes each, which train: by the signal that will end them."""
    found = {how: tmp_path_factory.mktemp(how.name) for how in (signal.SIGKILL, signal.SIGHUP)}
    running, before = {}, signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup a run rightly ignores it
    for how, folder in found.items():
        write(folder, timeout=TIMEOUT)
        running[how] = (start(folder, "launch", "-n", "2", "train", "job.toml"), folder)
    signal.signal(signal.SIGHUP, before)
    yield running
    for supervisor, folder in running.values():
        for left in started_by(folder):
            os.kill(left, signal.SIGKILL)
        supervisor.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGKILL, marks=pytest.mark.full), pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_no_process_outlives_its_supervisor(how, supervisors):
    supervisor, folder = supervisors[how]
    assert wait_until(lambda: len(rows(folder)) > 2, seconds=60)
    assert len(started_by(folder)) == 3
    supervisor.send_signal(how)
    assert wait_until(lambda: not started_by(folder), seconds=TIMEOUT + 5), "they still wait"
    saved = [path.name for path in (folder / "run" / "checkpoints").glob("0*")]
    assert saved == ([f"{rows(folder)[-1]['step']:06d}"] if how == signal.SIGHUP else [])


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("stderr", ["closed", "full"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_though_its_last_words_cannot_be_said(ending, stderr):
    code = (
        "import os, signal, sys, threading, time\n"
        "def end():\n"
        f"    {ENDINGS[ending]}\n"
        "threading.Thread(target=end).start(); time.sleep(60)"  # as in a collective
    )
    reading, writing = os.pipe()
    if stderr == "closed":
        os.close(reading)
    else:
        os.set_blocking(writing, False)
        while True:
            try:
                os.write(writing, bytes(4096))
            except BlockingIOError:
                break
        os.set_blocking(writing, True)
    process = subprocess.Popen([sys.executable, "-c", code], stderr=writing, stdin=subprocess.DEVNULL)
    os.close(writing)
    try:
        assert process.wait(20) in (70, 75)
    finally:
        process.kill()
        process.wait()
        if stderr == "full":
            os.close(reading)


@pytest.mark.full
@pytest.mark.parametrize(
    "ignored", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.full)]
)
def test_a_terminal_that_closes_is_heard_unless_nohup_says_otherwise(ignored, folder):
    write(folder, steps=150, seconds=0.03)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        run = start(folder, "train", "job.toml", "mesh.simulate=2")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert wait_until(lambda: len(rows(folder)) > 2, seconds=60)
    run.send_signal(signal.SIGHUP)
    out, err = run.communicate(timeout=60)
    assert run.returncode == (0 if ignored else 129), err
    assert ("stopped by SIGHUP, saved step " in out) != ignored
    assert (len(rows(folder)) == 150) == ignored
