"""Processes that watch each other: who is at fault is found by one pure function; files and threads carry it."""

import errno
import re
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.errors import JaxparError
from jaxpar.train.watchdog.beat import Heartbeat, read
from jaxpar.train.watchdog.decisions import judge
from jaxpar.train.watchdog.digest import merge
from jaxpar.train.watchdog.thread import LostPeer, SingleProcess, WatchdogThread

LIMIT = 30.0


def beats(*others, **mine):
    """Returns what processes say, process 0 first: each as (place, doing, silent, stuck)."""
    rows = [{"place": 5, "doing": "training", "silent": 0.0, "stuck": 0.0} | row for row in (mine, *others)]
    return [
        (
            Heartbeat(
                process=i, host=f"h{i}", pid=i, place=row["place"], step=row["place"], doing=row["doing"],
                stuck=row["stuck"],
            ),
            row["silent"],
        )
        for i, row in enumerate(rows)
    ]  # fmt: skip


def heard(*others, **mine):
    """Returns what is known of such processes."""
    return merge(beat.digest(silent) for beat, silent in beats(*others, **mine))


def test_all_well_is_no_problem():
    assert judge(0, heard({}, {}, {}), limit=LIMIT) is None
    assert judge(0, heard({"doing": "done", "silent": 1e6}, stuck=1e6), limit=LIMIT) is None
    long_step = [{"stuck": 1e6}] * 3
    assert judge(0, heard(*long_step, stuck=1e6), limit=LIMIT) is None  # nobody is behind: it is only slow


def test_a_silent_process_is_named_with_its_host_and_what_it_did():
    found = judge(0, heard({}, {"silent": 31.0, "doing": "saving"}), limit=LIMIT)
    assert "process 2 (host h2, pid 2) has given no sign of life for 31 s; it was saving (step 5)" in found.got


def test_a_late_process_is_named_also_by_itself():
    rows = ({"place": 4, "doing": "reading the batch", "stuck": 33.0}, {"stuck": 31.0})
    for me in range(3):
        found = judge(me, heard(*rows, stuck=31.0), limit=LIMIT)
        assert found.got.startswith("process 1 (host h1, pid 1) is late: reading the batch (step 4) for 33 s")
        assert "2 others wait, training (step 5)" in found.got


def test_compiling_may_take_ten_times_as_long():
    rows = ({"place": 4, "doing": "compiling", "stuck": 200.0}, {"stuck": 199.0})
    assert judge(0, heard(*rows, stuck=199.0), limit=LIMIT) is None
    rows = ({"place": 4, "doing": "compiling", "stuck": 301.0}, {"stuck": 300.5})
    assert "is late: compiling" in judge(0, heard(*rows, stuck=300.5), limit=LIMIT).got


def test_it_may_take_as_long_again_as_it_took_another():
    rows = ({"place": 4, "doing": "compiling", "stuck": 1500.0}, {"stuck": 900.0})
    known = replace(heard(*rows, stuck=900.0), longest={"compiling": 601.0})
    assert judge(0, known, limit=LIMIT) is None
    assert judge(0, replace(known, longest={"compiling": 599.0}), limit=LIMIT) is not None
    assert judge(0, replace(known, longest={"saving": 601.0}), limit=LIMIT) is not None


def test_a_process_that_failed_says_why():
    found = judge(0, heard({"doing": "failed: no data"}), limit=LIMIT)
    assert found.got == "process 1 (host h1, pid 1) ended: no data"
    assert judge(1, heard({"doing": "failed: no data"}), limit=LIMIT) is None  # it says so itself


times = st.floats(0, 1000)
words = st.sampled_from(["training", "compiling", "done"])
rows = st.fixed_dictionaries({"place": st.integers(0, 3), "doing": words, "silent": times, "stuck": times})


@given(st.lists(rows, min_size=2, max_size=6))
def test_nobody_is_blamed_within_the_limit(rows):
    quick = [row | {"silent": min(row["silent"], LIMIT), "stuck": min(row["stuck"], LIMIT)} for row in rows]
    assert judge(0, heard(*quick[1:], **quick[0]), limit=LIMIT) is None


@given(st.lists(rows, min_size=2, max_size=6))
def test_who_is_blamed_is_silent_or_last(rows):
    found = judge(0, heard(*rows[1:], **rows[0]), limit=LIMIT)
    if found is not None:
        everyone = beats(*rows[1:], **rows[0])
        blamed = [(beat, silent) for beat, silent in everyone if beat.name in found.got]
        least = min(beat.place for beat, _ in everyone if not beat.ended)
        assert blamed
        assert all(silent > LIMIT or (beat.place == least and beat.stuck > LIMIT) for beat, silent in blamed)


def meet(folder, count, *, limit=1.0, end=None):
    return [WatchdogThread(folder, "a", process=i, count=count, limit=limit, end=end) for i in range(count)]


def together(*calls):
    """Makes all calls at once; returns what each raised, or None."""
    raised = {}

    def make(i, call):
        try:
            call()
            raised[i] = None
        except JaxparError as error:
            raised[i] = error

    threads = [threading.Thread(target=make, args=(i, call)) for i, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [raised[i] for i in range(len(calls))]


def test_processes_agree_or_the_odd_one_is_named(tmp_path):
    watchdog = meet(tmp_path, 3)
    assert together(*(partial(each.agree, "job", "a = 1\nb = 2") for each in watchdog)) == [None] * 3
    values = ["a = 1\nb = 2", "a = 1\nb = 2", "a = 1\nb = 3"]
    for error in together(*(partial(each.agree, "job", value) for each, value in zip(watchdog, values, strict=True))):
        assert re.search(r"process 2 \(host .*\) has another job than the other 2: .*it has b = 3", str(error))
        assert error.status == 1
    for each in watchdog:
        each.close()


def test_one_that_never_comes_is_named(tmp_path):
    (first, second) = meet(tmp_path, 2, limit=0.1, end=lambda problem: None)
    with pytest.raises(LostPeer, match=r"process 1 \(host .*\) is late: starting for .*agreeing on the data") as error:
        first.agree("data", "x")
    assert error.value.status == 75
    first.close()
    second.close()


def test_a_stopped_thread_and_a_late_one_are_found_in_time(tmp_path):
    found = []
    first, second = meet(tmp_path, 2, end=found.append)
    second._closed.set()  # as if it were stopped: it says nothing any more
    begin = time.monotonic()
    while not found and time.monotonic() - begin < 10:
        time.sleep(0.02)
    assert "process 1" in found[0].got
    assert 1.0 <= time.monotonic() - begin < 3.0
    first.close()


def test_all_stop_after_the_same_step(tmp_path):
    watchdog, stopped = meet(tmp_path, 3, limit=30.0), {}

    def train(each):
        for step in range(1, 10_000):
            time.sleep(0.001 * (1 + each.process))  # the wish comes to process 2, in its third step
            if each.stopping("SIGTERM" if each.process == 2 and step >= 3 else None, step):
                stopped[each.process] = step
                return

    begin = time.monotonic()
    assert together(*(partial(train, each) for each in watchdog)) == [None] * 3
    assert len(set(stopped.values())) == 1
    assert time.monotonic() - begin < 5.0
    for each in watchdog:
        each.close()


def test_on_a_full_disk_a_process_still_says_that_it_lives(tmp_path, monkeypatch):
    (watchdog,) = meet(tmp_path, 1)
    watchdog._closed.set()
    watchdog._asked.set()
    watchdog._thread.join()
    before = read(watchdog.folder, 0)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    watchdog.begin_activity(123, "training")
    watchdog._watchdog.turn()
    after = read(watchdog.folder, 0)
    assert (after.step, after.doing) == (123, "training")
    assert after.count > before.count
    watchdog._watchdog.files.state(0, "eval program (1)")
    assert watchdog._watchdog.files.read_fact(0) == ""
    monkeypatch.setattr("pathlib.Path.write_text", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        watchdog._watchdog.turn()


def test_alone_there_is_nothing_to_agree_on():
    alone = SingleProcess()
    assert alone.stopping("SIGINT", 3) == "SIGINT"
    alone.agree("job", "x")
    error = ValueError("Gloo")
    assert alone.explain(error) is error


def test_a_broken_collective_is_explained(tmp_path):
    first, second = meet(tmp_path, 2, end=lambda problem: None)
    second.begin_activity(7, "training")
    second.close("failed: the loss is nan")
    lost = first.explain(ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"))
    assert isinstance(lost, LostPeer)
    assert "process 1" in str(lost)
    assert "the loss is nan" in str(lost)
    error = ValueError("something of the user's")
    assert first.explain(error) is error
    first.close()
