"""`jaxpar evaluate`: the number that training logged, that of plain Flax on the same rows, and that of transformers."""

import io
import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_huggingface import GPT2, LLAMA, born
from tokenizing import gpt2, llama2, llama3, t5

from jaxpar.checkpoint import listing, reading
from jaxpar.cli.main import main
from jaxpar.data.tokenizers.encoders import load as load_tokenizer
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.data.tokens import RunTokenizer
from jaxpar.errors import JaxparError
from jaxpar.job.evaluation.evaluate import EvaluationRequest, evaluate
from jaxpar.job.evaluation.text_bytes import token_bytes
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.names import model_settings
from jaxpar.job.run import train
from jaxpar.models.decoder import Decoder
from jaxpar.models.huggingface.weights import export, load
from jaxpar.step.evaluation_loss import evaluation_names

JOB = """
[run]
dir = "{dir}"
[mesh]
devices = {devices}
[parallel]
data = 2
[model]
layers = 1
dim = 16
heads = 2
[data]
source = "text"
path = "{text}"
seq = 16
held_out = 0.1
[train]
steps = 4
global_batch = 8
eval_every = 2
[checkpoint]
every = 2
"""
ONE = ("mesh.devices=1", "parallel.data=1", "parallel.fsdp=1", "parallel.tensor=1")
SEQ = 16


def train_run(folder, name, *overrides, devices=8, job=JOB):
    text = folder / "corpus.txt"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(400)))
    train(loads(job.format(dir=folder / name, text=text, devices=devices), overrides), stream=io.StringIO())
    return folder / name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a cube, whose evaluated parameters are not the trained ones, with two sets and a metric of the model."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "more.txt").write_text("".join(f"{i} and {i} are {2 * i}.\n" for i in range(50)))
    return train_run(
        folder, "run", "parallel.fsdp=2", "parallel.tensor=2", "optimizer.name=schedule_free_adamw",
        "optimizer.learning_rate=0.01", "optimizer.arguments={b1=0.9}", "optimizer.decay=constant",
        f"data.sets.more.path={folder / 'more.txt'}", 'metrics.evaluate=["accuracy","perplexity"]',
    )  # fmt: skip


def logged(folder):
    """Returns the evaluations of a run by step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = {row["step"]: {key: row[key] for key in row if key.startswith("eval_")} for row in rows}
    return {step: values for step, values in metrics.items() if values}


def named(result):
    """Returns the scores of a result by step, under the names that training gives them."""
    found = {}
    for score in result.scores:
        names = evaluation_names(score.metrics, score.set)
        found.setdefault(score.step, {}).update(zip(names, score.metrics.values(), strict=True))
    return found


def scores(folder, *overrides, **request):
    return evaluate(folder, EvaluationRequest(overrides=overrides, **request))


def check_logged(folder, *overrides, tolerance=1e-6):
    wanted, found = logged(folder), named(scores(folder, *overrides, checkpoints="all"))
    assert wanted.keys() == found.keys() == {2, 4}
    for step, values in wanted.items():
        for name, value in values.items():
            assert found[step][name] == pytest.approx(value, rel=tolerance), (step, name)
    return found


def written(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.nightly
def test_a_checkpoint_has_the_scores_that_training_logged_and_the_run_stays_as_it_was(run, tmp_path, capsys):
    before = written(run)
    assert main(["evaluate", str(run), "--checkpoints", "all", "--json", str(tmp_path / "scores.json")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert written(run) == before
    wanted, result = logged(run), json.loads((tmp_path / "scores.json").read_text())
    assert [(score["step"], score["set"]) for score in result["scores"]] == [(2, ""), (2, "more"), (4, ""), (4, "more")]
    for score in result["scores"]:
        names = dict(zip(evaluation_names(score["metrics"], score["set"]), score["metrics"].values(), strict=True))
        logged_here = {key: value for key, value in wanted[score["step"]].items() if key in names}
        assert len(logged_here) == 3
        assert logged_here == pytest.approx({key: names[key] for key in logged_here}, rel=1e-6)
    assert printed[0].split() == "step set tokens loss perplexity bits per byte accuracy".split()
    assert f"{wanted[4]['eval_more_loss']:.4f}" in printed[4]
    assert printed[4].split()[:2] == ["4", "more"]


@pytest.mark.nightly
def test_the_scores_are_the_same_on_one_device(run):
    check_logged(run, *ONE)


@pytest.mark.nightly
def test_best_steps_and_one_checkpoint_choose_what_is_evaluated(run):
    wanted = logged(run)
    best = min(wanted, key=lambda step: wanted[step]["eval_loss"])
    assert [score.step for score in scores(run, *ONE, checkpoints="best").scores] == [best, best]
    one = scores(run / "checkpoints" / "000002", *ONE)
    assert {score.step for score in one.scores} == {2}
    assert one.scores == scores(run, *ONE, checkpoints="2").scores


def averaged(folder):
    """Returns the parameters that optax evaluates, read as plain arrays."""
    path = listing.find(folder)
    contents = reading.read_manifest(path)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    likes = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        for name, array in contents.arrays.items()
        if not array.dtype.startswith("key")
    }
    arrays = reading.read_arrays(path, contents, likes)
    (b1,) = (value for name, value in arrays.items() if name.endswith("/b1"))
    params = {name.removeprefix("params/"): value for name, value in arrays.items() if name.startswith("params/")}
    z = {name: next(array for path, array in arrays.items() if path.endswith(f"/z/{name}")) for name in params}
    state = optax.contrib.ScheduleFreeState(b1, None, None, None, None, z)
    return optax.contrib.schedule_free_eval_params(state, params)


def plain_logits(settings, params):
    """Returns tokens to logits of a decoder as plain Flax runs it on one device."""
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0))))
    flat = [(path, leaf.replace(jnp.asarray(params["/".join(path)][...]))) for path, leaf in nnx.to_flat_state(state)]
    return jax.jit(nnx.merge(graph, nnx.from_flat_state(flat)).__call__)


def nats(logits, rows):
    """Returns the cross entropy of each target of the rows, in numpy and float64."""
    found = np.asarray(logits(jnp.asarray(rows[:, :-1]))).astype(np.float64)
    found -= found.max(-1, keepdims=True)
    found -= np.log(np.exp(found).sum(-1, keepdims=True))
    return -np.take_along_axis(found, rows[:, 1:, None], -1)[..., 0]


def windows(tokens, seq=SEQ):
    """Cuts tokens into rows whose last token is the first of the next row."""
    count = (len(tokens) - 1) // seq
    return np.stack([tokens[i * seq : (i + 1) * seq + 1] for i in range(count)]).astype(np.int32)


@pytest.mark.nightly
def test_the_loss_of_other_text_is_that_of_plain_flax_and_numpy(run, tmp_path):
    text = "".join(f"{i} times {i} is {i * i}, \u00fc\n" for i in range(30)) + "the end"
    (tmp_path / "test.txt").write_text(text)
    result = scores(run, *ONE, "data.source=text", f"data.path={tmp_path / 'test.txt'}")
    (score,) = result.scores  # the run's own set is of other data
    rows = windows(np.array([*text.encode(), 0]))
    settings = model_settings(loads((run / "job.toml").read_text()))
    wanted = nats(plain_logits(settings, averaged(run)), rows)
    assert score.count == wanted.size
    assert score.metrics["loss"] == pytest.approx(wanted.mean(), rel=1e-6)
    assert score.metrics["perplexity"] == pytest.approx(math.exp(wanted.mean()), rel=1e-6)
    assert score.metrics["bits_per_byte"] == pytest.approx(wanted.sum() / math.log(2) / wanted.size, rel=1e-6)
    rest = len(text.encode()) % SEQ
    assert rest
    assert result.notes == (
        f"{tmp_path / 'test.txt'}: the last {rest} tokens are left out, as they do not fill a row of data.seq = 16",
    )


@pytest.mark.nightly
def test_a_bpe_of_the_run_reads_other_text_and_its_bytes_are_counted(tmp_path):
    run = train_run(tmp_path, "bpe", "data.tokenizer=bpe", "data.vocab=300", "train.steps=2", devices=2)
    (own,) = scores(run).scores
    assert own.metrics["loss"] == pytest.approx(logged(run)[2]["eval_loss"], rel=1e-6)
    text, before = "".join(f"{i} cubed is {i**3}.\n" for i in range(60)), written(run)
    (tmp_path / "test.txt").write_text(text)
    (score,) = scores(run, f"data.path={tmp_path / 'test.txt'}").scores
    tokenizer = RunTokenizer(run / "data", "bpe")
    rows = windows(np.array([*tokenizer.encode(text), 0]))
    decoded = sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in rows)
    assert score.count == rows[:, 1:].size
    bits = score.metrics["loss"] * score.count / math.log(2)
    assert score.metrics["bits_per_byte"] == pytest.approx(bits / decoded, rel=1e-9)
    assert written(run) == before


def test_a_byte_level_tokenizer_tells_the_bytes_of_its_tokens_and_any_other_says_why_not(tmp_path):
    text = "Numbers 12345 and ü, 日本語, a\ttab\r\n  and   spaces ’s"
    for make in (llama3, gpt2):
        folder = make(tmp_path / make.__name__)
        ids = load_tokenizer(read_tokenizer(folder)).encode(text, add_special_tokens=False).ids
        counts = token_bytes(folder).counts
        assert counts is not None
        assert counts[ids].sum() == len(text.encode())
        assert counts[read_tokenizer(folder).special_id("eos_token")] == 0
    for make, reason in ((llama2, "normalizes the text"), (t5, "normalizes the text")):
        unknown = token_bytes(make(tmp_path / make.__name__))
        assert unknown.counts is None
        assert reason in unknown.reason


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of Hugging Face's with random weights, its tokenizer, and documents."""
    return pretrained(tmp_path_factory.mktemp("pretrained") / "my-llama", LLAMA)


def pretrained(to, settings):
    tokenizer = read_tokenizer(llama3(to.parent / "tokenizer"))
    settings = replace(settings, vocab=tokenizer.size, seq=32)
    export(born(settings), settings, to)
    tokenizer.copy(to)
    documents = [f"Document {i} has {i} words: " + "word " * i for i in range(1, 12)]
    (to.parent / "test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return to


def rows_of(folder):
    """Returns the tokens of each document as transformers makes them, with the end that jaxpar adds."""
    facts = read_tokenizer(folder)
    tokenizer, end = load_tokenizer(facts), facts.special_id("eos_token")
    lines = (folder.parent / "test.jsonl").read_text().splitlines()
    return [[*tokenizer.encode(json.loads(line)["text"]).ids, end] for line in lines]


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [LLAMA, pytest.param(GPT2, marks=pytest.mark.slow)], ids=["llama", "gpt2"])
def test_a_folder_of_hugging_face_has_the_loss_of_plain_flax(settings, tmp_path):
    folder = pretrained(tmp_path / "mine", settings)
    (score,) = scores(folder, "data.source=jsonl", f"data.path={folder.parent / 'test.jsonl'}").scores
    stream = np.array([token for row in rows_of(folder) for token in row])
    model = load(folder)
    wanted = nats(plain_logits(model.settings, model.params), windows(stream, 32))
    assert (score.step, score.count) == (None, wanted.size)
    assert score.metrics["loss"] == pytest.approx(wanted.mean(), rel=1e-6)


def test_padded_documents_of_a_folder_have_the_loss_of_transformers(folder):
    torch = pytest.importorskip("torch", reason="without torch transformers computes nothing")
    transformers = pytest.importorskip("transformers", reason="without transformers there is nothing to compare with")
    words = ["data.source=jsonl", f"data.path={folder.parent / 'test.jsonl'}", "data.documents=alone", "data.seq=96"]
    (score,) = scores(folder, *words).scores
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    total, count = 0.0, 0
    for row in rows_of(folder):
        ids = torch.tensor([row])
        with torch.no_grad():
            loss = theirs(input_ids=ids, labels=ids).loss
        total, count = total + float(loss) * (len(row) - 1), count + len(row) - 1
    assert score.count == count
    assert score.metrics["loss"] == pytest.approx(total / count, rel=1e-6)
    texts = [json.loads(line)["text"] for line in (folder.parent / "test.jsonl").read_text().splitlines()]
    bits = total / math.log(2) / sum(len(text.encode()) for text in texts)
    assert score.metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.exchange={name='diloco', every=2}", "parallel.fsdp=4"),
        ("parallel.exchange={name='local', every=3}", "parallel.fsdp=4"),
        ("sweep.over.optimizer.learning_rate=[1e-3, 3e-3, 1e-2, 3e-2]", "parallel.fsdp=4"),
        ("parallel.pipe=2", "parallel.fsdp=2", "model.layers=2", "parallel.pipeline.microbatches=2"),
    ],
    ids=["diloco", "local", "sweep", "pipe"],
)
def test_replicas_members_and_pipelines_have_the_scores_that_training_logged(overrides, tmp_path):
    run = train_run(tmp_path, "run", *overrides)
    check_logged(run)
    if overrides[0].startswith("parallel.exchange"):  # one model, which needs no replicas
        check_logged(run, *ONE)


REFUSED = {
    "a step that is not there": (
        ["--checkpoints", "2,3"], "no checkpoint '3'", "--checkpoints 4; there are 2, 4",
    ),
    "words": (["--checkpoints", "newest"], "no checkpoint 'newest'", "last, all, best, or steps"),
    "other tokens": (
        ["data.path=x", "data.vocab=300"], "data.vocab=300", "on the tokens that it was trained on",
    ),
    "other held-out examples": (["data.held_out=0.2"], "of a run's own data", "another value holds out others"),
    "a key of training": (["optimizer.learning_rate=1"], "optimizer.learning_rate", "an evaluation reads data"),
    "an unknown key": (["data.pth=x"], "unknown key data.pth", "did you mean 'path'?"),
    "no such text": (["data.path=nowhere.txt"], "nowhere.txt", "names no file"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_an_evaluation_that_cannot_be_is_refused_with_a_way_out(case, run, capsys):
    words, *messages = REFUSED[case]
    assert main(["evaluate", str(run), *words]) == 1
    printed = capsys.readouterr().err
    assert not [message for message in messages if message not in printed], printed


def test_a_folder_without_model_checkpoint_or_data_is_refused(run, folder, tmp_path, capsys):
    def refused(*words):
        assert main(["evaluate", *map(str, words)]) == 1
        return capsys.readouterr().err

    assert "holds no job.toml and no config.json" in refused(tmp_path)
    assert "is no folder" in refused(tmp_path / "nothing")
    (tmp_path / "job.toml").write_text((run / "job.toml").read_text())
    assert "no checkpoint in" in refused(tmp_path)
    assert f"jaxpar evaluate {folder} data.source=text data.path=FILE" in refused(folder)
    assert "holds one model" in refused(folder, "--checkpoints", "all")
    text = ["data.source=text", f"data.path={folder.parent / 'test.jsonl'}", "data.vocab=505"]
    assert "bpe trains others on the text" in refused(folder, *text, "data.tokenizer=bpe")


def copied(run, to, section, **keys):
    """Copies a run whose job has other values of these keys."""
    shutil.copytree(run, to)
    job = loads((run / "job.toml").read_text())
    (to / "job.toml").write_text(dumps(replace(job, **{section: replace(getattr(job, section), **keys)})))
    return to


def test_the_best_checkpoint_needs_a_score(run, tmp_path):
    other = copied(run, tmp_path / "run", "checkpoint", best="eval_accuracy", best_is="highest")
    with pytest.raises(JaxparError, match=r"(?s)has the score eval_accuracy.*--checkpoints all"):
        scores(other, checkpoints="best")


@pytest.mark.slow
def test_a_run_without_held_out_examples_says_which_data_to_name(run, tmp_path):
    other = copied(run, tmp_path / "run", "data", held_out=0.0, sets={})
    with pytest.raises(JaxparError, match=r"(?s)holds no example out.*data\.sets\.test\.path=FILE"):
        scores(other, *ONE)
    (tmp_path / "test.txt").write_text("seven times seven is forty-nine. " * 4)
    by_set, by_path = (
        scores(other, *ONE, f"{key}={tmp_path / 'test.txt'}") for key in ("data.sets.test.path", "data.path")
    )
    assert [score.set for score in by_set.scores] == ["test"]
    assert by_set.scores[0].metrics == by_path.scores[0].metrics


def test_held_out_examples_of_other_data_than_the_run_had_are_refused(run, tmp_path):
    (tmp_path / "other.txt").write_text("other text than the run was trained on. " * 100)
    other = copied(run, tmp_path / "run", "data", path=str(tmp_path / "other.txt"))
    with pytest.raises(JaxparError, match=r"(?s)was trained on data .* now.*part of the data that it was trained on"):
        scores(other, *ONE)


def test_few_batches_are_reported(run):
    result = scores(run, *ONE, "train.eval_batches=1")
    assert result.scores[0].count == 8 * SEQ
    assert "held out: the first 1 batches of 8 examples are evaluated" in result.notes[0]


@pytest.mark.nightly
def test_adapters_of_a_base_in_8_bits_are_evaluated_when_the_folder_of_the_base_is_gone(folder, tmp_path):
    base = tmp_path / "my-llama"
    shutil.copytree(folder, base)
    model = JOB.replace("layers = 1\ndim = 16\nheads = 2\n", f'name = "{base}"\n')
    adapters = 'train.adapters={rank=2, paths=["blocks/attention/*"], base="int8"}'
    run = train_run(tmp_path, "run", f'data.tokenizer="{base}"', adapters, devices=2, job=model)
    shutil.rmtree(base)
    check_logged(run)


@pytest.mark.slow
def test_lm_eval_runs_a_task_on_the_exported_folder(folder, tmp_path):
    for package in ("torch", "transformers", "lm_eval"):
        pytest.importorskip(package, reason=f"without {package} lm-eval runs no task on a Hugging Face model")
    lines = [{"question": "one and one are", "choices": [" two", " three"], "answer": i % 2} for i in range(4)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = {
        "task": "tiny", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "test.jsonl")}}, "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(json.dumps(task))  # YAML holds JSON
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={folder}", "--tasks", "tiny",
         "--include_path", str(tmp_path), "--device", "cpu", "--output_path", str(tmp_path / "out")],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(result.read_text())["results"]["tiny"]["acc,none"] == 0.5  # the answers are half of each
