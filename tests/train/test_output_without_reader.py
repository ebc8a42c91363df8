"""Whoever reads the output may go away: a run goes on, and says so in its folder."""

import os
import signal
import subprocess
import sys

import pytest
from supervised_runs import OWN_CHILD, rows, start, wait_until, write

from jaxpar.cli import main as cli
from jaxpar.cli import train

pytestmark = pytest.mark.xdist_group("supervisor")


def head(process, lines):
    """Reads as `head` does: a few lines, then it goes away. Returns them."""
    found = [process.stdout.readline() for _ in range(lines)]
    process.stdout.close()
    return found


def end(run):
    """Waits until a run has ended well, and returns what it said on stderr."""
    try:
        status = run.wait(40)
    finally:
        run.kill()
        err = run.stderr.read()
        run.stderr.close()
    assert status == 0, err
    return err


@pytest.mark.nightly
def test_training_goes_on_when_the_reader_has_seen_enough(tmp_path):
    write(tmp_path, steps=400, seconds=0)
    run = start(tmp_path, "train", "job.toml")
    head(run, 3)
    err = end(run)
    assert len(rows(tmp_path)) == 400
    assert (
        "jaxpar: stdout can no longer be written (Broken pipe): the run goes on, and says so in run/output.log" in err
    )
    log = (tmp_path / "run" / "output.log").read_text()
    assert "stdout can no longer be written (Broken pipe)" in log.splitlines()[0]
    assert "step 400/400" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "output", [pytest.param("closed", marks=pytest.mark.slow), pytest.param("full", marks=pytest.mark.full)]
)
def test_launched_processes_go_on_when_nobody_reads(output, tmp_path):
    """Two light processes that say 2 MB each: far more than a pipe holds."""
    write(tmp_path)
    (tmp_path / "child").write_text(f"#!{sys.executable}\n{OWN_CHILD}")
    (tmp_path / "child").chmod(0o755)
    code = (
        f"import sys; sys.executable = {str(tmp_path / 'child')!r}; from jaxpar.cli.main import main\n"
        "sys.exit(main(['launch', '-n', '2', '--restarts', '0', 'train', 'job.toml']))"
    )
    with open("/dev/full", "w") as full:
        run = start(tmp_path, program=["-c", code], **({"stdout": full} if output == "full" else {}))
        if output == "closed":
            head(run, 3)
        err = end(run)
    log = (tmp_path / "run" / "output.log").read_text()
    assert log.count("the last line") == 2
    assert "the run goes on, and says so in run/output.log" in err


@pytest.mark.full
def test_a_run_whose_reader_stops_reading_goes_on_and_hears_signals(tmp_path):
    write(tmp_path, seconds=0)
    run = start(tmp_path, "launch", "-n", "2", "train", "job.toml")
    try:
        assert wait_until((tmp_path / "run" / "output.log").exists, seconds=40)  # what a pipe holds is full
        before = len(rows(tmp_path))
        assert wait_until(lambda: len(rows(tmp_path)) > before + 100, seconds=20)
        run.send_signal(signal.SIGTERM)
        assert run.wait(10) == 143
    finally:
        run.kill()
        _, err = run.communicate()
    assert "stdout can no longer be written (nothing was read for 4 s): the run goes on" in err
    log = (tmp_path / "run" / "output.log").read_text()
    assert "nothing was read for 4 s" in log.splitlines()[0]
    assert "step " in log


def test_a_broken_pipe_of_the_user_s_own_is_no_reader_that_has_seen_enough(monkeypatch):
    def broken(args):
        raise BrokenPipeError

    monkeypatch.setattr(train, "run_train", broken)
    with pytest.raises(BrokenPipeError):
        cli.main(["train", "job.toml"])


@pytest.mark.nightly
def test_a_reader_that_has_seen_enough_of_the_defaults_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jaxpar", "train", "--print-defaults"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
