"""Rows of files become rows of batches: what is in them, what of it counts, and what is said of broken ones."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizing
from flax import nnx

import jaxpar as jp
from jaxpar.data.document_rows import row_bounds
from jaxpar.data.sources import ROUND
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.check import check
from jaxpar.job.file.parse import loads
from jaxpar.step.losses import next_token_loss

jp.simulate(8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tokenizing.llama3(tmp_path_factory.mktemp("t") / "llama3")


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def talks(count):
    return [
        {
            "id": i,
            "messages": [
                {"role": "user", "content": f"what is {i} plus {i}?"},
                {"role": "assistant", "content": f"it is {i + i}" + ", I think" * (i % 5)},
            ],
        }
        for i in range(count)
    ]


def test_rows_of_jsonl_and_parquet_are_the_same_tokens(folder, tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    texts = [{"id": i, "body": f"document {i}, ü " * (i % 7 + 1)} for i in range(700)]
    for name, rows, column in (("text", texts, {"column": "body"}), ("chat", talks(700), {"messages": "messages"})):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet", row_group_size=300)
        kept = {"tokenizer": str(folder), "seq": 16, **column}
        made = [
            jp.open_data(jp.Data(source=kind, path=path, **kept), tmp_path / name / kind)
            for kind, path in (
                ("jsonl", write(tmp_path / f"{name}.jsonl", rows)),
                ("parquet", str(tmp_path / f"{name}.parquet")),
            )
        ]
        assert np.array_equal(made[0].tokens, made[1].tokens)
        assert made[0].fingerprint != made[1].fingerprint


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_packing_of_rows_goes_on_at_the_exact_row(folder, tmp_path, monkeypatch, kind):
    rows = talks(600)
    path = write(tmp_path / "a.jsonl", rows[:500]), write(tmp_path / "b.jsonl", rows[500:])
    if kind == "parquet":
        parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        for name, part in (("a", rows[:500]), ("b", rows[500:])):
            parquet.write_table(pyarrow.Table.from_pylist(part), tmp_path / f"{name}.parquet", row_group_size=200)
        path = str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")
    asked = jp.Data(source=kind, path=list(path), tokenizer=str(folder), messages="messages", seq=16)
    whole = jp.open_data(asked, tmp_path / "whole").tokens
    monkeypatch.setattr("jaxpar.data.packing.SYNC_EVERY", 0.0)
    monkeypatch.setattr("jaxpar.data.tokenizers.encoders.MOST", 37)
    from jaxpar.data.tokenizers.encoders import HuggingFaceEncoder

    encode, left = HuggingFaceEncoder.encode, iter(range(9))
    with monkeypatch.context() as patch:
        patch.setattr(
            HuggingFaceEncoder, "encode", lambda *given: encode(*given) if next(left, None) is not None else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            jp.open_data(asked, tmp_path / "data")
    seen = []
    monkeypatch.setattr(HuggingFaceEncoder, "encode", lambda of, pieces: seen.extend(pieces) or encode(of, pieces))
    assert np.array_equal(jp.open_data(asked, tmp_path / "data").tokens, whole)
    assert len(seen) == 600 - 9 * 37


@pytest.mark.parametrize("seed", range(4))
def test_every_token_is_in_one_row_and_documents_are_whole_where_they_fit(seed):
    rng, seq = np.random.default_rng(seed), 16
    ends = np.cumsum(rng.integers(1, 40, 200))
    for apart in (True, False):
        bounds = row_bounds(iter(np.array_split(ends, 7)), int(ends[-1]), seq, apart=apart)
        assert bounds[0] == 0
        assert bounds[-1] == ends[-1]
        assert ((np.diff(bounds) > 0) & (np.diff(bounds) <= seq)).all()
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            inside = ((bounds > begin) & (bounds < end)).sum()
            assert inside == -(-(end - begin) // seq) - 1 if not apart else inside <= -(-(end - begin) // seq)
            assert apart is False or end - begin > seq or inside == 0
        if not apart:
            assert set(ends) <= set(bounds)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "hf"])
def test_a_packed_row_says_which_token_is_of_which_document(folder, tmp_path, tokenizer):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text("abc " * (i % 5 + 1))
    spec = {"source": "text", "path": str(tmp_path / "*.txt"), "seq": 64, "vocab": 300, "shuffle": False}
    spec["tokenizer"] = str(folder) if tokenizer == "hf" else tokenizer
    source = jp.open_data(jp.Data(**spec, documents="apart", held_out=0.0), tmp_path / "data")
    batch = source.batch(0, source.examples)
    segments, positions, mask = batch["segments"], batch["positions"], batch["mask"]
    assert (np.diff(segments, axis=1) >= 0).all()
    assert (segments[:, 0] == 0).all()
    within = np.diff(segments, axis=1) == 0
    filled = segments == segments[:, -1:]
    assert (np.diff(positions, axis=1)[within & ~filled[:, 1:]] == 1).all()
    assert (positions[:, 1:][~within] == 0).all()
    assert np.array_equal(batch["targets"][:, :-1][mask[:, :-1] == 1], batch["inputs"][:, 1:][mask[:, :-1] == 1])
    assert not mask[:, :-1][~within].any()  # the last token of a document does not predict the next document
    tokens = sum((np.bincount(row.clip(0))[:-1].sum() if mask[i, -1] == 0 else 64) for i, row in enumerate(segments))
    assert mask.sum() == tokens - 40
    alone = jp.open_data(jp.Data(**spec, documents="alone", held_out=0.0), tmp_path / "data")
    assert alone.examples == 40
    assert alone.batch(0, 40)["mask"].sum() == mask.sum()
    assert alone.batch(0, 40).keys() == {"inputs", "targets", "mask"}


class Told(nnx.Module):
    """A model that is told which token is of which document: attention within them, positions that are learned."""

    def __init__(self, rngs, size=500, dim=16, seq=128):
        self.embed = nnx.Embed(size, dim, rngs=rngs)
        self.place = nnx.Embed(seq, dim, rngs=rngs)
        self.mix, self.head = nnx.Linear(dim, 3 * dim, rngs=rngs), nnx.Linear(dim, size, rngs=rngs)

    def __call__(self, tokens, segments=None, positions=None):
        count = tokens.shape[1]
        places = jnp.arange(count)[None] if positions is None else positions
        q, k, v = jnp.split(self.mix(self.embed(tokens) + self.place(places)), 3, axis=-1)
        seen = jnp.tril(jnp.ones((count, count), bool))[None]
        if segments is not None:
            seen &= segments[:, :, None] == segments[:, None, :]
        weights = jax.nn.softmax(jnp.where(seen, jnp.einsum("bsd,btd->bst", q, k), -1e30))
        return self.head(jnp.einsum("bst,btd->bsd", weights, v))


@pytest.mark.nightly
def test_the_loss_of_packed_rows_and_its_gradient_are_those_of_each_document_alone(folder, tmp_path):
    path = write(tmp_path / "a.jsonl", talks(60))
    spec = {
        "source": "jsonl",
        "path": path,
        "tokenizer": str(folder),
        "messages": "messages",
        "seq": 128,
        "held_out": 0.0,
    }
    model = Told(nnx.Rngs(0))

    def found(documents):
        source = jp.open_data(jp.Data(**spec, documents=documents), tmp_path / "data")
        batch = {name: jnp.asarray(value) for name, value in source.batch(0, source.examples).items()}

        def mean(model):
            total, count = next_token_loss(model, batch)["loss"]
            return total / count, count

        return source.examples, *nnx.jit(nnx.value_and_grad(mean, has_aux=True))(model)

    rows, (loss, count), slope = found("apart")
    ones, (alone, counted), slopes = found("alone")
    assert (ones, counted) == (60, count)
    assert rows < ones
    assert loss == pytest.approx(alone, rel=1e-5)
    each = zip(jax.tree.leaves(slope), jax.tree.leaves(slopes), strict=True)
    assert all(np.allclose(one, other, rtol=1e-4, atol=1e-7) for one, other in each)
    said = read_tokenizer(folder)
    source = jp.open_data(jp.Data(**spec, documents="alone", shuffle=False), tmp_path / "data")
    first = {name: value[0] for name, value in source.batch(0, 1).items()}
    learned = first["targets"][first["mask"] == 1]
    assert learned[-1] == said.ids["<|eot|>"]  # "it is 0" and its end, not the question
    assert len(learned) < (first["inputs"] != 0).sum() - 5


def test_rows_without_an_answer_are_left_out(folder, tmp_path):
    path = write(tmp_path / "a.jsonl", [*talks(10), *[{"messages": talks(1)[0]["messages"][:1]}] * 10])
    spec = {"source": "jsonl", "path": path, "tokenizer": str(folder), "messages": "messages", "documents": "alone"}
    source = jp.open_data(jp.Data(**spec, seq=64, held_out=0.0), tmp_path / "data")
    assert source.examples == 10
    assert source.batch(0, 10)["mask"].any(axis=1).all()
    assert jp.open_data(jp.Data(**spec, seq=64, held_out=0.0, learn="all"), tmp_path / "data").examples == 20
    path = write(tmp_path / "b.jsonl", [{"messages": talks(1)[0]["messages"][:1]}] * 10)
    with pytest.raises(JaxparError, match="no token that is learned"):
        jp.open_data(jp.Data(**{**spec, "path": path}, seq=64), tmp_path / "data")


def test_a_mixture_draws_by_its_weights_and_evaluates_each_held_out_example_once(tmp_path):
    paths = []
    for name, count in (("a", 30), ("b", 90), ("c", 50)):
        (tmp_path / f"{name}.txt").write_text(name * (8 * count + 1))
        paths.append(str(tmp_path / f"{name}.txt"))
    spec = jp.Data(source="text", path=paths, weights=(0.5, 0.3, 0.2), seq=8, held_out=0.1)
    source = jp.open_data(spec, tmp_path / "data")
    firsts = np.concatenate([source.batch(step, 50)["inputs"][:, 0] for step in range(4)])
    assert [int((firsts == ord(name)).sum()) for name in "abc"] == [100, 60, 40]
    for step in (0, 3, 10**6):
        whole = source.batch(step, 50)
        part = source.batch(step, 50, np.array([3, 44, 45]))
        assert all(np.array_equal(value[[3, 44, 45]], part[name]) for name, value in whole.items())
    of, inner = source._locate(np.arange(3 * ROUND))
    for index in range(3):
        assert inner[of == index].tolist() == list(range(3 * source.counts[index]))
    seen, index = {}, 0
    while batches := source.evaluation(index, 7):
        for each in batches:
            for row in each.batch["inputs"][:, 0].tolist():
                seen[row] = seen.get(row, 0) + each.weight
        index += 1
    assert {row: round(count, 6) for row, count in seen.items()} == {97: 3, 98: 9, 99: 5}
    assert "a.txt" not in source.where(0, 50, 0)  # a row is told by its file of tokens
    with pytest.raises(JaxparError, match="every set is drawn at least once"):
        jp.open_data(jp.Data(source="text", path=paths[:2], weights=(1, 1e-6), seq=8), tmp_path / "data")


JOB = """
[mesh]
simulate = 8
[parallel]
fsdp = 8
[model]
layers = 1
dim = 16
heads = 2
[data]
source = "jsonl"
path = "{path}"
tokenizer = "{folder}"
messages = "messages"
documents = "alone"
seq = 64
[train]
steps = 4
global_batch = 8
[optimizer]
decay = "constant"
[checkpoint]
every = 2
[run]
dir = "{run}"
"""


@pytest.mark.nightly
def test_a_run_on_conversations_is_resumed_bit_for_bit(folder, tmp_path):
    text = JOB.format(path=write(tmp_path / "a.jsonl", talks(80)), folder=folder, run=tmp_path / "run")
    losses = []
    for name, steps in (("whole", [4]), ("parts", [2, 4])):
        for count in steps:
            job = loads(text, [f"run.dir={tmp_path / name}", f"train.steps={count}"])
            assert not check(job)
            run.train(job, stream=io.StringIO())
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    assert (tmp_path / "whole" / "data" / "tokenizer" / "tokenizer.json").is_file()


GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LINES = {  # what line 3 is instead, and what is said of it
    "cut off": ('{"messages": [', (), ["line 3 is broken", "sed -n 3p"]),
    "latin": (b'{"messages": "\xff"}', (), ["line 3 is broken", "utf-8"]),
    "a list": ("[1, 2]", (), ["line 3 is [1, 2]", "an object"]),
    "other columns": ('{"talk": [], "id": 3}', (), ["line 3 has no column 'messages'", "its columns: talk, id"]),
    "a text": ('{"messages": "hello"}', (), ["line 3: messages is 'hello'", "data.column = 'messages'"]),
    "no role": ('{"messages": [{"content": "a"}]}', (), ["line 3: messages is", "{role, content}"]),
    "no message": ('{"messages": []}', (), ["line 3: messages is []", "at least one"]),
    "null": ('{"messages": null}', (), ["line 3: messages is null"]),
    "a tool": ('{"messages": [{"role": "tool", "content": "a"}]}', (), ["line 3: the chat template", "no tools"]),
    "a number as text": ('{"text": 5}', ("data.messages=", "data.column=text"), ["line 3: text is 5", "of text"]),
    "messages as text": (json.dumps({"text": GOOD["messages"]}), ("data.messages=", "data.column=text"),
                         ["line 3: text is", "data.messages = 'text'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", LINES)
def test_a_bad_line_is_told_by_its_number(folder, tmp_path, case):
    line, more, words = LINES[case]
    good = json.dumps(GOOD | {"text": "fine"}).encode()
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good, good, line, good, b""]))
    job = loads(JOB.format(path=tmp_path / "a.jsonl", folder=folder, run=tmp_path / "run"), list(more))
    with pytest.raises(JaxparError) as error:
        jp.open_data(job.data, tmp_path / "data")
    assert len(error.value.problems) == 1
    assert all(word in str(error.value) for word in words), error.value
    assert "Traceback" not in str(error.value)
