"""Text from a trained run: with a cache as without, on any layout, drawn as the formulas say."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import some
from terminal import said
from tiny import Staged
from tokenizing import llama3

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.data.tokenizers.chat_template import load_template as read_template
from jaxpar.data.tokenizers.encoders import load as load_tokenizer
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.chat import chat
from jaxpar.job.file.parse import loads
from jaxpar.job.sample import SamplingRequest, TextModel, _text_job, sample
from jaxpar.models.decoder import Decoder
from jaxpar.models.settings.decoder import DecoderConfig
from jaxpar.step.sampling import Generator, Sampling

LLAMA = DecoderConfig(vocab=40, seq=16, layers=2, dim=16, heads=4, kv_heads=2, hidden=24)
GPT2 = replace(LLAMA, kv_heads=0, position="learned", norm="layer", gated=False, use_bias=True, tied=True)
# of one token, of as many as the window, and of more
PROMPTS = [[1, 2, 3], [5], list(range(7, 19)), [4] * 30, [9, 9]]
LAYOUTS = {
    "data": jp.Parallel(data=8), "fsdp": jp.Parallel(fsdp=8), "cube": jp.Parallel(data=2, fsdp=2, tensor=2),
    "ZeRO-1 and tensor": jp.Parallel(fsdp=4, tensor=2, zero=1), "tensor": jp.Parallel(tensor=2),
}  # fmt: skip


def test_a_run_is_sampled_with_the_tokenizer_that_it_keeps(tmp_path):
    for named, wanted in (("gone", tmp_path / "data" / "tokenizer"), ("bytes", "bytes")):
        (tmp_path / "job.toml").write_text(f'[data]\nsource = "text"\npath = "x"\ntokenizer = "{named}"\n')
        assert _text_job(tmp_path, allow_import=False).data.tokenizer == str(wanted)


def generator(model, parallel, **how):
    count = int(np.prod(list(parallel.sizes.values())))
    layout = jp.compose(lambda rngs: Decoder(model, rngs=rngs), parallel, jax.devices()[:count])
    state = jp.init_state(layout, optax.sgd(0.1), seed=3)
    return Generator(layout, state.params, state.model_state, **{"window": 16, "vocab_size": 37} | how)


@pytest.fixture(scope="module")
def wanted():
    """Returns the tokens of a model on one device, each by a pass over its whole window."""
    made = {}

    def of(name, sampling):
        if (name, sampling) not in made:
            alone = generator(LLAMA if name == "llama" else GPT2, jp.Parallel(), cached=False)
            made[name, sampling] = alone.generate(PROMPTS, sampling, max_new_tokens=24)
        return made[name, sampling]

    return of


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("name", "layout", "temperature"),
    [
        pytest.param("llama", "cube", 2.0, marks=pytest.mark.slow),
        pytest.param("gpt2", "cube", 0.0, marks=pytest.mark.full),
        pytest.param("llama", "data", 0.0, marks=pytest.mark.slow),
        pytest.param("llama", "fsdp", 2.0, marks=pytest.mark.full),
        pytest.param("llama", "tensor", 2.0, marks=pytest.mark.full),
        pytest.param("llama", "ZeRO-1 and tensor", 2.0, marks=pytest.mark.full),
        pytest.param("gpt2", "fsdp", 2.0, marks=pytest.mark.full),
    ],
)
def test_tokens_with_a_cache_on_any_layout_are_those_without_on_one_device(name, layout, temperature, wanted):
    sampling = Sampling(temperature=temperature, top_k=20, top_p=0.95, seed=5)
    made = generator(LLAMA if name == "llama" else GPT2, LAYOUTS[layout])
    assert made.cached
    got = made.generate(PROMPTS, sampling, max_new_tokens=24)
    assert got == wanted(name, sampling)
    assert len({tuple(each) for each in got}) == len(PROMPTS)
    # one program for every token, whatever came before: its cost does not grow
    assert made._next._cache_size() == 1
    held = made._first(*made._values, jnp.zeros((8, 2), jnp.int32), jnp.ones(8, jnp.int32))[1].keys
    assert held.shape == (2, 8, 16, 2 if name == "llama" else 4, 4)


@pytest.mark.nightly
def test_a_row_draws_the_same_beside_any_others():
    made, sampling = generator(LLAMA, jp.Parallel()), Sampling(temperature=2.0)
    alone = made.generate(PROMPTS[:1], sampling, max_new_tokens=8)
    assert made.generate(PROMPTS, sampling, max_new_tokens=8)[0] == alone[0]
    assert made.generate(PROMPTS[:1], replace(sampling, seed=1), max_new_tokens=8) != alone
    stopped = made.generate(PROMPTS, sampling, max_new_tokens=8, stops=lambda row, new: row == 0 and len(new) == 3)
    assert stopped[0] == alone[0][:3]
    assert [len(each) for each in stopped[1:]] == [8] * 4


def nucleus(logits, temperature, k, p):
    """Returns the tokens that may be drawn and their probabilities, one after the other as the papers say."""
    scores = logits.astype(np.float64) / temperature
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: k or None]
    share = np.exp(scores[best] - max(scores[best]))
    share /= share.sum()
    reached = (i + 1 for i, total in enumerate(np.cumsum(share)) if total >= p - 1e-7)
    count = len(best) if p == 1 else next(reached, len(best))  # all of them, however little the last ones weigh
    return {token: value / share[:count].sum() for token, value in zip(best[:count], share, strict=False)}


@pytest.mark.nightly
@settings(deadline=None, max_examples=60)
@given(
    logits=st.lists(st.integers(-8, 8), min_size=12, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    k=st.integers(0, 14),
    p=st.sampled_from([0.05, 0.33, 0.71, 0.97, 1.0]),
)
def test_top_k_and_top_p_keep_what_the_papers_say(logits, temperature, k, p):
    scores = np.array(logits) + np.linspace(0, 0.37, 12)  # no ties between shares, whose sum would be rounding's
    order, kept = Sampling(temperature=temperature, top_k=k, top_p=p).candidates(jnp.asarray(scores[None], jnp.float32))
    share = np.asarray(jax.nn.softmax(kept[0]))
    got = {int(token): share[i] for i, token in enumerate(order[0]) if kept[0, i] > -np.inf}
    want = nucleus(scores, temperature, k, p)
    edge = abs(sum(want.values()) - 1) < 1e-9 and abs(len(got) - len(want)) <= 1
    assert edge
    if got.keys() == want.keys():
        np.testing.assert_allclose([got[token] for token in want], list(want.values()), rtol=1e-4)
    else:  # the share of the last one is where float32 rounds
        assert set(got) ^ set(want) <= {min(set(got) | set(want), key=lambda token: scores[token])}


@pytest.mark.slow
def test_draws_have_the_probabilities_of_what_is_kept():
    logits = np.array([2.0, 1.0, 0.5, 0.0, -1.0], np.float32)
    sampling, count = Sampling(temperature=0.9, top_k=4, top_p=0.9, seed=1), 20_000
    rows = jnp.arange(count, dtype=jnp.int32)
    drawn = np.asarray(sampling.draw(jnp.broadcast_to(logits, (count, 5)), rows, jnp.zeros_like(rows)))
    want = nucleus(logits, 0.9, 4, 0.9)
    assert set(drawn) == set(want)
    for token, share in want.items():
        assert np.mean(drawn == token) == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / count))


JOB = """
[run]
dir = "{to}"
[model]
layers = 2
dim = 16
heads = 4
kv_heads = 2
[data]
source = "text"
path = "{text}"
seq = 16
[train]
steps = 2
global_batch = 8
{train}
[mesh]
devices = 1
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    for name, train in (("run", ""), ("tuned", 'adapters = {rank = 2, paths = ["blocks/mlp/*"]}')):
        job = loads(JOB.format(to=folder / name, text=folder / "text.txt", train=train))
        run.train(job, stream=io.StringIO())
    return folder


@pytest.mark.nightly
@pytest.mark.xdist_group("trained")
def test_prompts_of_a_file_are_answered_into_another(trained, capsys):
    prompts = ["the quick", "fox", "é"]
    (trained / "p.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    command = ["sample", str(trained / "run"), "--prompts", str(trained / "p.jsonl"), "--tokens", "20", "--seed", "3"]
    assert main([*command, "--out", str(trained / "a.jsonl")]) == 0
    answers = [json.loads(line) for line in (trained / "a.jsonl").read_text().splitlines()]
    assert [each["prompt"] for each in answers] == prompts
    assert {each["tokens"] for each in answers} == {20}
    (trained / "p.txt").write_text("the quick\n\nfox\né\n")
    assert main([*command[:3], str(trained / "p.txt"), *command[4:], "--out", str(trained / "b.jsonl")]) == 0
    assert (trained / "b.jsonl").read_text() == (trained / "a.jsonl").read_text()
    stop = answers[0]["text"][5:7]
    assert main([*command, "--stop", stop]) == 0
    first = capsys.readouterr().out.split("\n---\n")[0]
    assert first.endswith(answers[0]["prompt"] + answers[0]["text"][: answers[0]["text"].find(stop)])


@pytest.mark.nightly
@pytest.mark.xdist_group("trained")
@pytest.mark.parametrize(
    "name", [pytest.param("run", marks=pytest.mark.full), pytest.param("tuned", marks=pytest.mark.slow)]
)
def test_a_run_is_sampled_on_a_layout_that_it_was_not_trained_on(name, trained):
    command = ["sample", str(trained / name), "--prompt", "the ", "--tokens", "20"]
    for where, file in ((["parallel.data=2", "parallel.fsdp=2", "parallel.tensor=2"], "many"), ([], "one")):
        assert main([*command, *where, "--out", str(trained / f"{name}-{file}.jsonl")]) == 0
    assert (trained / f"{name}-many.jsonl").read_text() == (trained / f"{name}-one.jsonl").read_text()


WRONG = {
    "--tokens 0": "tokens 0", "--temperature -1": "temperature = -1.0", "--temperature nan": "temperature = nan",
    "--top-p 1.5": "top_p = 1.5", "--top-k -1": "top_k = -1", "--seed -1": "seed = -1", "--prompt=": "an empty prompt",
    "--stop=": "an empty text to stop at", "model.dim=32": "where: parallel and mesh",
    "parallel.data=2 parallel.context=4": "split over data, fsdp and tensor", "--prompts none.txt": "none.txt",
    "--prompts broken.jsonl": "broken.jsonl, line 2", "--prompts empty.txt": "holds no prompt",
    "--out nowhere/x": "--out",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.xdist_group("trained")  # one worker, so that there is one run
@pytest.mark.parametrize(
    "words",
    some(
        WRONG,
        ["--temperature -1", "--temperature nan", "--top-p 1.5", "--top-k -1"],
        [
            "--seed -1",
            "--prompt=",
            "--stop=",
            "model.dim=32",
            "parallel.data=2 parallel.context=4",
            "--prompts none.txt",
            "--prompts broken.jsonl",
            "--prompts empty.txt",
            "--out nowhere/x",
        ],
    ),
)
def test_what_cannot_be_sampled_is_refused(words, trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    (trained / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    (trained / "empty.txt").write_text("\n")
    assert main(["sample", "run", *words.split()]) == 1
    assert WRONG[words] in capsys.readouterr().err


class Decoding(Staged):
    """Has a method of that name for something else."""

    def decode(self, x):
        return x


class Doubled(Decoder):
    """Inherits a cache, whose logits are not its own."""

    def __init__(self, rngs):
        super().__init__(LLAMA, rngs=rngs)

    def __call__(self, tokens):
        return 2 * super().__call__(tokens)


@pytest.mark.slow
def test_a_chat_in_a_terminal_answers_each_line_until_the_lines_end(trained):
    words = f"sample {trained / 'run'} --chat --tokens 6 --temperature 0".split()
    heard = said(words, typed=b"the quick\nthe fox\n\x04")  # then the end
    assert heard.count(b"> ") == 3
    first = sample(
        trained / "run", ["the quick\n"], SamplingRequest(tokens=6, sampling=Sampling(temperature=0.0))
    ).answers[0]
    assert first.text.strip() in heard.decode(errors="replace").replace("\r\n", "\n")


def test_a_chat_is_rendered_by_the_template_and_each_turn_sees_those_before(tmp_path, monkeypatch):
    kept, seen = llama3(tmp_path / "llama"), []

    def continued(self, rows, asked):
        seen.extend(self.text.bpe.decode(row, skip_special_tokens=False) for row in rows)
        return [(f" answer {len(seen)}\n", 3)]

    monkeypatch.setattr(TextModel, "continue_rows", continued)
    made = TextModel(
        text=SimpleNamespace(bpe=load_tokenizer(read_tokenizer(kept))), generator=None, ends=(), tokenizer=str(kept)
    )
    monkeypatch.setattr("jaxpar.job.chat.load_text_model", lambda *_, **__: made)
    answers = []
    said = chat(tmp_path, ["2 + 2?\n", " ", "sure?"], answers.append, SamplingRequest())
    assert answers == ["answer 1", "answer 2"]
    assert [each["role"] for each in said] == ["user", "assistant"] * 2
    template = read_template(read_tokenizer(kept))
    assert seen == [template.render(said[:1], True)[0], template.render(said[:3], True)[0]]


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [pytest.param(Staged, marks=pytest.mark.slow), Decoding, pytest.param(Doubled, marks=pytest.mark.slow)]
)
def test_a_model_without_a_cache_is_sampled_without_one(model):
    layout = jp.compose(model, jp.Parallel(), jax.devices()[:1])
    state = jp.init_state(layout, optax.sgd(0.1), seed=1)
    made = Generator(layout, state.params, state.model_state, window=8, vocab_size=32)
    assert not made.cached
    assert len(made.generate([[1, 2]], Sampling(), max_new_tokens=3)[0]) == 3
    with pytest.raises(JaxparError, match="has `cache` and `decode`"):
        Generator(layout, state.params, state.model_state, window=8, vocab_size=32, cached=True)
