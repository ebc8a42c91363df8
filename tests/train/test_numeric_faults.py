"""Numbers that go wrong: what is skipped leaves no trace, what is rolled back was never seen."""

import inspect
import io
import json
import math
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from pairwise import some

import jaxpar as jp
from jaxpar.data.arrays import Arrays
from jaxpar.data.packed import Packed
from jaxpar.data.spec import Data
from jaxpar.data.text import Tokens
from jaxpar.data.validate import BatchSpec, CorruptBatch
from jaxpar.errors import JaxparError
from jaxpar.job import run as job_run
from jaxpar.job.check import check
from jaxpar.job.file.parse import load, loads
from jaxpar.train.faults import BadStep, Faults, SkippedBatches, Watch
from jaxpar.train.feed import Feed

# a step that skips

STASHED = {"pipe": 2, "pipeline": jp.Pipeline(schedule="1f1b", microbatches=4, weights="stash")}
CASES = {
    "data": (tiny.Annotated, {"data": 2}, {}),
    "zero3": (tiny.Annotated, {"fsdp": 2, "zero": 3}, {}),
    "zero1 accumulated": (tiny.Annotated, {"fsdp": 2, "zero": 1}, {"accumulate": 2}),
    "pipeline": (lambda rngs: tiny.Staged(rngs, layers=2, rate=0.1), {"pipe": 2}, {}),
    "pipeline without a flush": (lambda rngs: tiny.Staged(rngs, layers=2, tied=False), STASHED, {}),
}


def bits(state):
    parts = (state.params, state.optimizer, state.model_state)
    return [np.asarray(leaf).tobytes() for leaf in jax.device_get(jax.tree.leaves(jax.tree.map(tiny._bits, parts)))]


@pytest.mark.nightly
@pytest.mark.parametrize("case", some(CASES, ["zero3"], ["pipeline without a flush"]))
def test_a_skipped_step_leaves_the_state_bit_for_bit(case):
    model, parallel, numerics = CASES[case]
    chain = tiny.optimizer()
    layout = jp.compose(model, jp.Parallel(**parallel), jax.devices()[:2])
    step = jp.train_step(layout, tiny.token_loss, chain, guard=True, **numerics)
    first, bad, last = tiny.batches(3)
    bad["mask"][3, 1] = np.nan
    state, metrics = step(jp.init_state(layout, chain, seed=1), first)
    assert not metrics["skipped"]
    before = bits(state)
    state, metrics = step(state, bad)
    assert metrics["skipped"]
    assert math.isnan(metrics["loss"])
    assert (bits(state), int(state.step)) == (before, 2)
    state, metrics = step(state, last, limit=0.5)
    assert metrics["skipped"]
    assert math.isfinite(metrics["loss"])
    assert (bits(state), int(state.step)) == (before, 3)
    state, metrics = step(state, last)
    assert not metrics["skipped"]
    assert all(a != b for a, b in zip(bits(state), before, strict=True) if len(a) > 64)


def test_a_step_that_does_not_guard_has_no_choice_in_it():
    layout = jp.compose(tiny.Annotated, jp.Parallel(data=2), jax.devices()[:2])
    chain, (batch,) = tiny.optimizer(), tiny.batches(1)
    plain, guarded = (jp.train_step(layout, tiny.token_loss, chain, guard=guard) for guard in (False, True))
    looks = re.compile(r"is_finite %\S+ : \(tensor<f32>\)")
    assert not looks.search(plain.lower(plain.abstract(), batch).as_text())
    assert looks.search(guarded.lower(guarded.abstract(), batch).as_text())


# runs

JOB = """
[mesh]
devices = 2
[parallel]
data = 2
[model]
layers = 1
dim = 16
heads = 2
vocab = 32
[data]
source = "test_numeric_faults:Planted"
[optimizer]
learning_rate = 0.02
decay = "constant"
[train]
steps = 14
global_batch = 4
[checkpoint]
every = 4
keep_last = 4
"""


class Planted:
    """Tokens that repeat, so that a loss falls; with faults at some batches, or a gap of batches."""

    fingerprint = "planted"
    bad: dict = {}
    gap = (0, 0)

    def batch(self, step, size):
        at, past = Planted.gap
        step += past * (step >= at)
        rng = np.random.default_rng(step)
        tokens = (rng.integers(0, 32, (size, 1)) + np.arange(9)).astype(np.int32) % 32
        mask = np.ones((size, 8), np.float32)
        fault = Planted.bad.get(step)
        if fault == "nothing counts":
            mask[:] = 0
        elif fault == "overflow":  # inf / inf
            mask[:] = 3e38
        elif fault == "spike":
            tokens = rng.integers(0, 32, (size, 9)).astype(np.int32)
        elif fault == "token":
            tokens[1, 2] = 99
        elif fault == "inf":
            mask[2, 3] = np.inf
        elif fault == "dtype":
            mask = mask > 0
        elif fault == "rows":
            mask = mask[1:]
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


def run(folder, *overrides, bad=None, gap=(0, 0)):
    Planted.bad, Planted.gap = bad or {}, gap
    said = io.StringIO()
    outcome = job_run.train(loads(JOB, [f"run.dir={folder}", *overrides]), stream=said)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return outcome, rows, said.getvalue()


def losses(rows):
    return [(row["loss"], row["grad_norm"]) for row in rows]


@pytest.mark.nightly
def test_stop_names_the_step_and_saves_nothing_after_it(tmp_path):
    with pytest.raises(JaxparError, match=r"the loss of step 6 is nan \(grad_norm 0.0\)"):
        run(tmp_path, bad={5: "overflow"})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000004"]


@pytest.mark.nightly
def test_skip_goes_on_and_says_so(tmp_path):
    words = ["faults.on_bad_step=skip", "optimizer.decay=linear", "optimizer.final=0.0"]
    _, rows, _ = run(tmp_path / "falling", *words, bad={5: "overflow"})
    assert [row["learning_rate"] for row in rows[4:8]] == pytest.approx([0.02 * (14 - n) / 14 for n in (4, 5, 5, 6)])
    outcome, rows, said = run(tmp_path / "again", "faults.on_bad_step=skip", bad={5: "overflow"})
    assert outcome["step"] == 14
    assert [row["step"] for row in rows if row.get("skipped")] == [6]
    assert rows[5]["loss"] is None
    assert all(math.isfinite(row["loss"]) for row in rows if row["step"] != 6)
    assert "step 6 skipped: loss nan" in said


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", pytest.param("skip", marks=pytest.mark.full)])
def test_steps_in_which_nothing_counts_are_said_and_do_not_end_a_run(tmp_path, policy):
    words = [f"faults.on_bad_step={policy}", "faults.skips=1", "faults.spike=3.0"]
    outcome, rows, said = run(tmp_path, *words, bad=dict.fromkeys((4, 5, 6), "nothing counts"))
    assert outcome["step"] == 14
    assert [row["step"] for row in rows if row["tokens"] == 0] == [5, 6, 7]
    assert all((row["loss"] is None) == (row["step"] in (5, 6, 7)) for row in rows)
    assert said.count("no example of its batch counts (a mask of zeros?)") == 3
    assert "step 5: no example of its batch counts" in said
    assert rows[-1]["loss"] < rows[3]["loss"]


@pytest.mark.nightly
def test_too_many_skipped_in_a_row_stop_the_run(tmp_path):
    with pytest.raises(JaxparError, match=r"step 7 is bad .*, the last of 3 in a row"):
        run(tmp_path, "faults.on_bad_step=skip", "faults.skips=2", bad=dict.fromkeys((4, 5, 6), "overflow"))


@pytest.mark.nightly
def test_a_rollback_equals_a_run_that_never_saw_those_batches(tmp_path):
    bad = {9: "overflow"}  # step 10; the newest checkpoint is of step 8, so batches 8 and 9 are passed over
    _, rows, said = run(tmp_path / "back", "faults.on_bad_step=rollback", bad=bad)
    _, never, _ = run(tmp_path / "never", gap=(8, 2))
    assert losses(rows) == losses(never)
    assert "the loss of step 10 is nan (grad_norm 0.0): back to step 8" in said
    skipped = json.loads((tmp_path / "back" / "skipped_batches.json").read_text())
    assert [(each["at"], each["past"]) for each in skipped["skipped"]] == [(8, 2)]


@pytest.mark.nightly
def test_a_run_that_went_back_and_is_stopped_goes_on_the_same(tmp_path):
    bad = {5: "overflow", 13: "overflow"}
    roll = "faults.on_bad_step=rollback"
    _, rows, _ = run(tmp_path / "whole", roll, bad=bad)
    run(tmp_path / "stopped", roll, "train.steps=7", bad=bad)
    _, resumed, said = run(tmp_path / "stopped", roll, bad=bad)
    assert "on from step 7" in said
    assert losses(resumed) == losses(rows)
    again = json.loads((tmp_path / "stopped" / "skipped_batches.json").read_text())
    assert again["rollbacks"] == 2


@pytest.mark.slow
def test_a_run_goes_back_three_times_at_most(tmp_path):
    bad = dict.fromkeys(range(5, 40), "overflow")
    with pytest.raises(JaxparError, match="after 3 rollbacks"):
        run(tmp_path, "faults.on_bad_step=rollback", bad=bad)


@pytest.mark.nightly
def test_without_a_checkpoint_there_is_nothing_to_go_back_to(tmp_path):
    with pytest.raises(JaxparError, match=r"the loss of step 3 is nan .*, and no checkpoint to go back to"):
        run(tmp_path, "faults.on_bad_step=rollback", bad={2: "overflow"})


@pytest.mark.nightly
@pytest.mark.parametrize("policy", some(["stop", "skip", "rollback"], ["rollback"], ["skip"]))
def test_a_spike_is_a_bad_step(tmp_path, policy):
    words = [f"faults.on_bad_step={policy}", "faults.spike=1.5", "train.steps=24"]
    if policy == "stop":
        with pytest.raises(JaxparError, match=r"the loss of step 20 is .*, a spike above"):
            run(tmp_path, *words, bad={19: "spike"})
        return
    outcome, rows, _ = run(tmp_path, *words, bad={19: "spike"})
    assert outcome["step"] == 24
    assert [row["step"] for row in rows if row.get("skipped")] == ([20] if policy == "skip" else [])
    assert (tmp_path / "skipped_batches.json").exists() is (policy == "rollback")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "got"),
    [
        (
            "token",
            r"step 6 is corrupt: targets\[1, 1\] is 99|step 6 is corrupt: inputs\[1, 2\] is 99 \(row 1, batch 5 of",
        ),
        pytest.param(
            "inf", r"step 6 is corrupt: mask\[2, 3\] is inf \(row 2, batch 5 of .*; 1 such\)", marks=pytest.mark.full
        ),
        pytest.param(
            "dtype",
            r"step 6 is corrupt: mask is bool\[4, 8\], in the first batch it was float32\[4, 8\]",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "rows",
            r"step 6 is corrupt: test_numeric_faults:Planted yields mask of shape \[3, 8\]",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_corrupt_batch_is_named_before_it_is_fed(tmp_path, fault, got):
    with pytest.raises(JaxparError, match=got):
        run(tmp_path, bad={5: fault})


@pytest.mark.slow
def test_a_corrupt_batch_that_is_skipped_was_never_there(tmp_path):
    bad = {5: "token", 6: "rows", 11: "inf"}
    _, rows, said = run(tmp_path / "skips", "faults.on_bad_batch=skip", "train.steps=9", bad=bad)
    _, never, _ = run(tmp_path / "never", "train.steps=9", gap=(5, 2))
    assert losses(rows) == losses(never)
    assert said.count("passed over") == 2
    Planted.bad, Planted.gap = bad, (0, 0)
    assert SkippedBatches(tmp_path / "skips", fresh=False).batch_index(8) == 10
    with pytest.raises(JaxparError, match="3 corrupt batches one after the other"):
        run(tmp_path / "many", "faults.on_bad_batch=skip", "faults.skips=2", bad=dict.fromkeys(range(3, 9), "token"))


@pytest.mark.spread(0)
@pytest.mark.parametrize("on_bad_step", some(["rollback", "skip"], [], ["rollback"]))
def test_two_processes_come_to_the_same_as_one(tmp_path, on_bad_step):
    bad = {6: "overflow", 9: "token"}
    code = inspect.getsource(Planted).replace("bad: dict = {}", f"bad = {bad}")
    (tmp_path / "planted.py").write_text(f"import numpy as np\n\n\n{code}")
    (tmp_path / "job.toml").write_text(
        JOB.replace("devices = 2", "simulate = 2").replace("test_numeric_faults:", "planted:")
    )
    words = [f"faults.on_bad_step={on_bad_step}", "faults.on_bad_batch=skip", "faults.spike=50.0"]
    seen = []
    for command in (["train"], ["launch", "-n", "2", "--restarts", "0", "train"]):
        target = tmp_path / command[0]
        whole = [sys.executable, "-m", "jaxpar", *command, "job.toml", f"run.dir={target}", *words]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
        skipped = json.loads((target / "skipped_batches.json").read_text())["skipped"]
        seen.append((losses(rows), [row.get("skipped") for row in rows], skipped))
    assert len(seen[0][0]) == 14
    assert seen[0] == seen[1]


# the pieces


def values(loss, norm=1.0):
    return {"loss": loss, "grad_norm": norm, "skipped": 0.0}


@given(st.lists(st.floats(0.5, 4.0), min_size=8, max_size=60))
def test_a_limit_is_the_same_after_any_resume_and_any_rollback(some):
    faults = Faults(spike=100.0)
    whole = Watch(faults, span=60)
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(some, start=1)]
    for row in rows:
        whole.judge(row["step"], values(row["loss"]))
    for at in range(1, len(some) + 1):
        resumed = Watch(faults, rows[:at])
        assert resumed.limit(at + 1) == whole.limit(at + 1)
    cut = len(some) // 2
    back = Watch(faults, rows, span=60)
    back.rewind(cut)
    assert back.limit(cut + 2) == Watch(faults, rows[:cut]).limit(cut + 2)


def test_a_limit_is_a_multiple_of_the_median_of_32():
    watch = Watch(Faults(spike=3.0), [{"step": step, "loss": float(step)} for step in range(1, 41)])
    assert watch.limit(42) == 3 * np.median(np.arange(9, 41))
    assert Watch(Faults(), [{"step": 1, "loss": 1.0}]).limit(9) == math.inf
    assert Watch(Faults(spike=3.0), [{"step": step, "loss": -1.0} for step in range(1, 41)]).limit(42) == math.inf


@pytest.mark.parametrize(
    ("loss", "norm", "got"),
    [
        (math.nan, math.nan, "the loss of step 4 is nan (grad_norm nan)"),
        (2.0, math.inf, "the gradients of step 4 are not finite (grad_norm inf, loss 2)"),
    ],
)
def test_what_is_not_finite_is_named(loss, norm, got):
    with pytest.raises(BadStep) as caught:
        Watch().judge(4, values(loss, norm))
    assert (caught.value.step, caught.value.problems[0].got) == (4, got)


@pytest.mark.parametrize("norm", [math.nan, 0.7])
def test_a_loss_that_is_not_a_number_late_may_come_from_an_id_out_of_range(norm):
    with pytest.raises(BadStep) as caught:
        Watch().judge(4, values(math.nan, norm))
    assert caught.value.problems[0].fix.startswith("labels within 0..classes - 1 and tokens within 0..vocab - 1")


def test_skips_within_skips_end_after_the_bad_batch(tmp_path):
    skipped = SkippedBatches(tmp_path, fresh=True)
    skipped.go_back(15, to=10, why="")
    assert [skipped.batch_index(step) for step in (9, 10, 11)] == [9, 15, 16]
    skipped.go_back(18, to=15, why="")
    assert [skipped.batch_index(step) for step in (14, 15)] == [19, 23]
    skipped.go_back(12, to=5, why="")  # the newer checkpoints were lost
    assert [skipped.batch_index(step) for step in (4, 5, 6, 30)] == [4, 17, 18, 42]
    skipped.skip(7, "")
    assert [skipped.batch_index(step) for step in (6, 7, 8)] == [18, 20, 21]
    again = SkippedBatches(tmp_path, fresh=False)
    assert (again.all, again.rollbacks) == (skipped.all, 3)
    (tmp_path / "skipped_batches.json").write_text("{")
    with pytest.raises(JaxparError, match="damaged"):
        SkippedBatches(tmp_path, fresh=False)
    assert SkippedBatches(tmp_path, fresh=True).all == []


def test_labels_that_do_not_count_may_be_none():
    sound = BatchSpec(id_counts={"labels": 3})
    labels, mask = np.array([0, 2, -100]), np.array([1.0, 1.0, 0.0])
    assert sound.check({"labels": labels, "mask": mask}, str)
    with pytest.raises(CorruptBatch, match=r"labels\[2\] is -100"):
        sound.check({"labels": labels}, str)


def careful(source, folder, size, said, policy="stop", rows=None, **below):
    """Returns a feed; `rows` are those that a process holds, as one of several."""
    skipped, faults = SkippedBatches(folder, fresh=True), Faults(on_bad_batch=policy)
    layout = jp.compose(lambda rngs: nnx.Linear(2, 2, rngs=rngs), jp.Parallel(), jax.devices()[:1])
    feed = Feed(source, layout, size, good=BatchSpec(id_counts=below), skipped=skipped, faults=faults, say=said.append)
    feed.rows = rows
    return feed


def test_a_row_of_a_file_is_named_by_where_it_lies(tmp_path):
    tokens = np.arange(200, dtype=np.uint16) % 50
    tokens[100] = 999  # the first target of window 9, and the last token that is shown to it in window 10
    (tmp_path / "tokens.bin").write_bytes(tokens.tobytes())
    spec = Data(source="text", path="x", seq=10, held_out=0.0, shuffle=False)
    source = Tokens(tmp_path / "tokens.bin", Packed(text="f", mark="", dtype="uint16", size=0, parts=()), spec, 0)
    with pytest.raises(JaxparError, match=r"targets\[1, 9\] is 999 \(row 1, from token 90 of .*tokens.bin; 1 such\)"):
        careful(source, tmp_path, 2, [], inputs=50, targets=50).read(4)
    given = np.zeros((9, 2), np.float32)
    given[5, 1] = np.nan
    source = Arrays({"inputs": given}, Data(source="arrays", path="x.npz", held_out=0.0, shuffle=False), 0)
    with pytest.raises(JaxparError, match=r"inputs\[1, 1\] is nan \(row 1, example 5 of x.npz; 1 such\)"):
        careful(source, tmp_path, 4, []).read(1)


def test_of_several_processes_each_looks_at_its_rows_or_all_at_all(tmp_path):
    given = np.zeros((8, 2), np.float32)
    given[3] = np.nan
    source = Arrays({"inputs": given}, Data(source="arrays", path="x.npz", held_out=0.0, shuffle=False), 0)
    first, second = np.arange(2), np.arange(2, 4)
    assert len(careful(source, tmp_path, 4, [], rows=first).read(0)["inputs"]) == 2
    with pytest.raises(JaxparError, match=r"inputs\[3, 0\] is nan \(row 3, example 3 of x.npz; 2 such\)"):
        careful(source, tmp_path, 4, [], rows=second).read(0)
    for rows in (first, second):
        said = []
        batch = careful(source, tmp_path, 4, said, "skip", rows=rows).read(0)
        assert (batch["inputs"] == given[4 + rows]).all()
        assert len(said) == 1


def test_a_held_out_batch_that_is_corrupt_is_found_too(tmp_path):
    given = np.zeros((20, 2), np.float32)
    given[[3, 7, 19]] = np.inf  # held out: every other one, from the second on
    source = Arrays({"inputs": given}, Data(source="arrays", path="x.npz", held_out=0.5, shuffle=False), 0)
    with pytest.raises(JaxparError, match=r"a held-out batch is corrupt: inputs\[1, 0\] is inf \(row 1, held-out b"):
        careful(source, tmp_path, 2, []).evaluation(0)
    said = []
    skips = careful(source, tmp_path, 2, said, "skip")
    for _ in range(2):
        found = [skips.evaluation(index) for index in range(4)]
        assert [bool(batches) for batches in found] == [True, True, False, False]
    assert len(said) == 3


def test_tables_that_make_no_sense_are_refused(tmp_path):
    for text, got in (("spike=0.5", "spike = 0.5"), ("rollbacks=0", "rollbacks = 0"), ("on_bad_step=wait", "'wait'")):
        with pytest.raises(JaxparError) as caught:
            loads(JOB, [f"faults.{text}"])
        assert any(got.strip("'") in problem.got for problem in caught.value.problems)
    (tmp_path / "job.toml").write_text(JOB)
    job = load(tmp_path / "job.toml", ["faults.on_bad_step=rollback", "checkpoint.every=0"])
    assert any("checkpoint.every = 0" in problem.got for problem in check(job))
