"""A plan of a model of one's own weighs `context` where its rows are long: what it splits, needs, sends and writes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_loop
import pytest
from flax import nnx
from specs import models
from specs.test_trained import CASES, plain, train

import jaxpar as jp
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.plan_splits import find_splits
from jaxpar.job.plan import apply_layout
from jaxpar.mesh.target import missing_plugin
from jaxpar.parallel.compose import as_blueprint
from jaxpar.plan.candidate import Candidate
from jaxpar.sharding.names import shard_bytes

# long rows, and matrices so small that splitting them gains less than it sends
LONG = partial(models.Gpt, vocab=512, dim=1024, heads=4, hidden=1024, layers=1)
BATCH = {key: jax.ShapeDtypeStruct((1, 32768), "int32") for key in ("x", "y")}


def plan_of(model, loss, batch, devices=8):
    layout = jp.compose(model, jp.Parallel(), jax.devices()[:1])
    step = jp.train_step(layout, loss, optax.adamw(1e-3), precision="bf16")
    return jp.plan(step, batch, devices=devices, top=100)


@pytest.fixture(scope="module")
def plan():
    return plan_of(LONG, models.next_token, BATCH)


def test_context_is_weighed_and_is_first_where_one_long_row_is_all_there_is(plan):
    every = plan.question.legal()
    sizes = {*zip(np.asarray(every.context).tolist(), np.asarray(every.tensor).tolist(), strict=True)}
    assert sizes == {(8, 1), (1, 8)}  # one example has no replicas
    first = plan.best[0]
    assert first.candidate.context == 8
    assert first.time["context"] > 0
    assert "jp.Parallel(context=8), precision='bf16').parallel" in plan.command
    assert any(text.startswith("context with tensor: ") for text in plan.exclusions)


def test_devices_of_context_share_the_work_and_the_kept_activations(plan):
    model = plan.question.model
    whole, split = model.trace.programs["none"], model.trace.split_programs[8, 1]["none"]
    work = [float((program.flop.sum(axis=1) * program.runs).sum()) for program in (whole, split)]
    assert work[1] == pytest.approx(work[0] / 8, rel=0.01)
    kept = [program.peak(1, weights=0, gradients=0)["activations"] for program in (whole, split)]
    assert kept[1] == pytest.approx(kept[0] / 8, rel=0.1)


def test_sums_of_gradients_over_context_do_not_grow_with_the_examples(plan):
    """They were priced by the example: of four microbatches each would have sent a quarter of its gradients."""
    model, software = plan.question.model, plan.question.software
    parameters = 2 * model.parameters  # bytes of gradients, in 16 bits
    for microbatch in (1, 4):
        sent = model.collectives(Candidate(context=8, microbatch=microbatch), software)
        sums = sum(each.times * each.payload for each in sent if each.kind == "all-reduce")
        assert 0.9 * parameters < sums < 1.1 * parameters
        moved = sum(each.times * each.payload for each in sent if each.kind == "all-gather")
        assert moved == pytest.approx(microbatch * 2 * 2 * 32768 * 1024, rel=0.01)  # keys and values


def test_a_device_stores_what_the_layout_of_the_found_specs_stores(plan):
    found = jp.find_specs(LONG, models.next_token, BATCH, jp.Parallel(context=8), precision="bf16")
    layout = jp.compose(LONG, found.parallel, 8)
    stored = sum(shard_bytes(place.leaf, place.stored, layout.sizes) for place in layout.placements.values())
    assert float(plan.question.bytes(Candidate(context=8)).parameters) == stored


class Wide(nnx.Module):
    """Two matrices, and no dim of activations beside examples and features."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def splits_of(model, loss, batch, **given):
    options = {"devices": 8, "sizes": (2, 8), "precision": "fp32", "frozen": ()}
    return find_splits(as_blueprint(model), loss, batch, **{**options, **given})


def test_sizes_that_split_what_tensor_splits_or_nothing_are_left_out_with_a_sentence():
    def mean(model, batch):
        return jnp.mean(model(batch["x"]) ** 2)

    found, sentences = splits_of(Wide, mean, {"x": jax.ShapeDtypeStruct((8, 64), "float32")}, rows=8)
    assert {*found} == {(1, 2), (1, 8)}
    assert sentences == ("context 2, 8: the solver splits the same dims for it as for tensor",)

    def table(model, batch):  # a lookup alone: no matmul has a dim that an axis splits
        return jnp.mean(model.scale[...] * batch["x"])

    class Scale(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(()))

    found, sentences = splits_of(Scale, table, {"x": jax.ShapeDtypeStruct((8, 64), "float32")}, rows=8)
    assert found == {}
    assert sentences[0].startswith("context 2, 8: splits no activation along a dim of the batch")


def test_dims_are_found_for_the_replicas_of_a_run():
    """Without their sums of gradients, a plan of 64 devices left whole parameters that a run splits."""

    def mean(model, batch):
        return jnp.mean(model(batch["x"]) ** 2)

    batch = {"x": jax.ShapeDtypeStruct((8, 64), "float32")}
    found, _ = splits_of(Wide, mean, batch, rows=8)
    run = jp.find_specs(Wide, mean, batch, jp.Parallel(data=4, tensor=2))
    assert found[1, 2].solution.cost == pytest.approx(run.solution.cost, rel=1e-9)
    assert found[1, 2].names.paths == run.specs.paths


def test_context_is_left_out_where_the_model_calls_an_attention_that_meets_other_keys():
    def attend(model, batch):
        x = model.up(batch["x"]).reshape(*batch["x"].shape[:2], 4, -1)
        return jnp.mean(jp.attention(x, x, x, causal=True) ** 2)

    found, sentences = splits_of(Wide, attend, {"x": jax.ShapeDtypeStruct((8, 16, 64), "float32")}, rows=8)
    assert all(context == 1 for context, _ in found)
    assert sentences == ("context: how jp.attention meets the keys of other devices is priced for decoders",)


def test_a_written_job_finds_its_specs_for_context():
    job = loads('[model]\nname = "vit"\n[data]\nsource = "digits"\n[train]\nloss = "classify"\nglobal_batch = 8\n')
    written = apply_layout(job, Candidate(data=2, context=4), 1).parallel
    assert (written.data, written.context, written.specs) == (2, 4, "found")
    assert apply_layout(job, Candidate(data=8), 1).parallel.specs == ""


@pytest.mark.spread(0)
@pytest.mark.parametrize("case", ["gpt", pytest.param("scanned", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*each device computes")  # what no dim of its own splits is computed again
def test_a_layout_of_context_trains_as_one_device_does(case):
    model, loss, batch = CASES[case]
    found = jp.find_specs(model, loss, batch, jp.Parallel(data=2, context=4))
    layout = jp.compose(model, found.parallel, jax.devices()[:8])
    plain_loop.assert_alike(train(layout, case), plain(case))


@pytest.mark.nightly
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_a_layout_of_context_needs_and_sends_what_was_predicted():
    batch = {key: jax.ShapeDtypeStruct((1, 8192), "int32") for key in ("x", "y")}
    found = jp.find_specs(LONG, models.next_token, batch, jp.Parallel(context=8), precision="bf16")
    layout = jp.compose(LONG, found.parallel, jp.target_devices("h100:1x8"))
    step = jp.train_step(layout, models.next_token, optax.adamw(1e-3), precision="bf16")
    asked, report = jp.plan(step, batch, devices=8, top=1).question, jp.inspect(step, batch)
    predicted = asked.bytes(Candidate(context=8))
    assert float(predicted.total) == pytest.approx(report.total, rel=0.1)
    sums = found.solution.traffic["all-reduce"] + found.solution.traffic.get("reduce-scatter", 0.0)
    kinds = report.by_axis["context"]
    assert kinds.get("all-reduce", 0) + kinds.get("reduce-scatter", 0) == pytest.approx(sums, rel=0.1)
