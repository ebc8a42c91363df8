"""A plan of a pipeline for any model with equal layers: its stages, their waits, and the job that trains so."""

import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.hlo.text import parse
from jaxpar.inspector.compiled import compile_program
from jaxpar.mesh.target import missing_plugin
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.sharding.names import shard_bytes

OWN = """
import jax.numpy as jnp
from flax import nnx

import jaxpar as jp


class Block(nnx.Module):
    def __init__(self, dim, rngs):
        self.up, self.down = nnx.Linear(dim, 4 * dim, rngs=rngs), nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs, layers=4, pipelined=True):
        self.enter = nnx.Linear(64, 16, rngs=rngs)
        self.blocks = nnx.List([Block(16, rngs) for _ in range(layers)])
        self.leave, self.pipelined = nnx.Linear(16, 10, rngs=rngs), pipelined

    def __call__(self, x):
        x = self.enter(x.reshape(x.shape[0], -1))
        if self.pipelined:
            return self.leave(jp.pipelined(self.blocks, x))
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def total(model, batch):
    error = (model(batch["inputs"]) - 1.0) ** 2
    return jnp.sum(error), error.size
"""
BATCH = {"inputs": jax.ShapeDtypeStruct((512, 8, 8), "float32")}


def own(**given):
    names: dict = {}
    exec(OWN, names)
    return partial(names["Net"], **given), names["total"]


def plan_of(model, loss, batch=None, *, devices=8, **given):
    step = jp.train_step(jp.compose(model, jp.Parallel(data=8)), loss, optax.adam(1e-3))
    return jp.plan(step, batch or BATCH, devices=devices, top=500, **given)


@pytest.fixture(scope="module")
def plan():
    return plan_of(*own())


def piped(**given):
    return Candidate(**{"schedule": "1f1b_phased", "pipe": 4, "data": 2, "microbatches": 8, "microbatch": 32} | given)


@pytest.mark.nightly
def test_all_stages_of_equal_layers_that_compose_are_weighed(plan):
    every = plan.question.legal()
    assert {*np.asarray(every.pipe).tolist()} == {1, 2, 4}
    assert {*np.asarray(every.schedule[every.pipe > 1]).tolist()} == {"1f1b_phased", "gpipe", "interleaved_phased"}
    assert (np.asarray(every.chunks)[np.asarray(every.pipe) == 4] == 1).all()  # a layer cannot be cut
    assert not any(text.startswith("pipe:") for text in plan.exclusions)


def test_a_device_stores_what_the_layout_stores_and_holds_a_stage_while_the_table_runs(plan):
    model, _ = own()
    layout = jp.compose(model, jp.Parallel(pipe=4, fsdp=2, zero=3, pipeline=jp.Pipeline(head="last")), 8)
    exact = sum(shard_bytes(place.leaf, place.stored, layout.sizes) for place in layout.placements.values())
    memory = plan.question.bytes(piped(data=1, fsdp=2, zero=3))
    assert float(memory.parameters) == exact
    layer, ends = 2 * 16 * 64 + 64 + 16, 64 * 16 + 16 + 16 * 10 + 10
    assert plan.question.model.shape.stages.parameters(4) == layer + ends


@pytest.mark.nightly
def test_stages_wait_as_the_table_says(plan):
    """The share of F and B in which a stage waits is that of the closed form (P - 1) / (M + P - 1)."""
    stages, hardware = plan.question.model.shape.stages, HARDWARE["h100"]
    for pipe, count in ((2, 4), (4, 8), (4, 16)):
        candidate = piped(pipe=pipe, data=8 // pipe, microbatches=count, microbatch=32)
        time = plan.question.seconds(candidate)
        of_ends = sum(
            sum(part.seconds(32, hardware).values())
            for part in (stages.embedding, stages.embedding_gradient, stages.head)
        )
        ends = count * (of_ends + 2e-6 * stages.arrays[1])  # a kernel of 2 us sums each gradient
        in_layers = float(time.matmuls + time.elementwise) - ends
        assert float(time.bubble) / (in_layers + float(time.bubble)) == pytest.approx((pipe - 1) / (count + pipe - 1))


@pytest.mark.slow
def test_what_passes_between_stages_is_the_input_of_a_layer(plan):
    for schedule, ticks in (("1f1b_phased", 2 * (8 + 3)), ("1f1b", 2 * 2 * (8 + 3))):  # of 1f1b all send both ways
        (message,) = plan.question.costs.collectives(piped(schedule=schedule))
        assert (message.kind, message.axes) == ("collective-permute", ("pipe",))
        assert (message.payload, message.times) == (32 * 16 * 4, ticks)


def test_more_microbatches_wait_less_and_more_in_flight_keep_more(plan):
    few, many, gpipe = (
        piped(microbatches=count, microbatch=256 // count, schedule=name)
        for count, name in ((4, "1f1b_phased"), (32, "1f1b_phased"), (32, "gpipe"))
    )
    seconds = [plan.question.seconds(each) for each in (few, many)]
    shares = [float(each.bubble / each.total) for each in seconds]
    assert shares[0] > shares[1]
    one, all_of_them = (float(plan.question.bytes(each).activations) - 256 * 64 * 4 for each in (many, gpipe))
    assert all_of_them > 3 * one  # 32 microbatches in flight, and 7; besides the batch


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (partial(own, pipelined=False), "does not call jp.pipelined"),
        (partial(own, layers=1), "cuts nothing"),
    ],
)
def test_a_model_that_no_pipeline_cuts_says_why(model, reason):
    plan = plan_of(*model())
    (said,) = [text for text in plan.exclusions if text.startswith("pipe:")]
    assert reason in said
    assert {each.candidate.pipe for each in plan.best} == {1}


@pytest.mark.nightly
def test_a_loss_of_examples_that_is_a_mean_has_no_pipeline():
    model, loss = own()
    plan = plan_of(model, lambda model, batch: loss(model, batch)[0])
    assert any(text.startswith("pipe:") for text in plan.exclusions)


@cache
def planned_on_slow_links():
    """A plan whose first layout is a pipeline: links are so slow that gradients of all parameters take longest."""
    model, loss = own()
    return model, loss, plan_of(model, loss, {"inputs": jax.ShapeDtypeStruct((32, 8, 8), "float32")}, inside="2MB")


@pytest.mark.nightly
def test_the_printed_layout_is_planned_and_trains_as_flax_and_optax_alone():
    model, loss, plan = planned_on_slow_links()
    first = plan.best[0].candidate
    assert first.pipe > 1
    names = {"jp": jp, "model": model, "loss": loss, "optimizer": optax.adam(1e-3)}
    exec(plan.command, names)
    step = names["step"]
    assert (step.layout.sizes["pipe"], step.layout.microbatches) == (first.pipe, first.microbatches)

    state, alone = jp.init_state(step.layout, optax.adam(1e-3), seed=0), model(rngs=nnx.Rngs(0))
    nnx.update(alone, nnx.state(jp.model(step.layout, state)))
    optimizer = nnx.Optimizer(alone, optax.adam(1e-3), wrt=nnx.Param)
    rows = {"inputs": np.random.default_rng(0).normal(size=(32, 8, 8)).astype(np.float32)}

    @nnx.jit
    def update(alone, optimizer, rows):
        def mean(alone):
            total, count = loss(alone, rows)
            return total / count

        value, gradients = nnx.value_and_grad(mean)(alone)
        optimizer.update(alone, gradients)
        return value

    for _ in range(3):
        expected = update(alone, optimizer, rows)
        state, metrics = step(state, rows)
        assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_a_planned_job_trains_as_on_one_device(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    text = '[model]\nname = "own:Net"\n[data]\nsource = "digits"\n[train]\nglobal_batch = 32\nsteps = 3\n'
    (tmp_path / "own.toml").write_text(text + 'loss = "own:total"\n')

    def jaxpar(*words):
        return subprocess.run(
            [sys.executable, "-m", "jaxpar", *words], cwd=tmp_path, capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(jp.__file__).parents[1]}"},
        ).stdout  # fmt: skip

    said = jaxpar("plan", "own.toml", "--devices", "8", "--inside", "2MB", "--write", "planned.toml")
    assert "parallel.pipe=" in said.partition("Train it so:")[2]
    assert "ok: Net on pipe" in jaxpar("check", "planned.toml")
    jaxpar("train", "planned.toml", "mesh.devices=0", 'mesh.target=""', "mesh.simulate=8", "run.dir=piped")
    jaxpar("train", "own.toml", "mesh.simulate=1", "run.dir=whole")
    np.testing.assert_allclose(losses(tmp_path / "piped"), losses(tmp_path / "whole"), rtol=1e-5)


class Layers(nnx.Module):
    """Equal layers in a stack, behind an embedding."""

    def __init__(self, rngs, layers=8, dim=512, vocab=8192):
        from bench.plain_models import Block

        self.embed = nnx.Embed(vocab, dim, dtype=jnp.bfloat16, rngs=rngs)
        make = nnx.split_rngs(splits=layers)(nnx.vmap(lambda rngs: Block(dim, 8, rngs=rngs)))
        self.blocks = make(rngs)
        self.head = nnx.Linear(dim, vocab, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(jp.pipelined(lambda x: run(x, self.blocks), self.embed(tokens)))


def scanned_pipeline(sizes):
    """Returns a step of stacked layers, and the shapes of its batch."""
    from bench.plain_models import cross_entropy, ids

    def loss(model, batch):
        return cross_entropy(model(batch["inputs"]), batch["targets"])

    rows = {"inputs": ids(64, 512), "targets": ids(64, 512)}
    pipeline = jp.Pipeline(schedule="1f1b_phased", microbatches=8, keep="residuals", head="last")
    layout = jp.compose(Layers, jp.Parallel(**sizes, pipeline=pipeline), jp.target_devices("h100:1x8"))
    return jp.train_step(layout, loss, optax.adamw(1e-3), precision="bf16"), rows


@cache
def compiled_pipeline(pipe, data, fsdp):
    """Returns the question of a plan, its layout, and the report on the layout's program."""
    sizes = {"pipe": pipe, "data": data, "fsdp": fsdp} | ({"zero": 3} if fsdp > 1 else {})
    step, rows = scanned_pipeline(sizes)
    question = jp.plan(step, rows, devices=8).question
    candidate = Candidate(**sizes, schedule="1f1b_phased", microbatches=8, microbatch=64 // 8 // (data * fsdp))
    return question, candidate, jp.inspect(step, rows)


absent_gpus = pytest.mark.skipif(
    missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}"
)  # fmt: skip


@absent_gpus
@pytest.mark.xdist_group("compiled pipelines")
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [pytest.param((4, 2, 1), id="data", marks=pytest.mark.nightly), pytest.param((2, 1, 4), id="zero3")]
)
def test_a_plan_has_the_bytes_and_messages_of_the_compiled_pipeline(sizes):
    question, candidate, report = compiled_pipeline(*sizes)
    newest = jax.__version_info__ >= (0, 12)  # the rules are of its XLA; 0.10's needs 22 % more with ZeRO-3
    assert float(question.bytes(candidate).total) == pytest.approx(report.total, rel=0.1 if newest else 0.25)
    sent = [(each.payload, each.times) for each in report.ledger if each.kind == "collective-permute"]
    (planned,) = question.costs.collectives(candidate)
    assert sum(size * count for size, count in sent) == planned.payload * planned.times


@absent_gpus
@pytest.mark.xdist_group("compiled pipelines")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 2, 1), (2, 1, 4)], ids=["data", "zero3"])
def test_a_plan_has_the_seconds_of_the_replayed_pipeline(sizes):
    from bench.traced_models import replay_prices

    question, candidate, report = compiled_pipeline(*sizes)
    seconds = question.costs.time(candidate, replay_prices()).total
    assert float(seconds) == pytest.approx(report.timeline.seconds, rel=0.15)


@absent_gpus
@pytest.mark.xdist_group("compiled pipelines")
@pytest.mark.slow
def test_slots_are_written_in_place_and_never_copied():
    """Else each tick moves the residuals of all microbatches in flight into another layout, and back."""
    step, rows = scanned_pipeline({"pipe": 4, "data": 2})
    devices = [*step.layout.device_mesh.devices.flat]
    compiled = compile_program(step.lower(step.abstract(), rows), devices)
    slots = 7  # of 1f1b_phased with 4 stages: `tests/pipeline/test_parts.py`
    kernels = [
        op
        for name, ops in parse(compiled.text).computations.items()
        for op in ops
        if op.opcode in ("fusion", "copy", "transpose") and not name.startswith("fused")
    ]
    made = [op.name for op in kernels if any(array.dims[:3] == (slots, 2, 4) for array in op.arrays)]
    assert any("dynamic_update_slice" in name for name in made)
    assert not [name for name in made if "dynamic_update_slice" not in name and "broadcast" not in name]


def test_no_choice_of_schedules_is_dropped_in_silence(plan):
    assert any("1f1b" in text and "--schedules all" in text for text in plan.exclusions)
    assert any("zb_h1" in text for text in plan.exclusions)
    every = plan.question.model.legal(devices=8, rows=512, choices=Choices(schedules=("zb_h1", "1f1b")))
    assert {*np.asarray(every.schedule).tolist()} == {"1f1b"}
