"""What a plan says of `expert`, beside the program that XLA compiles: bytes of tokens, gathers, and memory."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxpar.job.file.parse import load, loads
from jaxpar.job.inspect import observe
from jaxpar.job.plan import apply_layout, overrides
from jaxpar.job.plan import question as asked_of
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import JAXPAR
from jaxpar.plan.search import predict, search

gpu_compiler = pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for absent GPUs: jax-cuda13-pjrt")
ROOT = Path(__file__).parents[2]
JOB = """
[model]
name = "decoder"
vocab = 512
layers = 2
dim = 256
heads = 4
experts = {count = 8, per_token = 2, hidden = 512, capacity = 1.25}
[data]
seq = 512
[train]
global_batch = 64
precision = "bf16"
"""


@cache  # a mixture is traced, which takes seconds
def question(*changes, devices=8):
    return asked_of(loads(JOB, list(changes)), devices=devices, chip="h100", per_node=None, options={})


@pytest.mark.slow
@pytest.mark.xdist_group("expert costs")
def test_the_all_to_alls_of_a_plan_are_those_of_the_program():
    asked = question()
    layout = Candidate(fsdp=2, axes={"expert": 4}, zero=3, remat="full", microbatches=2, microbatch=4)
    planned = [each for each in asked.model.costs(JAXPAR).collectives(layout) if each.kind == "all-to-all"]
    report = observe(apply_layout(loads(JOB, []), layout, 2, asked.hardware), "h100:1x8")
    compiled = [each for each in report.ledger if each.kind == "all-to-all"]
    assert {each.axes for each in compiled} == {each.axes for each in planned} == {("expert",)}
    assert sum(each.times for each in compiled) == sum(each.times for each in planned) == 2 * 2 * 6
    sent = [sum(each.step_wire for each in entries) for entries in (compiled, planned)]
    assert sent[1] == pytest.approx(sent[0], rel=2e-3)


@pytest.mark.slow
@pytest.mark.xdist_group("expert costs")
def test_what_is_no_expert_is_gathered_over_the_axis_too():
    asked = question()
    layout = Candidate(fsdp=1, axes={"expert": 8}, zero=0, remat="none", microbatches=1, microbatch=8)
    (reduced,) = [each for each in asked.model.costs(JAXPAR).collectives(layout) if each.kind == "all-reduce"]
    dense = asked.model.parameters - asked.model.shape.parameters_by_dim["expert"]
    assert reduced.payload == 2 * dense
    assert asked.model.shape.parameters_by_dim["expert"] == 2 * 8 * 3 * 256 * 512
    assert "parallel.expert=8" in overrides(layout, 2)
    assert "parallel.zero=0" in overrides(layout, 2)


@pytest.mark.full
@pytest.mark.xdist_group("expert costs")
def test_all_sizes_that_divide_experts_and_rows_are_weighed():
    assert {*np.asarray(question().legal().size("expert")).tolist()} == {1, 2, 4, 8}
    shared = question("model.experts.dispatch=dropless", "model.experts.overflow=spill", "model.experts.buffers=4")
    assert {*np.asarray(shared.legal().size("expert")).tolist()} == {1, 2, 4}
    assert {*np.asarray(question("model.experts.count=6").legal().size("expert")).tolist()} == {1, 2}
    assert "expert: no dim is called expert" in question("model.experts.count=0").exclusions


@pytest.fixture(scope="module")
def mixtral():
    job = load(ROOT / "configs/gpu_mixtral_8x7b_expert8.toml")
    return job, asked_of(job, devices=16, chip="h100", per_node=None, options={})


@pytest.mark.full
def test_the_job_of_mixtral_needs_the_memory_that_its_plan_says(mixtral):
    job, asked = mixtral
    rows = job.train.global_batch // (16 * job.train.accumulate)
    own = Candidate(
        fsdp=2, axes={"expert": 8}, zero=3, remat=job.train.remat, microbatches=job.train.accumulate, microbatch=rows
    )
    report = observe(apply_layout(job, own, 32, asked.hardware), "h100:2x8")
    assert predict(asked, own).memory.total == pytest.approx(report.total, rel=0.1)
    assert report.fits  # with 1.4 % to spare


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1], ids=["a pipeline", "tensor"])
def test_layouts_of_mixtral_that_leave_memory_to_spare_compile_and_fit(rank, mixtral):
    job, asked = mixtral
    layout = search(asked).best[rank]
    report = observe(apply_layout(job, layout.candidate, 32, asked.hardware), "h100:2x8")
    assert layout.memory.total == pytest.approx(report.total, rel=0.1)
    assert report.fits
