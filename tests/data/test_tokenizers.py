"""A tokenizer of Hugging Face's makes the tokens that it makes elsewhere, of documents of any length, once."""

import json
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import tokenizing
from pairwise import some

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.data import corpus, packed, packing
from jaxpar.data.corpus import Corpus
from jaxpar.data.documents.plain_text import START, DocumentPiece
from jaxpar.data.tokenizers import encoders
from jaxpar.data.tokenizers.chat_template import conversation, load_template
from jaxpar.data.tokenizers.encoders import HuggingFaceEncoder, encode_documents
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.data.tokens import RunTokenizer
from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.names import vocabulary

KINDS = ("llama3", "llama2", "gpt2", "t5")
WORDS = [
    "a", "cat", "don't", "12", "3456", "...", "ü", "e\u0301", "。", "日本語", "\u3000", "\xa0", " ", "  ", "\n", "\n\n",
    "\x00", "\t", "\r\n", "!", "?\n", "🙂", "ﬁ", "def f(x):", "</s>", "<|eot|>", "<|endoftext|>", "Hello", " world", "▁"
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: getattr(tokenizing, kind)(tmp_path_factory.mktemp("t") / kind) for kind in KINDS}


def given(talk):
    return conversation(talk, None, column="messages", where="row 1")


def text(rng, most=40):
    return "".join(rng.choice(WORDS) + rng.choice(["", " "]) for _ in range(rng.randint(0, most)))


def talks(rng):
    return [
        [{"role": ("user", "assistant")[i % 2], "content": text(rng)} for i in range(rng.randint(1, 6))]
        for _ in range(1000)
    ]


def ids(encoder, *pieces):
    return [packed.token_ids(each).tolist() for each in encoder.encode(pieces)]


@pytest.mark.parametrize("kind", some(KINDS, ["llama2", "gpt2"]))
def test_tokens_are_those_of_the_package_tokenizers(folders, kind):
    rng, found = random.Random(0), read_tokenizer(folders[kind])
    encoder, texts = HuggingFaceEncoder(found), [text(rng) for _ in range(1000)]
    end, made = (
        found.special_id("eos_token"),
        ids(HuggingFaceEncoder(found), *(DocumentPiece(each, 0, START) for each in texts)),
    )
    bare = [each.ids for each in encoders.load(found).encode_batch(texts, add_special_tokens=False)]
    around = (len(encoder.before), len(encoder.after))
    for ours, theirs in zip(made, bare, strict=True):
        assert ours[around[0] :][: len(theirs)] == theirs
        assert ours[-1] == end
        assert len(ours) <= len(theirs) + sum(around) + 1


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_long_document_are_those_of_its_pieces(folders, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", 2**10)
    monkeypatch.setattr(corpus, "BLOCK", 2**12 + 1)  # also within a character
    rng, encoder = random.Random(1), HuggingFaceEncoder(read_tokenizer(folders[kind]))
    whole = "".join(text(rng) + "\n" for _ in range(300))
    (tmp_path / "a.txt").write_text(whole, newline="")
    documents = Corpus((tmp_path / "a.txt",))
    pieces = list(documents.pieces(START, encoder.seam))
    assert len(pieces) > 15
    made = np.concatenate([tokens for tokens, _ in encode_documents(documents, encoder, lambda _: None)])
    assert [packed.token_ids(made).tolist()] == ids(encoder, DocumentPiece(whole, 0, START))
    assert packed.document_starts(made).nonzero()[0].tolist() == [0]
    for index in (1, 7, -1):  # from any place on the pieces are the same
        assert list(documents.pieces(pieces[index - 1].next, encoder.seam)) == pieces[index:] or index == 0


def test_answers_are_what_is_learned_whether_the_template_marks_them_or_not(folders, tmp_path):
    rng, found = random.Random(2), read_tokenizer(folders["llama3"])
    marked = tokenizing.CHAT.replace(
        "{{ message['content'] | trim }}<|eot|>",
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim }}<|eot|>"
        "{% endgeneration %}{% else %}{{ message['content'] | trim }}<|eot|>{% endif %}",
    )
    by_marks = load_template(
        read_tokenizer(tokenizing.write(tmp_path, encoders.load(found), **found.config | {"chat_template": marked}))
    )
    ours, encoder = load_template(found), HuggingFaceEncoder(found)
    conversations = talks(rng)
    rendered = [ours.render_conversation(given(talk), "row 1") for talk in conversations]
    for talk, (whole, answers) in zip(conversations, rendered, strict=True):
        assert (whole, answers) == by_marks.render_conversation(given(talk), "row 1")
        said = [each["content"].strip() + "<|eot|>" for each in talk if each["role"] == "assistant"]
        assert [whole[begin:end] for begin, end in answers] == said
    made = encoder.encode(
        [DocumentPiece(whole, 0, START, answers=answers, rendered=True) for whole, answers in rendered]
    )
    (eot,) = (found.ids[name] for name in ("<|eot|>",))
    for tokens, talk in zip(made, conversations, strict=True):
        learned = packed.token_ids(tokens)[~packed.ignored_by_loss(tokens)]
        assert (learned == eot).sum() >= len(talk) // 2
        assert not len(talk) == 1 or not len(learned)


@pytest.mark.nightly
def test_tokens_and_templates_are_those_of_transformers(folders):
    transformers = pytest.importorskip("transformers", reason="of the extra huggingface-tests, on Python 3.11")
    for kind in KINDS:
        rng, found = random.Random(0), read_tokenizer(folders[kind])
        encoder, texts = HuggingFaceEncoder(found), [text(rng) for _ in range(1000)]
        theirs, end = transformers.AutoTokenizer.from_pretrained(folders[kind]), found.special_id("eos_token")
        made = ids(encoder, *(DocumentPiece(each, 0, START) for each in texts))
        for ours, wanted in zip(made, theirs(texts)["input_ids"], strict=True):
            assert ours == (wanted if wanted[-1:] == [end] else [*wanted, end])
        assert found.size == len(theirs)
        if not found.template:
            continue
        for talk in talks(rng):
            whole, answers = load_template(found).render_conversation(given(talk), "row 1")
            (tokens,) = encoder.encode([DocumentPiece(whole, 0, START, answers=answers, rendered=True)])
            assert packed.token_ids(tokens).tolist() == theirs.apply_chat_template(talk)


def job(folder, tokenizer, **keys):
    return jp.Data(source="text", path=str(folder / "*.txt"), tokenizer=str(tokenizer), seq=16, **keys)


def write_text(folder, lines=4000):
    rng = random.Random(3)
    (folder / "a.txt").write_text("".join(f"{i} squared is {i * i}, or {text(rng, 6)}\n" for i in range(lines)))
    (folder / "b.txt").write_text("a second document. " * 50)


def tokens_of(folder):
    (file,) = folder.glob("tokens-*.bin")
    return file.read_bytes()


class Killed(BaseException):
    pass


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "after", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(20, marks=pytest.mark.slow)]
)
def test_what_was_killed_goes_on_at_the_exact_token(folders, tmp_path, monkeypatch, capsys, after):
    write_text(tmp_path)
    monkeypatch.setattr("jaxpar.data.tokenizers.encoders.AT_ONCE", 2**11)
    monkeypatch.setattr(corpus, "PIECE", 2**11)
    asked = job(tmp_path, folders["llama3"])
    jp.open_data(asked, tmp_path / "whole")
    monkeypatch.setattr(packing, "SYNC_EVERY", 0.0)
    encode, seen = HuggingFaceEncoder.encode, []

    def killed(encoder, pieces):
        if len(seen) == after:
            raise Killed
        seen.append(sum(each.size for each in pieces))
        return encode(encoder, pieces)

    monkeypatch.setattr(HuggingFaceEncoder, "encode", killed)
    with pytest.raises(Killed):
        jp.open_data(asked, tmp_path / "data")
    (begun,) = (tmp_path / "data").glob("*.begun")
    with begun.open("ab") as more:
        more.write(b"what was written after the last note")
    done, after = sum(seen), -1
    seen.clear()
    jp.open_data(asked, tmp_path / "data")
    assert tokens_of(tmp_path / "data") == tokens_of(tmp_path / "whole")
    assert sum(seen) == sum(file.stat().st_size for file in tmp_path.glob("*.txt")) - done
    assert ("goes on after" in capsys.readouterr().err) == (done > 0)
    assert not list((tmp_path / "data").glob("*.begun")) + list((tmp_path / "data").glob("*.progress"))


@pytest.mark.parametrize("damage", ["file", "notes"])
def test_a_begun_file_that_is_altered_is_begun_anew(folders, tmp_path, monkeypatch, damage):
    write_text(tmp_path, 400)
    monkeypatch.setattr(packing, "SYNC_EVERY", 0.0)
    monkeypatch.setattr("jaxpar.data.tokenizers.encoders.AT_ONCE", 2**9)
    monkeypatch.setattr(corpus, "PIECE", 2**9)
    asked, mark = job(tmp_path, folders["llama3"]), packed.set_flags
    jp.open_data(asked, tmp_path / "whole")
    left = iter(range(6))
    with monkeypatch.context() as patch:
        patch.setattr(
            encoders, "set_flags", lambda *args, **kw: mark(*args, **kw) if next(left, None) is not None else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            jp.open_data(asked, tmp_path / "data")
    (altered,) = (tmp_path / "data").glob("*.begun" if damage == "file" else "*.progress")
    data = bytearray(altered.read_bytes())
    data[len(data) // 3] ^= 1
    altered.write_bytes(data)
    jp.open_data(asked, tmp_path / "data")
    assert tokens_of(tmp_path / "data") == tokens_of(tmp_path / "whole")


PACK = """
import sys, jaxpar as jp
from jaxpar.data import corpus, packing
packing.SYNC_EVERY = 0.0
import jaxpar.data.tokenizers.encoders as encode
encode.AT_ONCE = corpus.PIECE = 2**11
print("begun", flush=True)
jp.open_data(jp.Data(source="text", path=sys.argv[1], tokenizer=sys.argv[2], seq=16), sys.argv[3])
"""


@pytest.mark.nightly
def test_sigkill_at_any_moment_loses_no_token(folders, tmp_path):
    write_text(tmp_path, 20_000)
    jp.open_data(job(tmp_path, folders["llama3"]), tmp_path / "whole")
    command = [sys.executable, "-c", PACK, str(tmp_path / "*.txt"), str(folders["llama3"]), str(tmp_path / "data")]
    kills = 0
    for wait in (0.1, 0.3):
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout.readline()
        time.sleep(wait)
        child.kill()
        kills += child.wait() != 0
        child.stdout.close()
    assert kills
    jp.open_data(job(tmp_path, folders["llama3"]), tmp_path / "data")
    assert tokens_of(tmp_path / "data") == tokens_of(tmp_path / "whole")


COPY = """
import sys
from pathlib import Path
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
tokenizer = read_tokenizer(sys.argv[1])
print("begun", flush=True)
sys.stdin.readline()
for _ in range(300):
    tokenizer.copy(Path(sys.argv[2]))
"""


@pytest.mark.nightly
def test_processes_copy_one_tokenizer_into_one_folder_at_once(folders, tmp_path):
    """Two jobs that begin together over one folder of data must not take the unfinished file from each other."""
    command = [sys.executable, "-c", COPY, str(folders["gpt2"]), str(tmp_path / "tokenizer")]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for child in children:
        assert child.stdout.readline() == b"begun\n"
    for child in children:
        child.stdin.write(b"\n")
        child.stdin.flush()
    for child in children:
        child.communicate()
        assert child.returncode == 0
    names = {path.name for path in folders["gpt2"].iterdir()}
    assert {path.name for path in (tmp_path / "tokenizer").iterdir()} <= names


def test_a_run_keeps_its_tokenizer_and_reads_text_back(folders, tmp_path):
    write_text(tmp_path, 400)
    source = jp.open_data(job(tmp_path, folders["llama2"]), tmp_path / "data")
    kept = RunTokenizer(tmp_path / "data", str(folders["llama2"]))
    assert kept.size == read_tokenizer(folders["llama2"]).size
    assert kept.encode("the cat")[0] == kept.bpe.token_to_id("<s>")
    assert kept.decode(kept.encode("the cat sat")) == "the cat sat"
    assert source.batch(0, 4)["inputs"].max() < kept.size
    other = jp.open_data(job(tmp_path, folders["gpt2"]), tmp_path / "data")
    assert other.fingerprint != source.fingerprint


@pytest.mark.parametrize("size", [499, 500, 512, 1500, 1524, 1525, 128_256])
def test_a_vocabulary_is_that_of_the_tokenizer_or_padded(folders, size):
    found = read_tokenizer(folders["llama3"])
    assert found.size == 500
    if 500 <= size <= 1524:
        found.check_model(size)
        return
    with pytest.raises(JaxparError, match=f"model.vocab = {size}, the tokenizer .* has 500 tokens"):
        found.check_model(size)


@pytest.mark.parametrize(
    ("data", "vocab", "is_good"),
    [
        ("", 1280, True), ("", 1281, False), ("", 128_256, False), ('tokenizer = "bpe"', 2048, True),
        ('tokenizer = "bpe"', 2049, False), ('tokenizer = "bpe"\nvocab = 50257', 50_304, True),
        ('source = "digits"', 128_256, True),
    ],
)  # fmt: skip
def test_a_vocabulary_beyond_bytes_or_a_bpe_is_padding_or_refused_before_it_is_trained(data, vocab, is_good):
    made = loads(f"model = {{ name = 'decoder', vocab = {vocab} }}\n[data]\n{data}")
    assert bool(vocabulary(made)) != is_good
    if not is_good:
        assert f"model.vocab = {vocab}, the" in vocabulary(made)[0].got
        assert "padding: at most 1024" in vocabulary(made)[0].rule


@pytest.mark.spread(0)
@pytest.mark.parametrize("verb", [pytest.param("check", marks=pytest.mark.slow), "train"])
def test_a_llamas_vocabulary_over_bytes_is_refused(verb, tmp_path, capsys):
    (tmp_path / "job.toml").write_text(f"""
        run.dir = "{tmp_path}/run"
        mesh.devices = 1
        model = {{ vocab = 128256, layers = 1, dim = 8, heads = 1 }}
        train = {{ steps = 1, global_batch = 1 }}
        """)
    assert main([verb, str(tmp_path / "job.toml")]) == 1
    assert "the bytes tokenizer has 256 tokens" in capsys.readouterr().err
    assert not (tmp_path / "run" / "data").exists()


def test_large_vocabularies_are_padded_by_a_share(folders):
    found = read_tokenizer(folders["llama3"])
    for tokens, rows in (
        (151_665, 151_936),
        (151_665, 152_064),
        (50_295, 51_200),
        (100_015, 102_400),
        (32_000, 32_000),
    ):
        type(found)(**{**vars(found), "size": tokens}).check_model(rows)  # Qwen 2, Phi-2, DeepSeek-V2, Llama 2
    with pytest.raises(JaxparError, match="padding"):
        type(found)(**{**vars(found), "size": 32_000}).check_model(128_256)


def test_special_tokens_are_read_from_the_map_where_the_config_has_none(folders, tmp_path):
    config = json.loads((folders["llama3"] / "tokenizer_config.json").read_text())
    del config["eos_token"]
    made = tokenizing.write(tmp_path, encoders.load(read_tokenizer(folders["llama3"])), **config)
    with pytest.raises(JaxparError, match="names no eos_token"):
        HuggingFaceEncoder(read_tokenizer(made))
    assert HuggingFaceEncoder(read_tokenizer(made), "<|eot|>").end == 4
    (made / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|end_of_text|>"}}))
    assert HuggingFaceEncoder(read_tokenizer(made)).end == 1
