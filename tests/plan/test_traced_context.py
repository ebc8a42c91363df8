"""A plan of a model of one's own weighs `context` where its rows are long: what it splits, needs, sends and writes."""

from functools import partial
from itertools import product

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
from jaxpar.errors import Problem
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.plan_splits import find_splits, splits_tokens
from jaxpar.job.plan import apply_layout
from jaxpar.mesh.target import missing_plugin
from jaxpar.parallel.compose import as_blueprint
from jaxpar.plan.candidate import Candidate
from jaxpar.sharding.names import shard_bytes

pytestmark = pytest.mark.xdist_group("traced context")  # one worker, which makes each plan once
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
    assert first.time["sharding"] == 0  # sums of gradients over `context` are among its own traffic
    assert "jp.Parallel(context=8), precision='bf16').parallel" in plan.command
    assert any(text.startswith("context with tensor: ") for text in plan.exclusions)


def test_devices_of_context_share_the_work_and_the_kept_activations(plan):
    trace = plan.question.model.shape.trace
    whole, split = trace.programs["none"], trace.split_programs[8, 1]["none"]
    work = [float((program.flop.sum(axis=1) * program.runs).sum()) for program in (whole, split)]
    assert work[1] == pytest.approx(work[0] / 8, rel=0.01)
    kept = [program.peak(1, weights=0, gradients=0)["activations"] for program in (whole, split)]
    assert kept[1] == pytest.approx(kept[0] / 8, rel=0.1)


def test_sums_of_gradients_over_context_do_not_grow_with_the_examples(plan):
    """They were priced by the example: of four microbatches each would have sent a quarter of its gradients."""
    model, software = plan.question.model, plan.question.software
    parameters = 2 * model.parameters  # bytes of gradients, in 16 bits
    for microbatch in (1, 4):
        sent = model.costs(software).collectives(Candidate(context=8, microbatch=microbatch))
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
    assert found[1, 2].names.paths == run.specs.paths
    assert found[1, 2].names.activations == run.specs.activations


def test_context_is_left_out_where_the_model_calls_jp_attention_and_names_no_sequence():
    def attend(model, batch):
        x = model.up(batch["x"]).reshape(*batch["x"].shape[:2], 4, -1)
        return jnp.mean(jp.attention(x, x, x, causal=True) ** 2)

    found, sentences = splits_of(Wide, attend, {"x": jax.ShapeDtypeStruct((8, 16, 64), "float32")}, rows=8)
    assert all(context == 1 for context, _ in found)
    assert sentences == ('context: Wide names no dim seq; jp.constrain(x, "batch", "seq", "embed") on its stream does',)


def rows(count, length):
    return {key: jax.ShapeDtypeStruct((count, length), "int32") for key in ("x", "y")}


TOKENS = rows(2, 2048)


TWICE = pytest.mark.xfail(
    strict=True, reason="XLA gathers the last gradients of stream and logits twice: 0.3 MiB of 2.9 over tensor"
)


@pytest.fixture(scope="module")
def attending():
    return plan_of(models.Attending, models.next_token, TOKENS)


def test_context_is_planned_along_the_sequence_that_a_model_names(attending):
    every = attending.question.legal()
    sizes = {*zip(np.asarray(every.context).tolist(), np.asarray(every.tensor).tolist(), strict=True)}
    # with context 2 alone, the four replicas would share two examples
    assert {context for context, tensor in sizes if tensor == 1} == {4, 8}
    assert {(2, 2), (4, 2), (2, 4), (1, 8)} <= sizes
    assert "context_by ring and ulysses: priced for decoders; keys are gathered" in attending.exclusions
    first = attending.best[0].candidate
    assert first.context > 1
    assert "specs" not in attending.command
    assert f"context={first.context}" in attending.command


def test_sizes_that_do_not_divide_the_tokens_or_the_examples_are_left_out():
    odd = {key: jax.ShapeDtypeStruct((2, 65), "int32") for key in ("x", "y")}
    found, sentences = splits_of(models.Attending, models.next_token, odd, rows=2)
    assert all(context == 1 for context, _ in found)
    assert sentences == ("context: none of 2, 8 divides the 65 tokens of a row",)
    found, sentences = splits_of(models.Attending, models.next_token, TOKENS, rows=3, sizes=(2,))
    assert all(context == 1 for context, _ in found)
    assert sentences == ("context: with none of its sizes the replicas divide the examples",)


def test_a_model_that_context_does_not_support_is_planned_over_its_other_axes():
    def attend(model, batch):
        x = model.up(batch["x"]).reshape(*batch["x"].shape[:2], 4, -1)
        x = jp.constrain(x, "batch", "seq", "heads", "head_dim")
        if jax.sharding.get_abstract_mesh().shape.get("context", 1) > 1:
            raise jp.JaxparError(Problem("such a mask over pieces of a row", "whole rows", "context=1"))
        return jnp.mean(jp.attention(x, x, x, causal=True) ** 2)

    found, sentences = splits_of(Wide, attend, {"x": jax.ShapeDtypeStruct((8, 16, 64), "float32")}, rows=8)
    assert (1, 2) in found
    assert sentences == ("context: such a mask over pieces of a row",)


def test_keys_and_values_are_gathered_and_their_gradients_scattered(attending):
    model, software = attending.question.model, attending.question.software
    sent = model.costs(software).collectives(Candidate(context=8, microbatch=2))
    keys = 2 * 2048 * 256 * 2  # bytes of the keys of two rows, in 16 bits
    for kind in ("all-gather", "reduce-scatter"):
        assert sum(each.times * each.payload for each in sent if each.kind == kind) == 2 * 2 * keys  # k, v; layers


def test_devices_share_the_matmuls_and_the_activations_of_named_sequences(attending):
    trace = attending.question.model.shape.trace
    whole, split = trace.programs["none"], trace.split_programs[8, 1]["none"]
    work = [float((program.flop.sum(axis=1) * program.runs).sum()) for program in (whole, split)]
    assert work[1] == pytest.approx(work[0] / 8, rel=0.01)
    # in 16 bits a step with split sequences keeps one copy of the scores instead of two
    kept = [program.peak(2, weights=0, gradients=0)["activations"] for program in (whole, split)]
    assert kept[0] / 16 < kept[1] < kept[0] / 8


def test_a_model_with_dropout_in_a_loop_is_planned():
    """Its rate is a literal argument of the loop in the traced program."""

    class Dropping(nnx.Module):
        def __init__(self, rngs):
            self.wide = Wide(rngs)

        def __call__(self, x, key):
            def layer(x, key):
                return x + self.wide(x) * jax.random.bernoulli(key, 0.9, x.shape), None

            return jax.lax.scan(layer, x, jax.random.split(key, 2))[0]

    def mean(model, batch, key):
        return jnp.mean(model(batch["x"], key).astype(jnp.float32) ** 2)

    batch = {"x": jax.ShapeDtypeStruct((8, 64), "float32")}
    assert {*plan_of(Dropping, mean, batch).question.legal().tensor.tolist()} >= {1, 2}


def test_a_written_job_names_context_and_finds_no_specs_for_it():
    job = loads('[model]\nname = "vit"\n[data]\nsource = "digits"\n[train]\nloss = "classify"\nglobal_batch = 8\n')
    written = apply_layout(job, Candidate(data=2, context=4), 1, named=("context",)).parallel
    assert (written.data, written.context, written.specs) == (2, 4, "")
    assert apply_layout(job, Candidate(data=2, tensor=4), 1, named=("context",)).parallel.specs == "found"


def test_no_specs_are_found_for_context_alone_where_jp_attention_exchanges_keys():
    """They split heads by `context`, so that each device computed the attention of all tokens: 2.3 times the FLOP."""
    with pytest.raises(jp.JaxparError, match=r"which calls jp.attention[\s\S]*without specs"):
        jp.find_specs(models.Attending, models.next_token, TOKENS, jp.Parallel(context=8))
    unnamed = partial(models.Attending, names=None)
    with pytest.raises(jp.JaxparError, match=r"which calls jp.attention[\s\S]*fix:  jp.constrain"):
        jp.find_specs(unnamed, models.next_token, TOKENS, jp.Parallel(context=2, tensor=2, data=2))


def test_dims_found_for_tensor_leave_tokens_to_context():
    found = jp.find_specs(models.Attending, models.next_token, TOKENS, jp.Parallel(context=2, tensor=4))
    assert found.axes == ("tensor",)
    names = [names for names in found.specs.activations.values() if len(names) > 2]
    assert all(each[:2] == ("batch", "seq") for each in names)
    assert not any("context" in axes for axes in found.specs.axes.values())


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
@pytest.mark.parametrize(
    ("sizes", "policy"),
    [
        ({"context": 8}, "none"),
        ({"data": 2, "context": 4}, "full"),
        ({"data": 2, "context": 4}, "dots"),
        ({"fsdp": 2, "context": 4, "zero": 3}, "all_dots"),
        ({"data": 2, "context": 2, "tensor": 2}, "none"),
        pytest.param({"context": 4, "tensor": 2}, "full", marks=TWICE),
    ],
)
def test_a_plan_of_named_sequences_is_near_the_compiled_program(attending, sizes, policy):
    parallel, batch, question = jp.Parallel(**sizes), TOKENS, attending.question
    if parallel.tensor > 1:
        parallel = jp.find_specs(models.Attending, models.next_token, batch, parallel, precision="bf16").parallel
    layout = jp.compose(models.Attending, parallel, jp.target_devices("h100:1x8"))
    step = jp.train_step(layout, models.next_token, optax.adamw(1e-3), precision="bf16", remat=policy)
    report = jp.inspect(step, batch)
    candidate = Candidate(**sizes, microbatch=2 // layout.replicas, remat=policy)
    assert float(question.bytes(candidate).total) == pytest.approx(report.total, rel=0.1)
    sent = question.costs.collectives(candidate)
    for axis, kind in product(["context", "tensor"], ["all-gather", "reduce-scatter", "all-reduce"]):
        planned = sum(each.step_wire for each in sent if each.kind == kind and each.axes == (axis,))
        if planned:
            assert report.by_axis[axis].get(kind) == pytest.approx(planned, rel=0.02)


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


class Separate(models.Attending):
    """Queries, keys and values from one line each, as most models have them."""

    def __init__(self, rngs):
        super().__init__(rngs, dim=1024)
        self.q, self.k, self.v = (nnx.List([nnx.Linear(1024, 1024, rngs=rngs) for _ in range(2)]) for _ in range(3))

    def __call__(self, x):
        x = self.embed(x)
        for q, k, v, up, down in zip(self.q, self.k, self.v, self.up, self.down, strict=True):
            queries = q(x).reshape(*x.shape[:2], self.heads, -1)
            keys = k(x).reshape(*x.shape[:2], self.heads, -1)
            values = v(x).reshape(*x.shape[:2], self.heads, -1)
            heads = jp.attention(queries, keys, values, causal=True)
            x = x + heads.reshape(x.shape)
            hidden = nnx.gelu(up(x))
            x = x + down(hidden)
        return self.embed.attend(x)


def test_context_that_needs_tensor_has_named_dims_too():
    """With 32 devices for two rows of 1,000 tokens no size of context has enough devices alone."""
    planned = plan_of(partial(models.Attending, dim=32, heads=8), models.next_token, rows(2, 1000), devices=32)
    model = planned.question.model
    assert {context > 1 and tensor > 1 for context, tensor in model.shape.splits if context > 1} == {True}
    assert model.named_axes == ("context",)


def test_a_plan_of_one_device_has_no_sentence_on_context():
    planned = plan_of(partial(models.Attending, dim=32, heads=4), models.next_token, rows(2, 64), devices=1)
    assert not [text for text in planned.exclusions if text.startswith("context: with none")]


@pytest.mark.slow
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_scores_are_not_exchanged_where_heads_become_tokens():
    """XLA exchanged them, 3 GiB a step: no line of the model names the arrays inside of jp.attention."""
    batch, parallel = rows(4, 8192), jp.Parallel(data=2, tensor=4)
    found = jp.find_specs(Separate, models.next_token, batch, parallel, precision="bf16")
    layout = jp.compose(Separate, found.parallel, jp.target_devices("h100:1x8"))
    step = jp.train_step(layout, models.next_token, optax.adamw(1e-3), precision="bf16")
    compiled = jp.inspect(step, batch).by_axis["tensor"]
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        predicted = found.solution.traffic.get(kind, 0.0)
        assert compiled.get(kind, 0.0) == pytest.approx(predicted, rel=0.02)


@pytest.mark.spread(0)
def test_context_with_tensor_trains_as_one_device_does():
    model, loss, batch = CASES["attending"]
    found = jp.find_specs(model, loss, batch, jp.Parallel(data=2, context=2, tensor=2))
    layout = jp.compose(model, found.parallel, jax.devices()[:8])
    plain_loop.assert_alike(train(layout, "attending"), plain("attending"))


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


def test_dims_for_both_axes_are_found_where_there_are_fewer_examples_than_devices():
    """A model that names no sequence: four rows on 8 devices are shared by two axes, of which one splits tokens."""
    model = partial(models.Gpt, vocab=64, dim=32, heads=4, hidden=64, layers=1)
    found, sentences = splits_of(model, models.next_token, rows(4, 256), rows=4, sizes=(2, 4, 8), precision="bf16")
    assert {sizes for sizes in found if min(sizes) > 1} == {(2, 2)}
    assert {sent.axis for sent in found[2, 2].split.traffic} == {"context", "tensor"}
    axes = {axis for axis in ("context", "tensor") if splits_tokens(found[2, 2].names, axis)}
    assert len(axes) == 1
    assert {*found[2, 2].names.axes["heads"]} == {"context", "tensor"} - axes
    assert any(text.startswith("context with tensor: only 2 with 2, the smallest sizes") for text in sentences)
    found, _ = splits_of(model, models.next_token, rows(8, 256), rows=8, sizes=(2, 4, 8), precision="bf16")
    assert not [sizes for sizes in found if min(sizes) > 1]
