"""What a plan is asked with, tried from outside: numbers without units, no memory, wrong heads, and its own doubts."""

import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.plan.enumeration import select
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import JAXPAR, JAXPAR_FUSED
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model_protocol import Transformer, TransformerCosts
from jaxpar.plan.search import Question, predict, search
from jaxpar.plan.sensitivity import changes

JOB = str(Path(__file__).parents[2] / "configs/gpu_llama_8b_fsdp8.toml")
H100 = HARDWARE["h100"]
PLAN = ["plan", JOB, "--devices", "64", "--top", "1"]
VGG = str(Path(__file__).parents[1] / "partition" / "pipedream" / "vgg16.graph.txt")


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ([*PLAN, "--between", "3"], "3GB/s, or 3Gb/s"),
        ([*PLAN, "--between", "3/s"], "3GB/s, or 3Gb/s"),
        ([*PLAN, "--inside", "300"], "300GB/s, or 300Gb/s"),
        ([*PLAN, "--memory", "70"], '"70 GiB" or "70 B"'),
        (["partition", VGG, "16@10"], "10GB/s, or 10Gb/s"),
        (["partition", VGG, "16@10Gb/s", "--memory", "16"], '"16 GiB" or "16 B"'),
    ],
)
def test_a_number_that_needs_a_unit_is_refused_without_one(words, fix, capsys):
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "has no unit" in error
    assert fix in error


WRONG_OPTIONS = {"chip": "h1000", "per_node": 0, "inside": "300", "between": "0GB", "memory": "0GiB"}


@pytest.mark.parametrize(("name", "value"), WRONG_OPTIONS.items())
def test_an_error_names_the_flag_in_a_shell_and_the_argument_in_python(name, value, capsys):
    flag = f"--{name.replace('_', '-')}"
    assert main([*PLAN, flag, str(value)]) == 1
    error = capsys.readouterr().err
    assert f"{flag} {value}" in error
    assert f"{name}=" not in error
    with pytest.raises(JaxparError) as caught:
        jp.plan(JOB, devices=64, **{name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert "--" not in str(caught.value)


def test_options_in_a_way_out_are_arguments_in_python():
    with pytest.raises(JaxparError, match=r"between='12.5GB', of one GPU's share of the network; or per_node=8"):
        jp.plan(JOB, devices=8, chip="l40s", per_node=4)
    with pytest.raises(JaxparError, match=r"then chip='v5e.toml'"):
        jp.plan(JOB, devices=8, chip="v5e")
    with pytest.raises(JaxparError, match="to plan for") as caught:  # of jp.inspect on absent GPUs
        jp.target_devices("mi300x:1x8")
    assert "--" not in str(caught.value)


@pytest.mark.parametrize("memory", ["0", "0GiB", "0.0 B", ""])
def test_no_memory_is_refused_and_does_not_mean_the_default(memory, capsys):
    assert main([*PLAN, "--memory", memory]) == 1
    error = capsys.readouterr().err
    assert error.count("rule:") == 1
    assert "Traceback" not in error


@pytest.mark.parametrize(("devices", "batch", "fix"), [(11, 840, 836), (49, 7, 49), (100, 840, 800)])
def test_gpus_that_no_layout_divides_are_refused_with_a_batch_that_they_divide(devices, batch, fix, capsys):
    words = ["plan", JOB.replace("8b_fsdp8", "1b3_fsdp8"), "--top", "1", "--devices", str(devices)]
    assert main([*words, f"train.global_batch={batch}"]) == 1
    assert f"fix:  a global batch of {fix}" in capsys.readouterr().err
    assert main([*words, f"train.global_batch={fix}"]) == 0


def test_the_way_out_of_wrong_heads_is_the_nearest_number_of_heads(capsys):
    assert main([*PLAN, "model.heads=7"]) == 1
    assert capsys.readouterr().err.rstrip().endswith("fix:  heads = 8")


@settings(deadline=None, max_examples=300)
@given(
    dim=st.integers(1, 5000),
    heads=st.integers(1, 200),
    position=st.sampled_from(["rotary", "learned"]),
    kind=st.sampled_from([jp.DecoderConfig, jp.ViTConfig]),
)
def test_what_is_proposed_for_wrong_heads_is_accepted(dim, heads, position, kind):
    wanted = {"dim": dim, "heads": heads} | ({"position": position} if kind is jp.DecoderConfig else {})
    try:
        kind(**wanted)
    except JaxparError as error:
        key, value = re.match(r"(\w+) = (\d+)", error.problems[0].fix).groups()
        assert kind(**wanted | {key: int(value)})
        if key == "heads":
            assert heads / 2 <= int(value) <= 2 * heads


def asked(**given):
    shape = Shape(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, seq=4096, gated=True)
    usual = {"model": Transformer(shape=shape), "devices": 64, "rows": 128, "hardware": H100, "software": JAXPAR}
    return Question(**usual | given)


@pytest.mark.nightly
def test_a_plan_doubts_latency_overlap_and_the_efficiency_of_small_microbatches():
    question = asked()
    plan = search(question, top=1)
    later = {
        key: replace(link, latency=2 * link.latency)
        for key, link in (("inside", H100.inside), ("between", H100.between))
    }
    curve = H100.gemm
    changed = {
        "twice the latencies": replace(question, hardware=replace(H100, launch=2 * H100.launch, **later)),
        "twice the traffic that nothing hides": replace(
            question, software=replace(JAXPAR, overlap=0.0, tensor_overlap=0.0, context_overlap=0.6)
        ),
        "twice the fixed cost of a matmul": replace(
            question, hardware=replace(H100, gemm=replace(curve, half=2 * curve.half, wave=2 * curve.wave))
        ),
    }
    for what, other in changed.items():
        then, half = plan.sensitivity[what], plan.sensitivity[what.replace("twice", "half")]
        assert then.time.total == pytest.approx(predict(other, then.candidate).time.total, rel=1e-12)
        assert half.time.total < predict(question, half.candidate).time.total
        assert then.time.total > predict(question, then.candidate).time.total


@pytest.mark.full
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"devices": 32}, marks=pytest.mark.full),
        {"software": JAXPAR_FUSED, "devices": 32},
        pytest.param(
            {"hardware": replace(H100, between=replace(H100.between, bandwidth=1e9, latency=1e-3))},
            marks=pytest.mark.full,
        ),
    ],
)
def test_no_layout_that_a_doubt_would_put_first_is_left_out(given):
    question = asked(**given)
    found = search(question, top=1).sensitivity
    for doubt in changes(question.hardware, question.software):
        changed = replace(question, hardware=doubt.hardware, software=doubt.software)
        assert search(changed, top=1).best[0].candidate == found[doubt.description].candidate, doubt.description


@pytest.mark.nightly
def test_a_doubt_changes_no_step_by_more_than_twice():
    question = asked(devices=512, rows=1024)
    plan = search(question, top=1)
    some = select(plan.points.layouts, np.arange(0, len(plan.points.seconds), 97))
    before = question.seconds(some)
    for doubt in changes(question.hardware, question.software):
        after = replace(question, hardware=doubt.hardware, software=doubt.software).seconds(some)
        assert (after.total >= doubt.lower_bound(before) * (1 - 1e-9)).all()
        assert (after.total <= before.total * (2 + 1e-9)).all()
        for cause in doubt.unchanged_causes:
            np.testing.assert_array_equal(after[cause], before[cause], f"{cause}: {doubt.description}")


@pytest.mark.nightly
def test_a_doubt_weighs_what_it_may_put_first_and_not_all_that_fits():
    weighed = []

    class CountedCosts(TransformerCosts):
        def time(self, candidate, hardware):
            weighed.append(np.size(candidate.data))
            return super().time(candidate, hardware)

    class Counted(Transformer):
        def costs(self, software):
            costs = super().costs(software)
            return CountedCosts(**{each.name: getattr(costs, each.name) for each in fields(costs)})

    plan = search(asked(model=Counted(shape=asked().model.shape)), top=1)
    assert weighed[0] == plan.fitting
    assert sum(weighed[1:]) < 3 * plan.fitting  # by twelve doubts
