"""The search: what is legal, what fits, what is first and why; and the verb that asks it."""

import itertools
import math
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import some

from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import load
from jaxpar.job.plan import apply_layout, overrides
from jaxpar.job.plan import question as asked_of
from jaxpar.parallel.declaration import DECLARED
from jaxpar.pipeline.tables.library import LIBRARY, schedule
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.enumeration import legal_layouts, select_one
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import JAXPAR as UNFUSED
from jaxpar.plan.machine.software import JAXPAR_FUSED as JAXPAR
from jaxpar.plan.memory import memory
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model_protocol import Transformer
from jaxpar.plan.pages.terminal import page
from jaxpar.plan.search import Question, complexity, describe, predict, search
from jaxpar.plan.speed import speed
from jaxpar.plan.techniques.pipe import tables
from jaxpar.plan.time import step_time

H100 = HARDWARE["h100"]
SMALL = Shape(layers=6, dim=64, heads=8, kv_heads=4, hidden=192, vocab=512, seq=128, gated=True)
LLAMA_8B = Shape(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, seq=8192, gated=True)
LLAMA_70B = Shape(layers=80, dim=8192, heads=64, kv_heads=8, hidden=28672, vocab=128256, seq=8192, gated=True)
LLAMA_405B = Shape(layers=126, dim=16384, heads=128, kv_heads=8, hidden=53248, vocab=128256, seq=8192, gated=True)


def question(shape=LLAMA_8B, devices=64, rows=512, **given):
    return Question(model=Transformer(shape=shape), devices=devices, rows=rows, hardware=H100, software=JAXPAR, **given)


def rows_of(candidates):
    names = [field.name for field in fields(Candidate) if field.name != "axes"]
    return list(zip(*(getattr(candidates, name).tolist() for name in names), strict=True))


@settings(deadline=None, max_examples=30)
@given(devices=st.sampled_from([1, 2, 6, 8, 12, 24, 32]), rows=st.sampled_from([1, 8, 12, 48, 96]))
def test_every_legal_layout_uses_all_devices_and_rows_and_none_is_twice(devices, rows):
    try:
        found = legal_layouts(SMALL, devices=devices, rows=rows)
    except JaxparError:
        return
    assert (found.devices == devices).all()
    assert (found.microbatch * found.microbatches * found.replicas == rows).all()
    assert (SMALL.kv_heads % found.tensor == 0).all()
    assert (SMALL.seq % (found.context * np.where(found.sequence, found.tensor, 1)) == 0).all()
    assert (found.pipe * found.chunks <= SMALL.layers).all()
    assert ((found.zero > 0) == (found.fsdp > 1)).all()
    every = rows_of(found)
    assert len(set(every)) == len(every)


def test_legal_layouts_are_all_that_brute_force_finds():
    devices, rows = 8, 16
    found = legal_layouts(SMALL, devices=devices, rows=rows)
    want = 0
    for pipe in range(1, 9):
        for tensor in range(1, 9):
            for fsdp, context in itertools.product(range(1, 9), repeat=2):
                data = devices / (pipe * tensor * fsdp * context)
                if data != int(data) or pipe > 6 or tensor not in (1, 2, 4) or rows % (fsdp * data):
                    continue
                own = int(rows / (fsdp * data))
                for count in (n for n in range(1, own + 1) if own % n == 0):
                    tables = 1 if pipe == 1 else sum(
                        kind_takes(name, pipe, count, chunks)
                        for name in Choices().schedules for chunks in (1, *Choices().chunks)
                    )  # fmt: skip
                    want += tables * (3 if fsdp > 1 else 1) * (2 if tensor > 1 else 1) * len(Choices().remats)
    assert len(found.pipe) == want


def kind_takes(name, pipe, microbatches, chunks):
    try:
        schedule(name, stages=pipe, microbatches=microbatches, chunks=chunks)
    except JaxparError:
        return 0
    return chunks == 1 or SMALL.layers % (pipe * chunks) == 0


def test_chunks_differ_in_their_layers_only_where_a_search_lets_them():
    """126 layers on 16 stages: in 8 chunks of one layer each, two of them empty, as Llama 3's; 7 would waste a stage's
    14 places. jaxpar's own programs run neither.
    """
    some, equal = (replace(SMALL, layers=layers) for layers in (126, 128))
    tried = Choices(schedules=("interleaved",), chunks=(2, 4, 7, 8))
    found = [
        [each["chunks"] for each in tables(shape, replace(tried, uneven=uneven), 16, 16)]
        for shape, uneven in ((some, True), (some, False), (equal, False))
    ]
    assert found == [[2, 4, 8], [], [2, 4, 8]]


def test_all_schedules_of_a_search_are_of_the_library():
    assert set(Choices().schedules) <= set(LIBRARY)


@pytest.mark.nightly
def test_the_first_is_the_simplest_within_the_margin_and_the_rest_follow_by_time():
    plan = search(question())
    first, *rest = plan.best
    assert first.time.total <= plan.fastest.time.total * 1.05
    times = [each.time.total for each in rest]
    assert times == sorted(times)
    every = legal_layouts(LLAMA_8B, devices=64, rows=512)
    fits = memory(LLAMA_8B, every, JAXPAR).total <= plan.question.limit(every)
    seconds = np.where(fits, step_time(LLAMA_8B, every, H100, JAXPAR).total, np.inf)
    assert plan.fastest.time.total == pytest.approx(seconds.min())
    close = seconds <= seconds.min() * 1.05
    assert complexity(first.candidate) == complexity(every)[close].min()
    assert all(each.memory.total <= H100.chip.usable_memory for each in plan.best)


@pytest.mark.nightly
def test_of_what_is_as_simple_and_as_fast_less_memory_is_first():
    plan = search(question(rows=512, choices=Choices(remats=("full",)), margin=0.14))  # 5 % on eight nodes
    first, second = plan.best[:2]
    assert complexity(first.candidate) == complexity(second.candidate)
    assert second.time.total <= first.time.total <= 1.01 * second.time.total
    assert first.memory.total < second.memory.total
    said = page(plan)
    assert "  expert: no dim is called expert\n  height and width: no technique of a plan prices it\n" in said
    assert "less memory than the fastest" in said
    assert "but more memory" in said


@pytest.mark.nightly
def test_without_a_margin_the_fastest_is_first():
    plan = search(question(margin=0.0))
    assert plan.best[0].candidate == plan.fastest.candidate


def test_one_at_a_time_weighs_as_many_do():
    every = legal_layouts(SMALL, devices=8, rows=16)
    seconds = step_time(SMALL, every, H100, JAXPAR).total
    needed = memory(SMALL, every, JAXPAR).total
    for i in range(0, len(seconds), 97):
        one = predict(question(SMALL, 8, 16), select_one(every, i))
        assert one.time.total == pytest.approx(seconds[i])
        assert one.memory.total == pytest.approx(needed[i])


@pytest.mark.nightly
def test_a_hundred_thousand_layouts_take_seconds():
    asked = question(
        replace(LLAMA_8B, seq=2048), devices=512, rows=4096,  # rows for which keys are gathered alone
        choices=Choices(schedules=("1f1b_phased", "interleaved_phased", "gpipe", "1f1b", "zb_h1"), chunks=(2, 4, 8)),
    )  # fmt: skip
    begin = time.perf_counter()
    plan = search(asked)
    assert plan.considered > 80_000
    assert time.perf_counter() - begin < 15  # two seconds on a quiet machine


@pytest.mark.nightly
def test_a_pipeline_pays_where_nodes_are_far_from_each_other_and_not_inside_one():
    one_node = search(question(devices=8, rows=64))
    assert one_node.best[0].candidate.pipe == 1
    near = question(LLAMA_70B, rows=128)
    assert search(near).best[0].candidate.pipe == 1
    far = replace(near, hardware=replace(H100, between=replace(H100.between, bandwidth=3e9)))
    assert search(far).best[0].candidate.pipe > 1


def test_three_devices_that_share_a_matrix_straddle_nodes_of_eight():
    """With 12 heads of keys tensor may be 3 or 6, of which some groups lie on two nodes: as far as NICs reach."""
    twelve = replace(LLAMA_8B, dim=6144, heads=48, kv_heads=12, hidden=18432)
    asked = question(twelve, 48, 48, choices=Choices(pipe=1, context=1))
    found = asked.legal()
    assert {3, 6} < set(found.tensor.tolist())
    assert not np.isin(search(asked).points.layouts.tensor, (3, 6)).any()
    six = replace(asked, hardware=replace(H100, per_node=6))
    assert np.isin(search(six).points.layouts.tensor, (3, 6)).any()
    tensor = [each.time.tensor for each in (predict(q, Candidate(fsdp=16, zero=3, tensor=3)) for q in (asked, six))]
    assert tensor[0] > 2 * tensor[1]


def test_state_is_shared_by_more_than_512_devices_only_where_that_pays_by_a_margin():
    """No published run that the constants are fitted on has more."""
    asked = question(devices=4096, rows=32_768, choices=Choices(pipe=1, context=1, tensor=1))
    plan = search(asked)
    assert (asked.legal().fsdp > 512).any()
    assert (plan.points.layouts.fsdp <= 512).all()
    assert "fsdp over more than 512 devices" in "".join(plan.exclusions)
    less = replace(asked, memory=int(0.99 * plan.points.bytes.min() / (1 - asked.spare)))  # nothing narrower fits
    assert (search(less).points.layouts.fsdp > 512).all()


@pytest.mark.nightly
def test_405b_is_planned_onto_512_gpus():
    plan = search(question(LLAMA_405B, 512, 512, choices=Choices(tensor=8)))
    assert plan.best[0].memory.total < H100.chip.usable_memory
    assert math.prod(getattr(plan.best[0].candidate, axis) for axis in ("pipe", "data", "fsdp", "tensor")) == 512


def test_what_fits_nowhere_says_what_would_fit():
    with pytest.raises(JaxparError, match=r"none of [\d,]+ layouts fits; the leanest needs .*\n.*\n.*128 devices"):
        search(question(LLAMA_405B, 64, 512))


@pytest.mark.parametrize(
    ("shape", "devices", "rows", "said"),
    [
        (SMALL, 4096, 8, r"at most 3,072 devices"),
        (SMALL, 7, 8, r"more small factors"),
        (SMALL, 0, 8, r"0 devices"),
        (SMALL, 8, 0, r"0 examples"),
    ],
)
def test_more_devices_than_the_model_can_use_are_refused(shape, devices, rows, said):
    with pytest.raises(JaxparError, match=said):
        search(question(shape, devices, rows))


@pytest.mark.nightly
def test_the_page_names_the_first_its_causes_and_what_it_hangs_on():
    plan = search(question(), top=3)
    text = page(plan)
    assert describe(plan.best[0].candidate) in text
    assert "all numbers are modelled" in text
    assert "30% less bandwidth between nodes" in text
    assert text.count("\n  4  ") == 0


JOB = str(Path(__file__).parents[2] / "configs/gpu_llama_8b_fsdp8.toml")


def test_few_rows_of_many_tokens_want_a_context_axis():
    """4 examples of 32,768 tokens on 64 devices: 4 replicas and 8 heads of keys and values leave half of them idle."""
    long = replace(question(replace(LLAMA_8B, seq=32_768), 64, 4, choices=Choices(pipe=1)), software=UNFUSED)
    plan = search(long)
    assert all(each.candidate.context > 1 for each in plan.best)
    assert plan.best[0].time.context > 0
    with pytest.raises(JaxparError, match=r"at most 32 devices"):
        search(replace(long, choices=Choices(pipe=1, context=1)))


def test_fused_attention_takes_whole_sequences_and_the_plan_says_so():
    job = load(JOB, [])
    fused = asked_of(job, devices=64, chip="h100", per_node=None, options={})
    plain = asked_of(job, devices=64, chip="h100", per_node=None, options={"attention": "unfused"})
    for asked in (fused, plain):
        assert set(asked.legal().context.tolist()) == {1, 2, 4, 8, 16}
    assert fused.costs.attention.startswith("cuDNN's kernel, which keeps no scores; where context cuts")
    assert plain.costs.attention.startswith("XLA's own, which keeps the scores once")


@pytest.mark.nightly
def test_interleaved_pipelines_leave_more_memory_to_spare():
    asked = question()
    some = Candidate(pipe=2, chunks=np.array([1, 2, 4]), microbatches=4, schedule="interleaved_phased")
    assert asked.limit(some).tolist() == pytest.approx([asked.memory_limit * share for share in (0.95, 0.9, 0.9)])
    split = Candidate(pipe=2, chunks=np.array([1, 1, 2]), microbatches=4, schedule=np.array(["1f1b", "zb_h1", "zb_v"]))
    assert asked.limit(split).tolist() == pytest.approx([asked.memory_limit * share for share in (0.95, 0.9, 0.9)])
    assert "95%" not in page(search(asked))
    assert "with 5% to spare, interleaved pipelines with 10%; " in page(search(asked))


@pytest.mark.parametrize("index", some(range(0, 20_000, 1_667), [0, 1667, 5001, 10002]))
def test_a_planned_job_is_the_job_with_that_layout(index):
    job = load(JOB, ["train.global_batch=128"])
    asked = asked_of(job, devices=64, chip="h100", per_node=8, options={})
    every = legal_layouts(asked.model.shape, devices=64, rows=128)
    candidate = select_one(every, index % len(every.pipe))
    made = apply_layout(job, candidate, asked.model.layers)
    assert made.parallel.sizes == {axis: getattr(candidate, axis) for axis in DECLARED}
    assert made.parallel.stage == candidate.zero
    assert made.train.remat == candidate.remat
    if candidate.pipe > 1:
        assert made.parallel.pipeline.table(candidate.pipe).chunks == candidate.chunks
    else:
        assert made.train.accumulate == candidate.microbatches
    assert made.model == job.model


@pytest.mark.nightly
def test_a_plan_says_what_the_first_costs_in_hours_and_in_money_where_there_is_a_price():
    job = load(JOB, ["train.steps=1000"])
    asked = asked_of(job, devices=64, chip="h100", per_node=None, options={"price": "2.5"})
    plan = search(asked)
    seconds, tokens = plan.best[0].time.total, asked.rows * job.data.seq
    hours = 64 * seconds * 1000 / 3600
    assert speed(asked, plan.best[0]).hours == pytest.approx(hours * 1e9 / (1000 * tokens))
    said = next(line for line in page(plan).splitlines() if "costs" in line)
    assert f"{hours:,.4g} GPU-hours for the job's 1,000 steps ({hours * 2.5:,.4g} at 2.5 an hour)." in said
    assert " an hour" not in page(search(replace(asked, price=0.0)))
    with pytest.raises(JaxparError, match="--price free"):
        asked_of(job, devices=64, chip="h100", per_node=None, options={"price": "free"})


@pytest.mark.nightly
def test_all_schedules_that_train_are_weighed_where_they_are_asked_for():
    """On machines with one GPU and slow networks deep pipelines pay, and tables that split backwards or keep less."""
    job = load(JOB, ["train.global_batch=128"])
    usual, every = (
        asked_of(job, devices=16, chip="h100", per_node=1, options={"between": "500MB", "schedules": names})
        for names in (None, "all")
    )
    assert set(np.unique(every.legal().schedule)) == {*LIBRARY}
    assert "--schedules all" in "".join(usual.exclusions)
    assert "--schedules" not in "".join(every.exclusions)
    plans = [search(asked) for asked in (usual, every)]
    assert plans[1].best[0].candidate.schedule not in Choices().schedules
    assert plans[1].best[0].time.total < 0.9 * plans[0].best[0].time.total
    split = search(replace(every, choices=Choices(schedules=("zb_h1", "1f1b_phased"))))
    assert split.best[0].candidate.schedule == "zb_h1"


def test_layers_that_do_not_divide_are_dealt():
    words = overrides(Candidate(pipe=4, microbatches=4, schedule="1f1b_phased"), 6)
    assert "parallel.pipeline.layers=[2, 2, 1, 1]" in words


@pytest.mark.nightly
def test_the_verb_prints_a_plan_and_writes_a_job_that_loads(tmp_path, capsys):
    out = tmp_path / "planned.toml"
    assert main(["plan", JOB, "--devices", "64", "--top", "3", "--write", str(out)]) == 0
    said = capsys.readouterr().out
    assert "8.03 B parameters on 64 x NVIDIA H100 SXM" in said
    assert "jaxpar train" in said
    assert math.prod(load(out).parallel.sizes.values()) == 64


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "64", "--chip", "h1000"], "chip h1000"),
        (["--devices", "64", "--between", "0GB"], "--between 0GB"),
        (["--devices", "64", "--per-node", "0"], "--per-node 0"),
        (["--devices", "64", "--top", "0"], "--top 0"),
        (["--devices", "64", "--schedules", "zb_h9"], "--schedules zb_h9"),
        (["--devices", "64", "--price", "-1"], "--price -1"),
        (["--devices", "8", "--memory", "1MiB"], "fits"),
        (["--devices", "64", "model.name=mlp", "--top", "1"], "model"),
    ],
)
def test_the_verb_refuses_what_is_wrong_in_one_error(words, said, capsys):
    assert main(["plan", JOB, *words]) == 1
    assert said in capsys.readouterr().err
