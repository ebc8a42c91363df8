"""What steps wait for their batches is measured, and a thread that reads ahead takes the wait away."""

import threading
import time

import hooks
import numpy as np
import pytest

from jaxpar.errors import JaxparError
from jaxpar.train.feed import Reader


class Uneven:
    """A feed whose every fourth batch takes longer than two steps."""

    def __init__(self, slow=0.4, bad=None):
        self.slow, self.bad, self.threads, self.steps = slow, bad, set(), []

    def read(self, step):
        self.threads.add(threading.current_thread().name)
        self.steps.append(step)
        if step == self.bad:
            raise ValueError("no such batch")
        time.sleep(self.slow if step % 4 == 3 else 0.0)
        return {"x": np.full(2, step)}

    def to_global_arrays(self, batch):
        return batch


def waits(feed, ahead, *, count=8, compute=0.15):
    """Returns what each step waits, where a step takes so many seconds."""
    found = []
    with Reader(feed, ahead=ahead, last=count) as reader:
        for step in range(count):
            batch, waited = reader.batch(step, None)
            assert batch["x"].tolist() == [step, step]
            found.append(waited)
            time.sleep(compute)
    return found


def test_a_slow_batch_delays_no_step_where_others_are_read_ahead():
    direct, ahead = Uneven(), Uneven()
    assert sum(wait > 0.3 for wait in waits(direct, 0)) == 2
    assert direct.threads == {"MainThread"}
    assert sum(waits(ahead, 4)) < 0.3
    assert "MainThread" not in ahead.threads
    assert direct.steps == ahead.steps == list(range(8))


def test_what_reading_raises_is_raised_where_the_batch_is_wanted():
    feed = Uneven(slow=0.0, bad=5)
    with Reader(feed, ahead=3, last=100) as reader:
        assert [reader.batch(step, None)[0]["x"][0] for step in range(5)] == list(range(5))
        with pytest.raises(ValueError, match="no such batch"):
            reader.batch(5, None)
    assert max(feed.steps) <= 8


@pytest.mark.nightly
def test_a_run_says_what_its_steps_waited_and_is_the_same_with_reading_ahead(tmp_path):
    def late(index):
        time.sleep(0.4 if index == 4 else 0.0)

    hooks.run(tmp_path / "direct", batch=late)
    hooks.run(tmp_path / "ahead", "data.ahead=3")
    direct, ahead = hooks.rows(tmp_path / "direct"), hooks.rows(tmp_path / "ahead")
    assert direct[4]["input_wait_seconds"] >= 0.4
    assert all(row["input_wait_seconds"] < 0.2 for row in direct if row["step"] != 5)
    assert [row["loss"] for row in direct] == [row["loss"] for row in ahead]
    assert direct[-1]["eval_loss"] == ahead[-1]["eval_loss"]


@pytest.mark.slow
def test_a_corrupt_batch_that_is_read_ahead_ends_the_run_at_its_step(tmp_path):
    def broken(index):
        if index == 5:
            raise ValueError("torn")

    with pytest.raises(JaxparError, match="torn"):
        hooks.run(tmp_path / "run", "data.ahead=3", batch=broken)
    assert [row["step"] for row in hooks.rows(tmp_path / "run")] == [1, 2, 3, 4, 5]  # of batches 0 to 4
