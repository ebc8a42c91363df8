"""SIGKILL at any moment costs the steps since the last checkpoint, and changes no number.

Each process is forked from one that has imported jax and not used it, so that a kill costs a second.
"""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest

pytestmark = pytest.mark.xdist_group("kills")

POINTS = [
    "before there is a list",
    "before the list is on the disk",
    "before it has its name",
    "when it has just got its name",
    "while an old one is deleted",
]


@pytest.fixture(scope="module")
def processes():
    """A server that forks processes with everything imported."""
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed"])
    return context


@pytest.fixture(scope="module")
def whole(processes, tmp_path_factory):
    """The losses of a run nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert killed(processes, folder)[0] == 0
    return losses(folder)


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def killed(processes, folder, *, seconds=None, **point):
    """Starts or goes on with a run; returns its exit code, the step it began from and the last that it told."""
    from killed import train

    receive, send = processes.Pipe(duplex=False)
    process = processes.Process(target=train, args=(str(folder), send), kwargs=point)
    process.start()
    send.close()
    told = []
    end = None
    while True:
        if end is not None and (end < time.monotonic() or not receive.poll(max(0.0, end - time.monotonic()))):
            process.kill()
            break
        try:
            told.append(receive.recv())
        except EOFError:
            break
        if seconds is not None and end is None:
            end = time.monotonic() + seconds  # from where it trains
    process.join(60)
    while receive.poll():
        try:
            told.append(receive.recv())
        except EOFError:
            break
    return process.exitcode, told[0][1] if told else None, told[-1] if told[1:] else None


@pytest.mark.parametrize("kills", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_sigkills_lose_nothing_beyond_the_last_interval(kills, processes, whole, tmp_path):
    folder, moments, last = tmp_path / "run", random.Random(kills), 0
    for index in range(kills):
        if index % 2:
            how = {"seconds": moments.uniform(0.0, 1.0)}
        else:
            how = {"point": POINTS[index // 2 % len(POINTS)], "after": moments.randrange(3)}
        code, began, reached = killed(processes, folder, **how)
        # a row is told before its checkpoint begins, and that one waits for the one before: two may be on their way
        assert began is None or began >= last - 2, (index, how)
        last = max(last, reached or 0)
        assert code == -signal.SIGKILL or last == 40, (index, how, code)
    code, began, _ = killed(processes, folder)
    assert code == 0
    assert began >= last - 2
    assert losses(folder) == whole
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["000039", "000040"]
