"""Tables as text: what goes out comes back, and whatever else comes in is refused by name of its line."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxpar.errors import JaxparError
from jaxpar.pipeline.tables.csv import HEADER, from_csv, to_csv
from jaxpar.pipeline.tables.library import LIBRARY, schedule

KINDS = st.sampled_from(sorted(LIBRARY))
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
BITS = [
    "F",
    "B",
    "W",
    "0",
    "1",
    "9",
    "'",
    ".",
    ",",
    "\n",
    "\r",
    '"',
    " ",
    "=",
    "stages",
    "v",
    "ring",
    "\0",
    "é",
    "٣",
    "F0",
    "B3'1",
]


@cache
def table(name, stages, groups, chunks):
    kind = LIBRARY[name]
    chunks = chunks if chunks in kind.chunks else None
    return schedule(name, stages=stages, microbatches=max(2, 2 * groups) * stages, chunks=chunks)


TABLES = st.builds(table, KINDS, st.integers(1, 4), st.integers(1, 2), st.integers(1, 3))


@SLOW
@given(TABLES, st.text())
@example(table("1f1b", 2, 1, 1), 'a "name",\r\n')
def test_what_goes_out_comes_back(table, name):
    named = replace(table, name=name)
    assert from_csv(to_csv(named)) == named


def test_the_text_of_the_docs_is_1f1b():
    text = "1f1b,stages=2,microbatches=2,chunks=1,placement=ring\nF0,F1,.,B0,.,B1\n.,F0,B0,F1,B1,.\n"
    assert from_csv(text) == schedule("1f1b", stages=2, microbatches=2)
    assert to_csv(from_csv(text)) == text
    assert from_csv(text.replace(".", "").replace(",", ", ").replace("\n", "\r\n\r\n")) == from_csv(text)


def clean(text):
    """A table, or a refusal."""
    try:
        made = from_csv(text)
    except JaxparError:
        return
    assert from_csv(to_csv(made)) == made


@pytest.mark.nightly
@settings(SLOW, max_examples=500)
@given(st.text())
def test_any_text_is_read_or_refused(text):
    clean(text)


@pytest.mark.nightly
@settings(SLOW, max_examples=500)
@given(st.lists(st.sampled_from(BITS), max_size=30), st.integers(0, 3))
def test_any_lines_below_a_header_are_read_or_refused(bits, stages):
    clean(f"x,stages={stages},microbatches=1,chunks=1,placement=ring\n" + "".join(bits))


@pytest.mark.nightly
@settings(SLOW, max_examples=1500)
@given(
    TABLES, st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3), st.sampled_from(BITS)), min_size=1, max_size=4)
)
def test_any_damaged_table_is_read_or_refused(table, damages):
    text = to_csv(table)
    for at, gone, bit in damages:
        at %= len(text) + 1
        text = text[:at] + bit + text[at + gone :]
    clean(text)


ONE = "x,stages=1,microbatches=1,chunks=1,placement=ring\n"


@pytest.mark.parametrize(
    ("text", "got", "fix"),
    [
        ("", "line 1: ''", HEADER),
        ("F0,B0\n", "line 1: 'F0,B0'", HEADER),
        (ONE.replace("ring", "star"), "line 1: 'x,stages=1", HEADER),
        (ONE.replace("microbatches=1", "microbatches=-1"), "line 1", HEADER),
        (ONE.replace("stages=1", "stages=0"), "0 lines after the header, which says stages=0", "stages=1"),
        (ONE + "F0,B0\nF0,B0\n", "2 lines after the header, which says stages=1", "stages=2"),
        (ONE + "\nF0,F-1,B0\n", "line 3, cell 2: 'F-1'", "F0, B3'1"),
        (ONE + "F0,G0\n", "line 2, cell 2: 'G0'", "F0, B3'1"),
        (ONE + "F0,B٣\n", "line 2, cell 2", "F0, B3'1"),
        (ONE + "F0," + "9" * 5000, "line 2, cell 2: '" + "9" * 57 + "...'", "F0, B3'1"),
        (ONE + "F0,B1\n", "tick 1, stage 0 of x: B1", "None"),
        (ONE + "B0,F0\n", "tick 0, stage 0 of x: B0", "a later tick"),
        (ONE + "F0\n", "x ends without B0 of stage 0", "one more cell"),
        (ONE + '"F0,B0\n', "line 2: unexpected end of data", HEADER),
        (ONE.replace("stages=1", "stages=2") + "F0,.,B0\nF0,B0\n", "line 3 has 2 cells, line 2 has 3", "a . where"),
        (ONE.replace("chunks=1", "chunks=3").replace("ring", "v") + "F0,B0\n", "placement='v' with chunks=3", "ring"),
    ],
)
def test_a_damaged_line_is_named(text, got, fix):
    with pytest.raises(JaxparError) as raised:
        from_csv(text)
    (problem,) = raised.value.problems
    assert len(problem.got) < 200
    assert got in problem.got
    assert fix in problem.fix
