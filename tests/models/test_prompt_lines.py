"""A file of prompts has one a line, and only a line feed (with or without a carriage return) ends a line."""

import json

import pytest

from jaxpar.job.sample import Answer, Answers, read_prompts, write_answers

INSIDE = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"]  # where str.splitlines cuts


@pytest.mark.parametrize("mark", INSIDE, ids=ascii)
def test_a_mark_that_is_no_line_feed_stays_inside_of_a_prompt(tmp_path, mark):
    prompt = f"a line{mark}its second part"
    text, table = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text(f"{prompt}\nanother\n", encoding="utf-8", newline="")
    assert read_prompts(text) == [prompt, "another"]
    if mark >= "\x20":  # JSON escapes those below
        table.write_text(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n", encoding="utf-8", newline="")
        assert read_prompts(table) == [prompt]


def test_answers_that_were_written_are_read_as_prompts(tmp_path):
    prompts = [f"a{mark}b" for mark in INSIDE]
    answers = tuple(Answer(prompt=prompt, text=prompt, tokens=1) for prompt in prompts)
    write_answers(tmp_path / "answers.jsonl", Answers(answers=answers, rate=0.0))
    assert read_prompts(tmp_path / "answers.jsonl") == prompts


def test_lines_of_windows_have_no_carriage_return_left(tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"one\r\n\r\ntwo\r\n")
    assert read_prompts(tmp_path / "prompts.txt") == ["one", "two"]
