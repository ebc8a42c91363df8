"""The page says all that the report says, shows it on any screen and on paper, and runs nothing that users wrote.

TEXT      the HTML as a string: complete, escaped, balanced, from nowhere else
DRAWINGS  the arithmetic behind the pictures
BROWSER   in Chromium, where there is one: both themes, desktop and phone, paper
"""

import itertools
import json
import os
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from browser import CUT, OPEN, PALE, WIDTHS, Reader, shades
from pairwise import some

from jaxpar.hlo.attribution import STAGE_TO_STAGE, Argument
from jaxpar.hlo.flop import Flop
from jaxpar.html.markup import percent, tag
from jaxpar.inspector.findings import Flag
from jaxpar.inspector.memory_causes import CAUSES, Share
from jaxpar.inspector.pages.html import fragment, page
from jaxpar.inspector.pages.mesh_and_timeline import spans, stretches, ticks, width_share
from jaxpar.inspector.report import Report
from jaxpar.inspector.timeline import Timeline, TimelineEvent
from jaxpar.mesh.axes import coordinates, nodes_of_axes
from jaxpar.mesh.chips import find_chip
from jaxpar.mesh.collective import KINDS, Collective
from jaxpar.pipeline.tables.library import schedule

GIB = 2**30
HOSTILE = """<script>alert(1)</script><img src=x onerror=alert(2)>"' onload='alert(3)' &amp; </style></title>"""
FLAG_KINDS = (
    "replicates",
    "unsharded gradient",
    "per microbatch",
    "wide wire",
    "idle axis",
    "rematerialized",
    "unknown",
)


def collective(kind="all-gather", axes=("fsdp",), **changes):
    entry = Collective(
        kind=kind, axes=axes, dtype="bf16", group=8, times=32, payload=2**20, cause=f"cause of {kind}",
        source="layers.py:12", loop=(4, 8), parameters=("blocks/up",), asynchronous=True, count=3,
    )  # fmt: skip
    return replace(entry, **changes)


def argument(path="blocks/up", **changes):
    given = Argument(path, "parameters", "f32", (1024, 4096), (128, 4096), "f32[embed/fsdp, mlp]", ("fsdp",))
    return replace(given, **changes)


def made_timeline(unit=1e-3):
    """Two streams, three turns of a loop and nine more."""
    events = [TimelineEvent("compute", turn * unit, (turn + 0.9) * unit, "dot_general") for turn in range(3)]
    events += [TimelineEvent("compute", (turn + 0.9) * unit, (turn + 0.901) * unit, "add") for turn in range(3)]
    events += [TimelineEvent("fsdp", turn * unit, (turn + 0.5) * unit, "all-gather") for turn in range(3)]
    events += [TimelineEvent("compute", 3 * unit, 12 * unit, "9 more turns of the loop")]
    events += [TimelineEvent("data,fsdp", 12 * unit, 13 * unit, "all-reduce")]
    return Timeline(
        seconds=13 * unit, compute=12 * unit, communication={"fsdp": 6 * unit, "data,fsdp": unit},
        exposed={"data,fsdp": unit}, events=tuple(events), unknown=False,
    )  # fmt: skip


def report(**changes):
    causes = tuple(
        Share(cause, (index + 1) * GIB, "exact" if index < 5 else "compiled", ((f"array of {cause}", GIB), ("rest", 7)))
        for index, cause in enumerate(CAUSES)
    )
    part = collective("all-reduce", ("~data", "fsdp"), times=None, senders=0.5)
    step = argument("step", role="other state", shape=(), shard=())
    made = Report(
        title="a small model",
        devices="8 x NVIDIA H100 SXM",
        sizes={"data": 2, "fsdp": 4, "tensor": 1},
        per_node=8,
        chip=find_chip("h100"),
        memory=causes,
        total=sum(share.bytes for share in causes),
        ledger=(*(collective(kind) for kind in KINDS), part),
        flop=Flop(forward=10**12, backward=2 * 10**12, recomputed=10**12, by_dtype={"bf16": 4 * 10**12}, unknown=False),
        model_flop=3e12,
        timeline=made_timeline(),
        flags=tuple(Flag(kind, f"text of {kind}", f"fix of {kind}", 5.0) for kind in FLAG_KINDS),
        arguments=(argument(), argument("blocks/down", host=True), step),
        notes=("a note",),
        seconds=12.5,
        versions={"jax": "0.12.0"},
    )
    return replace(made, **changes)


def on_many():
    """1024 GPUs and a program with much to say."""
    ledger = tuple(collective(cause=f"layer {index}", payload=2**20 - index) for index in range(200))
    arguments = tuple(argument(f"blocks/{index}/attention/query") for index in range(300))
    events = tuple(
        TimelineEvent("compute", index * 1e-3, (index + 0.7) * 1e-3, f"kernel {index}") for index in range(4000)
    )
    time = replace(made_timeline(), seconds=5.0, events=events)
    sizes = {"data": 16, "fsdp": 8, "tensor": 8}
    return report(sizes=sizes, devices="1024 x NVIDIA H100 SXM", ledger=ledger, arguments=arguments, timeline=time)


def with_long_words():
    """Names without a place to break, as generated code has them."""
    long = "averylongname" * 12
    axes = ("data", "fsdp", "expert", "context", "tensor")
    ledger = tuple(collective(kind, axes, cause=long, source=f"{long}.py:12") for kind in KINDS)
    given = argument(long, role="optimizer state", shape=(32, 4096, 32, 128), placed=f"f32[{long}, {long}]")
    return report(
        title=long, ledger=ledger, flags=(Flag("replicates", long, long, 1.0),), arguments=(given,), notes=(long,),
        memory=(Share("activations", GIB, "compiled", ((long, 1), (long, 1))),), knobs=((long, 1),),
        timeline=replace(made_timeline(), communication={",".join(axes): 1.0}), sizes=dict.fromkeys(axes, 2),
    )  # fmt: skip


def with_pipeline(name="1f1b_phased", stages=4, microbatches=8, **changes):
    """A step of a pipeline; of a larger one, if so asked."""
    table = schedule(name, stages=stages, microbatches=microbatches)
    sent = collective(
        "collective-permute", ("pipe",), group=stages, times=table.ticks, cause=STAGE_TO_STAGE, source="execute.py:12",
        parameters=(), senders=1 - 1 / stages,
    )  # fmt: skip
    return report(schedule=table, sizes={"pipe": stages, "fsdp": 2}, ledger=(*report().ledger, sent), **changes)


SIMULATED = {"chip": None, "timeline": None, "devices": "8 x cpu"}
TOO_LARGE = {"total": 100 * GIB, "knobs": (("remat full", 60 * GIB), ("fsdp 16", GIB))}
REPORTS = {
    "gpus": report,
    "simulated": lambda: report(**SIMULATED),
    "simulated with a timeline": lambda: report(chip=None),
    "too large": lambda: report(**TOO_LARGE),
    "tiny": lambda: report(memory=(Share("parameters", 4, "exact"),), total=4),
    "one device": lambda: report(sizes={"data": 1}, per_node=1, ledger=(), flags=(), arguments=(), notes=()),
    "no axes": lambda: report(sizes={}, per_node=1, memory=(), total=0, flop=Flop(0, 0, 0, {}, False)),
    "one node of many": lambda: report(sizes={"data": 16, "fsdp": 8, "tensor": 8}, per_node=1024),
    "unlike nodes": lambda: report(sizes={"data": 3, "pipe": 2, "context": 2, "tensor": 3}, per_node=8),
    "an absurd time": lambda: report(timeline=made_timeline(1e9)),
    "no time at all": lambda: report(timeline=replace(made_timeline(), seconds=0.0, events=())),
    "an endless time": lambda: report(timeline=replace(made_timeline(), seconds=float("inf"))),
    "no events": lambda: report(timeline=replace(made_timeline(), events=())),
    "much": on_many,
    "long words": with_long_words,
    "pipeline": with_pipeline,
    "mixed pipeline": lambda: with_pipeline("zb_v", **SIMULATED),
    "large pipeline": lambda: with_pipeline(stages=8, microbatches=64),
    "huge pipeline": lambda: with_pipeline("1f1b", stages=16, microbatches=512),
    "hostile": lambda: hostile(),
}


# TEXT


@pytest.mark.parametrize("write", [page, fragment])
@pytest.mark.parametrize("name", some(REPORTS, ["gpus"]))
def test_it_is_well_formed_and_from_nowhere_else(write, name):
    html = write(REPORTS[name]())
    read = Reader(html)
    assert read.wrong == []
    assert html.isascii()
    assert not {"script", "link", "img", "iframe", "a", "object", "base"} & {*read.tags}
    assert not [name for name, _ in read.attributes if name in ("src", "href", "style") or name.startswith("on")]
    assert not re.search(r"url\((?!#)|@import|https?:|//", html)  # url(#id) is a mark of the page's own
    assert not re.search(r"\b(nan|inf|None)\b", read.said)


@pytest.mark.parametrize("write", [page, fragment])
def test_a_pipeline_is_shown_with_what_is_exact_and_what_is_compiled(write):
    said = Reader(write(with_pipeline())).said
    for words in (
        "Pipeline", "1f1b_phased, 4 stages, 8 microbatches: 22 ticks, 27.3% of the cells idle", "7 of 8 microbatches",
        "48 messages from stage to stage: 22 permutes of 1 MiB, in which a device sends 16.5 MiB", "activations kept",
    ):  # fmt: skip
        assert words in said, words
    assert "Pipeline" not in Reader(write(report())).said


def test_a_pipeline_in_json_counts_its_permutes_and_stays_without_one():
    found = json.loads(json.dumps(with_pipeline().to_dict()))["pipeline"]
    assert found == found | {
        "schedule": "1f1b_phased", "stages": 4, "microbatches": 8, "chunks": 1, "ticks": 22, "messages": 48,
        "bubble": pytest.approx(3 / 11), "kept": [7, 5, 3, 1], "permutes": 22, "largest": 2**20,
        "wire": 22 * 0.75 * 2**20,
    }  # fmt: skip
    assert report().to_dict()["pipeline"] is None
    unknown = with_pipeline()
    unknown = replace(unknown, ledger=(replace(unknown.ledger[-1], times=None),))
    assert unknown.to_dict()["pipeline"]["permutes"] is None
    assert "? permutes" in str(unknown)


@pytest.mark.parametrize(("name", "stages", "microbatches", "most"), [
    ("1f1b_phased", 8, 64, 200_000), ("interleaved", 16, 128, 350_000), ("1f1b", 16, 512, 350_000),
])  # fmt: skip
def test_a_large_table_is_still_a_page_to_send(name, stages, microbatches, most):
    given = with_pipeline(name, stages, microbatches)
    html = page(given)
    assert len(html) < most
    drawn = html[html.index('<svg class="jaxpar-schedule"') :]
    cells = sum(1 for _ in given.schedule)
    assert ("the first" in drawn) == (cells > 6000)
    assert drawn.count("v24h-") == cells or cells > 6000
    assert f"stage {stages - 1}" in drawn


def test_the_page_itself_forbids_scripts_and_requests():
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in Reader(page(report())).attributes


@pytest.mark.parametrize("write", [page, fragment])
def test_everything_that_the_report_says_is_there(write):
    given = report(**TOO_LARGE)
    said = Reader(write(given)).said
    assert "Does not fit" in said
    for words in (
        given.title, given.devices, "data 2 × fsdp 4", "jax 0.12.0", "12.5 s", "7 flags", "a note", "remat full",
        "60 GiB", "enough alone", "exact", "compiled", "modelled", "13 ms", "MFU", "~data,fsdp", "loops 4×8",
        "50% of the devices send", "3 arrays in one", "in host memory", "1024×4096", "128×4096", "f32[embed/fsdp, mlp]",
        "scalar", "+9×",
    ):  # fmt: skip
        assert words in said, words
    for share in given.memory:
        assert share.cause in said
        assert share.largest[0][0] in said
    for entry in given.ledger:
        assert entry.kind in said
        assert entry.cause in said
    for flag in given.flags:
        assert flag.kind in said
        assert flag.text in said
        assert flag.fix in said
    for each in given.arguments:
        assert each.path in said


def test_the_whole_ledger_and_every_array_are_there():
    said = Reader(page(on_many())).said
    assert all(f"layer {index}" in said for index in range(200))
    assert all(f"blocks/{index}/attention/query" in said for index in range(300))


@pytest.mark.parametrize("write", [page, fragment])
def test_simulated_devices_have_neither_a_time_nor_a_utilization(write):
    for given in (report(**SIMULATED), report(chip=None)):
        said = Reader(write(given)).said
        assert "No capacity" in said
        for word in ("MFU", "modelled", "Time of a step", "Timeline", "Fits", "exposed"):
            assert word not in said, word
    assert "simulated" in Reader(write(report(**SIMULATED))).said


def hostile():
    """Every text is one that would do harm if it were markup."""
    evil = HOSTILE
    entry = collective(axes=(evil,), dtype=evil, cause=evil, source=evil, operation=evil, parameters=(evil,))
    events = (TimelineEvent(evil, 0.0, 0.01, evil), TimelineEvent("compute", 0.0, 0.01, evil))
    return report(
        title=evil,
        devices=evil,
        sizes={evil: 2, "fsdp": 4},
        memory=(Share(evil, GIB, evil, ((evil, GIB), (evil, 1))),),
        ledger=(entry,),
        timeline=replace(made_timeline(), communication={evil: 1.0}, events=events),
        flags=(Flag(evil, evil, evil, 1.0),),
        arguments=(argument(evil, role=evil, placed=evil),),
        notes=(evil,),
        versions={evil: evil},
        knobs=((evil, 1),),
    )


@pytest.mark.parametrize("write", [page, fragment])
def test_what_users_write_is_text_wherever_it_stands(write):
    read, benign = Reader(write(hostile())), Reader(write(report(**TOO_LARGE)))
    assert read.wrong == []
    assert {*read.tags} <= {*benign.tags}
    assert {name for name, _ in read.attributes} <= {name for name, _ in benign.attributes}
    assert read.said.count(HOSTILE) >= 25


def test_a_file_name_that_is_no_text_is_still_a_page(tmp_path):
    html = page(report(title="job \udcff.toml"))
    (tmp_path / "page.html").write_text(html, encoding="ascii")
    assert "job &#56575;.toml" in html


def test_a_page_for_1024_gpus_is_small_enough_to_send():
    html = page(on_many())
    assert len(html) < 400_000
    assert "and 120 more nodes" in Reader(html).said


def test_a_fragment_touches_nothing_of_its_host():
    html = fragment(report())
    assert not {"html", "head", "body", "meta", "title", "h1", "h2", "h3"} & {*Reader(html).tags} - {"title"}
    style = re.sub(r"/\*.*?\*/", "", files("jaxpar.html").joinpath("page.css").read_text("utf-8"), flags=re.DOTALL)
    depth, outermost = 0, []
    for piece in re.split(r"([{}])", re.sub(r"@media print\s*\{(.*)\}\s*$", r"\1", style, flags=re.DOTALL)):
        outermost += [piece.strip()] if depth == 0 and piece not in "{}" and piece.strip() else []
        depth += {"{": 1, "}": -1}.get(piece, 0)
    assert outermost
    assert all(".jaxpar" in selector for rule in outermost for selector in rule.split(",")), outermost
    assert style.isascii()
    assert {name for _, value in Reader(html).attributes if _ == "class" for name in value.split()} <= {
        "jaxpar",
        *re.findall(r"jx-[\w-]+", html),
    }


def test_a_report_shows_itself_in_a_notebook_and_writes_itself(tmp_path):
    assert report()._repr_html_() == fragment(report())
    assert report().html(tmp_path / "page.html") == (tmp_path / "page.html").read_text() == page(report())


# DRAWINGS


def test_markup_is_escaped_once_and_only_once():
    assert tag("b", tag("i", "<"), ">", title='"') == '<b title="&quot;"><i>&lt;</i>&gt;</b>'


def test_coordinates_count_the_devices():
    sizes = {"data": 2, "fsdp": 3, "tensor": 4}
    found = [coordinates(device, sizes) for device in range(24)]
    assert [place["data"] * 12 + place["fsdp"] * 4 + place["tensor"] for place in found] == list(range(24))


@pytest.mark.parametrize(
    ("sizes", "per_node", "nodes"),
    [
        ({"data": 16, "fsdp": 8, "tensor": 8}, 8, {"data": 16, "fsdp": 8, "tensor": 1}),
        ({"fsdp": 8}, 8, {"fsdp": 1}),
        ({"data": 2, "tensor": 3}, 4, {"data": 2, "tensor": 2}),
        ({"data": 1}, 1, {"data": 1}),
    ],
)
def test_an_axis_goes_over_so_many_nodes(sizes, per_node, nodes):
    assert nodes_of_axes(sizes, per_node) == nodes


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1.0, 1e9])
def test_a_timeline_squeezes_what_is_not_drawn_and_loses_nothing(unit):
    time = made_timeline(unit)
    step = stretches(time)
    assert [stretch.drawn for stretch in step] == [True, False, True]
    assert step[1].right - step[1].left == pytest.approx(0.25)
    places = [width_share(time.seconds * index / 100, step) for index in range(101)]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0.0, pytest.approx(1.0))
    drawn = spans(time.events, step)
    assert sum(span.count for span in drawn) == len(time.events)
    assert sum(sum(span.busy.values()) for span in drawn) == pytest.approx(sum(e.end - e.start for e in time.events))
    labels = ticks(step)
    assert 2 <= len(labels) <= 8
    assert labels == sorted(labels)


def test_thousands_of_events_become_hundreds_of_marks():
    time = on_many().timeline
    many = tuple(TimelineEvent("compute", index * 1e-6, (index + 0.9) * 1e-6, "k") for index in range(4000))
    assert len(spans(time.events, stretches(time))) <= 1200
    marks = spans(many, stretches(replace(time, seconds=4e-3, events=many)))
    assert len(marks) <= 300
    assert sum(mark.count for mark in marks) == 4000


def test_lengths_are_short():
    assert [percent(share) for share in (0, 1, 0.5, 1 / 3, 1e-9)] == ["0%", "100%", "50%", "33.33%", "0%"]


# BROWSER


@pytest.fixture
def artifacts(tmp_path):
    folder = Path(os.environ.get("JAXPAR_ARTIFACTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpus", marks=pytest.mark.slow),
        pytest.param("simulated", marks=pytest.mark.slow),
        pytest.param("too large", marks=pytest.mark.slow),
        pytest.param("tiny", marks=pytest.mark.slow),
        pytest.param("one node of many", marks=pytest.mark.slow),
        "much",
        pytest.param("long words", marks=pytest.mark.slow),
        "hostile",
        pytest.param("pipeline", marks=pytest.mark.slow),
        pytest.param("large pipeline", marks=pytest.mark.full),
    ],
)
def test_in_a_browser_nothing_is_cut_off_pale_or_run(browser, artifacts, name):
    file = artifacts / f"{name.replace(' ', '_')}.html"
    file.write_text(page(REPORTS[name]()))
    grounds = set()
    for (device, width), theme in itertools.product(WIDTHS.items(), ("light", "dark")):
        browser.show(file, width=width, theme=theme)
        picture = file.with_name(f"{file.stem}_{device}_{theme}.png")
        browser.picture(picture)
        assert shades(picture) > 16, picture
        browser.ask(OPEN)
        assert browser.ask("document.documentElement.scrollWidth") <= width
        assert browser.ask(CUT) == []
        assert browser.ask(PALE) == []
        assert browser.ask("document.querySelectorAll('script, img').length") == 0
        assert browser.complaints(file) == []
        grounds.add(browser.ask("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpus", "much", "long words", "hostile", "large pipeline"])
def test_on_paper_everything_is_open_light_and_within_the_margins(browser, artifacts, name):
    file = artifacts / f"paper_{name}.html"
    file.write_text(page(REPORTS[name]()))
    browser.show(file, width=718, theme="dark", medium="print")  # the text of A4 between margins of 1 cm, in CSS pixels
    assert browser.ask("document.documentElement.scrollWidth") <= 718
    assert browser.ask(CUT) == []
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    hidden = "[...document.querySelectorAll('details > :not(summary)')].filter(each => !each.checkVisibility()).length"
    assert browser.ask("document.querySelectorAll('details').length") > 0
    assert browser.ask(hidden) == 0
    browser.paper(file.with_suffix(".pdf"))
    assert file.with_suffix(".pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.nightly
def test_in_a_notebook_the_fragment_takes_the_notebooks_theme_and_leaves_it_alone(browser, artifacts):
    host = "<!DOCTYPE html><p id='own'>host</p><table><tr><td id='cell'>cell</td></tr></table>"
    look = "['own', 'cell'].map(id => JSON.stringify({...getComputedStyle(document.getElementById(id))}))"
    file = artifacts / "notebook.html"
    file.write_text(host)
    browser.show(file, width=1000, theme="light")
    before = browser.ask(look)
    file.write_text(f"{host}<div data-jp-theme-light='false'>{fragment(report())}</div>")
    browser.show(file, width=1000, theme="light")
    assert browser.ask(look) == before
    assert browser.ask("getComputedStyle(document.querySelector('.jaxpar')).backgroundColor") == "rgb(21, 24, 29)"
    browser.ask(OPEN)
    assert browser.ask(PALE) == []
    assert browser.ask(CUT) == []
    browser.picture(file.with_suffix(".png"))
    assert browser.complaints(file) == []
