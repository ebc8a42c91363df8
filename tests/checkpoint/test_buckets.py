"""A run in a bucket: trained, killed, resumed, reported and begun from, with nothing of it on the disk in between."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import fsspec
import hooks
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar import buckets
from jaxpar.cli.main import main
from jaxpar.data.spec import Data
from jaxpar.errors import JaxparError

ADDRESS = "memory://bucket/runs/x"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Returns an empty file system in memory; the copies are in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    return files


def names(files):
    return {name.removeprefix("/bucket/runs/x/") for name in files.find("/bucket/runs/x")}


def forget():
    """Deletes what is on the disk, as a machine does that goes away."""
    shutil.rmtree(buckets.local_folder(ADDRESS))


@pytest.mark.nightly
def test_a_run_is_in_the_bucket_and_goes_on_from_it(store, tmp_path):
    outcome, out = hooks.run(ADDRESS, "checkpoint.every=2", "checkpoint.keep_last=2", batch=hooks.signalling(15, 4))
    assert (outcome["stopped_by"], outcome["step"]) == ("SIGTERM", 5)
    assert f"{ADDRESS}: on this machine it is {tmp_path}" in out
    there = names(store)
    assert {"job.toml", "run.json", "metrics.jsonl"} <= there
    assert {name.split("/")[1] for name in there if name.startswith("checkpoints/")} == {"000004", "000005"}
    assert not any(name.endswith((".bin", ".lock", "/lock")) or name == "lock" for name in there)
    forget()
    outcome, _ = hooks.run(ADDRESS, "checkpoint.every=2", "checkpoint.keep_last=2")
    assert (outcome["resumed_from"], outcome["step"]) == (5, 8)
    hooks.run(tmp_path / "undisturbed", "checkpoint.every=2", "checkpoint.keep_last=2")
    forget()
    assert [row["loss"] for row in hooks.rows(buckets.pull_folder(ADDRESS))] == [
        row["loss"] for row in hooks.rows(tmp_path / "undisturbed")
    ]
    assert hooks.saved(buckets.pull_folder(ADDRESS)) == hooks.saved(tmp_path / "undisturbed")


@pytest.mark.nightly
def test_a_checkpoint_without_its_manifest_is_none(store):
    hooks.run(ADDRESS, "checkpoint.every=4", "checkpoint.keep_last=9")
    store.rm_file("/bucket/runs/x/checkpoints/000008/MANIFEST")
    forget()
    assert hooks.saved(buckets.pull_folder(ADDRESS)) == [4]
    outcome, _ = hooks.run(ADDRESS, "checkpoint.every=4", "checkpoint.keep_last=9")
    assert (outcome["resumed_from"], outcome["step"]) == (4, 8)
    assert "checkpoints/000008/MANIFEST" in names(store)


@pytest.mark.nightly
def test_a_copy_that_is_behind_becomes_that_of_the_bucket(store):
    hooks.run(ADDRESS, "train.steps=4")
    bucket = buckets.Bucket(ADDRESS)
    shutil.move(bucket.local / "checkpoints" / "000004", bucket.local / "checkpoints" / "000003")
    (bucket.local / "metrics.jsonl").write_text("")
    bucket.pull()
    assert hooks.saved(bucket.local) == [4]
    assert len(hooks.rows(bucket.local)) == 4


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "gone",
    [
        pytest.param("/bucket/runs/x/checkpoints/000008", marks=pytest.mark.slow),
        pytest.param("/bucket/runs/x", marks=pytest.mark.full),
    ],
)
def test_a_copy_that_is_ahead_is_kept_and_written(gone, store):
    hooks.run(ADDRESS, "checkpoint.every=4", "checkpoint.keep_last=9")
    store.rm(gone, recursive=True)
    _, out = hooks.run(ADDRESS, "checkpoint.every=4", "checkpoint.keep_last=9", "train.steps=10")
    assert "000008" in out
    assert "on from the copy" in out
    forget()
    assert hooks.saved(buckets.pull_folder(ADDRESS)) == [4, 8, 10]
    assert [row["step"] for row in hooks.rows(buckets.pull_folder(ADDRESS))] == [*range(1, 11)]


@pytest.mark.nightly
def test_reading_leaves_the_copy_of_a_run_alone(store):
    """A run may be writing it: a checkpoint that the bucket does not have yet, and newer rows."""
    seen = []

    def look(step):
        if step == 6:
            local = buckets.local_folder(ADDRESS)
            deadline = time.monotonic() + 60  # a thread of its own writes it
            while not store.exists("/bucket/runs/x/checkpoints/000004/MANIFEST") and time.monotonic() < deadline:
                time.sleep(0.05)
            before = (local / "metrics.jsonl").read_bytes()
            (local / "checkpoints" / "000006.writing").mkdir()
            with redirect_stdout(io.StringIO()):
                assert main(["report", ADDRESS]) == 0
            seen.append((local / "metrics.jsonl").read_bytes().startswith(before))  # the run itself writes on
            seen.append((local / "checkpoints" / "000006.writing").is_dir())

    hooks.run(ADDRESS, "checkpoint.every=4", batch=look)
    assert seen == [True, True]


@pytest.mark.nightly
def test_a_bucket_that_is_away_for_a_while_is_said_and_has_all_at_the_end(store, monkeypatch):
    put, failures = store.put_file, []

    def broken(local, remote, **more):
        if "/000002/" in remote and not failures:
            failures.append(remote)
            raise RuntimeError("503 slow down")
        return put(local, remote, **more)

    monkeypatch.setattr(type(store), "put_file", lambda self, *given, **more: broken(*given, **more))
    _, out = hooks.run(ADDRESS, "checkpoint.every=2", "checkpoint.keep_last=9")
    assert out.count("503 slow down") == 1
    assert "training goes on" in out
    forget()
    assert hooks.saved(buckets.pull_folder(ADDRESS)) == [2, 4, 6, 8]


@pytest.mark.slow
def test_a_bucket_that_is_away_at_the_end_is_an_error_that_says_where_the_run_is(store, monkeypatch, tmp_path):
    def broken(self, *given, **more):
        raise RuntimeError("403 forbidden")

    monkeypatch.setattr(type(store), "put_file", broken)
    with pytest.raises(JaxparError, match="403 forbidden") as error:
        hooks.run(ADDRESS)
    assert f"all of it is in {buckets.local_folder(ADDRESS)}" in str(error.value)
    assert hooks.saved(buckets.local_folder(ADDRESS)) == [8]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hooks.run(ADDRESS)  # the same command, as the message says
    forget()
    assert hooks.saved(buckets.pull_folder(ADDRESS)) == [8]


@pytest.mark.nightly
def test_a_run_begins_with_parameters_from_a_bucket(store, tmp_path):
    hooks.run(ADDRESS)
    forget()
    _, out = hooks.run(tmp_path / "next", f"checkpoint.start_from={ADDRESS}", "train.steps=2")
    assert "of step 8" in out or "000008" in out


@pytest.mark.slow
def test_the_verbs_read_a_bucket(store):
    hooks.run(ADDRESS, "checkpoint.every=4", "checkpoint.keep_last=9")
    forget()
    with redirect_stdout(io.StringIO()) as out:
        assert main(["checkpoint", "ls", ADDRESS]) == 0
        assert main(["checkpoint", "verify", ADDRESS]) == 0
        assert main(["report", ADDRESS]) == 0
    assert "8" in out.getvalue()
    assert "report.html" in names(store)


def test_data_are_read_from_a_bucket_and_copied_once(store, tmp_path):
    texts = {"a.txt": "alpha " * 200, "b.txt": "beta " * 200, "c.md": "no text"}
    for name, text in texts.items():
        store.pipe_file(f"/bucket/corpus/{name}", text.encode())
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / name).write_text(text)
    for path in ("corpus", "corpus/*.txt", "corpus/a.txt"):
        got, want = (
            jp.open_data(Data(source="text", path=f"{start}{path}", pattern="*.txt", seq=16), folder=tmp_path / kind)
            for kind, start in (("theirs", "memory://bucket/"), ("here", f"{tmp_path}/"))
        )
        assert got.fingerprint == want.fingerprint
        np.testing.assert_array_equal(got.batch(3, 4)["inputs"], want.batch(3, 4)["inputs"])
    copy = buckets.local_folder("memory://bucket/corpus") / "a.txt"
    before = copy.stat().st_mtime_ns
    buckets.fetch("memory://bucket/corpus")
    assert copy.stat().st_mtime_ns == before
    store.pipe_file("/bucket/corpus/a.txt", b"gamma " * 200)
    buckets.fetch("memory://bucket/corpus")
    assert copy.read_text().startswith("gamma")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def test_a_fit_saves_itself_in_a_bucket(store):
    def loss(model, batch):
        return jnp.sum((model(batch["x"]) - 1) ** 2), batch["x"].shape[0]

    step = jp.train_step(jp.compose(Net, jp.Parallel(data=8)), loss, optax.sgd(0.01))
    data = {"x": np.random.default_rng(0).normal(size=[32, 4]).astype(np.float32)}
    jp.fit(step, data, steps=3, batch=8, run=ADDRESS)
    forget()
    outcome = jp.fit(step, data, steps=6, batch=8, run=ADDRESS)
    assert int(outcome.state.step) == 6
    assert [row["step"] for row in hooks.rows(buckets.pull_folder(ADDRESS))] == [*range(1, 7)]


JOB = hooks.JOB.replace('source = "hooks:Hooked"', "seq = 32").replace("vocab = 32", "vocab = 256")


@pytest.mark.full
def test_a_process_that_is_killed_goes_on_from_the_bucket_on_another_machine(tmp_path):
    address = f"file://{tmp_path}/bucket/run"
    (tmp_path / "job.toml").write_text(JOB.replace("steps = 8", "steps = 400"))
    command = [sys.executable, "-m", "jaxpar", "train", "job.toml", f"run.dir={address}", "checkpoint.every=20"]

    def begun(machine):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / machine)}
        env |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
        return subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    first = begun("first")
    until = time.monotonic() + 120
    while not list((tmp_path / "bucket").glob("run/checkpoints/0*/MANIFEST")):
        assert time.monotonic() < until
        assert first.poll() is None, first.stdout.read()
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second = begun("second")
    out, _ = second.communicate(timeout=240)
    assert second.returncode == 0, out
    assert "on from step" in out
    assert Path(tmp_path / "bucket" / "run" / "checkpoints" / "000400" / "MANIFEST").exists()
    assert [row["step"] for row in hooks.rows(tmp_path / "bucket" / "run")] == [*range(1, 401)]
