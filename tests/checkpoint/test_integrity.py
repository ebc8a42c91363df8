"""A checkpoint cannot lie: a byte that is not as it was written is found and named, and an older good one is used.

The checkpoints are real ones of a tiny state; nothing is compiled.
"""

import contextlib
import dataclasses
import io
import json
import os
import random
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpar.checkpoint import Checkpoints, Store, listing, manifest, writing
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.files import content_hash
from jaxpar.job.file.parse import loads
from jaxpar.job.run import train
from jaxpar.train.metrics import Log

KEEP_ALL = Checkpoints(keep_last=100)


def state(step, size=64):
    return {
        "step": jnp.int32(step),
        "params": {"w": jnp.arange(size, dtype=jnp.float32) + step, "b": jnp.full((3,), step, jnp.bfloat16)},
        "rest": {"key": jax.random.key(step)},
    }


def like(size=64):
    return as_wanted(state(0, size))


def as_wanted(state):
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone), state)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run folder with checkpoints of steps 10, 20 and 30."""
    run = tmp_path_factory.mktemp("written")
    store = Store(run / "checkpoints", KEEP_ALL)
    for step in (10, 20, 30):
        store.save(step, state(step), {"loss": step / 10, "eval_loss": step / 8})
    store.finish()
    return run


@pytest.fixture
def run(written, tmp_path):
    """A copy of it, to be damaged."""
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def store(run):
    said = []
    made = Store(run / "checkpoints", KEEP_ALL, say=said.append)
    made.said = said
    return made


def newest(run):
    return run / "checkpoints" / "000030"


def files(checkpoint):
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def test_what_was_saved_is_restored(store):
    restored, step = store.restore(like())
    assert step == 30
    np.testing.assert_array_equal(restored["params"]["w"], state(30)["params"]["w"])
    assert restored["params"]["b"].dtype == jnp.bfloat16
    assert (jax.random.key_data(restored["rest"]["key"]) == jax.random.key_data(jax.random.key(30))).all()
    assert store.restore(like(), step=10)[1] == 10
    assert listing.read_scores(store.folder, 20) == {"loss": 2.0, "eval_loss": 2.5}
    assert store.said == []


@pytest.mark.nightly
def test_a_thousand_random_bytes_altered_are_a_thousand_found(run):
    """Any byte of any file, a large file as likely as a small one, and the list of hashes itself."""
    moments, found, hit = random.Random(0), 0, set()
    whole = [path for path in files(newest(run)) if path.stat().st_size]
    for _ in range(1000):
        path = moments.choice(whole)
        content = path.read_bytes()
        at, flip = moments.randrange(len(content)), moments.randrange(1, 256)
        path.write_bytes(content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :])
        wrong = manifest.check(newest(run))
        found += len(wrong) == 1 and path.relative_to(newest(run)).as_posix() in wrong[0]
        hit.add(path)
        path.write_bytes(content)
    assert found == 1000
    assert hit == set(whole)
    assert [path.name for path in whole] == ["MANIFEST", "00000"]
    assert manifest.check(newest(run)) == []


def _data(checkpoint):
    return checkpoint / "arrays" / "00000"


def _flip(checkpoint, path=None):
    content = bytearray((path or _data(checkpoint)).read_bytes())
    content[100] ^= 1
    (path or _data(checkpoint)).write_bytes(content)


def _link(checkpoint):
    target = _data(checkpoint).rename(checkpoint.parent / "elsewhere")
    (checkpoint / "arrays" / "link").symlink_to(target)


def _manifest(checkpoint, change):
    """Writes another list whose own hash is right."""
    path = checkpoint / "MANIFEST"
    listed = json.loads(path.read_bytes().partition(b"\n")[2])
    change(listed)
    rest = json.dumps(listed).encode()
    path.write_bytes(content_hash(rest).encode() + b"\n" + rest)


DAMAGE = {
    "a flipped bit": (_flip, "is altered"),
    "cut off": (lambda c: os.truncate(_data(c), 100), "has 100 bytes"),
    "longer": (lambda c: os.truncate(_data(c), 5000), "has 5000 bytes"),
    "emptied": (lambda c: os.truncate(_data(c), 0), "has 0 bytes"),
    "missing": (lambda c: _data(c).unlink(), "is missing"),
    "another name": (lambda c: _data(c).rename(_data(c).with_name("00001")), "is missing"),
    "one file more": (lambda c: (c / "arrays" / "more").write_bytes(b""), "arrays/more does not belong to it"),
    "a pipe for a file": (lambda c: (_data(c).unlink(), os.mkfifo(c / "orbax.fifo")), "is missing"),
    "a link for a file": (_link, "is missing"),
    "no list": (lambda c: (c / "MANIFEST").unlink(), "MANIFEST is missing"),
    "half a list": (lambda c: os.truncate(c / "MANIFEST", 300), "MANIFEST is altered"),
    "a list of nothing": (lambda c: (c / "MANIFEST").write_bytes(b""), "MANIFEST is altered"),
    "no folder within": (lambda c: shutil.rmtree(c / "arrays"), "is missing"),
    "nothing in it": (lambda c: (shutil.rmtree(c), c.mkdir()), "MANIFEST is missing"),
    "a list of another format": (lambda c: _manifest(c, lambda listed: listed.update(format=9)), "format 9"),
    "a list of other things": (lambda c: _manifest(c, lambda listed: listed.update(blocks=[1])), "MANIFEST"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_one_is_named_and_set_aside_and_the_one_before_is_used(damage, words, run, store):
    damage(newest(run))
    restored, step = store.restore(like())
    assert step == 20
    assert restored["params"]["w"][0] == 20
    (said,) = store.said
    assert all(word in said for word in (str(newest(run)), words, "step 20 is used", "000030.damaged")), said
    assert store.steps() == [10, 20]
    assert (run / "checkpoints" / "000030.damaged").is_dir()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PATHS = st.sampled_from(["MANIFEST", "..", "a/../b", "/a", "", ".", "a\\b", "a\0", "x" * 5000]) | st.text(max_size=8)
FILES = st.dictionaries(PATHS, st.fixed_dictionaries({"size": st.integers(), "hash": st.text(max_size=4)}), max_size=3)


@pytest.mark.nightly
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(["step", "written", "scores", "arrays", "blocks", "format"]), value=json_values | FILES)
def test_whatever_a_list_says_is_read_or_refused(key, value, run):
    """Its own hash is right: somebody wrote it so."""
    before = (newest(run) / "MANIFEST").read_bytes()
    _manifest(newest(run), lambda listed: listed.update({key: value}))
    try:
        for name in manifest.read(newest(run)).sizes:
            assert (newest(run) / name).resolve().is_relative_to(newest(run).resolve())
    except JaxparError:
        pass
    assert key != "blocks" or manifest.check(newest(run))
    (newest(run) / "MANIFEST").write_bytes(before)


def test_a_damaged_one_that_is_asked_for_is_refused(run, store):
    _flip(newest(run))
    with pytest.raises(
        JaxparError, match=r"000030 is damaged: arrays/00000 is altered: .*\n.*\n.*another step \(10, 20\)"
    ):
        store.restore(like(), step=30)
    assert store.steps() == [10, 20, 30]


def test_where_none_is_good_every_reason_is_said(run, store):
    for step in store.steps():
        _flip(run / "checkpoints" / listing.folder_name(step))
    with pytest.raises(JaxparError) as caught:
        store.restore(like())
    named = [problem.got.split(" is damaged")[0][-6:] for problem in caught.value.problems]
    assert named == ["000030", "000020", "000010"]
    assert store.steps() == [10, 20, 30]


def test_who_only_reads_renames_nothing_and_a_warning_is_the_default(run):
    _flip(newest(run))
    with pytest.warns(UserWarning, match="step 20 is used instead$"):
        assert Store(run / "checkpoints", KEEP_ALL, is_owner=False).restore(like())[1] == 20
    assert newest(run).is_dir()


def test_half_written_and_half_deleted_ones_are_never_taken_and_deleted_by_who_writes(run, store):
    left = ["000040.writing", "000050.writing.orbax-checkpoint-tmp", "000005.deleted"]
    for name in left:
        shutil.copytree(newest(run), run / "checkpoints" / name)
    (run / "checkpoints" / "000040.writing.mine").touch()
    assert store.restore(like())[1] == 30
    assert {path.name for path in (run / "checkpoints").iterdir()} >= set(left)
    (run / "checkpoints" / "000040.writing.mine").unlink()
    store.save(31, state(31), {})
    store.finish()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["000010", "000020", "000030", "000031"]


def test_what_differs_is_said_before_anything_is_read(run, store):
    with pytest.raises(JaxparError, match=r"w is \[64\] in the checkpoint, \[65\] in the job"):
        store.restore(like(65))
    wanted = like()
    wanted["params"]["w"] = jax.ShapeDtypeStruct((64,), jnp.bfloat16, sharding=wanted["step"].sharding)
    with pytest.raises(JaxparError, match="w is float32 in the checkpoint, bfloat16 in the job"):
        store.restore(wanted)
    wanted = like()
    wanted["params"]["more"] = wanted["params"].pop("b")
    with pytest.raises(JaxparError) as caught:
        store.restore(wanted)
    assert [problem.got for problem in caught.value.problems] == [
        "more is in the job and not in the checkpoint",
        "b is in the checkpoint and not in the job",
    ]


class Disk:
    """A file system of its own, of a megabyte."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"mounting a file system of a megabyte takes root: {done.stderr.strip()}")

    def fill(self, leave):
        free = shutil.disk_usage(self.folder).free
        with contextlib.suppress(OSError):  # what a run writes meanwhile may fill it first
            with (self.folder / "ballast").open("ab") as ballast:
                ballast.write(b"\1" * (free - leave))

    def empty(self):
        (self.folder / "ballast").unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path / "disk")
    yield made
    subprocess.run(["umount", "-l", made.folder], check=True)


NOISE = np.random.default_rng(0).random(40_000, np.float32)  # 160 kB that do not compress


def large(step):
    return {"params": {"w": jnp.asarray(NOISE + step)}}


@pytest.mark.parametrize("leave", [0, 4096, 60_000, 150_000], ids=lambda leave: f"{leave} bytes free")
def test_a_full_disk_keeps_training_and_the_last_good_one(leave, disk, capfd):
    said = []
    store = Store(disk.folder / "run" / "checkpoints", KEEP_ALL, say=said.append)
    store.save(1, large(1), {})
    store.wait()
    disk.fill(leave)
    for step in (2, 3):
        store.save(step, large(step), {})
    store.wait()
    (told,) = said  # once, though it failed twice
    assert "step 2 is not saved" in told
    assert "156.2 KiB needed" in told
    assert "training goes on, step 1 stays the last that is saved" in told
    assert store.steps() == [1]  # what a failed write left, the next write takes away
    with pytest.raises(JaxparError, match=r"step 3 is not saved: the disk of .* is full .*\n.*\n.*goes on from step 1"):
        store.finish()
    disk.empty()
    store.save(4, large(4), {})
    store.finish()  # what failed in between is no matter any more
    assert store.steps() == [1, 4]
    assert store.restore(as_wanted(large(4)))[1] == 4
    assert "Traceback" not in capfd.readouterr().err


def test_rows_wait_while_the_disk_is_full_and_none_is_cut_in_half(disk):
    rows = [{"step": step, "loss": 1 / step} for step in range(1, 401)]

    def there():
        return [json.loads(line) for line in (disk.folder / "metrics.jsonl").read_text().splitlines()]

    log = Log(disk.folder, start=0)
    disk.fill(0)
    for row in rows[:300]:  # some still fit into the last page of the file
        log.write(row)
    assert there() == rows[: len(there())]
    assert len(there()) < 300
    disk.empty()
    log.write(rows[300])
    assert there() == rows[:301]
    disk.fill(0)
    for row in rows[301:]:
        log.write(row)
    with pytest.warns(UserWarning, match=r"metrics.jsonl: the disk is full, \d+ rows are not written"):
        log.close()
    disk.empty()
    with pytest.warns(UserWarning, match=r"has no row of \d+ of the 400 steps before"):
        Log(disk.folder, start=400).close()  # goes on from whole lines
    assert there() == rows[: len(there())]


class Watcher(io.StringIO):
    """What a run says, and somebody who acts on it."""

    def __init__(self, **actions):
        super().__init__()
        self.actions = actions

    def write(self, text):
        for said, act in self.actions.items():
            if text.startswith(f"step {said[1:]}/"):
                act()
        return super().write(text)


JOB = """
[model]
name = "mlp"
inputs = 64
dim = 16
layers = 1
classes = 10
[data]
source = "arrays"
path = "{folder}/data.npz"
[train]
steps = 8
global_batch = 16
loss = "classify"
[run]
dir = "{folder}/disk/run"
[parallel]
data = -1
[checkpoint]
every = 1
[metrics]
show_every = 1
"""


@pytest.mark.nightly
@pytest.mark.xdist_group("integrity")
def test_a_run_on_a_disk_that_is_full_for_a_while_loses_nothing(disk, tmp_path):
    numbers = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", inputs=numbers.random((64, 64), np.float32), labels=np.arange(64) % 10)
    job, folder = loads(JOB.format(folder=tmp_path)), disk.folder / "run"
    for _ in range(2):  # the second time it goes on from step 8
        stream = Watcher(_3=lambda: disk.fill(0), _6=disk.empty, _11=lambda: disk.fill(0))
        outcome = train(job, stream=stream)
        assert stream.getvalue().count("training goes on") == (outcome["resumed_from"] == 0)
        assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [
            *range(1, 9)
        ]
        assert listing.steps(folder / "checkpoints") == [7, 8]
    keep = dataclasses.replace(job.checkpoint, keep_last=9)  # what is deleted makes room for one more
    longer = dataclasses.replace(job, train=dataclasses.replace(job.train, steps=13), checkpoint=keep)
    with pytest.raises(JaxparError, match="step 13 is not saved: the disk of"):
        train(longer, stream=stream)
    assert listing.steps(folder / "checkpoints") in ([7, 8, 9], [7, 8, 9, 10])  # step 10 may have been on its way
    disk.fill(0)  # what was half written, and is deleted, has left room
    with pytest.raises(JaxparError, match=r"(lock|job.toml|run.json): No space left"):
        train(longer, stream=stream)
    assert not (folder / "lock").exists()
    disk.empty()
    assert train(longer, stream=io.StringIO())["resumed_from"] in (9, 10)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 13


def test_another_error_of_a_write_is_refused(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writing.manifest, "write", broken)
    store = Store(tmp_path, KEEP_ALL)
    store.save(1, state(1), {})
    with pytest.raises(JaxparError, match=r"step 1 is not saved in .*EIO"):
        store.wait()
    assert list(tmp_path.iterdir()) == []


def test_verbs_list_show_verify_compare_and_copy(run, tmp_path, capsys):
    def typed(*words):
        status = main(["checkpoint", *map(str, words), "--json", str(tmp_path / "out.json")])
        return status, capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())

    status, out, rows = typed("ls", run)
    assert (status, [row["step"] for row in rows], {row["state"] for row in rows}) == (0, [10, 20, 30], {"whole"})
    assert "loss 3.0000 eval_loss 3.7500" in out
    status, out, made = typed("show", run, "--step", 20)
    assert made["arrays"]["params/w"] == {"shape": [64], "dtype": "float32", "bytes": 256}
    assert "bfloat16" in out
    assert [row["step"] for row in typed("verify", run, "--all")[2]] == [10, 20, 30]
    checkpoints = run / "checkpoints"
    status, out, made = typed("diff", checkpoints / "000010", checkpoints / "000030")
    assert (status, made["differences"], made["values"]["params/w"], made["values"]["step"]) == (1, [], 20.0, 20.0)
    assert typed("diff", run, run)[:2] == (0, "no difference\n")
    status, out, made = typed("export", run, "--step", 10, "--to", tmp_path / "copies" / "ten")
    assert status == 0
    assert manifest.check(tmp_path / "copies" / "ten") == []
    assert main(["checkpoint", "export", str(run), "--to", str(tmp_path / "copies" / "ten")]) == 1
    assert main(["checkpoint", "export", str(run), "--to", str(tmp_path / "x"), "--format", "safetensor"]) == 1
    assert main(["checkpoint", "show", str(run), "--step", "11"]) == 1
    assert "there are 10, 20, 30" in capsys.readouterr().err
    _flip(newest(run))
    status, out, rows = typed("verify", run)
    assert (status, "is altered" in out, rows[0]["step"]) == (1, True, 30)
    assert main(["checkpoint", "export", str(run), "--to", str(tmp_path / "bad")]) == 1
    assert not (tmp_path / "bad").exists()
    os.truncate(_data(newest(run)), 3)
    assert "damaged: arrays/00000" in typed("ls", run)[1]


def test_an_exported_one_is_read_by_orbax(run, tmp_path, capsys):
    from orbax.checkpoint import v1 as ocp

    export = ["checkpoint", "export", str(run), "--step", "20", "--format", "orbax", "--to"]
    assert main([*export, str(tmp_path / "given")]) == 0
    assert "from" in capsys.readouterr().out
    found, saved = ocp.load(str(tmp_path / "given")), state(20)
    for name in ("w", "b"):
        assert found["params"][name].dtype == saved["params"][name].dtype
        np.testing.assert_array_equal(found["params"][name], saved["params"][name])
    assert found["step"] == 20
    np.testing.assert_array_equal(found["rest"]["key"], jax.random.key_data(saved["rest"]["key"]))
    assert main([*export, str(tmp_path / "given")]) == 1
    assert "is there already" in capsys.readouterr().err
    _flip(newest(run))
    assert main(["checkpoint", "export", str(run), "--format", "orbax", "--to", str(tmp_path / "none")]) == 1
    assert "is altered" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.nightly
def test_to_list_and_to_verify_take_no_jax(run):
    for words in (["ls", str(run)], ["verify", str(run)], ["show", str(run)]):
        code = f"import sys, jaxpar.cli.main as m; m.main(['checkpoint', *{words}]); print('jax' in sys.modules)"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert out.splitlines()[-1] == "False"
