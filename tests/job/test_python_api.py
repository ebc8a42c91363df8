"""What a job does has a door in Python: training that saves, resumes and evaluates; plans, schedules, saved states."""

import json
import pydoc
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints
from jaxpar.cli.main import main
from jaxpar.job import plan_api
from jaxpar.job.report.read import read
from jaxpar.plan.pages.terminal import page
from jaxpar.train.api.fit_inputs import open_fit_data
from jaxpar.train.faults import Faults
from jaxpar.train.run import Best

OPTIMIZER = optax.adam(0.05)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


class Points:
    """Points whose second half is the sines of the first, in the user's own class."""

    def __init__(self, seed=0):
        self.seed = seed

    @property
    def fingerprint(self):
        return f"points {self.seed}"

    def batch(self, step, size):
        x = np.random.default_rng([self.seed, step]).normal(size=(size, 8)).astype(np.float32)
        return {"x": x, "y": np.sin(x)}

    def evaluation(self, index, size):
        return self.batch(10**6 + index, size) if index < 2 else None


def loss(model, batch):
    squares = (model(batch["x"]) - batch["y"]) ** 2
    return squares.sum(), squares.size


class Far:
    """Examples to evaluate, and none to train on."""

    def evaluation(self, index, size):
        return {"x": np.full((4, 8), 2.0, np.float32), "y": np.zeros((4, 8), np.float32)} if index < 1 else None


@cache
def step_of(**sizes):
    return jp.train_step(jp.compose(Net, jp.Parallel(**sizes)), loss, OPTIMIZER)


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(left), jax.device_get(right))


@pytest.mark.slow
def test_a_fit_that_is_resumed_ends_as_one_that_was_not_and_another_layout_goes_on(tmp_path, capsys):
    whole = jp.fit(step_of(fsdp=8), Points(), steps=8, batch=16)
    first = jp.fit(step_of(fsdp=8), Points(), steps=5, batch=16, run=tmp_path / "run", eval_every=5, show_every=5)
    assert {"loss", "eval_loss"} <= first.last.keys()
    gone_on = jp.fit(step_of(fsdp=8), Points(), steps=8, batch=16, run=str(tmp_path / "run"))
    said = capsys.readouterr().out
    assert "on from step 5" in said
    assert "/step" not in said  # of simulated devices no speed is shown
    same(whole.state, gone_on.state)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 8
    assert losses[-1] == whole.last["loss"]
    told = read(tmp_path / "run")
    assert (told.facts["mesh"]["fsdp"], [each["step"] for each in told.checkpoints]) == (8, [5, 8])

    path = jp.save(tmp_path / "saved", gone_on.state)
    assert path == tmp_path / "saved" / "checkpoints" / "000008"
    for where in (tmp_path / "saved", str(path), tmp_path / "run"):
        other = jp.restore(where, step_of(data=4, fsdp=2))
        same(other.params, whole.state.params)
    assert int(jp.restore(tmp_path / "run", step_of(fsdp=8), at=5).step) == 5
    with pytest.raises(jp.JaxparError, match=r"000008 is there\n.*\n.*replace=True"):
        jp.save(tmp_path / "saved", gone_on.state)
    jp.save(tmp_path / "saved", gone_on.state, replace=True)
    assert sorted(each.name for each in path.parent.iterdir()) == ["000008", "000008.left"]


@pytest.mark.slow
def test_a_fit_ends_when_evaluations_get_no_better_and_tells_its_loggers(tmp_path):
    class Logger:
        rows = []

        def log(self, step, values):
            self.rows.append(step)

    still = jp.train_step(jp.compose(Net, jp.Parallel(data=8)), loss, optax.sgd(0.0))
    ended = jp.fit(
        still, Points(), steps=50, batch=16, eval_every=2, best=Best(patience=2), run=tmp_path, loggers=[Logger()]
    )
    assert int(ended.state.step) == 6
    assert {1, 6} <= {*Logger.rows}


@pytest.mark.nightly
def test_a_fit_evaluates_sets_by_name_keeps_the_best_by_one_of_them_and_begins_with_the_parameters_of_a_run(tmp_path):
    sets = {"far": Far(), "near": [Points(7).batch(0, 12)], "digits": jp.Data(source="digits")}
    with pytest.raises(jp.JaxparError, match=r"'x'"):  # digits have no such array
        jp.fit(step_of(fsdp=8), Points(), steps=1, batch=16, sets=sets)
    del sets["digits"]
    begun = jp.fit(
        step_of(fsdp=8), Points(), steps=6, batch=16, run=tmp_path / "run", eval_every=2, sets=sets,
        checkpoints=Checkpoints(every=2, keep_last=1, keep_best=1), best=Best(metric="eval_far_loss"),
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    far = {row["step"]: row["eval_far_loss"] for row in rows if "eval_far_loss" in row}
    assert {"eval_loss", "eval_near_loss"} <= begun.last.keys()
    kept = sorted(int(each.name) for each in (tmp_path / "run" / "checkpoints").iterdir() if each.name.isdigit())
    assert kept == sorted({6, min(far, key=far.__getitem__)})
    assert len(kept) == 2  # far away it gets worse, so that the best is not the last
    alone = jp.fit(step_of(fsdp=8), [Points().batch(0, 16)], steps=1, batch=16, sets={"far": Far()})
    assert {"eval_far_loss"} == {each for each in alone.last if each.startswith("eval_")}
    still = jp.train_step(jp.compose(Net, jp.Parallel(data=4, fsdp=2)), loss, optax.sgd(0.0))
    taken = Checkpoints(start_from=str(tmp_path / "run"), take=("up/*",))
    tuned = jp.fit(still, Points(), steps=1, batch=16, checkpoints=taken)
    same(tuned.state.params["up"], begun.state.params["up"])
    fresh = jp.init_state(still.layout, still.optimizer)
    same(tuned.state.params["down"], fresh.params["down"])


ROWS = {name: np.concatenate([value] * 4) for name, value in Points().batch(0, 16).items()}  # 64 examples


class Numbered:
    """The rows as a dataset, which has other examples for its evaluation."""

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {name: value[number] for name, value in ROWS.items()}

    def evaluation(self):
        return [Points(7).batch(0, 8)]


@pytest.mark.slow
def test_a_fit_says_how_many_examples_are_held_out_and_goes_on_with_no_other_share(tmp_path, capsys):
    ended = [jp.fit(step_of(fsdp=8), ROWS, steps=1, batch=8, held_out=share) for share in (None, 0.25, 0)]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data: ")]
    assert said == [
        f"data: {64 - count} examples to train on, {count} held out for evaluation (held_out={share})"
        for count, share in ((1, 0.02), (16, 0.25), (0, 0))
    ]
    assert ["eval_loss" in each.last for each in ended] == [True, True, False]
    jp.fit(step_of(fsdp=8), Numbered(), steps=1, batch=8)
    assert open_fit_data(Numbered(), None, None).examples == 64  # it has others to evaluate
    jp.fit(step_of(fsdp=8), Points(), steps=1, batch=8)
    assert "held out" not in capsys.readouterr().out
    jp.fit(step_of(fsdp=8), ROWS, steps=1, batch=8, held_out=0.25, run=tmp_path)
    jp.fit(step_of(fsdp=8), ROWS, steps=2, batch=8, held_out=0.25, run=tmp_path)
    with pytest.raises(jp.JaxparError, match="held out 16 examples, now 1 are"):
        jp.fit(step_of(fsdp=8), ROWS, steps=3, batch=8, run=tmp_path)


def carried(model, batch):
    """A scan that gives back another type than it was given: JAX says which on its second line."""
    return jax.lax.scan(lambda x, _: (x.astype(np.int32), None), loss(model, batch)[0], length=2)[0], 1


BATCH = Points().batch(0, 16)


def fit(data=None, **asked):
    return jp.fit(step_of(fsdp=8), data or Points(), steps=1, batch=8, **asked)


WRONG = {
    "a layout for a step": (lambda path: jp.fit(jp.compose(Net, jp.Parallel(data=8)), Points(), steps=1, batch=8),
                            "jp.train_step"),
    "no steps": (lambda path: jp.fit(step_of(fsdp=8), Points(), steps=0, batch=8), "steps is a positive"),
    "data that is not open": (lambda path: jp.fit(step_of(fsdp=8), jp.Data(), steps=1, batch=8), r"jp\.open_data"),
    "no data": (lambda path: jp.fit(step_of(fsdp=8), 3, steps=1, batch=8), "batch"),
    "an old argument": (lambda path: fit(checkpoints={"every": 5}), "import Checkpoints"),
    "patience without evaluations": (lambda path: fit(best=Best(patience=2), run=path), "eval_every"),
    "patience without a run": (lambda path: fit(best=Best(patience=2), eval_every=1), "keeps their results"),
    "two ways to compare": (lambda path: fit(best=Best(), checkpoints=Checkpoints(best="eval_accuracy"), run=path),
                            "compared in one way"),
    "two directions": (lambda path: fit(best=Best(metric="eval_accuracy"), run=path,
                                        checkpoints=Checkpoints(best_is="highest")), "compared in one way"),
    "checkpoints without a run": (lambda path: fit(checkpoints=Checkpoints(every=5)), "without run"),
    "a rollback without a run": (lambda path: fit(faults=Faults(on_bad_step="rollback")), "rollback"),
    "skipped batches without a run": (lambda path: fit(faults=Faults(on_bad_batch="skip")), "without run"),
    "a skip of a step that does not": (lambda path: fit(faults=Faults(on_bad_step="skip")), "guard=True"),
    "an empty set": (lambda path: fit(sets={"far": []}), "at least one"),
    "a set whose path nothing reads": (lambda path: fit(sets={"far": jp.Data(path="far.txt")}), "reads no path"),
    "a set that is none": (lambda path: fit(sets={"far": 3}), r"sets\['far'\] is a int"),
    "the name of a set": (lambda path: fit(sets={"Far away": Far()}), "small letters"),
    "nothing to evaluate": (lambda path: fit(data=[Points().batch(0, 8)], eval_every=1), "holds no example out"),
    "nothing to compare": (lambda path: fit(data=[Points().batch(0, 8)], sets={"far": Far()}, eval_every=1, run=path,
                                            best=Best(patience=2)), 'metric="eval_far_loss"'),
    "a share of batches": (lambda path: fit(data=[Points().batch(0, 8)], held_out=0.1), "a share is held out of"),
    "a share of one's own evaluation": (lambda path: fit(held_out=0.1), "without an evaluation of its own"),
    "a share of data that is open": (lambda path: fit(data=jp.open_data(jp.Data(source="digits")), held_out=0.1),
                                     r"jp\.open_data\(jp\.Data\(\.\.\., held_out=0\.1"),
    "a share of more than half": (lambda path: fit(data=ROWS, held_out=0.7), "held_out"),
    "two beginnings": (lambda path: fit(state=1, checkpoints=Checkpoints(start_from="runs/other")), "one state"),
    "steps that are text": (lambda path: fit(eval_every="5"), "number of steps"),
    "a path for a step": (lambda path: jp.restore(path, "fsdp 8"), "jp.train_step"),
    "an optimizer of 2 steps": (lambda path: jp.init_state(step_of(fsdp=8).layout, optax.MultiSteps(OPTIMIZER, 2)),
                                r"optax\.MultiSteps\(\.\.\.\)\.gradient_transformation\(\)"),
    "an empty folder": (lambda path: jp.restore(path, step_of(fsdp=8)), "checkpoint"),
    "no such schedule": (lambda path: jp.schedule("1f2b", stages=2, microbatches=4), "1f1b"),
    "no such time": (lambda path: jp.schedule("1f1b", stages=2, microbatches=4).price(sent=1), "times are"),
    "no such file": (lambda path: jp.schedule("none.csv"), "none.csv"),
    "no GPUs": (lambda path: jp.plan("configs/gpu_llama_8b_fsdp8.toml", devices=0), "devices"),
    "no job": (lambda path: jp.plan("configs/none.toml", devices=8), "none.toml"),
    "a model for a plan": (lambda path: jp.plan(Net, BATCH, devices=8), "a job, or a step"),
    "a step without its batch": (lambda path: jp.plan(step_of(fsdp=8), devices=8), "global batch"),
    "a batch of numbers": (lambda path: jp.plan(step_of(fsdp=8), {"x": 3}, devices=8), "global batch"),
    "a batch of two sizes": (lambda path: jp.plan(step_of(fsdp=8), BATCH | {"y": BATCH["y"][1:]}, devices=8),
                             "same first"),
    "a batch without y": (lambda path: jp.plan(step_of(fsdp=8), {"x": BATCH["x"]}, devices=8), "no entry 'y'"),
    "a scan of two types": (lambda path: jp.plan(jp.train_step(step_of(fsdp=8).layout, carried, OPTIMIZER), BATCH,
                                                 devices=8),
                            r"type float32\[\] but .* type int32\[\]"),
    "devices that do not divide it": (lambda path: jp.plan(step_of(fsdp=8), BATCH, devices=7), "divides the examples"),
    "rules": (
        lambda path: jp.fit(
            step_of(fsdp=8), Points(), steps=1, batch=16, run=path, checkpoints=Checkpoints(start_from="a", rules="b:C")
        ),
        "jp.from_huggingface",
    ),
    "no GPUs for a step": (lambda path: jp.plan(step_of(fsdp=8), BATCH, devices=0), "0 devices\n"),
    "fewer than no GPUs": (lambda path: jp.plan(step_of(fsdp=8), BATCH, devices=-8), "-8 devices\n"),
    "GPUs as text": (lambda path: jp.plan(step_of(fsdp=8), BATCH, devices="8"), "'8' devices\n"),
    "a batch for other GPUs": (lambda path: jp.plan(step_of(fsdp=8), BATCH, devices=7), "or a global batch of"),
    "a chip that is a number": (lambda path: jp.plan(step_of(fsdp=8), BATCH, devices=8, chip=8), "chip=8"),
    "chips": (lambda path: jp.plan(step_of(fsdp=8), BATCH, devices=8, chip=["h100"]), r"chip=\['h100'\]"),
    "GPUs of a node as text": (lambda path: jp.plan(step_of(fsdp=8), BATCH, devices=8, per_node="8"), "per_node='8'"),
    "half a GPU of a node": (lambda path: jp.plan(step_of(fsdp=8), BATCH, devices=8, per_node=2.5), "per_node=2.5"),
    "a link of no bytes": (lambda path: jp.plan(step_of(fsdp=8), BATCH, devices=8, inside=0), "a byte per second"),
    "a link of fewer bytes": (lambda path: jp.plan(step_of(fsdp=8), BATCH, devices=8, between=-1), "no bandwidth"),
    "an unknown kernel": (lambda path: jp.plan(step_of(fsdp=8), BATCH, devices=8, attention="flash"), "'flash'"),
    "a batch for a job": (lambda path: jp.plan("configs/gpu_llama_8b_fsdp8.toml", BATCH, devices=8), "is text"),
    "a job to inspect": (lambda path: jp.inspect("configs/quickstart.toml"), "jaxpar inspect JOB"),
    "devices of a step": (lambda path: jp.inspect(step_of(fsdp=8), BATCH, devices=8), "with devices"),
    "roles of a step": (lambda path: jp.inspect(step_of(fsdp=8), BATCH, roles=("batch",)), "with roles"),
    "two batches": (lambda path: jp.inspect(step_of(fsdp=8), BATCH, batch=BATCH), "with a second argument"),
    "a sync round as text": (lambda path: jp.inspect(step_of(fsdp=8), BATCH, sync_round="1"), "sync_round='1'"),
    "a sync round of a step without": (
        lambda path: jp.inspect(step_of(fsdp=8), BATCH, sync_round=1), "replicas of this step have none"
    ),
    "a sync round beyond the exchange's": (
        lambda path: jp.inspect(step_of(data=8, exchange=jp.Exchange("diloco", every=3)), BATCH, sync_round=2),
        "this one has 1\n",
    ),
    "a sync round to lower": (
        lambda path: (step := step_of(fsdp=8)).lower(step.abstract(), BATCH, sync_round=3), "sync_round=3",
    ),
    "top": (lambda path: jp.plan("configs/gpu_llama_8b_fsdp8.toml", devices=8, top=0), "top is"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_with_the_way_out(case, tmp_path):
    call, said = WRONG[case]
    with pytest.raises(jp.JaxparError, match=said) as caught:
        call(tmp_path)
    assert all(problem.rule and problem.fix for problem in caught.value.problems)


def test_a_fit_names_what_is_not_finite_in_the_batch_of_a_bad_step_and_may_skip_it(tmp_path, capsys):
    x = np.arange(64.0 * 8, dtype=np.float32).reshape(64, 8) / 512
    damaged = {"x": x.copy(), "y": x}
    damaged["x"][37, 3] = np.nan
    named = (
        r"step \d is nan \(grad_norm nan\); in its batch x\[\d, 3\] is nan \(row \d, example 37 of yours:data; 1 such\)"
    )
    with pytest.raises(jp.JaxparError, match=named):
        jp.fit(step_of(fsdp=8), damaged, steps=8, batch=8, held_out=0)
    faults = Faults(on_bad_batch="skip")
    outcome = jp.fit(step_of(fsdp=8), damaged, steps=8, batch=8, held_out=0, faults=faults, run=tmp_path)
    assert np.isfinite(outcome.last["loss"])
    assert "example 37 of yours:data; 1 such); passed over" in capsys.readouterr().out


def masked_loss(model, batch):
    outputs = jax.nn.softmax(model(batch["x"]) + batch["mask"])
    counts = jnp.isfinite(batch["y"])
    return (jnp.where(counts, outputs - jnp.where(counts, batch["y"], 0.0), 0.0) ** 2).sum(), counts.sum()


def test_a_fit_trains_and_evaluates_on_masks_of_infinities_and_labels_that_are_missing():
    x = np.arange(64.0 * 8, dtype=np.float32).reshape(64, 8) / 512
    data = {"x": x, "y": np.where(x < 0.3, np.nan, x), "mask": np.where(np.arange(8) < 6, 0.0, -np.inf) + 0 * x}
    step = jp.train_step(jp.compose(Net, jp.Parallel(fsdp=8)), masked_loss, OPTIMIZER)
    outcome = jp.fit(step, data, steps=4, batch=8, held_out=0.25, sets={"far": data})
    assert np.isfinite([outcome.last[name] for name in ("loss", "eval_loss", "eval_far_loss")]).all()


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_data(tmp_path):
    jp.fit(step_of(fsdp=8), Points(), steps=1, batch=16, run=tmp_path)
    with pytest.raises(jp.JaxparError, match="points 1"):
        jp.fit(step_of(fsdp=8), Points(1), steps=2, batch=16, run=tmp_path)


@pytest.mark.nightly
def test_a_job_of_configs_is_planned_in_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan_api._print_once.cache_clear()
    plan = jp.plan("configs/gpu_llama_8b_fsdp8.toml", devices=8, top=1)
    message = capsys.readouterr().out
    assert message.startswith("configs/gpu_llama_8b_fsdp8.toml: not in this folder; taken from the installed jaxpar/")
    jp.plan("configs/gpu_llama_8b_fsdp8.toml", devices=8, top=1)
    assert not capsys.readouterr().out  # once is enough
    main(["check", "configs/gpu_llama_8b_fsdp8.toml"])
    assert message in capsys.readouterr().err  # the command says the same
    assert "jaxpar train configs/gpu_llama_8b_fsdp8.toml" in plan.command
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "gpu_llama_8b_fsdp8.toml").write_text("mine = 1")
    with pytest.raises(jp.JaxparError, match="mine"):
        jp.plan("configs/gpu_llama_8b_fsdp8.toml", devices=8, top=1)


@pytest.mark.nightly
def test_a_plan_in_python_is_the_one_of_the_shell(tmp_path, capsys):
    job = "configs/gpu_llama_8b_fsdp8.toml"
    plan = jp.plan(job, "train.global_batch=512", devices=64, top=2)
    assert main(["plan", job, "train.global_batch=512", "--devices", "64", "--top", "2"]) == 0
    said = capsys.readouterr().out
    assert str(plan) == page(plan) == said.split("\n\nTrain it so")[0]
    assert plan.command in said
    assert plan.html(tmp_path / "plan.html") == (tmp_path / "plan.html").read_text()


def test_a_schedule_in_python_goes_by_name_by_file_and_by_layout(tmp_path):
    made = jp.schedule("interleaved", stages=2, microbatches=4, chunks=2)
    made.csv(tmp_path / "own.csv")
    assert jp.schedule(tmp_path / "own.csv").cells == made.cells == jp.schedule(made).cells
    assert made.price(backward=2.0).barrier > made.price().barrier
    assert "zb_h1" in made.compare()
    assert made.svg(tmp_path / "own.svg").startswith("<svg")


def test_help_begins_with_an_example_and_the_order():
    said = pydoc.render_doc(jp, renderer=pydoc.plaintext)
    example, order = said.index("jp.compose(model, jp.Parallel("), said.index("What is made of what")
    words = [said.index(f"\n        {noun}  ") for noun in ("model", "layout", "state", "step")]
    assert example < order < min(words)
    assert words == sorted(words)
