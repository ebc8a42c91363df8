"""What is printed folds to the terminal that shows it, and is whole where a file or a pipe takes it."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.cli.main import main
from jaxpar.columns import LEAST, fold, table, terminal_width

CONFIG = "configs/gpu_llama_8b_fsdp8.toml"
WORDS = st.text("abc ,/:-", max_size=60)


@pytest.mark.slow
@given(st.lists(st.tuples(WORDS, st.from_regex("[0-9]{0,6}", fullmatch=True), WORDS), min_size=1), st.integers(40, 200))
def test_a_table_of_any_words_fits_and_keeps_every_character(rows, width):
    shown = table(rows, right=(1,), width=width)
    assert all(len(line) <= width for line in shown.splitlines())
    kept = sorted(shown.replace(" ", "").replace("\n", ""))
    assert kept == sorted("".join(map("".join, rows)).replace(" ", ""))
    numbers = [row[1] for row in rows if row[1]]
    assert all(any(number in line for line in shown.splitlines()) for number in numbers)  # these never fold


def test_a_table_that_fits_and_one_without_a_limit_are_the_same():
    rows = [("name", "bytes"), ("a long one", "12"), ("b", "1,234")]
    whole = "  name        bytes\n  a long one     12\n  b           1,234"
    assert table(rows, right=(1,)) == table(rows, right=(1,), width=40) == whole


@given(st.text("ab \n", max_size=300), st.integers(LEAST, 100))
def test_folded_lines_are_no_longer_than_the_width_and_keep_their_words(text, width):
    shown = fold(text, width)
    assert all(len(line) <= width for line in shown.split("\n") if " " in line.strip())
    assert "".join(shown.split()) == "".join(text.split())
    assert fold(text, 0) == text


@pytest.mark.spread(0)
@pytest.mark.parametrize("width", [pytest.param(80, marks=pytest.mark.full), pytest.param(120, marks=pytest.mark.slow)])
def test_a_plan_fits_a_terminal(width, monkeypatch, capsys):
    job = [CONFIG, "train.global_batch=256", "--devices", "64", "--advise"]
    assert main(["plan", *job]) == 0
    whole = capsys.readouterr().out
    show_on_terminal(monkeypatch, width)
    assert main(["plan", *job]) == 0
    narrow = capsys.readouterr().out
    command = next(line for line in whole.splitlines() if line.startswith("  jaxpar train"))
    assert command in narrow.splitlines()  # to be copied: one line
    assert all(len(line) <= width for line in narrow.splitlines() if line != command)
    assert max(map(len, whole.splitlines())) > 150
    assert "Train it so:" in narrow


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_an_inspection_fits_a_terminal(width, monkeypatch, capsys):
    show_on_terminal(monkeypatch, width)
    tiny = ["model.layers=1", "model.dim=32", "model.heads=4", "data.seq=8", "train.global_batch=16"]
    assert main(["inspect", "configs/tensor4_data2.toml", *tiny]) == 0
    shown = capsys.readouterr().out
    assert "Collectives of a step" in shown
    assert all(len(line) <= width for line in shown.splitlines())


def show_on_terminal(monkeypatch, width):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")


def test_a_pipe_has_no_width_and_a_terminal_has_its_own(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert terminal_width() == 0
    show_on_terminal(monkeypatch, 100)
    assert terminal_width() == 100
    show_on_terminal(monkeypatch, 20)
    assert terminal_width() == LEAST
