"""The watch of many processes: it is cheap, patient with what is slow, and stops all after the same step.

It used to open files by the square of the number of processes, and in each of their steps; to take a long compilation
for a hang; and to stop processes after different steps where reads of the shared folder were old.
"""

import json
import sys
import threading
import time

import jax
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from simulated_processes import Training, dogs, turns

import jaxpar as jp
from jaxpar.job import run
from jaxpar.job.file.schema import Job, RunTable
from jaxpar.train.watchdog import watchdog as tree
from jaxpar.train.watchdog.beat import Files, Heartbeat
from jaxpar.train.watchdog.decisions import judge
from jaxpar.train.watchdog.digest import NAMES, merge
from jaxpar.train.watchdog.thread import WatchdogThread
from jaxpar.train.watchdog.watchdog import Watchdog

opened: list[tuple[int, str]] = []  # thread, file; while `counting`
counting = threading.Event()


def _heed(event, args):
    if event == "open" and counting.is_set():
        opened.append((threading.get_ident(), str(args[0])))


sys.addaudithook(_heed)  # sees every way in which Python opens a file; there is no way to take it back


@pytest.fixture
def opens():
    """The files that are opened in the test, by which thread."""
    opened.clear()
    counting.set()
    yield opened
    counting.clear()


def bare(watchdog):
    """Seconds in which the files of a turn are read, and as many bytes written, and nothing is made of them."""
    begin, folder = time.thread_time(), watchdog.files.folder
    for child in watchdog._children:
        json.loads((folder / f"{child}.json").read_bytes())
    part = folder / ".bare"
    part.write_bytes((folder / f"{watchdog.process}.json").read_bytes())
    part.replace(folder / "bare")
    return time.thread_time() - begin


# cheap


@pytest.mark.nightly
def test_the_watch_of_4096_processes_opens_few_files_and_takes_5_ms(tmp_path, opens):
    count, rounds = 4096, 2
    files = Files(tmp_path)
    watch = [Watchdog(files, process=p, count=count, limit=30.0) for p in range(count)]
    opens.clear()
    spent = [float("inf")] * count
    for _ in range(rounds):
        for each in reversed(watch):
            begin = time.thread_time()  # of the processor: others may use this machine
            assert each.turn() is None
            spent[each.process] = min(spent[each.process], time.thread_time() - begin)
    opened_by_turns = len(opens)
    assert opened_by_turns / rounds / watch[0].interval <= 20_000
    assert watch[0].known.late.count == count  # it knows of all
    counting.clear()
    slowest = sorted(watch, key=lambda each: spent[each.process])[-8:]
    for each in (dog for dog in slowest if spent[dog.process] > 0.005):  # slow, or disturbed both times
        turns, files_alone = [], []
        for _ in range(8):
            files_alone.append(bare(each))
            begin = time.thread_time()
            assert each.turn() is None
            turns.append(time.thread_time() - begin)
        # where the files of so many children alone take 2 ms, no watch of theirs takes 5
        assert min(turns) <= max(0.005, 3 * min(files_alone)), (each.process, min(turns), min(files_alone))


def test_a_step_opens_no_file(tmp_path, opens):
    watchdog = [WatchdogThread(tmp_path, "a", process=p, count=20, limit=30.0) for p in range(20)]
    opens.clear()
    for step in range(1, 200):
        for each in watchdog:
            each.begin_activity(step, "reading the batch")
            each.begin_activity(step, "training")
            assert each.stopping(None, step) is None
    mine = [file for thread, file in opens if thread == threading.get_ident()]
    for each in watchdog:
        each.close()
    assert mine == []


def test_who_reads_whom_is_a_tree():
    for count in (1, 2, tree.WIDTH, tree.WIDTH + 1, 300, 5000):
        read = [child for process in range(count) for child in tree.children(process, count)]
        assert sorted(read) == list(range(1, count))
        assert max(len(tree.children(process, count)) for process in range(count)) <= 3 * tree.WIDTH + 1


times = st.floats(0, 100)
beats = st.builds(
    Heartbeat,
    process=st.just(0), place=st.integers(0, 3), doing=st.sampled_from(["training", "saving", "done", "failed: x"]),
    stuck=times, longest=st.dictionaries(st.sampled_from(["saving", "compiling"]), times),
    fact=st.tuples(st.integers(0, 2), st.sampled_from("ab")), hold=st.integers(0, 3), stop=st.sampled_from(["", "S"]),
)  # fmt: skip


@given(st.lists(st.tuples(beats, times), min_size=1, max_size=9), st.integers(0, 9))
def test_digests_add_up_in_any_grouping(rows, cut):
    each = [Heartbeat(**vars(beat) | {"process": i}).digest(silent) for i, (beat, silent) in enumerate(rows)]
    whole, halves = merge(each), merge([merge(each[:cut]), merge(each[cut:])])
    assert judge(-1, whole, limit=9.0) == judge(-1, halves, limit=9.0)
    assert (whole.late, whole.longest, whole.holding, whole.hold) == (
        halves.late, halves.longest, halves.holding, halves.hold
    )  # fmt: skip
    assert whole.late is None or len(whole.late.names) <= NAMES
    assert {value: count for value, (count, _) in whole.facts.items()} == {
        value: count for value, (count, _) in halves.facts.items()
    }


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "lost",
    [pytest.param(0, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.slow), 299],
    ids=["the first", "one that others report to", "the last"],
)
def test_a_silent_one_of_300_is_named_by_all_in_time(tmp_path, lost):
    watch, clock = dogs(tmp_path, 300)
    assert set(turns(watch, clock, 5.0).values()) == {None}
    found = turns(watch, clock, 28.0, but={lost})
    assert set(found.values()) == {None}
    found = turns(watch, clock, 5.0, but={lost})
    assert {problem.got.partition(" (host")[0] for problem in found.values()} == {f"process {lost}"}


# patient


def compile_for(watch, clock, seconds, *, late, by):
    """Lets all processes compile, one of them for longer; returns what is found until it is through."""
    for dog in watch:
        dog.begin_activity(1, "compiling")
    found = turns(watch, clock, seconds)
    for dog in watch:
        if dog.process != late:
            dog.begin_activity(1, "training")
    found |= {process: problem or found[process] for process, problem in turns(watch, clock, by).items()}
    return {problem.got for problem in found.values() if problem}


@pytest.mark.parametrize(
    ("seconds", "by"), [(300, 32), (600, 35), (600, 290), pytest.param(1200, 60, marks=pytest.mark.slow)]
)
def test_a_long_compilation_is_no_hang(tmp_path, seconds, by):
    watch, clock = dogs(tmp_path, 3)
    assert compile_for(watch, clock, seconds, late=1, by=by) == set()


def test_a_compilation_that_does_not_end_is_found(tmp_path):
    watch, clock = dogs(tmp_path, 3)
    (got,) = {text.partition(" for ")[0] for text in compile_for(watch, clock, 60, late=1, by=60 + 300 + 35)}
    assert got.endswith("is late: compiling (step 1)")
    assert got.startswith("process 1 ")


def test_a_slow_batch_is_no_hang_where_the_first_was_slow_everywhere(tmp_path):
    watch, clock = dogs(tmp_path, 3)
    for dog in watch:
        dog.begin_activity(1, "reading the batch")
    turns(watch, clock, 14.0)
    for dog in watch:
        dog.begin_activity(1, "training")
        dog.begin_activity(2, "reading the batch")
    for dog in watch[1:]:
        dog.begin_activity(2, "training")
    assert set(turns(watch, clock, 50.0).values()) == {None}
    assert "process 0 " in turns(watch, clock, 15.0)[1].got  # that is longer than anyone has ever needed


def test_a_hang_in_a_step_is_found_in_time_whatever_was_compiled(tmp_path):
    watch, clock = dogs(tmp_path, 3)
    compile_for(watch, clock, 900, late=1, by=3)
    for step in range(1, 20):
        for dog in watch:
            dog.begin_activity(step, "training")
        turns(watch, clock, 0.5)
    for dog in watch[1:]:
        dog.begin_activity(20, "training")
    assert set(turns(watch, clock, 29.0).values()) == {None}
    assert "process 0 " in turns(watch, clock, 3.0)[2].got


@pytest.mark.nightly
def test_a_step_says_when_it_compiles(tmp_path):
    layout = jp.compose(tiny.Annotated, jp.Parallel(data=2), jax.devices()[:2])
    chain, batches, said = tiny.optimizer(), list(tiny.batches(2)), []
    step = jp.train_step(layout, tiny.token_loss, chain)
    watchdog = WatchdogThread(tmp_path, "a", process=0, count=1, limit=30.0)
    step.compiler.compile_context = lambda: said.append("compiling") or watchdog.compiling()
    step.compiler.compare_programs = lambda what, _: said.append(f"{watchdog._watchdog.beat.doing}: {what}")
    watchdog.begin_activity(1, "training")
    state = jp.init_state(layout, chain, seed=1)
    for batch in batches:
        state, _ = step(state, batch)
        assert watchdog._watchdog.beat.activity == "training (step 1)"
    step.evaluate(state, batches[0])
    watchdog.close()
    assert said == ["compiling", "compiling: train program (0)", "compiling", "compiling: eval program (1)"]


@pytest.mark.parametrize("timeout", [5.0, 30.0, 120.5])
def test_jax_waits_longer_for_a_paused_process_than_the_watch(tmp_path, monkeypatch, timeout):
    seen = {}
    monkeypatch.setattr(run, "connect", lambda cluster, **settings: seen.update(settings))
    monkeypatch.setattr(run, "WatchdogThread", lambda *_, **settings: seen.update(settings))
    for name, value in (("COORDINATOR", "127.0.0.1:7"), ("PROCESSES", "2"), ("PROCESS", "0")):
        monkeypatch.setenv(f"JAXPAR_{name}", value)
    run._connect(Job(run=RunTable(dir=str(tmp_path), timeout=timeout)), tmp_path)
    assert seen["limit"] == timeout
    assert seen["heartbeat"] >= timeout + 20


# stopping


@pytest.mark.parametrize(("count", "delay"), [(2, 0.0), (2, 3.0), (3, 12.0), (40, 3.0)])
def test_all_stop_after_the_same_step_though_reads_are_old(tmp_path, count, delay):
    watch, clock = dogs(tmp_path, count, delay=delay)
    turns(watch, clock, 2 * delay + 2)
    runs, ticks = [Training(dog) for dog in watch], 0
    watch[-1].wish("SIGTERM")
    while not all(run.stopped for run in runs) and clock.now < 1000:
        clock.now += 0.048  # seconds per step
        ticks += 1
        for i, each in enumerate(runs):  # some are ahead, by as many steps as the loop keeps in flight
            each.go(most=min(other.step for other in runs) + 1 + i % 3)
        for dog in watch[ticks % 10 :: 10]:
            assert dog.turn() is None
    assert len({run.step for run in runs}) == 1
    assert clock.now < 8 * delay + 20


def test_what_is_decided_stays_though_the_file_is_gone_for_a_moment(tmp_path):
    watch, clock = dogs(tmp_path, 2)
    watch[1].wish("SIGTERM")
    turns(watch, clock, 3.0)
    assert (watch[1].holds(1), watch[1].stops(1)) == (False, "SIGTERM")
    watch[1].files.held.clear()
    watch[1].turn()
    assert (watch[1].holds(1), watch[1].stops(1)) == (False, "SIGTERM")
