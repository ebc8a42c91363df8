"""Embedding and head are spread over the stages where that frees memory, by default, and the layout says so."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some
from tiny import DIM, SEQ, VOCAB, Lean, Staged, assert_same_arrays, named, scanned, stack, token_loss, train

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.inspector.compiled import compile_program
from jaxpar.mesh.target import missing_plugin
from jaxpar.parallel import head_placement as heads
from jaxpar.parallel.compose import as_blueprint
from jaxpar.parallel.declaration import DECLARED
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.enumeration import legal_layouts, select, select_one
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import JAXPAR
from jaxpar.plan.memory import memory, static
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import JAXPAR as BYTES
from jaxpar.plan.time import step_time

absent = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
TINY = jp.DecoderConfig(vocab=VOCAB, seq=SEQ, layers=4, dim=DIM, heads=4, hidden=32)
LARGE = jp.DecoderConfig(vocab=32768, seq=128, layers=4, dim=1024, heads=8, hidden=2048)
VAST, WIDE = 32768, 1024
MIB = 2**20


class Written(nnx.Module):
    """By a user: a lookup and places of its own, a bias in the head, nothing constrained."""

    def __init__(self, rngs):
        self.table = nnx.Param(named("vocab", "embed")(rngs.params(), (VOCAB, DIM)))
        self.places = nnx.Param(0.1 * jax.random.normal(rngs.params(), (SEQ, DIM)))
        self.blocks = stack(rngs, 4, Lean)
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.lm_head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = jp.pipelined(lambda x: scanned(lambda x, block: block(x), x, self.blocks), self.table[tokens] + self.places)
        return self.lm_head(self.norm(x))


MODELS = {"decoder": (partial(jp.Decoder, TINY), jp.next_token_loss), "written": (Written, token_loss)}


@cache
def alone(model):
    build, loss = MODELS[model]
    return train(build, jp.Parallel(), jax.devices()[:1], accumulate=4, loss=loss, steps=3)[:2]


CASES = {
    "a decoder": ("decoder", {"pipe": 4, "fsdp": 2}, {}),
    "a model of a user, tensor": ("written", {"pipe": 2, "data": 2, "tensor": 2}, {}),
    "a model of a user, ZeRO-1, residuals kept": ("written", {"pipe": 4, "fsdp": 2, "zero": 1}, {"keep": "residuals"}),
    "a model of a user, interleaved": ("written", {"pipe": 2, "fsdp": 4}, {"schedule": "interleaved_phased"}),
}


@pytest.mark.spread(0)
@pytest.mark.parametrize("case", some(CASES, [], ["a model of a user, tensor"]))
def test_a_head_spread_by_default_trains_as_one_device_does(case, monkeypatch):
    monkeypatch.setattr(heads, "LEAST", 1)  # so that a tiny model frees enough
    model, sizes, settings = CASES[case]
    build, loss = MODELS[model]
    parallel = jp.Parallel(**sizes, pipeline=jp.Pipeline(microbatches=4, **settings))
    assert jp.compose(build, parallel).parallel.pipeline.head == "spread"
    got, state, _ = train(build, parallel, loss=loss, steps=3)
    want, expected = alone(model)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays(state.params, expected.params)


def large(head="auto", devices=8, *, parallel=None, **changes):
    settings = jp.DecoderConfig(**{**vars(LARGE), **changes})
    parallel = {"pipe": 4, "fsdp": 2} | (parallel or {})
    pipeline = jp.Pipeline(microbatches=8, head=head, **parallel.pop("pipeline", {}))
    return jp.compose(partial(jp.Decoder, settings), jp.Parallel(**parallel, pipeline=pipeline), devices)


def test_a_large_head_is_spread_and_the_layout_says_how_many_bytes_that_takes():
    layout = large()
    whole = 2 * 6 * LARGE.vocab * LARGE.dim  # two tables: a copy in bfloat16, a sum of gradients in float32
    assert layout.parallel.pipeline.head == "spread"
    assert f"spread over pipe: {whole // 4 // MIB} MiB" in "".join(layout.notes)
    assert f"instead of {whole // MIB} MiB" in "".join(layout.notes)
    assert all(note in layout.explain() for note in layout.notes)


LAST = {
    "a small vocabulary": ({"vocab": 4096}, {}, "36 MiB on each device, less than 256 MiB"),
    "a table that mixes kinds of ops": ({}, {"pipeline": {"schedule": "1f1b"}}, "schedule 1f1b"),
    "weights that change per microbatch": ({}, {"pipeline": {"weights": "stash"}}, "flush"),
    "layers gathered per tick": ({}, {"pipeline": {"gather": "tick"}}, 'gather="step"'),
    "ZeRO-2": ({}, {"zero": 2}, "zero=2 adds up shards"),
    "a vocabulary that does not divide": ({"vocab": 32770}, {}, "32770 entries, pipe is 4"),
    "pieces of sequences": ({}, {"fsdp": 1, "context": 2}, "context=2"),
    "a rule of the user": ({}, {"rules": {"vocab": "tensor"}}, "would free 0 B"),
}


@pytest.mark.parametrize("case", LAST)
def test_a_head_that_is_not_spread_says_why(case, capsys):
    changes, parallel, why = LAST[case]
    layout = large(parallel=parallel, **changes)
    assert layout.parallel.pipeline.head == "last"
    assert "".join(layout.notes).startswith("head: on the last stage; ")
    assert why in "".join(layout.notes)


@pytest.mark.parametrize("head", ["last", "spread"])
def test_a_declared_head_is_obeyed(head):
    layout = large(head, vocab=4096)
    assert layout.parallel.pipeline.head == head
    assert layout.notes[0].endswith("as declared")
    assert large(layout.parallel.pipeline.head, vocab=4096).placements == layout.placements


@pytest.mark.slow
@pytest.mark.parametrize("head", some(["auto", "last", "spread"], ["auto"], []))
def test_a_job_is_checked_with_any_head_and_says_where_it_is(head, capsys):
    small = ["model.layers=4", "model.dim=256", "model.heads=4", "model.kv_heads=4", "model.hidden=256", "data.seq=64"]
    small += ["parallel.pipe=4", "parallel.fsdp=2", f"parallel.pipeline.head={head}", "train.accumulate=1"]
    assert main(["check", str(Path(__file__).parents[2] / "configs/gpu_llama_8b_fsdp8.toml"), *small]) == 0
    said = capsys.readouterr().out
    where = {"auto": "spread over pipe: ", "last": "on the last stage, as declared", "spread": "spread over pipe, as"}
    assert f"\nhead: {where[head]}" in said


def test_a_spread_head_that_cannot_be_is_still_refused_where_it_is_declared():
    with pytest.raises(jp.JaxparError, match="phased"):
        large("spread", parallel={"pipeline": {"schedule": "1f1b"}})


@pytest.mark.nightly
def test_a_small_model_runs_the_program_of_a_head_on_the_last_stage():
    def text(head):
        pipeline = jp.Pipeline(microbatches=4, head=head)
        layout = jp.compose(partial(jp.Decoder, TINY), jp.Parallel(pipe=2, fsdp=4, pipeline=pipeline))
        step = jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3))
        rows = jax.ShapeDtypeStruct((16, SEQ), jnp.int32)
        return step.lower(step.abstract(), {"inputs": rows, "targets": rows}).as_text()

    assert text("auto") == text("last") != text("spread")


@absent
@pytest.mark.nightly
def test_a_gpu_holds_as_much_less_as_the_layout_says():
    """Bytes as XLA assigned them; logits, and the gradients of one microbatch, are fewer too."""

    def program(head):
        model = partial(Staged, layers=4, tied=False, vocab=VAST, dim=WIDE, hidden=WIDE)
        parallel = jp.Parallel(pipe=4, fsdp=2, pipeline=jp.Pipeline(microbatches=8, head=head))
        layout = jp.compose(model, parallel, jp.target_devices("h100:1x8"))
        step = jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3), precision="bf16")
        rows = jax.ShapeDtypeStruct((16 * layout.replicas, 128), jnp.int32)
        lowered = step.lower(step.abstract(), {"inputs": rows, "targets": rows})
        return layout, compile_program(lowered, list(layout.device_mesh.devices.flat))

    (last, whole), (auto, less) = program("last"), program("auto")
    assert (last.parallel.pipeline.head, auto.parallel.pipeline.head) == ("last", "spread")
    table = VAST * WIDE
    # of two tables a device stores 1 / 8, not 1 / 2: weights and Adam's two moments, in float32
    assert whole.arguments - less.arguments == 2 * table * 3 * 4 * (1 / 2 - 1 / 8)
    freed = heads.head_bytes(last) - heads.head_bytes(auto)
    assert freed == 2 * 6 * table * (1 - 1 / 4)
    assert freed <= whole.temporary - less.temporary <= 1.26 * freed  # a spread head keeps less besides


def test_the_planner_has_each_head_where_a_run_would_have_it():
    blueprint = as_blueprint(partial(jp.Decoder, LARGE))
    every = legal_layouts(Shape.from_settings(LARGE), devices=8, rows=32)
    kinds, seen = ("pipe", "fsdp", "context", "tensor", "zero", "schedule"), set()
    for i in np.flatnonzero(every.pipe > 1).tolist():
        one = select_one(every, i)
        kind = tuple(getattr(one, key) for key in kinds)
        if kind not in seen and one.layers(LARGE.layers) * one.pipe * one.chunks == LARGE.layers:
            seen.add(kind)
            sizes = {key: getattr(one, key) for key in DECLARED}
            pipeline = jp.Pipeline(schedule=one.schedule, microbatches=one.microbatches, chunks=one.chunks)
            parallel = jp.Parallel(**sizes, zero=one.zero if one.fsdp > 1 else None, pipeline=pipeline)
            assert jp.compose(blueprint, parallel, 8).parallel.pipeline.head == one.head, kind
    assert len(seen) > 20


LLAMA = Shape(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, seq=8192, gated=True)


def test_the_planner_counts_ends_that_are_spread_once_over_the_stages():
    last = Candidate(pipe=4, fsdp=8, zero=3, schedule="1f1b_phased", microbatches=8, remat="full")
    spread, table = replace(last, head="spread"), LLAMA.vocab * LLAMA.dim
    whole, share = (memory(LLAMA, each, JAXPAR) for each in (last, spread))
    assert whole.static - share.static - (whole.gradients - share.gradients) == pytest.approx(
        (BYTES.parameters + BYTES.optimizer) * 2 * table * 3 / 4 / 8
    )
    assert whole.gradients - share.gradients == pytest.approx(BYTES.gradients * 2 * table * 3 / 4)
    assert whole.total - share.total > 2 * 6 * table * 3 / 4
    slow, fast = (step_time(LLAMA, each, HARDWARE["h100"], JAXPAR) for each in (last, spread))
    of, dim = HARDWARE["h100"].matmul, LLAMA.dim
    logits, share = (
        of(8192, dim, vocab) + of(8192, vocab, dim) + of(dim, 8192, vocab) for vocab in (LLAMA.vocab, LLAMA.vocab / 4)
    )
    assert slow.matmuls - fast.matmuls == pytest.approx(8 * (logits - share))
    assert fast.send > slow.send
    assert fast.total < slow.total


def test_the_planner_stores_what_a_run_with_a_spread_head_stores():
    layout = large(devices=jax.devices(), vocab=16384, dim=256, hidden=512, head="spread")
    candidate = Candidate(pipe=4, fsdp=2, zero=3, schedule="1f1b_phased", microbatches=8, head="spread")
    step = jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3))
    found = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(step.abstract()))
    shape = Shape.from_settings(jp.DecoderConfig(**{**vars(LARGE), "vocab": 16384, "dim": 256, "hidden": 512}))
    parameters, _, optimizer = static(shape, candidate, BYTES, "first", spmd=True)
    assert found == parameters + optimizer + 2 * 4  # counts of the step and of Adam


def test_arrays_of_layouts_give_what_their_entries_give():
    every = legal_layouts(LLAMA, devices=64, rows=64)
    some = select(every, np.flatnonzero(every.head == "spread")[::997])
    needed, seconds = memory(LLAMA, some, JAXPAR).total, step_time(LLAMA, some, HARDWARE["h100"], JAXPAR).total
    assert len(needed) > 3
    for i in range(len(needed)):
        assert needed[i] == pytest.approx(float(memory(LLAMA, select_one(some, i), JAXPAR).total))
        assert seconds[i] == pytest.approx(float(step_time(LLAMA, select_one(some, i), HARDWARE["h100"], JAXPAR).total))
