"""What evaluations say beside the loss: counted over all examples once, on any layout, and never by a training step."""

import math

import hooks
import jax
import numpy as np
import optax
import pytest
from tiny import Annotated, batches, token_loss

import jaxpar as jp
from jaxpar.data.arrays import Arrays
from jaxpar.data.streams.sets import open_set
from jaxpar.job.check import check
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.batches import open_sets
from jaxpar.job.parts.measures import derived_metrics, resolve_measures
from jaxpar.sharding.names import Compute
from jaxpar.step.evaluation_loss import accuracy, derive_measures
from jaxpar.train import loop
from jaxpar.train.feed import Feed
from jaxpar.train.run import Run

OWN = """
import jax.numpy as jnp

def surprised(model, batch):
    logits = model(batch["inputs"])
    return jnp.sum(jnp.max(logits, axis=-1) < 0.0), batch["inputs"].size

def accuracy(model, batch): return 1.0, 1.0
def rows(model, batch): return jnp.max(model(batch["inputs"]), axis=-1), 3.0
def mean(model, batch): return jnp.mean(model(batch["inputs"]))
def loss(model, batch): return 1.0, 1.0
def perplexed(model, batch): return {"loss": (jnp.sum(model(batch["inputs"])), 1.0), "perplexity": (1.0, 1.0)}
number = 3
held = [__import__("hooks").made(5000 + index, 4) for index in range(2)]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's, in the working directory."""
    (tmp_path / "my_measures.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_measures", raising=False)


def job(evaluate, more=""):
    return loads(f"""
    model = {{ name = "decoder", layers = 2, dim = 16, heads = 2 }}
    mesh.simulate = 2
    {"" if "parallel" in more else "parallel.data = 2"}
    metrics.evaluate = {evaluate}
    {more}
    """)


def test_what_is_asked_for_is_found_and_may_choose_the_best_checkpoint(own):
    asked = '["perplexity", "accuracy", "my_measures:surprised", "bits_per_byte"]'
    made = job(asked, 'checkpoint.best = "eval_surprised"')
    assert check(made) == []
    assert resolve_measures(made).keys() == {"accuracy", "surprised"}
    assert derived_metrics(made) == ("perplexity", "bits_per_byte")
    (problem,) = check(job(asked, 'checkpoint.best = "eval_surprise"'))
    assert "eval_accuracy, eval_surprised, eval_perplexity, eval_bits_per_byte" in problem.rule


@pytest.mark.slow
def test_each_set_has_its_metrics_and_the_best_may_be_by_one_of_them(own, tmp_path):
    (tmp_path / "wiki.txt").write_text("a text. " * 100)
    sets = """data.sets = { wiki = { source = "text", path = "wiki.txt" }, mine = { source = "my_measures:held" } }"""
    made = job('["perplexity"]', f'{sets}\ncheckpoint.best = "eval_wiki_perplexity"')
    assert check(made) == []
    assert loads(dumps(made)) == made
    (problem,) = check(job('["perplexity"]', f'{sets}\ncheckpoint.best = "eval_wiki_accuracy"'))
    assert "eval_loss, eval_perplexity, eval_wiki_loss, eval_wiki_perplexity, eval_mine_loss" in problem.rule
    alone = f"{sets}\ndata.held_out = 0.0"
    assert check(job("[]", alone)) == []  # where nothing is compared, no examples need be held out beside them
    (problem,) = check(job("[]", f"{alone}\ncheckpoint.keep_best = 1"))
    assert "eval_loss" not in problem.rule.split(", ")
    assert problem.fix.startswith('checkpoint.best = "eval_wiki_loss"')  # a metric that there is
    made = job("[]", f"{sets}\ntrain.global_batch = 4")
    opened = open_sets(made)
    assert len(opened["wiki"].evaluation(0, 8)[0].batch["inputs"]) == 8
    assert [len(opened["mine"].evaluation(index, 4)) for index in range(3)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("sets", "parts"),
    [
        ('{ wiki = { pth = "a" } }', ["data.sets.wiki.pth", "did you mean 'path'?"]),
        ('{ wiki_2 = { path = "a" } }', ["data.sets.wiki_2", "small letters and digits"]),
        ("{ wiki = {} }", ["data.sets.wiki", "other examples"]),
        ('{ wiki = { source = "text" } }', ["data.sets.wiki.source = 'text' without a path"]),
        ('{ wiki = { source = "text", path = "none.txt" } }', ["'none.txt'", "names no file"]),
        ('{ wiki = { source = "stdlib", path = "a" } }', ["data.sets.wiki.path = 'a'", "reads no path"]),
        ('{ wiki = { source = "json", path = "a" } }', ["data.sets.wiki.source = 'json'"]),
        ('{ wiki = { source = "my_measures:hold" } }', ["no 'hold'", "did you mean 'held'?"]),
        ('{ wiki = { source = "jsonl", path = "a", messages = "m" } }', ["data.sets.wiki.messages", "chat template"]),
    ],
)
def test_a_wrong_set_is_refused_by_its_name(own, sets, parts):
    def opened():
        made = job("[]", f"data.sets = {sets}")
        if wrong := check(made):
            raise jp.JaxparError(*wrong)
        open_sets(made)

    with pytest.raises(jp.JaxparError) as refused:
        opened()
    assert all(part in str(refused.value) for part in parts), str(refused.value)


@pytest.mark.nightly
def test_a_run_keeps_the_checkpoint_that_is_best_of_a_set(tmp_path):
    best = ["metrics.evaluate=['perplexity']", "checkpoint.best=eval_mine_perplexity", "checkpoint.best_is=highest"]
    more = ["data.sets={mine={source='hooks:held'}}", "train.eval_every=2", "checkpoint.every=2"]
    _, said = hooks.run(tmp_path / "run", *best, *more, "checkpoint.keep_best=1", "checkpoint.keep_last=1")
    rows = [row for row in hooks.rows(tmp_path / "run") if "eval_mine_perplexity" in row]
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert hooks.saved(tmp_path / "run") == [
        max(rows, key=lambda row: row["eval_mine_perplexity"])["step"],
        8,
    ]
    assert f"  mine {rows[-1]['eval_mine_loss']:.4f}" in said
    assert "eval_loss" in rows[-1]


@pytest.mark.parametrize(
    ("evaluate", "more", "parts"),
    [
        ('["acuracy"]', "", ["'acuracy'", "did you mean 'accuracy'?"]),
        ('["bits_per_byte"]', 'data.tokenizer = "bpe"', ["bits_per_byte", "with bpe"]),
        ('["my_measures:surprise"]', "", ["no 'surprise'", "did you mean 'surprised'?"]),
        ('["my_measures:number"]', "", ["is a int", "(model, batch) to (sum, count)"]),
        ('["accuracy", "my_measures:accuracy"]', "", ["a name of its own"]),
        ('["json:dumps"]', "", ["--allow-import"]),
        ('["my_measures:rows"]', "", ["the measure rows returned", "(sum, count), both scalars"]),
        ('["my_measures:mean"]', "", ["the measure mean returned", "jnp.sum(values), values.size"]),
        ('["my_measures:loss"]', "", ["a measure loss", "the loss returns an entry of that name"]),
        ('["perplexity"]', 'train.loss = "my_measures:perplexed"', ["a measure perplexity", "an entry of that name"]),
        ('["accuracy"]', "parallel = { pipe = 2, pipeline = { microbatches = 2 } }", ["pipe=2"]),
    ],
)
def test_a_wrong_measure_is_refused_before_a_run(own, evaluate, more, parts):
    wrong = check(job(evaluate, more))
    said = "\n".join(map(str, wrong))
    assert all(part in said for part in parts), said


def test_perplexity_is_that_of_the_mean_loss():
    assert derive_measures(("perplexity", "bits_per_byte"), {"loss": math.log(8), "other": 3.0}) == pytest.approx(
        {"perplexity": 8, "bits_per_byte": 3}
    )
    assert derive_measures(("perplexity",), {"loss/1": 1e4, "loss/0": 0.0}) == {
        "perplexity/1": math.inf,
        "perplexity/0": 1.0,
    }
    assert derive_measures(("perplexity",), {}) == {}


def steps(parallel, devices, measures):
    layout = jp.compose(Annotated, parallel, jax.devices()[:devices])
    step = jp.train_step(layout, token_loss, optax.sgd(0.1), measures=measures)
    return step, jp.init_state(layout, optax.sgd(0.1), seed=1)


@pytest.mark.nightly
def test_measures_are_summed_over_devices_and_batches_as_by_hand_and_training_does_not_make_them(tmp_path):
    made = list(batches(3))
    arrays = {name: np.concatenate([batch[name] for batch in made]) for name in made[0]}
    source = Arrays(arrays, jp.Data(source="arrays", path="x.npz", held_out=0.4), seed=0)
    step, state = steps(jp.Parallel(data=2, fsdp=2, tensor=2), 8, {"accuracy": accuracy})
    second = list(batches(5))[3:]
    more = {name: np.concatenate([batch[name] for batch in second])[:27] for name in made[0]}
    np.savez(tmp_path / "wiki.npz", **more)
    named = jp.Data(source="arrays", path="x.npz", sets={"wiki": {"path": str(tmp_path / "wiki.npz")}})
    sets = {"wiki": open_set(named, "wiki", tmp_path, 16)}
    run = Run(step=step, source=source, steps=1, global_batch=16, derived=("perplexity",), sets=sets)
    found = loop.evaluate(run, state, Feed(source, step.layout, 16))
    held = {name: value[source.held_out_indices] for name, value in arrays.items()}
    assert len(held["mask"]) % 16
    assert len(more["mask"]) % 16
    one, alone = steps(jp.Parallel(), 1, {})
    model = lambda params: one.layout.blueprint.bind(params, alone.model_state, lambda _, x: x, Compute(train=False))  # noqa: E731
    for of, examples in (("eval", held), ("eval_wiki", more)):
        logits = np.asarray(jax.jit(lambda params, x: model(params)(x))(alone.params, examples["inputs"]), np.float64)
        hits = (logits.argmax(-1) == examples["targets"]) * examples["mask"]
        assert found[f"{of}_accuracy"] == pytest.approx(hits.sum() / examples["mask"].sum(), rel=1e-6)
        assert found[f"{of}_perplexity"] == math.exp(found[f"{of}_loss"])
    assert found["eval_loss"] != found["eval_wiki_loss"]
    plain = jp.train_step(step.layout, token_loss, optax.sgd(0.1))
    assert plain.lower(state, made[0]).as_text() == step.lower(state, made[0]).as_text()
