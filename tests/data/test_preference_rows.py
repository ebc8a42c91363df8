"""Rows of a prompt, a chosen and a rejected answer become pairs of rows in which the answers are learned."""

import json
from operator import eq

import numpy as np
import pytest
from tokenizing import llama3

import jaxpar as jp
from jaxpar.data.documents.plain_text import START
from jaxpar.data.documents.preference_rows import PreferenceCorpus
from jaxpar.data.tokenizers.encoders import load
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.errors import JaxparError

TEXTS = [
    {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "fünf"},
    {"prompt": "the cat ", "chosen": "sat", "rejected": "sits on the mat, and on all the other mats too"},
    {"prompt": "ü: ", "chosen": "an umlaut", "rejected": ""},
]
ASK = [{"role": "user", "content": "2 + 2?"}]
YES, NO = ([{"role": "assistant", "content": text}] for text in ("it is four", "five"))
SIDES = "chosen", "rejected"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(tmp_path, rows, name="pairs.jsonl", **settings):
    path = write(tmp_path / name, rows) if name.endswith("jsonl") else name
    spec = jp.Data(source="jsonl", path=path, preferences=True, held_out=0.0, shuffle=False, **settings)
    return jp.open_data(spec, tmp_path / "data")


def answer(batch, side, row):
    """Returns the inputs up to the last one that predicts something, and what is learned."""
    inputs, targets, mask = (batch[f"{side}_{name}"][row] for name in ("inputs", "targets", "mask"))
    places = np.flatnonzero(mask)
    assert (np.diff(places) == 1).all()
    assert not targets[mask == 0].any()
    return inputs[: places[-1] + 1].tolist(), targets[places].tolist()


def test_bytes_of_texts_are_learned_from_the_end_of_the_prompt_on(tmp_path):
    pairs = opened(tmp_path, TEXTS, seq=32)
    assert pairs.examples == 2
    assert "1 of 3 pairs are left out" in pairs.notes[0]
    batch = pairs.batch(0, 2)
    assert {value.shape for value in batch.values()} == {(2, 32)}
    for row, text in enumerate((TEXTS[0], TEXTS[2])):
        for side in SIDES:
            inputs, learned = answer(batch, side, row)
            whole = [*(text["prompt"] + text[side]).encode(), 0]
            assert inputs == whole[:-1]
            assert learned == [*text[side].encode(), 0]
    assert pairs.where(0, 2, 1).startswith("pair 2 of")


def test_texts_in_a_saved_tokenizer_get_its_special_tokens_as_the_tokenizer_puts_them(tmp_path):
    folder = llama3(tmp_path / "llama")
    saved = read_tokenizer(folder)
    batch = opened(tmp_path, TEXTS, seq=96, tokenizer=str(folder)).batch(0, 3)
    ids = lambda text: load(saved).encode(text, add_special_tokens=False).ids  # noqa: E731
    begin, end = saved.ids["<|begin|>"], saved.ids["<|end_of_text|>"]
    merged = set()
    for row, text in enumerate(TEXTS):
        # as in TRL 1.16 (tokenize_fn of DPOTrainer), an answer begins where one of the two leaves the prompt's tokens
        prompt, *wholes = ([begin, *ids(text["prompt"] + text.get(side, ""))] for side in ("", *SIDES))
        lengths = [[*map(eq, prompt, whole), False].index(False) for whole in wholes]
        merged |= {length < len(prompt) for length in lengths}
        for side, whole in zip(SIDES, wholes, strict=True):
            assert answer(batch, side, row) == (whole, [*whole[min(lengths) :], end])
    assert merged == {True, False}  # both are tested


def test_messages_are_rendered_by_the_template_and_may_share_their_prompt(tmp_path):
    folder = llama3(tmp_path / "llama")
    history = [*ASK, *NO, {"role": "user", "content": "sure?"}]
    rows = [
        {"prompt": history, "chosen": YES, "rejected": NO},
        {"chosen": [*history, *YES], "rejected": [*history, *NO]},
    ]
    batch = opened(tmp_path, rows, seq=96, tokenizer=str(folder)).batch(0, 2)
    tokenizer = load(read_tokenizer(folder))
    for side, text in zip(SIDES, ("it is four", "five"), strict=True):
        assert answer(batch, side, 0) == answer(batch, side, 1)
        inputs, learned = answer(batch, side, 0)
        assert tokenizer.decode(learned, skip_special_tokens=False) == f"{text}<|eot|>"
        assert tokenizer.decode(inputs, skip_special_tokens=False).count("<|start|>assistant") == 2


def test_parquet_has_the_pairs_of_jsonl(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = __import__("pyarrow").Table.from_pylist(TEXTS)
    parquet.write_table(table, tmp_path / "pairs.parquet")
    spec = {"preferences": True, "held_out": 0.0, "shuffle": False, "seq": 64}
    sources = [
        jp.open_data(jp.Data(source=kind, path=path, **spec), tmp_path / kind)
        for kind, path in (("parquet", str(tmp_path / "pairs.parquet")), ("jsonl", write(tmp_path / "p.jsonl", TEXTS)))
    ]
    one, other = (source.batch(0, 3) for source in sources)
    assert all((one[name] == other[name]).all() for name in one)


def test_packing_goes_on_between_the_two_answers_of_a_row(tmp_path):
    corpus = PreferenceCorpus((tmp_path / "pairs.jsonl",))
    write(tmp_path / "pairs.jsonl", TEXTS)
    whole = list(corpus.pieces())
    assert len(whole) == 6
    places = [START, *(piece.next for piece in whole)]
    assert all(list(corpus.pieces(place)) == whole[number:] for number, place in enumerate(places))
    assert sum(piece.size for piece in whole) == corpus.bytes


WRONG = {
    "no answer": ([{"prompt": "a", "chosen": "b"}], {}, "rejected = null"),
    "no prompt": ([{"chosen": "b", "rejected": "c"}], {}, "prompt = null"),
    "no column": ([{"prompt": "b"}], {}, "no column 'chosen'"),
    "mixed": ([{"prompt": "a", "chosen": YES, "rejected": NO}], {}, "three lists of messages"),
    "no template": ([{"prompt": ASK, "chosen": YES, "rejected": NO}], {}, "chat template of a tokenizer's folder"),
    "too long": (TEXTS, {"seq": 4}, "data.seq = 54"),
    "packed": (TEXTS, {"documents": "apart"}, "a row for each"),
    "messages": (TEXTS, {"messages": "chosen"}, "without messages"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_preference_is_refused(wrong, tmp_path):
    rows, settings, message = WRONG[wrong]
    with pytest.raises(JaxparError) as caught:
        opened(tmp_path, rows, **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("chosen", [[], ASK])
def test_an_answer_is_an_assistants_message(chosen, tmp_path):
    row = {"prompt": ASK, "chosen": chosen, "rejected": NO}
    with pytest.raises(JaxparError, match="after the prompt"):
        opened(tmp_path, [row], tokenizer=str(llama3(tmp_path / "llama")))
