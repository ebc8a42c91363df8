"""Predictions beside what XLA compiled: static bytes to the byte, and how ranks are compared."""

import json
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bench.command import main as bench
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import some

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import load
from jaxpar.job.inspect import verify
from jaxpar.job.plan import question
from jaxpar.mesh.target import missing_plugin
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import JAXPAR
from jaxpar.plan.memory import static
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import JAXPAR as BYTES
from jaxpar.plan.model_protocol import Transformer
from jaxpar.plan.search import Question, describe, predict, search
from jaxpar.plan.validation import CompiledLayout, agreement, comparison, proposal, rank_correlation, ranks, sample

MODEL = jp.DecoderConfig(vocab=64, seq=16, layers=8, dim=64, heads=8, hidden=128, gated=True)
ROWS = 32
EIGHT_B = str(Path(__file__).parents[2] / "configs/gpu_llama_8b_fsdp8.toml")
GRID = [
    *({"data": 8}, {"tensor": 8}, {"tensor": 8, "sequence": True}),
    *({"fsdp": 8, "zero": zero} for zero in (1, 2, 3)),
    *({"data": 2, "fsdp": 4, "zero": zero} for zero in (1, 3)),
    *({"data": 2, "fsdp": 2, "tensor": 2, "zero": zero} for zero in (1, 2, 3)),
    {"fsdp": 4, "tensor": 2, "zero": 3, "sequence": True},
    *({"fsdp": 2, "context": 2, "tensor": 2, "zero": zero} for zero in (1, 3)),
    {"pipe": 2, "data": 2, "context": 2},
    *({"pipe": 2, "data": 4}, {"pipe": 8}, {"pipe": 4, "tensor": 2}),
    *({"pipe": 2, "fsdp": 4, "zero": zero} for zero in (1, 3)),
    {"pipe": 2, "fsdp": 2, "tensor": 2, "zero": 3},
]
COUNTERS = 3 * 4  # the step, Adam's count, the learning rate's: int32


def words(sizes):
    return " ".join(f"{key}{size:d}" for key, size in sizes.items())


def built(sizes):
    """Returns a step of a layout of the grid, and its candidate."""
    candidate = Candidate(**sizes, schedule="1f1b_phased", microbatches=4 if "pipe" in sizes else 1)
    pipeline = jp.Pipeline(schedule="1f1b_phased", microbatches=4) if "pipe" in sizes else jp.Pipeline()
    layout = jp.compose(lambda rngs: jp.Decoder(MODEL, rngs=rngs), jp.Parallel(**sizes, pipeline=pipeline))
    return jp.train_step(layout, jp.next_token_loss, optax.adamw(optax.constant_schedule(1e-3))), candidate


def predicted(candidate):
    parameters, _, optimizer = static(Shape.from_settings(MODEL), candidate, BYTES, "first", spmd=JAXPAR.spmd)
    return float(parameters + optimizer)


@pytest.mark.parametrize("sizes", some(GRID, [GRID[7], GRID[16], GRID[17], GRID[18], GRID[19], GRID[20]]), ids=words)
def test_static_bytes_are_those_of_the_state(sizes):
    step, candidate = built(sizes)
    leaves = jax.tree.leaves(step.abstract())
    found = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    assert found == predicted(candidate) + COUNTERS


@pytest.mark.full  # those of each technique alone are compared in tests/contracts
@pytest.mark.parametrize("sizes", GRID, ids=words)
def test_static_bytes_are_the_arguments_of_the_compiled_program(sizes):
    step, candidate = built(sizes)
    rows = jax.ShapeDtypeStruct((ROWS, MODEL.seq), jnp.int32)
    compiled = step.lower(step.abstract(), {"inputs": rows, "targets": rows}).compile()
    replicas = candidate.data * candidate.fsdp
    batch = 2 * 4 * ROWS * MODEL.seq // replicas
    assert compiled.memory_analysis().argument_size_in_bytes == predicted(candidate) + COUNTERS + batch


@pytest.mark.slow
@settings(deadline=None)  # the first example imports scipy
@given(st.lists(st.integers(0, 5), min_size=3, max_size=30))
def test_ranks_are_those_of_scipy(values):
    stats = pytest.importorskip("scipy.stats", reason="scipy comes with scikit-learn")
    assert ranks(values).tolist() == stats.rankdata(values).tolist()
    other = [value * value - 3 * value + i % 3 for i, value in enumerate(values)]
    if len(set(values)) > 1 and len(set(other)) > 1:
        assert rank_correlation(values, other) == pytest.approx(stats.spearmanr(values, other).statistic)


def test_ranks_know_order_alone():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 1e9]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [8, 4, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3], [2, 1, 3]) == pytest.approx(0.5)  # 1 - 6 (1 + 1) / (3 (9 - 1))


@pytest.mark.parametrize(("one", "other"), [([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [1, 2])])
def test_too_little_to_compare_is_refused(one, other):
    with pytest.raises(JaxparError, match="rank correlation"):
        rank_correlation(one, other)


H100 = HARDWARE["h100"].chip


def compiled_to(size):
    """A report of so many bytes, and no more than a check reads."""
    return SimpleNamespace(total=size, memory=(), timeline=None, flop=SimpleNamespace(squeezed=0, total=1))


SMALL = Shape(layers=8, dim=64, heads=8, vocab=512, seq=128, gated=True)


def asked(**given):
    known = {
        "devices": 8,
        "rows": 32,
        "hardware": HARDWARE["h100"],
        "software": JAXPAR,
    }
    return Question(**({"model": Transformer(shape=SMALL)} | known | given))


@pytest.mark.slow
def test_a_sample_has_every_kind_alike_and_depends_on_its_seed():
    drawn = [each.candidate for each in sample(asked(), 50, seed=3)]
    kinds = Counter((each.pipe > 1, each.context > 1, each.tensor > 1, each.zero) for each in drawn)
    assert len(kinds) == 29  # with and without pipe, context, tensor, four stages of ZeRO: eight devices have 29 of 32
    assert set(kinds.values()) <= {1, 2}
    assert len(set(drawn)) == 50
    assert drawn == [each.candidate for each in sample(asked(), 50, seed=3)]
    assert drawn != [each.candidate for each in sample(asked(), 50, seed=4)]
    assert all(each.devices == 8 and each.microbatch * each.microbatches * each.replicas == 32 for each in drawn)


@pytest.mark.parametrize("count", [0, 10**9])
def test_a_sample_of_none_or_of_more_than_there_are_is_refused(count):
    with pytest.raises(JaxparError, match=f"{count} layouts of"):
        sample(asked(), count)


def checked(*pairs):
    """Layouts whose predictions stand to what was compiled as these numbers do: seconds, bytes."""
    layouts = search(asked(), top=len(pairs)).best
    return [
        CompiledLayout(
            ranked=each, seconds=(each.time.total - each.time.stragglers) / time, bytes=each.memory.total / size
        )
        for each, (time, size) in zip(layouts, pairs, strict=True)
    ]


@pytest.mark.slow
def test_agreement_is_the_errors_of_what_was_compiled():
    found = agreement(checked((1.0, 1.09), (1.2, 0.92), (0.9, 1.2)))
    assert found["layouts"] == 3
    assert found["mean_error_seconds"] == pytest.approx(0.1)
    assert found["largest_error_bytes"] == pytest.approx(0.2)
    assert found["mean_error_bytes"] == pytest.approx(0.37 / 3)
    assert found["bytes_within_a_tenth"] == pytest.approx(2 / 3)
    assert "3 layouts: rank correlation of seconds" in comparison(checked((1.0, 1.09), (1.2, 0.92), (0.9, 1.2)))
    assert agreement(checked((1.0, 1.0))) == {}


def test_what_does_not_fit_as_compiled_is_not_proposed():
    plan = search(asked(), top=3)
    first, second = (
        CompiledLayout(ranked=each, seconds=1.0, bytes=2.0**30, fits=fits)
        for each, fits in zip(plan.best, (False, True), strict=False)
    )
    assert proposal(plan) == plan.best[0]
    assert proposal(plan, [first, second]) == plan.best[1]
    assert str(first).endswith("DOES NOT FIT")
    with pytest.raises(JaxparError, match=r"none of the 1 layouts that were compiled fits.*leanest needs 1 GiB"):
        proposal(plan, [first])
    refused = CompiledLayout(
        ranked=plan.best[0], seconds=None, bytes=None, fits=False, refusal="blocks/mlp/down stays whole"
    )
    with pytest.raises(JaxparError, match="is one that jaxpar runs: blocks/mlp/down stays whole"):
        proposal(plan, [refused])


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "fits"), [("40GiB", True), pytest.param("39GiB", False, marks=pytest.mark.slow)])
def test_what_is_compiled_has_to_fit_the_memory_that_was_asked_for(limit, fits, monkeypatch):
    monkeypatch.setattr(
        "jaxpar.job.inspect.observe", lambda job, target: compiled_to(40 * 2**30)
    )  # of an H100's 72 GiB
    job = load(EIGHT_B, [], allow_import=False)
    asked = question(job, devices=64, chip="h100", per_node=None, options={"memory": limit})
    (found,) = verify(job, asked, search(asked, top=1).best)
    assert found.fits is fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "memory", "nvlink", "network"),
    [
        pytest.param([], H100.usable_memory, H100.nvlink, H100.network, marks=pytest.mark.slow),
        (["--between", "2GB", "--memory", "40GiB"], 40 * 2**30, H100.nvlink, H100.network * 2 / 46),
        pytest.param(
            ["--inside", "184.5GB"], H100.usable_memory, H100.nvlink / 2, H100.network, marks=pytest.mark.slow
        ),
    ],
)
def test_what_is_compiled_has_the_memory_and_the_links_that_were_asked_for(words, memory, nvlink, network, monkeypatch):
    """XLA computes again what the memory does not hold, and the replay has the plan's links."""
    seen = []
    monkeypatch.setattr("jaxpar.job.inspect.observe", lambda job, target: seen.append(target) or compiled_to(2**30))
    assert main(["plan", EIGHT_B, "--devices", "64", "--verify", "1", *words]) == 0
    (target,) = seen
    assert (target.nodes, target.per_node) == (8, 8)
    assert target.chip.usable_memory == pytest.approx(memory, abs=2)
    assert (target.chip.nvlink, target.chip.network) == (
        pytest.approx(nvlink, rel=1e-3),
        pytest.approx(network, rel=1e-3),
    )


def test_what_xla_repeated_to_save_memory_is_said():
    found = CompiledLayout(ranked=search(asked()).best[0], seconds=1.0, bytes=2.0**30, xla_remat=0.124)
    assert "12% of its FLOP repeated by XLA to save memory" in str(found)
    assert found.to_dict()["compiled"]["squeezed"] == 0.124


@pytest.mark.full
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_the_bench_compares_layouts_that_were_compiled(tmp_path, capsys):
    small = ["model.layers=4", "model.dim=256", "model.heads=8", "model.kv_heads=4", "model.hidden=512", "data.seq=256"]
    small += ["model.vocab=2048", "data.vocab=2048", "train.global_batch=32"]
    file = tmp_path / "found.json"
    status = bench("layouts", [EIGHT_B, *small, "--devices", "8", "--count", "3", "--json", str(file)])
    found = json.loads(file.read_text())
    assert status == (0 if found["holds"] else 1)
    assert found["agreement"]["layouts"] == 3
    assert all(each["compiled"]["bytes"] > 0 < each["replayed"]["seconds"] for each in found["layouts"])
    assert "3 layouts: rank correlation of seconds" in capsys.readouterr().out


def on_record(seed):
    """Returns what was compiled of a draw, beside what is predicted now."""
    record, other = (
        json.loads((Path(__file__).parents[1] / f"bench/records/layouts_{name}_jax0.12.0.json").read_text())
        for name in (f"seed{seed}", "context")
    )
    kept = record["question"]
    again = {each["layout"]: each for each in other["layouts"] if each["seed"] == seed}
    job = load(EIGHT_B, [], allow_import=False)
    given = {"attention": "unfused"}  # as they were compiled
    asked = question(job, devices=kept["devices"], chip=kept["chip"], per_node=None, options=given)
    names = {field.name for field in fields(Candidate)} - {"axes"}

    def today(each, ranked):
        """Returns a layout that was compiled again, in place of what is on record of a program that is gone."""
        return again.get(describe(ranked.candidate), each) if ranked.candidate.context > 1 else each

    drawn = [
        (each, predict(asked, Candidate(**{key: each["predicted"][key] for key in names & each["predicted"].keys()})))
        for each in record["layouts"]
        if not each["refusal"]
    ]
    return [
        CompiledLayout(
            # what states no head was compiled with all of it on every stage, as it is with head="last"
            ranked=ranked,
            seconds=today(each, ranked)["replayed"]["seconds"],
            bytes=today(each, ranked)["compiled"]["bytes"],
        )
        for each, ranked in drawn
    ]


@pytest.mark.parametrize(
    ("seeds", "count", "rank", "seconds"),
    [((5,), 31, 0.95, 0.1), ((6,), 31, 0.95, 0.09), ((5, 6), 62, 0.95, 0.095)],
)
def test_predictions_still_agree_with_the_compiled_programs_on_record(seeds, count, rank, seconds):
    """In sight of seed 5 two terms were mended, then seed 6 was drawn.

    ZeRO-1 and 2 (18 layouts of each) became other programs twice, were compiled again, and showed five terms more.
    Programs keep less since, stages first and then all of them: pipelines without remat are left out, and the bytes on
    record are of programs that are gone. Layouts that cut sequences keep shares in 16 bits since: those were compiled
    again, and showed two terms of what XLA makes of gathered scores. `bench.memory` compiles those of today, and
    has their bounds.
    """
    every = [each for seed in seeds for each in on_record(seed)]
    every = [each for each in every if each.ranked.candidate.pipe == 1 or each.ranked.candidate.remat != "none"]
    found = agreement(every)
    assert found["layouts"] == count
    assert found["rank_correlation"] >= rank
    assert found["mean_error_seconds"] <= seconds
