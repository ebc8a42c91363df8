"""SIGKILL at any moment costs the steps since the last checkpoint, and changes no number.

Each process is forked from one that has imported jax and not used it, so that a kill costs a second.
"""

import json
import math
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
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(os.path.dirname(__file__)), os.environ.get("PYTHONPATH", "")]
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_run"])
    return context


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def killed(processes, folder, steps, *, seconds=None, **point):
    """Starts or goes on with a run, and kills it so many seconds after its first step, or at a point.

    Returns its exit code, the step it began from and the last that it told; None where it told nothing.
    """
    from killed_run import train

    receive, send = processes.Pipe(duplex=False)
    process = processes.Process(target=train, args=(str(folder), steps, send), kwargs=point)
    process.start()
    send.close()
    told, end = [], math.inf
    try:
        while time.monotonic() < end and receive.poll(min(60, max(0.0, end - time.monotonic()))):
            told.append(receive.recv())
            if seconds is not None and len(told) == 2:
                end = time.monotonic() + seconds
        process.kill()
        while True:
            told.append(receive.recv())
    except EOFError:  # it is gone, and all that it told is read
        process.join(60)
    return process.exitcode, told[0] if told else None, told[-1] if told else None


@pytest.mark.parametrize(
    ("kills", "steps"), [pytest.param(10, 400, marks=pytest.mark.slow), pytest.param(30, 1200, marks=pytest.mark.full)]
)
def test_sigkills_lose_nothing_beyond_the_last_interval(kills, steps, processes, tmp_path):
    assert killed(processes, tmp_path / "whole", steps)[0] == 0
    folder, moments, last = tmp_path / "run", random.Random(kills), 0
    for index in range(kills):
        if index % 2:
            how = {"seconds": moments.uniform(0.0, 0.4)}
        else:
            how = {"point": POINTS[index // 2 % len(POINTS)], "after": moments.randrange(3)}
        code, began, reached = killed(processes, folder, steps, **how)
        assert code == -signal.SIGKILL, (index, how)
        # a row is told before its checkpoint begins, and that one waits for the one before: two may be on their way
        assert began >= last - 2, (index, how)
        last = max(last, reached)
    code, began, _ = killed(processes, folder, steps)
    assert (code, began >= last - 2) == (0, True)
    assert losses(folder) == losses(tmp_path / "whole")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [f"{steps - 1:06d}", f"{steps:06d}"]


@pytest.mark.slow
def test_replicas_that_differ_are_killed_and_go_on_to_the_bit(processes, tmp_path):
    """DiLoCo of two replicas, each over fsdp 2 x tensor 2, killed between two meetings and while it saves."""
    from killed_run import DILOCO

    steps = 40
    assert killed(processes, tmp_path / "whole", steps, parallel=DILOCO)[0] == 0
    for how in ({"seconds": 0.1}, {"point": POINTS[2], "after": 2}, {"seconds": 0.2}):
        code, _, reached = killed(processes, tmp_path / "run", steps, parallel=DILOCO, **how)
        assert (code, reached < steps) == (-signal.SIGKILL, True)
    code, began, _ = killed(processes, tmp_path / "run", steps, parallel=DILOCO)
    assert (code, 0 < began < steps) == (0, True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
