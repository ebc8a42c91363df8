"""Conversations as strangers write them: null keys, parts, tools and weights mean what they do elsewhere."""

import json

import numpy as np
import pytest
from pairwise import some

import jaxpar as jp
from jaxpar.data.documents.row_files import RowCorpus
from jaxpar.data.sources import report_lengths
from jaxpar.data.spec import Data
from jaxpar.data.tokenizers.chat_template import conversation, load_template
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.errors import JaxparError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{% if 'tool_calls' in m %}<|call|>{{ m.tool_calls | tojson }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}" + PLAIN
LLAMA = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('one call') }}{% endif %}<|{{ m.role }}|>{{ m.tool_calls[0].function.name }}<|end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TALKS = [
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}],
    [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "name": "add"},
        {"role": "assistant", "content": "it is 4"},
    ],
    [
        {"role": "user", "content": "hello hello"},
        {"role": "assistant", "content": "world"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "more of the world " * 5},
    ],
]
WORDS = ["<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<|call|>"]


@pytest.fixture
def folder(tmp_path):
    """Returns a function that saves a tokenizer with a template."""

    def made(template, **config):
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=WORDS, initial_alphabet=alphabet)
        made.train_from_iterator([json.dumps(talk) for talk in TALKS], trainer)
        path = tmp_path / "model"
        path.mkdir(exist_ok=True)
        made.save(str(path / "tokenizer.json"))
        about = {"eos_token": "<|end|>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
        (path / "tokenizer_config.json").write_text(json.dumps(about | config))
        return path

    return made


def jsonl(path, talks, **columns):
    rows = [{"messages": talk, **{key: each[i] for key, each in columns.items()}} for i, talk in enumerate(talks)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, talks, **columns):
    from pyarrow import parquet

    parquet.write_table(pa.table({"messages": talks, **columns}), path)
    return path


WRITERS = {"jsonl": jsonl, "parquet": parquet}


def pieces(kind, folder, tmp_path, talks, *, answers=True, **columns):
    path = WRITERS[kind](tmp_path / f"talks.{kind}", talks, **columns)
    rows = RowCorpus((path,), column="messages", chat=load_template(read_tokenizer(folder)), answers=answers)
    return [(piece.text, tuple(piece.text[a:b] for a, b in piece.answers or ())) for piece in rows.pieces()]


@pytest.mark.parametrize("template", [PLAIN, LLAMA, MARKED])
def test_parquet_and_jsonl_are_the_same_text_and_answers(template, folder, tmp_path):
    made = {kind: pieces(kind, folder(template), tmp_path, TALKS) for kind in WRITERS}
    assert made["jsonl"] == made["parquet"]
    assert made["jsonl"][0] == ("<|user|>hello<|end|><|assistant|>world<|end|>", ("world<|end|>",))
    assert not any("null" in text or "None" in text for text, _ in made["parquet"])


@pytest.mark.parametrize("kind", WRITERS)
def test_a_column_of_tools_goes_to_the_template(kind, folder, tmp_path):
    tools = [None, [{"type": "function", "function": {"name": "add"}}], None]
    text = pieces(kind, folder(TOOLS), tmp_path, TALKS, tools=tools)
    assert "<|system|>[" not in text[0][0]
    assert text[1][0].startswith('<|system|>[{"type": "function", "function": {"name": "add"}}]<|end|>')
    as_json = [None if each is None else json.dumps(each) for each in tools]
    assert pieces(kind, folder(TOOLS), tmp_path, TALKS, tools=as_json) == text


PARTS = [{"type": "text", "text": "wor"}, {"type": "text", "text": "ld"}]


@pytest.mark.parametrize("content", [PARTS, ["world"], ["wor", "ld"], [{"text": "world"}]])
@pytest.mark.parametrize("kind", WRITERS)
def test_parts_of_text_are_joined(kind, content, folder, tmp_path):
    talk = [{"role": "user", "content": ["hello"] if isinstance(content[0], str) else [{"text": "hello"}]}]
    text, answers = pieces(kind, folder(PLAIN), tmp_path, [[*talk, {"role": "assistant", "content": content}]])[0]
    assert answers == ("world<|end|>",)
    assert "<|user|>hello<|end|>" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "(assistant) has no content, or null"),
        (5, "has the content 5"),
        ({"text": "world"}, "has the content {'text': 'world'}"),
        ([{"type": "image", "url": "a.png"}], "has the content {'type': 'image'"),
        ([{"type": "text"}], "has the content {'type': 'text'}"),
    ],
)
def test_contents_that_are_no_text_are_refused_with_their_line(content, words, folder, tmp_path):
    talks = [TALKS[0], [TALKS[0][0], {"role": "assistant", "content": content}]]
    with pytest.raises(JaxparError) as error:
        pieces("jsonl", folder(PLAIN), tmp_path, talks)
    assert "talks.jsonl, line 2, message 1" in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("key", ["weight", "train", "trainable"])
@pytest.mark.parametrize("kind", WRITERS)
def test_an_answer_of_weight_zero_is_not_learned(kind, key, template, folder, tmp_path):
    off, on = (0, 1) if key == "weight" else (False, True)
    first, *others = TALKS[2]
    talk = [first, {**others[0], key: off}, others[1], {**others[2], key: on}]
    [(text, answers)] = pieces(kind, folder(template), tmp_path, [talk])
    assert text == pieces(kind, folder(template), tmp_path, [TALKS[2]])[0][0]
    assert answers == (others[2]["content"] + "<|end|>",)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "content": "a", "weight": 0.5}, "weight = 0.5"),
        ({"role": "assistant", "content": "a", "trainable": "yes"}, "trainable = 'yes'"),
        ({"role": "user", "content": "a", "weight": 1}, "(user): weight = 1"),
    ],
)
def test_other_weights_are_refused(message, words):
    with pytest.raises(JaxparError, match="line 1, message 0") as error:
        conversation([message], None, column="messages", where="line 1")
    assert words in str(error.value)


def test_weights_beside_learn_all_are_refused(folder, tmp_path):
    talk = [TALKS[0][0], {**TALKS[0][1], "weight": 0}]
    with pytest.raises(JaxparError, match="an answer of weight 0"):
        pieces("jsonl", folder(PLAIN), tmp_path, [talk], answers=False)


@pytest.mark.parametrize("tools", [5, "no json", '{"a": 1}'])
def test_tools_that_are_no_list_are_refused(tools):
    with pytest.raises(JaxparError, match="line 1: tools is"):
        conversation(TALKS[0], tools, column="messages", where="line 1")


@pytest.mark.parametrize(
    ("config", "length", "seq"),
    [({}, None, 2048), ({}, 64, 64), ({}, 131_072, 2048), ({"model_max_length": 512}, None, 512)],
)
def test_a_row_is_a_conversation_as_long_as_the_model_takes(config, length, seq, folder, tmp_path):
    made = folder(PLAIN, **config)
    if length:
        (made / "config.json").write_text(json.dumps({"max_position_embeddings": length}))
    path = jsonl(tmp_path / "talks.jsonl", TALKS[:1] * 30)
    spec = Data(source="jsonl", path=str(path), messages="messages", tokenizer=str(made))
    assert (spec.documents, spec.seq) == ("alone", seq)
    batch = jp.open_data(spec, tmp_path / "data").batch(0, 4)
    assert (batch["inputs"][:, 0] == read_tokenizer(made).ids["<|user|>"]).all()
    assert batch["mask"].any(1).all()


def test_text_keeps_its_defaults():
    assert (Data().documents, Data().seq) == ("mixed", 128)
    assert Data(seq=64, documents="apart").documents == "apart"


def test_conversations_longer_than_a_row_are_counted(folder, tmp_path):
    long = [TALKS[2][0], {"role": "assistant", "content": "more of the world " * 100}]
    path = jsonl(tmp_path / "talks.jsonl", [*TALKS * 5, long, long])
    spec = Data(source="jsonl", path=str(path), messages="messages", tokenizer=str(folder(PLAIN)), seq=128)
    assert report_lengths(spec).startswith("2 of 17 conversations at the beginning are longer than data.seq = 128")
    assert (
        jp.open_data(spec, tmp_path / "data")
        .notes[0]
        .startswith("2 of 17 conversations are longer than data.seq = 128")
    )
    assert report_lengths(Data(**{**vars(spec), "seq": 600})) == ""
    short = Data(**{**vars(spec), "seq": 8192})
    longest = len(jp.open_data(short, tmp_path / "data").batch(0, 16)["mask"].any(0).nonzero()[0])
    assert "tokens: data.seq = 512 fills up less of each row" in report_lengths(short)
    assert jp.open_data(short, tmp_path / "data").notes[0].startswith("the longest of 17 conversations has 511 tokens")
    assert longest <= 511


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("kind", some(WRITERS, ["parquet"]))
def test_learned_tokens_are_those_of_transformers(kind, folder, tmp_path):
    """Per row: ids and assistant masks of `apply_chat_template` on the same conversations."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    made = folder(MARKED)
    theirs = transformers.AutoTokenizer.from_pretrained(str(made))
    path = WRITERS[kind](tmp_path / f"talks.{kind}", TALKS)
    spec = Data(
        source=kind, path=str(path), messages="messages", tokenizer=str(made), seq=256, shuffle=False, held_out=0.0
    )
    batch = jp.open_data(spec, tmp_path / "data").batch(0, len(TALKS))
    for row, talk in enumerate(TALKS):
        want = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = np.asarray(want["input_ids"]), np.asarray(want["assistant_masks"])
        count = len(ids) - 1
        np.testing.assert_array_equal(batch["inputs"][row][:count], ids[:-1])
        np.testing.assert_array_equal(batch["mask"][row][:count], mask[1:])
        assert not batch["mask"][row][count:].any()
        np.testing.assert_array_equal(batch["targets"][row][:count][mask[1:] == 1], ids[1:][mask[1:] == 1])
