"""Runs of many kinds that signals stop at random moments end as runs that nobody disturbs, bit for bit.

Losses, evaluations, which checkpoints are kept, and the step at which the run ends are equal.
"""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest
from interrupted_run import JOB

pytestmark = pytest.mark.xdist_group("interruptions")

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
AIMS = ["evaluation", "save", "step", "compile"]
KINDS = {
    "patience and keep_best": ["train.steps=40", "train.eval_every=2", "train.patience=2", "checkpoint.keep_best=1"],
    "sets by name": ['data.sets={other={source="interrupted_run:held"}}', "checkpoint.keep_best=2"],
    "stream with a state": ['data.source="interrupted_run:Stream"', 'data.evaluation="interrupted_run:held"'],
    "growing batch": ["train.grow=[[4,2]]"],
    "adapters": ['train.adapters={rank=2,paths=["blocks/attention/*"]}'],
    "diloco": ['parallel.exchange={name="diloco",every=4}'],
    "easgd": ['parallel.exchange={name="easgd",every=4}'],
    "accumulate": ["train.accumulate=2"],
    "data.ahead": ["data.ahead=3", "checkpoint.every=2"],
    "mixture by weights": [
        "data.source=text",
        'data.path=["a.txt","b.txt"]',
        "data.weights=[0.8,0.2]",
        "data.seq=8",
        "model.vocab=256",
    ],
    "gradient noise": ["metrics.noise_every=2"],
    "mean of parameters": ['optimizer.name="interrupted_run:averaged"'],
    "dropout": ["model.dropout=0.2", "checkpoint.every=0"],
    "pipeline": ["parallel.data=1", "parallel.pipe=2", "model.layers=2"],
    "stream without a state": ['data.source="interrupted_run:plain_stream"', 'data.evaluation="interrupted_run:held"'],
}
ONCE = 15  # a seed that means the first time that a run comes to a phase
LASTED: list[float] = []  # seconds from each signal to the end of its run
SECONDS = {"seconds", "tokens_per_second", "input_wait_seconds"}


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """A server that forks processes with everything imported; what they compile is kept."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(os.path.dirname(__file__)), os.environ.get("PYTHONPATH", "")]
    )
    patch = pytest.MonkeyPatch()
    patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
    patch.setenv("JAXPAR_NO_HUGE_PAGES", "1")  # a process that has forked is not to start again
    patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["interrupted_run"])
    yield context
    patch.undo()


@pytest.fixture(scope="module")
def undisturbed(processes, tmp_path_factory):
    """Returns a function of the kind: the run that nobody disturbs."""
    runs = {}

    def of(kind):
        if kind not in runs:
            runs[kind] = tmp_path_factory.mktemp("undisturbed") / "run"
            status, _ = start(processes, kind, runs[kind])
            assert status == 0, said(runs[kind])
        return ending(runs[kind])

    return of


def start(processes, kind, run, verb="train", **stop):
    """Starts a run, goes on with it or samples; returns the status and the phase that its signal hit, or None."""
    from interrupted_run import run as target

    folder = run.parent
    (folder / "job.toml").write_text(JOB)
    for name, text in (("a", "the quick brown fox. "), ("b", "pack my box with jugs. ")):
        (folder / f"{name}.txt").write_text(text * 40)
    more = [word.replace('"a.txt","b.txt"', f'"{folder}/a.txt","{folder}/b.txt"') for word in KINDS[kind]]
    words = ["train", str(folder / "job.toml"), "--allow-import", f"run.dir={run}", *more]
    if verb == "sample":
        words = ["sample", str(run), "--prompt", "the ", "--tokens", "40"]
    receive, send = processes.Pipe(duplex=False)
    process = processes.Process(target=target, args=(str(run), words, send), kwargs=stop)
    process.start()
    send.close()
    try:
        phase = receive.recv()
    except EOFError:  # the run ended before the thread met its moment
        phase = None
    at = time.monotonic()
    process.join(120)
    assert process.exitcode is not None, said(run)
    LASTED.append(time.monotonic() - at)
    return process.exitcode, phase


def said(run):
    return run.with_name(f"{run.name}.out").read_text()[-3000:]


def ending(run):
    """Returns the rows without their seconds, and which checkpoints are kept."""
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if name not in SECONDS} for row in read]
    return rows, sorted(path.name for path in (run / "checkpoints").iterdir())


def written(run):
    """Returns the rows that a run has written, as text; none where it has not begun."""
    rows = run / "metrics.jsonl"
    return rows.read_text() if rows.exists() else ""


CASES = [pytest.param(kind, seed, id=f"{kind}-{seed}") for seed in range(4) for kind in KINDS]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_run_that_is_stopped_at_random_ends_as_one_that_is_not(kind, seed, processes, undisturbed, tmp_path):
    rows, kept = undisturbed(kind)
    run, case = tmp_path / "run", seed * len(KINDS) + list(KINDS).index(kind)
    for again in range(1 + random.Random(case).randrange(2)):
        number, aim = SIGNALS[(case + again) % 6], AIMS[(case + seed + again) % 4]
        before = written(run)
        status, phase = start(processes, kind, run, aim=aim, seed=10 * case + again, number=number)
        print(f"{kind}: {number.name} in {phase} (aim {aim}): status {status}")
        if phase is None:
            assert status == 0, said(run)
            break
        at_the_end = status == -number and ending(run) == (rows, kept)  # after all was saved
        not_begun = (
            status == -number and phase in ("start", "compile") and written(run) == before
        )  # nothing to save yet
        assert status == 128 + number or at_the_end or not_begun, said(run)
    status, _ = start(processes, kind, run)
    assert status == 0, said(run)
    assert ending(run)[0] == rows, said(run)
    assert ending(run)[1] == kept, said(run)


@pytest.mark.full
@pytest.mark.parametrize("phase", ["start", "packing", "compile", "step", "evaluation", "save", "last save", "sample"])
@pytest.mark.parametrize("number", SIGNALS, ids=lambda each: each.name)
def test_what_a_signal_does_in_each_phase(number, phase, processes, tmp_path):
    """The table of jaxpar/train/README.md: only `train` listens, from its first step to its last save."""
    kind, verb = "mixture by weights", "sample" if phase == "sample" else "train"
    for again in range(5):  # a save may be over before it is seen
        run = tmp_path / str(again)
        if phase == "sample":
            assert start(processes, kind, run)[0] == 0, said(run)
        status, met = start(processes, kind, run, verb, aim=phase, seed=ONCE, number=number)
        if met is not None:
            break
    words = [line for line in said(run).splitlines() if "stopped" in line or number.name in line][-1:]
    print(f"| {phase} | {number.name} | {met} | {status} | {LASTED[-1]:.2f} s | {' '.join(words)[-90:]} |")
    ends_at_once = 130 if number == signal.SIGINT else -number
    assert met is not None
    if met in ("start", "packing", "sample"):
        assert status == ends_at_once, said(run)
    elif met == "last save":  # all is done but the waiting for the disk: the run has ended if its save has
        assert status in (0, 128 + number, ends_at_once), said(run)
    else:
        assert status == 128 + number, said(run)
        assert f"stopped by {number.name}, saved step" in said(run)
    assert start(processes, kind, run)[0] == 0, said(run)
    assert written(run).count("\n") >= 12
