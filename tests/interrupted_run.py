"""A run of `jaxpar train` in a process of its own, and a thread in it that sends the process a signal in some phase.

The process is forked from one that has imported jax and not used it. What `train/test_random_interruptions.py` starts.
"""

import os
import random
import signal
import sys
import threading
import time

import numpy as np
import optax

from jaxpar.cli.main import main
from jaxpar.optim.eval_params import ema_params

JOB = """
[mesh]
simulate = 2
[parallel]
data = 2
[model]
layers = 1
dim = 16
heads = 2
vocab = 32
[data]
source = "interrupted_run:Numbers"
[optimizer]
learning_rate = 0.02
decay = "constant"
[train]
steps = 12
global_batch = 4
eval_every = 3
[checkpoint]
every = 5
keep_last = 1
"""
LOOP, COMPILER = "train/loop", ("backend_compile_and_load", "backend_compile", "compile_or_get_cached")
# A phase is the first of these for each of which the main thread is in a function: (part of the file's name, names)
PHASES = {
    "compile": [("jax/_src", COMPILER), (LOOP, ("_train_until_end", "_evaluate"))],
    "last save": [("checkpoint/store", ("finish",))],
    "save": [(LOOP, ("_save",))],
    "evaluation": [(LOOP, ("_evaluate",))],
    "step": [(LOOP, ("_train_until_end",))],
    "packing": [("job/parts/batches", ("open_data",))],
    "sample": [("cli/sample", ("run_sample",))],
}


def rows(step, size):
    """Sequences that count up until batch 16, and down after it: evaluations, which count up, get worse."""
    rng = np.random.default_rng(step)
    way = -1 if 16 <= step < 1000 else 1
    tokens = (rng.integers(0, 32, (size, 1)) + way * np.arange(9)).astype(np.int32) % 32
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((size, 8), np.float32)}


class Numbers:
    fingerprint = "numbers"

    def batch(self, step, size):
        return rows(step, size)

    def evaluation(self, index, size):
        return rows(1000 + index, size) if index < 3 else None


def held():
    return (rows(5000 + index, 4) for index in range(2))


class Stream:
    """Batches that depend on all before them, with a state as torchdata's loaders have."""

    def __init__(self):
        self.last = 7

    def __iter__(self):
        while True:
            self.last = (self.last * 48271) % 2147483647
            yield rows(2000 + self.last, 4)

    def state_dict(self):
        return {"last": self.last}

    def load_state_dict(self, state):
        self.last = state["last"]


def plain_stream():
    return (rows(index, 4) for index in range(100))


def averaged(learning_rate):
    return optax.chain(optax.adam(learning_rate), ema_params(0.9))


def phase():
    """Returns what the main thread does now."""
    frame, inside = sys._current_frames()[threading.main_thread().ident], set()
    while frame is not None:
        inside.add((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    for name, needs in PHASES.items():
        if all(any(file in path and function in names for path, function in inside) for file, names in needs):
            return name
    return "start"


def interrupt(aim, seed, number, send):
    """Sends the signal up to 4 ms after a phase has begun for the first or second time; tells which phase it hit."""
    rng, before = random.Random(seed), ""
    left = rng.randint(1, 2)
    while True:
        now = phase()
        left -= now == aim != before
        if now == aim and not left:
            break
        before = now
        time.sleep(0.0002)
    time.sleep(rng.uniform(0.0, 0.004))
    send.send(phase())
    send.close()
    os.kill(os.getpid(), number)


def run(folder, words, send, aim=None, seed=0, number=0):
    """Runs the command; its status is that of this process."""
    with open(f"{folder}.out", "a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
    # `nohup pytest &` ignores both, and so would a run
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setswitchinterval(0.0005)
    if aim:
        threading.Thread(target=interrupt, args=(aim, seed, number, send), daemon=True).start()
    else:
        send.close()
    try:
        status = main(words)
    except KeyboardInterrupt:  # while the command is read: Python itself ends so
        status = 130
    os._exit(status)  # not by way of what multiprocessing does at an end, which a signal would find
