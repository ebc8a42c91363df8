"""What is no text: counted with its first place, or refused by name; hidden and compressed files in folders."""

import gzip
import json
import tracemalloc

import numpy as np
import pytest
import tokenizing

import jaxpar as jp
from jaxpar.data.packing import pack
from jaxpar.data.sources import check_text
from jaxpar.data.text import text_files
from jaxpar.data.tokenizers.encoders import open_corpus
from jaxpar.errors import JaxparError
from jaxpar.job.sample import read_prompts

HALF = r'{"text": "caf\ud83d latte"}'
PROSE = "The quick brown fox jumps over the lazy dog. " * 100


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    return tokenizing.llama3(tmp_path_factory.mktemp("t") / "llama3")


def packed(tmp_path, **settings):
    """Returns the tokens of a job, and what was said meanwhile."""
    spec, said = jp.Data(**settings), []
    file, made = pack(open_corpus(spec, text_files(spec, said.append)), spec, tmp_path / "data", said.append)
    return np.fromfile(file, made.dtype), said


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "llama3"])
def test_half_a_surrogate_pair_is_u_fffd_and_counted_with_its_line(tmp_path, llama3, tokenizer):
    settings = {"source": "jsonl", "tokenizer": str(llama3) if tokenizer == "llama3" else tokenizer, "vocab": 300}
    lines = ['{"text": "a \\ud83d\\ude00 b"}', HALF, HALF.replace("ud83d", "udc00")] * 3
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    tokens, said = packed(tmp_path, path=str(tmp_path / "a.jsonl"), **settings)
    assert [f"6 characters that are no Unicode in 6 rows became U+FFFD (the first: {tmp_path}/a.jsonl, line 2)"] == said
    mended = [line.replace("\\ud83d lat", "\ufffd lat").replace("\\udc00", "\ufffd") for line in lines]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.jsonl").write_text("\n".join(mended) + "\n", encoding="utf-8")
    assert (packed(tmp_path / "b", path=str(tmp_path / "b" / "a.jsonl"), **settings)[0] == tokens).all()


def test_half_a_surrogate_pair_in_a_conversation_is_u_fffd(tmp_path, llama3):
    talk = '{"messages": [{"role": "user", "content": "a\\ud83d"}, {"role": "assistant", "content": "\\ude00b"}]}'
    (tmp_path / "a.jsonl").write_text(talk + "\n")
    settings = {"source": "jsonl", "messages": "messages", "tokenizer": str(llama3)}
    _, said = packed(tmp_path, path=str(tmp_path / "a.jsonl"), **settings)
    assert len(said) == 1
    assert "2 characters that are no Unicode in 1 rows" in said[0]


@pytest.mark.parametrize("nested", [False, True])
def test_bytes_of_parquet_that_are_no_utf_8_are_u_fffd_and_counted_with_their_row(tmp_path, llama3, nested):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [b"good", b"caf\xe9", b"\xff\xfe", "schön \ufffd".encode()]
    strings = pyarrow.array(texts, pyarrow.binary()).cast(pyarrow.binary()).view(pyarrow.string())
    column = strings
    if nested:
        roles = pyarrow.array(["user"] * 4)
        messages = pyarrow.StructArray.from_arrays([roles, strings], ["role", "content"])
        column = pyarrow.ListArray.from_arrays([0, 1, 2, 3, 4], messages)
    parquet.write_table(pyarrow.table({"it": column}), tmp_path / "a.parquet")
    settings = {"messages": "it", "learn": "all"} if nested else {"column": "it"}
    _, said = packed(tmp_path, source="parquet", path=str(tmp_path / "a.parquet"), tokenizer=str(llama3), **settings)
    assert said == [
        f"3 characters that are no Unicode in 2 rows became U+FFFD (the first: {tmp_path}/a.parquet, row 2)"
    ]


def test_wrong_bytes_of_text_are_counted_with_their_file_and_place(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(PROSE + "ü", encoding="utf-8")
    (folder / "b.txt").write_bytes((PROSE + "café").encode("latin-1"))
    (folder / "c.txt").write_bytes(PROSE.encode() + b"\0\0")
    _, said = packed(tmp_path, source="text", path=str(folder))
    assert len(said) == 1
    assert f"1 bytes in 2 files (the first: {folder}/b.txt, byte {len(PROSE) + 3}) are no utf-8" in said[0]
    assert "2 zeros" in said[0]


def test_characters_across_blocks_are_no_wrong_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpar.data.corpus.BLOCK", 7)
    (tmp_path / "a.txt").write_text("äöü€😀" * 50, encoding="utf-8")
    assert packed(tmp_path, source="text", path=str(tmp_path / "a.txt"))[1] == []
    (tmp_path / "a.txt").write_bytes("äöü€😀".encode() * 50 + b"\xe2\x82")  # cut within a character: said by its start
    said = packed(tmp_path, source="text", path=str(tmp_path / "a.txt"))[1]
    assert len(said) == 1
    assert f"byte {50 * 13}" in said[0]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (PROSE.encode("utf-16"), "UTF-16"),
        (PROSE.encode("utf-16-le"), "zeros"),
        (gzip.compress(PROSE.encode()), "gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(100), "Zstandard"),
        (b"\x89PNG\r\n" + bytes(100), "PNG"),
        (np.random.default_rng(0).bytes(4096), "no utf-8"),
        ("Привет, мир! ".encode("cp1251") * 50, "iconv"),
    ],
    ids=["utf-16", "utf-16-le", "gzip", "zstd", "png", "random", "cp1251"],
)
def test_a_file_that_is_no_text_is_refused_by_name_by_check_and_training(tmp_path, content, word):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(PROSE)
    (folder / "b").write_bytes(content)
    spec = jp.Data(source="text", path=str(folder))
    for read in (check_text, lambda spec: jp.open_data(spec, tmp_path / "data")):
        with pytest.raises(JaxparError, match=word) as error:
            read(spec)
        assert f"{folder}/b" in str(error.value)


def test_hidden_files_and_folders_are_not_read_and_counted(tmp_path, capsys):
    folder = tmp_path / ".cache" / "texts"  # what the path itself writes is not hidden
    (folder / ".git" / "objects").mkdir(parents=True)
    (folder / "sub").mkdir()
    for name in ("a.txt", "sub/b.txt"):
        (folder / name).write_text(PROSE)
    for name in (".DS_Store", "._a.txt", ".git/objects/ab", "sub/.c.txt"):
        (folder / name).write_bytes(bytes(200))
    good = [folder / "a.txt", folder / "sub" / "b.txt"]
    assert text_files(jp.Data(source="text", path=str(folder))) == good
    assert text_files(jp.Data(source="text", path=f"{folder}/**/*")) == good
    jp.open_data(jp.Data(source="text", path=str(folder), seq=16), tmp_path / "data")
    assert "4 hidden files of data.path are not read" in capsys.readouterr().err
    assert text_files(jp.Data(source="text", path=str(folder / "._a.txt"))) == [folder / "._a.txt"]
    assert text_files(jp.Data(source="text", path=str(folder), pattern=".DS*")) == [folder / ".DS_Store"]


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_jsonl_has_the_tokens_of_the_plain_file_from_every_row_on(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    rows = [json.dumps({"text": f"row {i} " * (i % 9)}) for i in range(300)]
    text = ("\n".join(rows) + "\n").encode()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.jsonl").write_bytes(text)
    (tmp_path / "small").mkdir()
    if kind == "gz":
        (tmp_path / "small" / "a.jsonl.gz").write_bytes(gzip.compress(text[:999]) + gzip.compress(text[999:]))
    else:
        with pyarrow.CompressedOutputStream(str(tmp_path / "small" / "a.jsonl.zst"), "zstd") as out:
            out.write(text)
    want, _ = packed(tmp_path / "1", source="jsonl", path=str(tmp_path / "plain"))
    got, _ = packed(tmp_path / "2", source="jsonl", path=str(tmp_path / "small"))
    assert (got == want).all()
    spec = jp.Data(source="jsonl", path=str(tmp_path / "small"))
    corpus = open_corpus(spec, text_files(spec))
    every = list(corpus.pieces())
    assert len(every) == 300
    for number in (0, 1, 150, 298):
        assert [each.text for each in corpus.pieces(every[number].next)] == [each.text for each in every[number + 1 :]]


def test_a_compressed_file_that_is_cut_off_is_refused_by_name(tmp_path):
    whole = gzip.compress("".join(json.dumps({"text": str(i) * 50}) + "\n" for i in range(5000)).encode())
    for name, content in (("a", whole[: len(whole) // 2]), ("b", whole[:2000] + bytes(64) + whole[2064:])):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(content)
        with pytest.raises(JaxparError, match=f"{name}.jsonl.gz"):
            jp.open_data(jp.Data(source="jsonl", path=str(tmp_path / f"{name}.jsonl.gz")), tmp_path / name)
    (tmp_path / "c.jsonl").write_bytes(b"BZh91AY")
    with pytest.raises(JaxparError, match="bzip2"):
        jp.open_data(jp.Data(source="jsonl", path=str(tmp_path / "c.jsonl")), tmp_path / "c")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_without_a_row_are_refused_as_such(tmp_path, kind):
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), file)
    else:
        file.write_text("\n\n")
    with pytest.raises(JaxparError, match="without a row"):
        jp.open_data(jp.Data(source=kind, path=str(file)), tmp_path / "data")


@pytest.mark.nightly
def test_a_row_of_parquet_has_the_limit_of_a_row_of_jsonl(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    large = "x" * (2**26 + 1)
    parquet.write_table(pyarrow.table({"text": ["small", *[large] * 9]}), tmp_path / "a.parquet")
    del large
    spec = jp.Data(source="parquet", path=str(tmp_path / "a.parquet"))
    tracemalloc.start()
    with pytest.raises(JaxparError, match=r"row 2 has more than 67108864 bytes"):
        list(open_corpus(spec, text_files(spec)).pieces())
    assert tracemalloc.get_traced_memory()[1] < 2**28
    tracemalloc.stop()


def test_a_prompt_with_half_a_surrogate_pair_is_refused_with_its_line(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "fine"}\n{"prompt": "caf\\ud83d"}\n')
    with pytest.raises(JaxparError, match=r"line 2"):
        read_prompts(tmp_path / "p.jsonl")
