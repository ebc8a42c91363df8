"""Pictures of a plan: nothing is left out, nothing runs, heights add up, and the front is one."""

import itertools
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from browser import CUT, PALE, WIDTHS, Reader, shades
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import some

from jaxpar.cli.main import main
from jaxpar.job.file.parse import load
from jaxpar.job.plan import question
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import JAXPAR_FUSED
from jaxpar.plan.model.shape import Shape, masked_flop, step_flop
from jaxpar.plan.model_protocol import Transformer
from jaxpar.plan.pages.html import write
from jaxpar.plan.pages.pareto_svg import PlotFrame, kinds, memory_ticks, thinned, time_ticks
from jaxpar.plan.pages.terminal import BYTES, bars, lengths, page, smaller_layouts, styles
from jaxpar.plan.search import Question, describe, search
from jaxpar.plan.sensitivity import pareto
from jaxpar.plan.validation import CompiledLayout
from jaxpar.units import show_bytes, show_seconds

JOB = str(Path(__file__).parents[2] / "configs/gpu_llama_8b_fsdp8.toml")
HOSTILE = """<script>alert(1)</script><img src=x onerror=alert(2)>"' onload='alert(3)' &amp; </style></title>"""
LLAMA_8B = Shape(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, seq=4096, gated=True)
SMALL = Shape(layers=6, dim=64, heads=8, kv_heads=4, hidden=192, vocab=512, seq=128, gated=True)
SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=60)


@cache
def plan(name="many"):
    h100 = HARDWARE["h100"]
    asked = Question(model=Transformer(shape=LLAMA_8B), devices=64, rows=512, hardware=h100, software=JAXPAR_FUSED)
    far = replace(h100, between=replace(h100.between, bandwidth=1e9))
    return {
        "many": lambda: search(asked),
        "slow links": lambda: search(replace(asked, hardware=far, rows=128)),
        "one device": lambda: search(replace(asked, model=Transformer(shape=SMALL), devices=1, rows=1)),
        "small": lambda: search(
            replace(asked, model=Transformer(shape=SMALL), devices=8, rows=16, memory=12 * 2**20), top=100
        ),
    }[name]()


def checked(given):
    first, second, *_ = [*given.best, *given.best]
    return [
        CompiledLayout(ranked=first, seconds=1.5, bytes=2.0**30),
        CompiledLayout(ranked=second, seconds=None, bytes=None, refusal=HOSTILE),
    ]


def sheet(name="many", **more):
    return write(plan(name), title="a job", **more)


NAMES = ("many", "slow links", "one device", "small")


# FRONT


@given(SIZES)
def test_the_front_is_all_that_nothing_beats_in_order(points):
    seconds, needed = np.array(points, float).T
    found = pareto(seconds, needed)
    assert (np.diff(seconds[found]) > 0).all()
    assert (np.diff(needed[found]) < 0).all()
    for i in range(len(points)):
        as_good = (seconds <= seconds[i]) & (needed <= needed[i])
        beaten = (as_good & ((seconds < seconds[i]) | (needed < needed[i]))).any()
        assert beaten or points[i] in [points[j] for j in found]
        assert not (beaten and i in found)


@settings(deadline=None)  # the first example searches
@given(SIZES, st.lists(st.integers(0, 14), min_size=1, max_size=5))
def test_under_a_limit_the_fastest_that_fits_is_found(points, limits):
    seconds, needed = np.array(points, float).T
    known = replace(plan("one device").points, seconds=seconds, bytes=needed)
    want = {seconds[needed <= limit].min() for limit in limits if (needed <= limit).any()}
    assert set(seconds[known.fastest_below(np.array(limits))]) == want


@pytest.mark.spread(0)
@pytest.mark.parametrize("name", some(NAMES, ["one device", "small"]))
def test_a_plan_has_the_points_of_all_that_fit(name):
    given = plan(name)
    assert len(given.points.seconds) == len(given.points.bytes) == given.fitting
    assert given.points.seconds.min() == pytest.approx(given.fastest.time.total)
    assert given.points.bytes.max() <= given.question.memory_limit
    assert [each["seconds"] for each in given.to_dict()["pareto"]] == given.points.seconds[given.points.pareto].tolist()
    json.dumps(given.to_dict())
    less = smaller_layouts(given, 6)
    assert all(each.memory.total < given.best[0].memory.total for each in less)
    if less:
        assert less[-1].memory.total == pytest.approx(given.points.bytes.min())


# BARS


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=9), st.integers(1, 200))
def test_columns_of_parts_add_up_to_the_whole(parts, columns):
    scale = sum(parts) or 1.0
    assert sum(lengths(parts, scale, columns)) == round(sum(parts) / scale * columns)
    assert all(length >= 0 for length in lengths(parts, scale, columns))


@pytest.mark.slow
def test_bars_of_a_terminal_are_as_long_as_the_steps_and_coloured_only_if_asked():
    given = plan("slow links")
    _, _, *lines = bars(given, colour=False).splitlines()
    longest = max(each.time.total for each in given.best)
    for each, line in zip(given.best, lines, strict=True):
        drawn = line[5:61].rstrip()
        assert len(drawn) == pytest.approx(56 * each.time.total / longest, abs=0.51)
        assert set(drawn) <= {look.letter for look in styles().values()}
        assert show_seconds(each.time.total) in line
    assert "\033[" not in page(given)
    plain = re.sub(r"\033\[[\d;]*m", "", page(given, colour=True))
    assert plain == page(given)
    assert plain != page(given, colour=True)


@pytest.mark.nightly
def test_every_cause_has_a_letter_and_a_colour_of_its_own():
    first = plan().best[0]
    found = styles()
    assert {*found} == {*first.time, "exchange", "host"}  # of jobs whose replicas agree by one, or that offload
    assert len({look.letter for look in found.values()}) == len({look.shade for look in found.values()}) == len(found)
    assert len({look.light for look in found.values()}) == len({look.dark for look in found.values()}) == len(found)
    assert {*BYTES} == {*first.memory, "state"}  # which only models have that keep arrays beside parameters


# PAGE


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("name", some(NAMES, ["many", "one device"]))
def test_every_ranked_layout_is_there_once_with_its_numbers(name):
    given = plan(name)
    html = sheet(name)
    rows = html[html.index('<ol class="jx-plans">') : html.index("</ol>")].split("<li>")[1:]
    assert [Reader(row.removesuffix("</li>")).text[2] for row in rows] == [describe(r.candidate) for r in given.best]
    for each, row in zip(given.best, rows, strict=True):
        assert f"<b>{show_seconds(each.time.total)}</b>" in row
        assert show_bytes(each.memory.total) in row


@pytest.mark.parametrize("name", some(NAMES, ["slow links", "one device", "small"]))
def test_widths_of_a_bar_add_up_to_its_step_and_its_memory(name):
    given = plan(name)
    longest = max(each.time.total for each in given.best)
    drawn = re.findall(r'<svg class="jx-stack(?: jx-room)?".*?</svg>', sheet(name))
    assert len(drawn) == 2 * len(given.best)
    for index, each in enumerate(given.best):
        for bar, whole in zip(
            drawn[2 * index :],
            (each.time.total / longest, each.memory.total / given.question.memory_limit),
            strict=False,
        ):
            widths = [float(width) for width in re.findall(r' width="([\d.]+)%"', bar)]
            assert sum(widths) == pytest.approx(100 * whole, abs=0.06)


@pytest.mark.spread(0)
@pytest.mark.parametrize("name", some(NAMES, ["many", "one device"]))
def test_it_is_well_formed_from_nowhere_else_and_says_how_each_number_is_known(name):
    html = sheet(name, command="jaxpar train job.toml", checked=checked(plan(name)))
    read = Reader(html)
    assert read.wrong == []
    assert html.isascii()
    assert not {"script", "link", "img", "iframe", "a", "object", "base"} & {*read.tags}
    assert not [key for key, _ in read.attributes if key in ("src", "href", "style") or key.startswith("on")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in read.attributes
    assert not re.search(r"\b(nan|inf|None)\b", read.said)
    assert {"modelled", "compiled", "exact"} <= {*read.text}
    assert "compiled" not in Reader(sheet(name)).text
    assert "jaxpar train job.toml" in read.said


def test_what_users_write_is_text_wherever_it_stands():
    html = write(plan(), title=HOSTILE, command=HOSTILE, checked=checked(plan()))
    read, benign = Reader(html), Reader(write(plan(), title="a", command="b", checked=checked(plan())))
    assert read.wrong == []
    assert {*read.tags} == {*benign.tags}
    assert {key for key, _ in read.attributes} == {key for key, _ in benign.attributes}
    assert read.said.count(HOSTILE) == 4  # title, heading, command, refusal


def test_a_hundred_thousand_layouts_are_still_a_page_to_send():
    given = plan()
    count = 100_000
    rng = np.random.default_rng(0)
    layouts = given.points.layouts
    wide = layouts.map_fields(lambda value: np.resize(value, count))
    points = replace(given.points, layouts=wide, seconds=rng.uniform(5, 50, count),
                     bytes=rng.uniform(1, given.question.memory_limit, count))  # fmt: skip
    assert len(write(replace(given, points=points), title="many")) < 600_000


# SCATTER


@pytest.mark.parametrize("name", some(NAMES, ["slow links", "one device", "small"]))
def test_all_points_and_ticks_are_on_the_sheet_and_labels_apart(name):
    given = plan(name)
    frame = PlotFrame(given.points, given.question.memory_limit)
    assert ((frame.x(given.points.seconds) > 0) & (frame.x(given.points.seconds) < 1)).all()
    assert ((frame.y(given.points.bytes) > 0) & (frame.y(given.points.bytes) <= 340)).all()
    places = [frame.x(each) for each in time_ticks(frame)]
    assert 2 <= len(places) <= 8
    assert min(np.diff(places)) >= 0.13 - 1e-9
    assert sum(mask.sum() for mask in kinds(given.points).values()) == given.fitting


@given(st.floats(1e-6, 1e6), st.floats(1.0, 1e5))
def test_any_times_have_ticks(low, ratio):
    points = replace(plan("one device").points, seconds=np.array([low, low * ratio]), bytes=np.ones(2))
    assert 2 <= len(time_ticks(PlotFrame(points, 1.0))) <= 8


@given(st.floats(1, 1e15))
def test_any_memory_has_few_round_ticks(room):
    sizes = memory_ticks(room)
    assert 1 <= len(sizes) <= 6 or room < 6
    assert sizes[0] == 0
    assert sizes[-1] <= room


def test_thinning_keeps_one_dot_of_each_cell():
    x, y = np.array([1.0, 2.0, 7.0, 7.0]), np.array([1.0, 2.0, 1.0, 9.0])
    assert thinned(x, y).tolist() == [0, 2, 3]


# VERB AND BROWSER


@pytest.mark.nightly
def test_the_verb_writes_the_page(tmp_path, capsys):
    out = tmp_path / "plan.html"
    assert main(["plan", JOB, "--devices", "64", "--top", "3", "--html", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"page: {out}" in said
    read = Reader(out.read_text())
    assert "gpu_llama_8b_fsdp8: a plan" in read.said
    assert said[said.index("jaxpar train") :].splitlines()[0] in read.said


def test_the_verb_refuses_a_page_that_is_no_file_to_be_before_it_plans(tmp_path, capsys):
    assert main(["plan", JOB, "--devices", "64", "--html", str(tmp_path)]) == 1
    assert "--html plan.html" in capsys.readouterr().err


@pytest.mark.spread(0)
@pytest.mark.parametrize("name", some(NAMES[:3], NAMES[:1]))
def test_in_a_browser_nothing_is_cut_off_pale_or_run(browser, tmp_path, name):
    file = tmp_path / "plan.html"
    file.write_text(write(plan(name), title=HOSTILE, command="jaxpar train " + 200 * "x", checked=checked(plan(name))))
    grounds = set()
    for width, theme in itertools.product(WIDTHS.values(), ("light", "dark")):
        browser.show(file, width=width, theme=theme)
        browser.picture(file.with_suffix(".png"))
        assert shades(file.with_suffix(".png")) > 16
        assert browser.ask("document.documentElement.scrollWidth") <= width
        assert browser.ask(CUT) == []
        assert browser.ask(PALE) == []
        assert browser.complaints(file) == []
        grounds.add(browser.ask("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


@pytest.mark.nightly
def test_a_page_names_both_ways_to_count_attention(capsys):
    """Of 1M tokens nearly all is attention, of which a causal mask drops half."""
    shape = replace(LLAMA_8B, seq=2**20)
    assert step_flop(shape, 2) - masked_flop(shape, 2) < 0.55 * step_flop(shape, 2)
    assert masked_flop(replace(shape, causal=False), 2) == 0
    assert main(["plan", JOB, "--devices", "64", "--top", "1"]) == 0
    shown = capsys.readouterr().out
    whole = float(re.search(r"^  1  .* ([\d.]+)%", shown, re.MULTILINE)[1])
    half = float(re.search(r"of the causal half alone the first one's is ([\d.]+)%", shown)[1])
    job = question(load(JOB, []), devices=64, chip="h100", per_node=None, options={})
    kept = 1 - job.model.masked_flop(1) / job.model.step_flop(1)
    assert half == pytest.approx(whole * kept, abs=0.1)
