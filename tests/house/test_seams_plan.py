"""The planner takes a new technique without being rebuilt: a toy one, added here through the public seam alone."""

import json
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toy_axis

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import load, loads
from jaxpar.job.inspect import observe
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.plan import apply_layout, overrides
from jaxpar.job.plan import question as asked_of
from jaxpar.mesh import axes
from jaxpar.mesh.target import missing_plugin
from jaxpar.parallel.techniques import all_techniques
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.enumeration import legal_layouts
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.search import complexity, describe, predict, search
from jaxpar.plan.techniques import table as plan_table

ROOT = Path(__file__).parents[2]
SMALL = Shape(layers=4, dim=64, heads=8, hidden=192, vocab=512, seq=128)
WEIGHTS = 2 * 256 * 1024  # parameters in arrays with a dim called wide


@pytest.fixture(autouse=True)
def toy():
    with ExitStack() as stack:
        stack.enter_context(axes.add_axis(toy_axis.AXIS))
        stack.enter_context(all_techniques.with_technique(toy_axis.TECHNIQUE))
        stack.enter_context(plan_table.added(toy_axis.TWIN))
        yield


def question(devices=8, **changes):
    job = loads(toy_axis.JOB, [], allow_import=True)
    return replace(asked_of(job, devices=devices, chip="h100", per_node=None, options={}), **changes)


@pytest.mark.nightly
def test_all_its_legal_sizes_are_weighed_and_no_layout_is_twice():
    found = question().legal()
    assert {*found.size("toy").tolist()} == {1, 2, 4, 8}
    assert (found.devices == 8).all()
    assert (found.microbatch * found.microbatches * found.replicas == 1024).all()
    every = [*zip(*map(np.ndarray.tolist, found.sizes.values()), found.zero.tolist(), found.microbatches.tolist())]  # noqa: B905
    assert len({*every}) == len(every)
    assert {*question(choices=Choices(axes={"toy": 2})).legal().size("toy").tolist()} == {1, 2}


def test_a_model_without_such_a_dim_is_planned_without_it():
    assert {*legal_layouts(SMALL, devices=8, rows=16).size("toy").tolist()} == {1}
    job = load(ROOT / "configs/gpu_llama_8b_fsdp8.toml")
    asked = asked_of(job, devices=8, chip="h100", per_node=None, options={})
    assert "toy: no dim is called wide" in asked.exclusions
    assert "toy" not in describe(search(asked).best[0].candidate)


@pytest.mark.nightly
def test_its_bytes_and_seconds_have_causes_and_add_up():
    one, two = (predict(question(), Candidate(data=8 // toy, axes={"toy": toy}, microbatch=128)) for toy in (1, 2))
    assert one.memory.toy == one.time.toy == 0
    assert two.memory.toy == 4 * WEIGHTS
    layout = jp.compose(lambda rngs: toy_axis.Wide(rngs=rngs), jp.Parallel(data=4, axes={"toy": 2}), 8)
    assert two.memory.parameters == 4 * (WEIGHTS / 2 + 1024 + 256) == pytest.approx(_bytes(layout))
    hardware = question().hardware
    once = hardware.gather(4 * WEIGHTS, 2, 1)
    assert two.time.toy == pytest.approx(2 * float(once))
    assert two.time.total == pytest.approx(sum(two.time.values()))


def _bytes(layout):
    from jaxpar.sharding.names import shard_bytes

    return sum(shard_bytes(place.leaf, place.stored, layout.sizes) for place in layout.placements.values())


def test_neighbours_of_the_axes_outside_of_it_are_as_far_as_it_is_wide():
    some = Candidate(data=2, fsdp=2, tensor=2, axes={"toy": 4})
    assert [some.stride(axis) for axis in some.sizes] == [32, 16, 8, 2, 2, 1]
    assert some.replicas == 16
    assert some.devices == 32


def by_kind(every):
    """Returns kind of collective to the bytes that a device sends in a step."""
    found = {}
    for each in every:
        found[each.kind] = found.get(each.kind, 0) + each.step_wire
    return found


@pytest.mark.nightly
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"data": 4, "toy": 2}, marks=pytest.mark.full),
        {"fsdp": 2, "toy": 4},
        pytest.param({"toy": 8}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_its_predicted_bytes_are_those_of_the_ledger_of_a_program_for_gpus(sizes):
    asked = question()
    own = {axis: size for axis, size in sizes.items() if axis != "toy"}
    layout = Candidate(**own, zero=3 * ("fsdp" in own), axes={"toy": sizes["toy"]}, microbatch=128)
    job = loads(toy_axis.JOB, [], allow_import=True)
    report = observe(apply_layout(job, layout, 1), "h100:1x8")
    kernels = [each for each in report.ledger if any("kernel" in path for path in each.parameters)]
    said = by_kind(asked.costs.collectives(layout))
    assert said == by_kind(each for each in kernels if each.axes == ("toy",))
    assert said["all-gather"] == 4 * WEIGHTS * (1 - 1 / sizes["toy"])


@pytest.mark.slow
def test_it_is_in_text_bars_html_and_json_and_in_the_job_that_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(toy_axis.JOB)
    words = ["--devices", "8", "--memory", "9MiB", "--html", "p.html", "--json", "p.json", "--write", "made.toml"]
    assert main(["plan", "job.toml", "--allow-import", "--top", "40", "--advise", *words]) == 0
    said, html = capsys.readouterr().out, Path("p.html").read_text()
    best = json.loads(Path("p.json").read_text())["best"]
    assert re.search(r"data 4 x toy 2\b", said)
    assert re.search(r"Y toy\b", said)
    assert re.search(r"^ *\d+ .*Y.*%$", said, re.MULTILINE)
    assert ".jx-t-toy { --c: light-dark(#aa3377, #dd77aa)" in html
    assert re.search(r'<rect[^>]* class="jx-t-toy"', html)
    row = next(each for each in best if each["axes"]["toy"] == 2)
    assert row["seconds"]["toy"] > 0 < row["bytes"]["toy"]


def test_the_job_that_a_plan_proposes_declares_it_and_explains_it():
    layout = Candidate(data=4, axes={"toy": 2}, microbatch=128)
    assert "parallel.axes.toy=2" in overrides(layout, 1)
    job = apply_layout(loads(toy_axis.JOB, [], allow_import=True), layout, 1)
    assert job.parallel.sizes["toy"] == 2
    assert "wide/toy" in jp.compose(resolve_model(job, resolve_loss(job)), job.parallel, 8).explain()


def test_it_is_less_simple_than_what_is_there_without_it():
    plain, with_toy = Candidate(data=8), Candidate(data=4, axes={"toy": 2})
    assert complexity(with_toy) == complexity(plain) + toy_axis.TWIN.complexity
    assert describe(with_toy) == "data 4 x toy 2"


def test_a_second_technique_of_an_axis_is_refused():
    with pytest.raises(JaxparError, match=r"one technique for an axis, .* pipe, tensor, context, expert, toy"):
        plan_table.added(toy_axis.TWIN).__enter__()
    with pytest.raises(JaxparError, match="axes has sizes of further axes of a mesh"):
        Candidate(axes={"data": 2})


def test_the_planner_does_not_know_the_toy():
    files = [path for room in ("plan", "job", "html", "cli") for path in (ROOT / "jaxpar" / room).rglob("*.*")]
    assert not [path for path in files if path.suffix in (".py", ".css") and re.search(r"\btoy\b", path.read_text())]
