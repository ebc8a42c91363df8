"""A schedule is drawn to scale and says what the table says; the verb prints, writes and refuses.

TERMINAL  the table as text, with colours and without
SVG       every bar spans its time, every number is there, nothing of a user's is markup
VERB      what it prints, what it writes, what it refuses, what it imports
BROWSER   in Chromium, where there is one: both themes, alone and in a notebook
"""

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from pairwise import some

from jaxpar.cli import schedule as verb
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.html import markup
from jaxpar.pipeline.draw.draw_schedule import legend, saved_activations, svg, terminal, timed_runs
from jaxpar.pipeline.draw.notebook import compare, table
from jaxpar.pipeline.draw.svg import LEFT, SHADES, STYLES, ink, shade
from jaxpar.pipeline.tables.csv import from_csv
from jaxpar.pipeline.tables.library import LIBRARY, schedule
from jaxpar.pipeline.tables.price import OpTimes, price
from jaxpar.pipeline.tables.schedule import Cell, Schedule

HOSTILE = """<script>alert(1)</script>"' onload='x' &amp; ]]> \x1b[31m \x00 </title></svg>"""
EVEN, UNEVEN = OpTimes(), OpTimes(forward=1.0, backward=1.2, weights=0.8, send=0.1)
SIZES = [
    ("gpipe", 4, 8),
    ("1f1b", 4, 8),
    ("1f1b_phased", 8, 32),
    ("interleaved", 4, 8),
    ("zb_h1", 2, 2),
    ("zb_v", 4, 8),
]
IDS = [name for name, _, _ in SIZES]
NS = "{http://www.w3.org/2000/svg}"


def made(name, stages, microbatches):
    return schedule(name, stages=stages, microbatches=microbatches)


def plain(text):
    return re.sub(r"\x1b\[[\d;]*m", "", text)


# TERMINAL


@pytest.mark.parametrize(("name", "stages", "microbatches"), SIZES, ids=IDS)
def test_the_terminal_shows_the_table_and_colours_add_nothing_but_colour(name, stages, microbatches):
    asked = made(name, stages, microbatches)
    text = terminal(asked, colour=False)
    assert text == str(asked)
    assert plain(terminal(asked, colour=True)) == text
    tiles = re.findall(r"\x1b\[38;5;\d+;48;5;(\d+)m", terminal(asked, colour=True))
    assert len(tiles) == sum(1 for _ in asked)
    assert len(set(tiles)) == len({(cell.op, cell.chunk) for _, _, cell in asked})


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("width", [1, 30, 80, 100])
def test_a_table_wider_than_the_terminal_goes_on_below(width, colour):
    asked = made("interleaved", 4, 8)
    text = plain(terminal(asked, colour=colour, width=width))
    lines = [line for line in text.splitlines() if line.startswith("stage")]
    assert all(len(line) <= max(width, len("stage 0  F0'1")) for line in lines)
    for stage in range(4):
        cells = " ".join(line[7:] for line in lines if line.startswith(f"stage {stage}")).split()
        full = [str(row[stage] or ".") for row in asked.cells]
        assert cells in (full, [re.sub(r"[FBW](\d+).*", r"\1", cell) for cell in full])
    firsts = [int(first) for first in re.findall(r"^ticks (\d+) to", text, flags=re.MULTILINE)]
    assert firsts == sorted(set(firsts))


def test_the_legend_names_what_is_there():
    assert legend(made("1f1b", 2, 2), colour=False) == "F forward  B backward  . idle"
    said = legend(made("zb_v", 2, 4), colour=False)
    assert said == "F forward  B backward of inputs  W backward of weights  '1 chunk 1  . idle"


# SVG


def bars(drawn, kind):
    """Returns (cell, stage, tick) to (x, width, y) of the rectangles of a run."""
    found = {}
    for group in drawn.iter(f"{NS}g"):
        if kind in group.get("class", "").split():
            for rect in group.iter(f"{NS}rect"):
                cell, stage, tick = re.match(r"(\S+), stage (\d+), tick (\d+):", rect.find(f"{NS}title").text).groups()
                found[cell, int(stage), int(tick)] = tuple(float(rect.get(key)) for key in ("x", "width", "y"))
    return found


@pytest.mark.parametrize("times", [EVEN, UNEVEN, OpTimes(forward=0.0), OpTimes(forward=1e-6)], ids=str)
@pytest.mark.parametrize(("name", "stages", "microbatches"), some(SIZES, [("gpipe", 4, 8)]), ids=IDS)
def test_every_bar_spans_its_time_to_scale(name, stages, microbatches, times):
    asked = made(name, stages, microbatches)
    cost, drawn = price(asked, times), ElementTree.fromstring(svg(asked, times))
    shown = timed_runs(cost)
    for run in shown:
        found = bars(drawn, "jx-ideal" if run.name == "ideal" else "jx-run")
        assert found.keys() == {(str(cell), stage, tick) for tick, stage, cell in asked}
        rate = (float(drawn.get("width")) - LEFT - 74) / cost.barrier
        for (_, stage, tick), (x, width, _) in found.items():
            start, stop = run.spans[tick, stage]
            assert x == pytest.approx(LEFT + start * rate, abs=0.02)
            assert width == pytest.approx((stop - start) * rate, abs=0.02)
        rows = {stage: {y for (_, at, _), (_, _, y) in found.items() if at == stage} for stage in range(stages)}
        assert all(len(ys) == 1 for ys in rows.values())
        assert len(set.union(*rows.values())) == stages
    ideal, last = shown[0], shown[-1]
    assert (ideal.end, last.end) == pytest.approx((cost.asynchronous, cost.barrier))
    assert ideal.bubble == pytest.approx(cost.asynchronous_bubble)
    for tick, stage, _ in asked:
        assert cost.ticks[tick] <= last.spans[tick, stage][0]
        assert last.spans[tick, stage][1] <= cost.ticks[tick + 1] + 1e-9


@pytest.mark.parametrize(("name", "stages", "microbatches"), [*SIZES, ("interleaved", 8, 32), ("1f1b", 1, 1)])
def test_the_drawing_has_every_number_and_stays_in_its_frame(name, stages, microbatches):
    asked = made(name, stages, microbatches)
    text = svg(asked, EVEN)
    drawn = ElementTree.fromstring(text)
    numbers = [each.text for group in drawn.iter(f"{NS}g") for each in group.findall(f"{NS}text")]
    assert set(numbers) == {str(number) for number in range(microbatches)}
    assert len(numbers) == len(timed_runs(price(asked, EVEN))) * sum(1 for _ in asked)
    width, height = float(drawn.get("width")), float(drawn.get("height"))
    for each in drawn.iter():
        if each.get("x") and not each.get("transform"):
            assert 0 <= float(each.get("x")) <= width
            assert 0 <= float(each.get("y")) < height
    said = "".join(drawn.itertext())
    for words in (
        name,
        f"{stages} stage",
        f"{microbatches} microbatch",
        "bubble",
        "idle",
        "forward",
        "activations kept",
    ):
        assert words in said
    assert "backward of weights" in said or not asked.split
    assert "nan" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(("name", "stages", "microbatches"), SIZES, ids=IDS)
@pytest.mark.parametrize("times", [EVEN, UNEVEN], ids=str)
def test_the_curves_of_memory_end_empty_and_their_peaks_are_the_tables(name, stages, microbatches, times):
    asked = made(name, stages, microbatches)
    for run in timed_runs(price(asked, times)):
        for stage in range(stages):
            curve = saved_activations(asked, run.spans, stage)
            assert [time for time, _ in curve] == sorted({time for time, _ in curve})
            assert max(count for _, count in curve) == asked.peak[stage]
            assert curve[-1][1] == 0
    said = "".join(ElementTree.fromstring(svg(asked, times)).itertext())
    assert re.findall(r"peak ([\d.]+)", said) == [f"{peak / asked.chunks:.3g}" for peak in asked.peak]


@pytest.mark.parametrize("times", [EVEN, UNEVEN], ids=str)
@pytest.mark.parametrize("name", LIBRARY)
def test_one_panel_where_the_runs_are_the_same_and_two_where_they_are_not(name, times):
    cost = price(schedule(name, stages=4, microbatches=8), times)
    shown = timed_runs(cost)
    assert len(shown) == 2 or cost.barrier == pytest.approx(cost.asynchronous)
    if len(shown) == 1:
        assert all(span == pytest.approx(shown[0].spans[at]) for at, span in cost.starts.items())
    if times is EVEN and name in ("gpipe", "1f1b"):
        assert len(shown) == {"gpipe": 1, "1f1b": 2}[name]


def test_a_name_is_escaped_shortened_and_free_of_control_characters():
    for name in (HOSTILE, HOSTILE * 20, "", "Ünïcode 流水线"):
        cells = ((Cell("F", 0),), (Cell("B", 0),))
        text = svg(Schedule(name=name, stages=1, microbatches=1, cells=cells), EVEN)
        drawn = ElementTree.fromstring(text)
        assert {each.tag.removeprefix(NS) for each in drawn.iter()}.isdisjoint({"script", "img", "a", "image"})
        assert drawn.find(f"{NS}title").text == re.sub(r"[\x00\x1b]", "?", name) + ": 1 stage, 1 microbatch"
        assert not any(key.startswith("on") for each in drawn.iter() for key in each.attrib)
        assert len(drawn.find(f"{NS}text").text or "") <= 60


def test_colours_are_told_apart_without_hue_and_numbers_are_read_on_all_of_them():
    def light(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(one, other):
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    for op in SHADES:
        for chunks in (1, 2, 3, 8):
            shades = [shade(op, chunk, chunks) for chunk in range(chunks)]
            assert len(set(shades)) == chunks
            assert [light(colour) for colour in shades] == sorted(light(colour) for colour in shades)
            assert all(contrast(colour, ink(colour)) >= 4.5 for colour in shades)
    firsts = [shade(op, 0, 1) for op in SHADES]
    pairs = [(firsts[0], firsts[1]), (firsts[1], firsts[2]), (firsts[0], firsts[2])]
    assert all(contrast(one, other) > 1.35 for one, other in pairs)


def test_the_style_of_a_page_has_no_colours_for_the_parts_of_a_drawing():
    # a page's own classes weigh more than a drawing's: one name for two things would paint the drawing anew
    css = Path(markup.__file__).with_name("page.css").read_text().replace(".jaxpar-schedule > .jx-ground", "")
    assert ".jx-line {" in css
    assert [name for name in STYLES if re.search(rf"\.jx-{name}\b(?!-)", css)] == []


def test_a_drawing_of_no_time_is_refused():
    for times in (OpTimes(0.0, 0.0, 0.0, 0.0), OpTimes(0.0, 0.0, 0.0, 1.0)):
        with pytest.raises(JaxparError, match="one op takes time"):
            svg(schedule("1f1b", stages=2, microbatches=2), times)


# VERB

NUMBERS = ("--stages", "4", "--microbatches", "8")


def test_the_help_shows_what_is_printed(capsys):
    command, _, said = verb.EXAMPLE.partition("\n")
    assert main(command.split()[2:]) == 0
    printed = capsys.readouterr().out
    assert printed == "".join(line[2:] + "\n" for line in said.partition("\n\n")[0].splitlines())


@pytest.mark.parametrize("name", LIBRARY)
def test_every_schedule_is_written_and_read_back(name, tmp_path, capsys):
    files = {option: tmp_path / f"own.{option}" for option in ("csv", "svg", "json")}
    options = [word for option, file in files.items() for word in (f"--{option}", str(file))]
    assert main(["schedule", name, *NUMBERS, *options]) == 0
    printed = capsys.readouterr().out
    asked = schedule(name, stages=4, microbatches=8)
    assert from_csv(files["csv"].read_text()) == asked
    assert files["svg"].read_text() == svg(asked, EVEN)
    said = json.loads(files["json"].read_text())["schedule"]
    cost = price(asked, EVEN)
    assert said["bubble"] == {"ideal": cost.asynchronous_bubble, "barrier": cost.barrier_bubble}
    assert (said["ticks"], said["messages"], said["peak"]) == (asked.ticks, asked.messages, list(asked.peak))
    assert said["cells"][0][0] == "F0"
    assert main(["schedule", str(files["csv"])]) == 0
    again = capsys.readouterr().out
    assert again == re.sub(r"^(csv|svg): .*\n", "", printed, flags=re.MULTILINE)


def test_compare_has_a_row_for_every_schedule_and_a_reason_where_there_is_none(tmp_path, capsys):
    file = tmp_path / "all.json"
    assert main(["schedule", "--compare", "--stages", "4", "--microbatches", "6", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text())["compare"]
    assert [row["name"] for row in rows] == list(LIBRARY)
    assert rows == compare(EVEN, stages=4, microbatches=6)
    assert printed == table(rows) + "\n"
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines()[1 : len(rows) + 1]}
    for row in rows:
        if "cannot" in row:
            assert lines[row["name"]] == ["cannot:", *row["cannot"].split()]
            continue
        asked = schedule(row["name"], stages=4, microbatches=6)
        cost, most, late = price(asked, EVEN), max(asked.peak), max(asked.stash)
        assert lines[row["name"]] == [
            str(asked.chunks), str(asked.ticks), f"{cost.asynchronous_bubble:.1%}", f"{cost.barrier_bubble:.1%}",
            f"{cost.work_ratio:.2f}", str(most), f"{most / asked.chunks:.3g}", f"{late / asked.chunks:.3g}",
            str(asked.messages),
        ]  # fmt: skip
    assert {row["name"] for row in rows if "cannot" in row} >= {"interleaved", "interleaved_phased"}
    assert "cannot" not in rows[0]


def test_compare_takes_chunks_for_those_that_take_them_and_a_table_of_ones_own(tmp_path, capsys):
    rows = {row["name"]: row for row in compare(EVEN, stages=4, microbatches=8, chunks=3)}
    assert (rows["interleaved"]["chunks"], rows["1f1b"]["chunks"], rows["zb_v"]["chunks"]) == (3, 1, 2)
    own = tmp_path / "own.csv"
    assert main(["schedule", "1f1b", *NUMBERS, "--csv", str(own)]) == 0
    capsys.readouterr()
    assert main(["schedule", str(own), "--compare"]) == 0
    printed = capsys.readouterr().out
    mine, theirs = (re.search(rf"^{re.escape(name)} +(.*)", printed, flags=re.MULTILINE) for name in (str(own), "1f1b"))
    assert mine[1].split() == theirs[1].split()


REFUSED = {
    "": "without a name",
    "--compare": "--compare without --stages",
    "--compare --stages 0 --microbatches 8": "--stages 0",
    "--compare --stages 4 --microbatches 8 --chunks 0": "--chunks 0",
    "--compare --stages 4 --microbatches 8 --svg all.svg": "without a name",
    "1f1b": "1f1b without --stages",
    "1f1b --stages 4": "1f1b without --microbatches",
    "1f1b --stages -4 --microbatches 8": "--stages -4",
    "1f1bb --stages 4 --microbatches 8": "did you mean '1f1b'?",
    "1f1b --stages 4 --microbatches 8 --chunks 2": "chunks=2",
    "1f1b --stages 4 --microbatches 8 --times 1,1,1": "four numbers",
    "1f1b --stages 4 --microbatches 8 --times a,b,c,d": "four numbers",
    "1f1b --stages 4 --microbatches 8 --times 1,-1,1,0": "backward=-1.0",
    "1f1b --stages 4 --microbatches 8 --times nan,1,1,0": "forward=nan",
    "1f1b --stages 4 --microbatches 8 --times 0,0,0,1": "some time",
    "1f1b --stages 4 --microbatches 8 --csv no/such/folder.csv": "--csv no/such/folder.csv",
    "1f1b --stages 4 --microbatches 8 --svg .": "--svg .",
    "nowhere.csv": "nowhere.csv: No such file",
    ".": "Is a directory",
    "own.csv --stages 5": "the file says stages=2",
    "broken.csv": "needs F0",
    "latin.csv": "UTF-8",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_drawn_is_refused_with_a_way_out(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("own.csv").write_text("own,stages=2,microbatches=1,chunks=1,placement=ring\nF0,.,.,B0\n.,F0,B0,.\n")
    Path("broken.csv").write_text("own,stages=2,microbatches=1,chunks=1,placement=ring\n.,F0,.,B0\nF0,.,B0,.\n")
    Path("latin.csv").write_bytes("é".encode("latin-1"))
    before = sorted(os.listdir())
    assert main(["schedule", *words.split(), "--json", "said.json"]) == 1
    said = capsys.readouterr()
    assert REFUSED[words] in said.err
    assert "rule:" in said.err
    assert "fix:" in said.err
    assert "Traceback" not in said.err
    assert json.loads(Path("said.json").read_text())["problems"]
    assert sorted(os.listdir()) == sorted([*before, "said.json"])


@pytest.mark.parametrize("words", ["--help", "schedule --help", "schedule zb_v --compare --stages 4 --microbatches 8"])
def test_the_verb_imports_neither_jax_nor_numpy(words, tmp_path):
    code = (
        "import sys\nfrom jaxpar.cli.main import main\n"
        f"try: main({words.split()!r})\nexcept SystemExit: pass\n"
        "assert not {'jax', 'jaxlib', 'numpy', 'pydantic', 'flax'} & set(sys.modules), sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# BROWSER

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars"
# text that leaves the picture, or lies on other text
CROWDED = """
const root = document.querySelector('svg'), frame = root.getBoundingClientRect();
const boxes = [...root.querySelectorAll('text')].map(each => [each.getBoundingClientRect(), each.textContent]);
const out = boxes.filter(([b]) => b.left < frame.left || b.right > frame.right || b.bottom > frame.bottom);
const over = boxes.filter(([a], i) => boxes.slice(i + 1).some(([b]) => a.left < b.right - 1 && b.left < a.right - 1
  && a.top < b.bottom - 3 && b.top < a.bottom - 3));
const ground = getComputedStyle(root.querySelector('.jx-ground')).fill;
document.body.textContent = JSON.stringify({out: out.map(e => e[1]), over: over.map(e => e[1]), ground});
"""


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_in_a_browser_no_text_is_cut_off_or_lies_on_another(tmp_path):
    light, dark = "rgb(255, 255, 255)", "rgb(21, 24, 29)"
    for number, (name, stages, microbatches, theme, ground) in enumerate(
        [("interleaved", 8, 32, "true", light), ("zb_v", 4, 8, "false", dark), ("1f1b", 2, 2, "", light)]
    ):
        drawn = svg(schedule(name, stages=stages, microbatches=microbatches), UNEVEN)
        file = tmp_path / f"{number}.html"
        page = f"<!DOCTYPE html><body data-jp-theme-light='{theme}'>{drawn}<script>{CROWDED}</script>"
        file.write_text(page, encoding="utf-8")
        command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(re.search(r"<body[^>]*>(.*)</body>", done.stdout, flags=re.DOTALL)[1])
        assert found == {"out": [], "over": [], "ground": ground}, name
