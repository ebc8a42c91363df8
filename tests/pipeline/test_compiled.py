"""What XLA's GPU compiler makes of a pipeline, for eight GPUs that are not there.

Two stages x data 2 x fsdp 2, or four x fsdp 2; a microbatch is two rows on each device. What follows from a table is
counted from the table: how often a stage sends. Bytes are the theory's, to 0.2 %.
"""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from pairwise import some
from tiny import Lean, Staged

import jaxpar as jp
from jaxpar.hlo.text import parse
from jaxpar.hlo.trip_counts import walk
from jaxpar.inspector import report as reports
from jaxpar.inspector.compiled import compile_program
from jaxpar.mesh.collective import KINDS
from jaxpar.mesh.target import missing_plugin
from jaxpar.pipeline.run.parameter_moves import permutation_rounds

pytestmark = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
VOCAB, SEQ, DIM, HIDDEN, LAYERS = 512, 64, 256, 1024, 8
MESH = {"pipe": 2, "data": 2, "fsdp": 2}
ALONE = {"pipe": 4, "fsdp": 2}
PHASED = ("1f1b_phased", "gpipe", "interleaved_phased", "looped_bfs")
MIXED = ("1f1b", "zb_h1")
EXACT = {"rel": 2e-3}
MESSAGE = 4 * 2 * SEQ * DIM  # bytes of one microbatch's activation
LAYER_BYTES, SHARED_BYTES = 4 * LAYERS * 2 * DIM * HIDDEN, 4 * (2 * VOCAB * DIM + VOCAB)


def step_of(name, mesh, *, microbatches, keep="inputs"):
    model = partial(Staged, layers=LAYERS, tied=False, vocab=VOCAB, dim=DIM, hidden=HIDDEN)
    pipeline = jp.Pipeline(schedule=name, microbatches=microbatches, keep=keep)
    layout = jp.compose(model, jp.Parallel(**mesh, pipeline=pipeline), jp.target_devices("h100:1x8"))
    shape = jax.ShapeDtypeStruct((2 * microbatches * layout.replicas, SEQ), jnp.int32)
    return jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3)), {"inputs": shape, "targets": shape}


@cache
def found(name, *, alone=False):
    """Returns (table, report, compiled program) of a schedule with four microbatches."""
    step, batch = step_of(name, ALONE if alone else MESH, microbatches=4)
    report, program = inspected(step, batch)
    return step.layout.schedule, report, parse(program.text)


def inspected(step, batch):
    """Returns (report, the program that it is of), compiled once."""
    programs = []

    def compiled(*args, **kwargs):
        programs.append(compile_program(*args, **kwargs))
        return programs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "compile_program", compiled)
        report = jp.inspect(step, batch)
    return report, programs[0]


def each(names):
    """In every run: one mixed table, compiled once; in CI: phased ones too, with chunks and without."""
    rarely = {n: [pytest.mark.slow] for n in ("1f1b_phased", "interleaved_phased", "zb_h1")}
    rarely |= {"gpipe": [pytest.mark.full], "looped_bfs": [pytest.mark.full]}
    marks = lambda n: [pytest.mark.xdist_group(f"gpu {n}"), *rarely.get(n, [])]  # noqa: E731
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n)) for n in names])


def opcodes(module):
    return {op.opcode for ops in module.computations.values() for op in ops}


def payload(report, axis, kind):
    return sum(e.step_payload for e in report.ledger if (e.axis, e.kind) == (axis, kind) and e.payload > 64)


@pytest.mark.spread(1)
@each(PHASED)
def test_a_phased_table_compiles_without_a_conditional(name):
    _, _, module = found(name)
    assert "conditional" not in opcodes(module)
    assert "while" in opcodes(module)


@pytest.mark.slow
@each(MIXED)
def test_a_mixed_table_chooses_and_sends_outside_of_what_it_chooses(name):
    _, _, module = found(name)
    assert "conditional" in opcodes(module)
    assert not [v.op for v in walk(module) if v.branch and v.op.opcode.removesuffix("-start") in KINDS]


@each(PHASED + MIXED)
def test_stages_send_once_or_twice_a_tick(name):
    """All stages of a phased table go the same way, so they send one; else one to the right and one to the left."""
    plan, report, _ = found(name)
    sent = [e for e in report.ledger if e.axis == "pipe" and e.kind == "collective-permute" and e.payload == MESSAGE]
    assert sum(e.times for e in sent) == plan.ticks * (1 if plan.phased else 2)
    assert 2 * sum(e.times for e in sent) >= plan.messages


@each(PHASED + MIXED)
def test_nothing_else_crosses_stages_or_replicas_inside_of_a_loop(name):
    _, report, _ = found(name)
    inside = [e for e in report.ledger if e.loop]
    assert inside
    assert {(e.axis, e.kind, e.payload) for e in inside} == {("pipe", "collective-permute", MESSAGE)}


@each(PHASED + MIXED)
def test_gradients_and_parameters_travel_once_per_step(name):
    """A stage's own layers over its own replicas; what all stages share over all of them."""
    _, report, _ = found(name)
    layers, shared = LAYER_BYTES / MESH["pipe"], SHARED_BYTES
    assert payload(report, "fsdp", "all-gather") == pytest.approx(layers + shared, **EXACT)
    assert payload(report, "fsdp", "reduce-scatter") == pytest.approx(layers + shared, **EXACT)
    assert payload(report, "data", "all-reduce") == pytest.approx(layers / MESH["fsdp"], **EXACT)
    assert payload(report, "pipe,data", "all-reduce") == pytest.approx(shared / MESH["fsdp"], **EXACT)
    others = {(e.axis, e.kind) for e in report.ledger if e.payload > 64 and e.axis != "pipe"}
    assert others == {
        ("fsdp", "all-gather"),
        ("fsdp", "reduce-scatter"),
        ("data", "all-reduce"),
        ("pipe,data", "all-reduce"),
    }


SCATTERED = list(itertools.product(PHASED + MIXED, (True, False)))


@pytest.mark.parametrize(("name", "alone"), some(SCATTERED, [], [("1f1b", False)]))
def test_gradients_are_scattered_over_fsdp_with_one_replica_and_with_two(name, alone):
    _, report, _ = found(name, alone=alone)
    layers = LAYER_BYTES / (ALONE if alone else MESH)["pipe"]
    assert payload(report, "fsdp", "reduce-scatter") == pytest.approx(layers + SHARED_BYTES, **EXACT)
    assert payload(report, "fsdp", "all-reduce") == 0


@each(PHASED + MIXED)
def test_layers_make_one_hop_to_the_stage_that_runs_them_and_one_back(name):
    """Those that stay make none: on two stages with two chunks, half of them."""
    plan, report, _ = found(name)
    dealt = [e for e in report.ledger if e.axis == "pipe" and e.payload not in (MESSAGE, 4)]
    moves = 0
    if plan.chunks > 1:
        hops = [[part // plan.chunks != plan.locate(part)[0] for part in parts] for parts in permutation_rounds(plan)]
        moves = sum(map(any, hops))
    piece = LAYER_BYTES / MESH["fsdp"] / plan.parts
    assert sum(e.step_payload for e in dealt) == pytest.approx(2 * moves * piece, **EXACT)
    assert all(e.kind == "collective-permute" for e in dealt)


@each(PHASED + MIXED)
def test_a_good_pipeline_raises_no_flag(name):
    assert found(name)[1].flags == ()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [pytest.param(PHASED[0], marks=pytest.mark.full), pytest.param(MIXED[0], marks=pytest.mark.slow)]
)
def test_zero_2_adds_up_shards_of_gradients(name):
    """Half of the sums' bytes. Of 4 microbatches on 4 stages, 7 ticks make gradients of layers; mixed ones all may."""
    step, batch = step_of(name, ALONE | {"zero": 2}, microbatches=4)
    report, program = inspected(step, batch)
    layers, table = LAYER_BYTES / ALONE["pipe"], step.layout.schedule
    sent = 7 * layers + 4 * SHARED_BYTES if table.phased else table.ticks * (layers + SHARED_BYTES)
    assert payload(report, "fsdp", "reduce-scatter") == pytest.approx(sent, **EXACT)
    assert payload(report, "fsdp", "all-reduce") == 0
    # in place, what is scattered of one matrix is there beside the sums, which it is added to; and stage 1 keeps one
    # less, as it adds up gradients of the ends before it sends, where stage 2 scatters them first
    beside = 1.01 * 2 * 4 * DIM * HIDDEN / 2 if table.phased else 0.1 * layers / 2
    assert temporary(name, ALONE | {"zero": 1}, 4) - program.temporary >= layers / 2 - beside


def temporary(name, mesh, microbatches, keep="inputs"):
    step, batch = step_of(name, mesh, microbatches=microbatches, keep=keep)
    return compile_program(step.lower(step.abstract(), batch), list(step.layout.device_mesh.devices.flat)).temporary


FLAT = [  # the fewest microbatches are as many as the first stage keeps
    ("1f1b", {"pipe": 4, "data": 2}, (4, 64), "inputs"),
    ("1f1b_phased", {"pipe": 2, "data": 2, "fsdp": 2}, (4, 64), "residuals"),
    ("zb_h1", {"pipe": 4, "data": 2}, (4, 64), "inputs"),
    ("1f1b", {"pipe": 4, "data": 2}, (4, 64), "residuals"),
    ("1f1b_phased", {"pipe": 4, "data": 2}, (8, 64), "inputs"),
    ("interleaved_phased", {"pipe": 2, "data": 4}, (8, 64), "inputs"),
]


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("name", "mesh", "counts", "keep"),
    [
        pytest.param(*case, id=f"{case[0]}, {case[3]}", marks=mark)
        for case, mark in zip(FLAT, [pytest.mark.slow, *[pytest.mark.full] * 5], strict=True)
    ],
)
def test_memory_does_not_grow_with_microbatches(name, mesh, counts, keep):
    """Temporary bytes of one device as XLA assigned them, the size of a microbatch being the same."""
    sizes = [temporary(name, mesh, count, keep) for count in counts]
    assert max(sizes) == pytest.approx(min(sizes), rel=0.01)


@pytest.mark.nightly
def test_gpipe_keeps_every_microbatch():
    """The contrast: one more input of a stage, and its slot, with every microbatch."""
    small, large = (temporary("gpipe", {"pipe": 4, "data": 2}, count) for count in (8, 64))
    assert large - small >= (64 - 8) * MESSAGE


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.blocks = nnx.List([Lean(rngs, DIM, HIDDEN) for _ in range(LAYERS)])

    def __call__(self, tokens):
        return self.embed.attend(jp.pipelined(self.blocks, self.embed(tokens)))


@pytest.mark.nightly
def test_a_list_of_layers_goes_to_its_stages_and_back_once_per_step():
    """Each device sends and receives no more than the share of its stage's weights, and of its gradients."""
    parallel = jp.Parallel(**ALONE, pipeline=jp.Pipeline(microbatches=8))
    layout = jp.compose(Listed, parallel, jp.target_devices("h100:1x8"))
    shape = jax.ShapeDtypeStruct((2 * 8 * layout.replicas, SEQ), jnp.int32)
    report, _ = inspected(
        jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3)), {"inputs": shape, "targets": shape}
    )
    assert payload(report, "pipe", "all-to-all") == pytest.approx(2 * LAYER_BYTES / 8, **EXACT)
    assert payload(report, "pipe", "all-gather") == 0
