"""A run that goes on with another job: what changed is said, what makes another run of it needs a word."""

import hooks
import pytest

from jaxpar.errors import JaxparError
from jaxpar.job.file import run_folder
from jaxpar.job.file.parse import loads

BINDING = [
    "train.global_batch=8", "train.seed=3", "train.precision.compute=bf16", "train.loss=mine:loss",
    "data.shuffle=false", "data.held_out=0.4", "data.seq=64", "data.tokenizer=bpe", "optimizer.learning_rate=2.0",
    "optimizer.beta1=0.5", "optimizer.warmup=5", "model.dropout=0.5", "parallel.pipeline.weights=stash",
]  # fmt: skip
FREE = [
    "parallel.data=1", "parallel.fsdp=2", "parallel.zero=1", "parallel.pipe=2", "parallel.pipeline.microbatches=4",
    "mesh.devices=1", "train.accumulate=2", "train.remat=full", "train.eval_every=5", "checkpoint.every=3",
    "faults.skips=3",
]  # fmt: skip


@pytest.fixture
def trained(tmp_path):
    run_folder.save_job(tmp_path, loads(hooks.JOB))
    return tmp_path


def found(folder, *overrides):
    job = loads(hooks.JOB, [*overrides])
    made = run_folder.compare_jobs(folder, job)
    run_folder.check_changes(made, job, 4)
    return [change.key for change in made]


@pytest.mark.parametrize("override", BINDING)
def test_what_makes_another_run_of_it_needs_a_word(trained, override):
    key = override.partition("=")[0]
    with pytest.raises(JaxparError) as caught:
        found(trained, override)
    (problem,) = caught.value.problems
    assert problem.got.startswith(f"{key} = ")
    assert f'run.changed = ["{key}"]' in problem.fix
    assert found(trained, override, f'run.changed=["{key}"]') == [key]


@pytest.mark.parametrize("override", FREE)
def test_where_it_is_trained_may_change(trained, override):
    assert found(trained, override) == [override.partition("=")[0]]


def test_a_longer_run_needs_a_word_where_its_rates_change_on_the_way(trained):
    assert found(trained, "train.steps=20") == ["train.steps"]  # its rate is constant
    run_folder.save_job(trained, loads(hooks.JOB, ["optimizer.decay=cosine"]))
    longer = loads(hooks.JOB, ["optimizer.decay=cosine", "train.steps=20"])
    run_folder.check_changes(run_folder.compare_jobs(trained, longer), longer, 8)  # all 8 steps were made
    with pytest.raises(JaxparError, match=r"train.steps = 20, it was 8, up to step 7"):
        run_folder.check_changes(run_folder.compare_jobs(trained, longer), longer, 7)


def test_a_word_that_is_no_key_is_refused(trained):
    with pytest.raises(JaxparError, match=r"did you mean 'train.seed'"):
        found(trained, "train.seed=1", 'run.changed=["train.sed"]')


@pytest.mark.nightly
def test_keys_that_differ_are_printed_and_every_job_is_kept(tmp_path):
    hooks.run(tmp_path, "train.steps=2")
    first = (tmp_path / "job.toml").read_text()
    with pytest.raises(JaxparError, match=r"train.seed = 7, it was 0, up to step 2"):
        hooks.run(tmp_path, "train.steps=3", "train.seed=7")
    assert (tmp_path / "job.toml").read_text() == first
    assert hooks.saved(tmp_path) == [2]
    _, said = hooks.run(tmp_path, "train.steps=3", "train.seed=7", 'run.changed=["train.seed"]')
    assert "changed since step 2: train.seed = 7, it was 0" in said
    assert "changed since step 2: train.steps = 3, it was 2" in said
    _, said = hooks.run(tmp_path, "train.steps=4", "train.seed=7", "parallel.data=1", "parallel.fsdp=2")
    assert "changed since step 3: parallel.fsdp = 2, it was 1" in said
    assert (tmp_path / "job.0001.toml").read_text() == first
    assert loads((tmp_path / "job.0002.toml").read_text()).train.seed == 7
    assert loads((tmp_path / "job.toml").read_text()).parallel.fsdp == 2
    before = sorted(path.name for path in tmp_path.iterdir())
    _, said = hooks.run(tmp_path, "train.steps=4", "train.seed=7", "parallel.data=1", "parallel.fsdp=2")
    assert "changed" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == before
