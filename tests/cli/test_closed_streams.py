"""A command that is started with closed descriptors (`<&-`, `>&-`, `2>&-`), as by a daemon or over ssh, works."""

import itertools
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from supervised_runs import rows, started_by, wait_until, write

CLOSED = [" ".join(each) for count in (1, 2, 3) for each in itertools.combinations(("<&-", ">&-", "2>&-"), count)]
SUPERVISOR = """\
import os, subprocess, sys, time
from jaxpar.process_exit import LIFELINE, lifeline
follower = (
    "from jaxpar.process_exit import exit_with_supervisor; import time; exit_with_supervisor(); "
    "open('follows', 'w'); time.sleep(60)"
)
with lifeline() as end:
    subprocess.Popen([sys.executable, "-c", follower], env={**os.environ, LIFELINE: str(end)}, pass_fds=(end,),
                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(60)
"""

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="no /proc to find processes in"),
    pytest.mark.xdist_group("supervisor"),
]


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    for left in started_by(tmp_path):
        os.kill(left, signal.SIGKILL)


def start(folder, *words, closed):
    """Starts Python by a shell that closes descriptors; those that stay open are pipes."""
    command = f"exec {shlex.join([sys.executable, *words])} {closed}"
    return subprocess.Popen(
        command, shell=True, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@pytest.mark.nightly
def test_a_process_ends_with_its_supervisor_and_not_before_whatever_is_closed(tmp_path):
    folders = {closed: tmp_path / str(index) for index, closed in enumerate(CLOSED)}
    for folder in folders.values():
        folder.mkdir()
    supervisors = {each: start(folder, "-c", SUPERVISOR, closed=each) for each, folder in folders.items()}
    try:
        for closed, folder in folders.items():
            assert wait_until((folder / "follows").exists, seconds=60), closed
            # a lifeline that is no pipe ends at once; both processes are alive half a second later
            assert not wait_until(lambda folder=folder: len(started_by(folder)) < 2, seconds=0.5), closed
            supervisors[closed].send_signal(signal.SIGKILL)
            assert wait_until(lambda folder=folder: not started_by(folder), seconds=10), closed
    finally:
        for closed, folder in folders.items():
            for left in started_by(folder):
                os.kill(left, signal.SIGKILL)
            supervisors[closed].communicate()


@pytest.mark.spread(0)
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "verb",
    ["schedule 1f1b --stages 2 --microbatches 4", pytest.param("train --print-defaults", marks=pytest.mark.slow)],
)
def test_a_verb_prints_nothing_and_ends_well_without_a_stdout(verb, closed, folder):
    run = start(folder, "-m", "jaxpar", *verb.split(), closed=closed)
    assert run.communicate(timeout=60) == ("", "")
    assert run.returncode == 0


def test_the_next_file_that_opens_is_not_what_native_code_prints_into(folder):
    code = "from jaxpar.cli.main import main; import os; main(['train', '--print-defaults'])\n"
    code += "open('mine', 'w').write(str([os.open('other', os.O_CREAT | os.O_WRONLY), os.open(os.devnull, 0)]))"
    start(folder, "-c", code, closed="<&- >&- 2>&-").communicate(timeout=60)
    first, second = sorted(eval((folder / "mine").read_text()))
    assert first > 2
    assert second > 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    "closed", [pytest.param(">&-", marks=pytest.mark.full), pytest.param("<&- >&- 2>&-", marks=pytest.mark.slow)]
)
def test_training_without_a_stdout_says_all_in_its_folder(closed, folder):
    write(folder, steps=5, seconds=0)
    run = start(folder, "-m", "jaxpar", "train", "job.toml", closed=closed)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert len(rows(folder)) == 5
    log = (folder / "run" / "output.log").read_text()
    assert "stdout can no longer be written (it was closed when the run began)" in log
    assert "step 5/5" in log


@pytest.mark.nightly
@pytest.mark.parametrize(
    "closed", [pytest.param("<&-", marks=pytest.mark.slow), pytest.param("<&- >&-", marks=pytest.mark.full)]
)
def test_launched_processes_train_and_end_with_their_supervisor(closed, folder):
    write(folder)
    run = start(folder, "-m", "jaxpar", "launch", "-n", "2", "train", "job.toml", closed=closed)
    assert wait_until(lambda: len(rows(folder)) > 2, seconds=90)
    assert len(started_by(folder)) == 3
    run.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not started_by(folder), seconds=10), "they still train"
    run.communicate()
