"""A checkpoint is of the step that it was written at, whatever its folder is called: a copy is found out."""

import json
import shutil

import hooks
import jax
import jax.numpy as jnp
import pytest

from jaxpar.checkpoint import Checkpoints, Store, listing, manifest
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.files import content_hash

KEEP_ALL = Checkpoints(keep_last=100)


def state(step):
    return {"step": jnp.int32(step), "params": {"w": jnp.arange(64, dtype=jnp.float32) + step}}


def like():
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone), state(0))


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 20 and 40."""
    store = Store(tmp_path / "run" / "checkpoints", KEEP_ALL)
    for step in (20, 40):
        store.save(step, state(step), {"loss": step / 10})
    store.finish()
    return store.folder


def copied(to):
    return lambda folder: shutil.copytree(folder / "000040", folder / to)


def renamed(to):
    return lambda folder: (folder / "000040").rename(folder / to)


def relisted(step):
    """Writes another step into the list of the newest, whose own hash is right."""

    def change(folder):
        path = folder / "000040" / "MANIFEST"
        listed = json.loads(path.read_bytes().partition(b"\n")[2])
        rest = json.dumps(listed | {"step": step}).encode()
        path.write_bytes(content_hash(rest).encode() + b"\n" + rest)

    return change


def both(step):
    """Names and lists the newest as of another step; only its arrays know better."""

    def change(folder):
        relisted(step)(folder)
        renamed(listing.folder_name(step))(folder)

    return change


WRONG = {  # what is done: (the step whose name is wrong, what is said, the step that is used)
    "copied to a later step": (copied("000050"), 50, "MANIFEST is of step 40", 40),
    "copied to a step that no run reaches": (copied("999999999999"), 999999999999, "MANIFEST is of step 40", 40),
    "renamed to a later step": (renamed("000050"), 50, "MANIFEST is of step 40", 20),
    "listed as of a later step": (relisted(41), 40, "MANIFEST is of step 41", 20),
    "listed as of a negative step": (relisted(-1), 40, "MANIFEST is of step -1", 20),
    "named and listed as of a later step": (both(41), 41, "its state is of step 40", 20),
}


@pytest.mark.parametrize(("damage", "step", "words", "used"), WRONG.values(), ids=WRONG)
def test_a_run_goes_on_from_the_newest_whose_name_is_true(damage, step, words, used, folder):
    damage(folder)
    said = []
    restored, at = Store(folder, KEEP_ALL, say=said.append).restore(like())
    assert (at, int(restored["step"]), float(restored["params"]["w"][0])) == (used, used, used)
    (line,) = said
    assert f"{listing.folder_name(step)} is damaged: {words}" in line
    assert f"step {used} is used instead" in line
    assert not (folder / listing.folder_name(step)).exists()


@pytest.mark.parametrize(("damage", "step", "words"), [each[:3] for each in WRONG.values()], ids=WRONG)
def test_one_that_is_asked_for_by_a_false_name_is_refused(damage, step, words, folder):
    damage(folder)
    with pytest.raises(JaxparError, match=words):
        Store(folder, KEEP_ALL).restore(like(), step)
    assert (folder / listing.folder_name(step)).is_dir()


def test_an_earlier_name_is_as_false(folder):
    copied("000030")(folder)
    with pytest.raises(JaxparError, match="MANIFEST is of step 40"):
        Store(folder, KEEP_ALL).restore(like(), 30)
    assert listing.read_scores(folder, 30) == {}  # nor is it the best by the scores of another


def test_verbs_say_which_step_it_is_of(folder, capsys):
    copied("000050")(folder)
    run = str(folder.parent)
    assert main(["checkpoint", "verify", run]) == 1
    assert main(["checkpoint", "ls", run]) == 0
    assert main(["checkpoint", "show", run]) == 1
    out, err = capsys.readouterr()
    assert out.count("MANIFEST is of step 40") == 2
    assert f"{folder}/000050/MANIFEST is of step 40" in err


def test_a_copy_under_a_name_that_is_no_step_is_as_good(folder):
    shutil.copytree(folder / "000040", folder.parent / "best")
    assert manifest.check(folder.parent / "best") == []


@pytest.mark.parametrize("name", ["000050", "999999999999"])
def test_the_supervisor_counts_progress_by_true_names(name, folder):
    copied(name)(folder)
    assert listing.newest(folder) == 40
    shutil.rmtree(folder)
    assert listing.newest(folder) is None


@pytest.mark.nightly
def test_a_job_does_not_jump_over_steps_nor_write_them_twice(tmp_path):
    hooks.run(tmp_path, "train.steps=4")
    shutil.copytree(tmp_path / "checkpoints" / "000004", tmp_path / "checkpoints" / "000006")
    outcome, said = hooks.run(tmp_path, "train.steps=8")
    assert outcome["resumed_from"] == 4
    assert "000006 is damaged: MANIFEST is of step 4; step 4 is used instead; it is called 000006.damaged now" in said
    assert [row["step"] for row in hooks.rows(tmp_path)] == list(range(1, 9))


@pytest.mark.nightly
def test_a_new_run_does_not_begin_with_a_step_that_was_never_saved(tmp_path):
    hooks.run(tmp_path / "old", "train.steps=4")
    (tmp_path / "old/checkpoints/000004").rename(tmp_path / "old/checkpoints/000006")
    with pytest.raises(JaxparError, match="MANIFEST is of step 4"):
        hooks.run(tmp_path / "new", "train.steps=1", f"checkpoint.start_from={tmp_path}/old")
