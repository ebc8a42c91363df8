"""Every signal that asks for a stop saves the run: those of terminals and of queues, also while XLA compiles."""

import faulthandler
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time

import hooks
import pytest
from pairwise import some

from jaxpar.errors import STOPPED
from jaxpar.process_exit import stop_signals

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
ENV = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


@pytest.fixture(autouse=True)
def with_defaults():
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS if number != signal.SIGINT}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.nightly
@pytest.mark.parametrize("number", some(SIGNALS, [signal.SIGTERM], [signal.SIGINT]))
def test_each_signal_saves_the_step_and_the_run_goes_on(number, tmp_path):
    outcome, out = hooks.run(tmp_path, batch=hooks.signalling(number, 4))
    assert (outcome["stopped_by"], outcome["step"]) == (number.name, 5)
    assert hooks.saved(tmp_path) == [5]
    assert f"stopped by {number.name}, saved step 5" in out
    assert STOPPED[number.name] == 128 + number
    outcome, _ = hooks.run(tmp_path)
    assert (outcome["stopped_by"], outcome["step"]) == (None, 8)
    assert all(signal.getsignal(each) is not None for each in SIGNALS)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_a_warning_with_a_handler_of_the_users_stays_the_users(number):
    assert number in stop_signals()
    heard = []
    signal.signal(number, lambda *_: heard.append(True))
    assert number not in stop_signals()
    signal.signal(number, signal.SIG_IGN)
    assert number not in stop_signals()


@pytest.mark.slow
def test_faulthandlers_signal_stays_its_own(tmp_path):
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            outcome, _ = hooks.run(tmp_path / "run", batch=hooks.signalling(signal.SIGUSR1, 4))
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert (outcome["stopped_by"], outcome["step"]) == (None, 8)
    assert "hooks.py" in (tmp_path / "stacks").read_text()


def busy_then(check, number, seconds=3.0):
    """Keeps the main thread in one call of C, as XLA does when it compiles, while a signal comes."""

    def work(index):
        if index or not hooks.Hooked.trained:
            return
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        until = time.monotonic() + seconds
        while time.monotonic() < until and not check.seen:
            hashlib.pbkdf2_hmac("sha256", b"jaxpar", b"", check.rounds)
            check()

    return work


class SavedMeanwhile:
    """Looks whether a step was saved by the end of one call of C that lasts longer than the wait of the thread."""

    def __init__(self, folder):
        self.folder, self.seen = folder, []
        begin = time.monotonic()
        hashlib.pbkdf2_hmac("sha256", b"jaxpar", b"", 200_000)
        self.rounds = int(200_000 * 3 / (time.monotonic() - begin))

    def __call__(self):
        self.seen.append(hooks.saved(self.folder))


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), pytest.param(signal.SIGUSR1, marks=pytest.mark.full)],
)
def test_a_signal_while_the_main_thread_compiles_is_said_and_saves(number, tmp_path, monkeypatch):
    monkeypatch.setattr(hooks.Hooked, "trained", False, raising=False)
    check = SavedMeanwhile(tmp_path)

    def trained(step):
        hooks.Hooked.trained = step >= 2

    outcome, out = hooks.run(tmp_path, "train.eval_every=3", batch=trained, evaluation=busy_then(check, number))
    assert check.seen == [[3]]
    assert f"{number.name} heard while XLA compiles: saving meanwhile" in out
    assert (outcome["stopped_by"], outcome["step"]) == (number.name, 3)
    assert hooks.saved(tmp_path) == [3]
    outcome, _ = hooks.run(tmp_path, "train.eval_every=3")
    assert [row["step"] for row in hooks.rows(tmp_path) if "eval_loss" in row] == [3, 6, 8]


@pytest.mark.nightly
def test_a_run_is_saved_before_the_step_for_a_grown_batch_compiles(tmp_path):
    saved = []

    def look(step):
        if step == 6:  # the first batch has one draw of examples, the grown ones have two
            time.sleep(0.5)  # for the thread that writes
            saved.extend(hooks.saved(tmp_path))

    hooks.run(tmp_path, "train.grow=[[4, 2]]", batch=look)
    assert saved == [4]


JOB = """
[mesh]
simulate = 2
[parallel]
data = 2
[model]
layers = 1
dim = 16
heads = 2
vocab = 256
[data]
seq = 32
[train]
steps = 100000
global_batch = 4
"""


TRAIN, LAUNCH = ["train"], ["launch", "-n", "2", "train"]
OFTEN = [(LAUNCH, signal.SIGUSR1)]


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("verb", "number"),
    [
        pytest.param(verb, number, marks=pytest.mark.slow if (verb, number) in OFTEN else pytest.mark.full)
        for verb in (TRAIN, LAUNCH)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
    ],
)
def test_a_command_ends_with_the_signals_status_and_has_saved(verb, number, tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    command = [sys.executable, "-m", "jaxpar", *verb, "job.toml", "run.dir=mine"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV)
    rows = tmp_path / "mine" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (rows.exists() and rows.read_text().count("\n") > 5):
        assert time.monotonic() < until
        assert run.poll() is None, run.stdout.read()
        time.sleep(0.2)
    run.send_signal(number)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + number, out
    assert f"stopped by {number.name}, saved step" in out
    assert len(list((tmp_path / "mine" / "checkpoints").glob("0*"))) == 1
