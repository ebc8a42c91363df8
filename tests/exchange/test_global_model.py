"""Replicas that differ train one model: it is what is evaluated, and what leaves the run."""

import contextlib
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some
from test_seams_exchange import CHAIN, batch, composed, loss, sums_of
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.checkpoint.saved_replicas import describe_replicas
from jaxpar.checkpoint.start_from import start
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.build import build
from jaxpar.job.file.parse import load
from jaxpar.models.huggingface.safetensors import entries
from jaxpar.sharding.names import leaves_by_path

SIZES, CUBE = {"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}
EXCHANGES = {
    "local": jp.Exchange("local", every=2),
    "gossip": jp.Exchange("gossip"),
    "diloco": jp.Exchange("diloco", every=2),
    "streaming": jp.Exchange("streaming", every=4, fragments=2, delay=1),
    "easgd": jp.Exchange("easgd", every=2),
}
OWN = {"diloco": "anchor", "streaming": "anchor", "easgd": "center"}  # the papers' words for the model


def of_papers(name, state):
    """Returns the parameters, by path, that the paper of an exchange evaluates."""
    state = jax.device_get(state)
    if name in OWN:
        return leaves_by_path(state.exchange[OWN[name]])
    return {path: x.mean(0) for path, x in leaves_by_path(state.params).items()}


OFTEN = ("gossip", "easgd")  # the mean, and a center


@pytest.fixture(scope="module", params=some(EXCHANGES, OFTEN))
def trained(request):
    """The name of an exchange, and its layout, step and state between two meetings."""
    layout = composed(SIZES, EXCHANGES[request.param])
    step, state = jp.train_step(layout, loss, CHAIN), jp.init_state(layout, CHAIN)
    for i in range(3):
        state, _ = step(state, batch(i))
    return request.param, layout, step, state


@pytest.mark.nightly
def test_an_evaluation_is_of_the_global_model(trained):
    name, _, step, state = trained
    one = {"up": {}, "down": {}}
    for path, value in of_papers(name, state).items():
        one[path.split("/")[0]][path.split("/")[1]] = value
    np.testing.assert_allclose(step.evaluate(state, batch(9))["loss"], sums_of(one, batch(9)), rtol=1e-5)


def saved(tmp_path, layout, state):
    store = Store(tmp_path / "checkpoints", Checkpoints(), replicas=describe_replicas(layout))
    store.save(3, state, {})
    store.finish()


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("sizes", some([{"fsdp": 4}, CUBE], [CUBE]), ids=str)
def test_a_new_run_begins_with_the_global_model(sizes, trained, tmp_path):
    name, layout, _, state = trained
    saved(tmp_path, layout, state)
    other = composed(sizes, jp.Exchange("all_reduce"))
    begun, origin = start(Checkpoints(start_from=str(tmp_path)), jp.init_state(other, CHAIN), other, CHAIN)
    assert_same_arrays(leaves_by_path(begun.params), of_papers(name, state), 1e-6)
    assert f"from the {OWN.get(name, 'mean')} of 4 replicas ({name})" in str(origin)
    jp.train_step(other, loss, CHAIN)(begun, batch(3))


@pytest.mark.spread(1)
@pytest.mark.slow
def test_a_run_goes_on_as_one_model(trained, tmp_path):
    name, layout, _, state = trained
    saved(tmp_path, layout, state)
    other = composed({"fsdp": 4}, jp.Exchange("all_reduce"))
    step, said = jp.train_step(other, loss, CHAIN), []
    with pytest.raises(JaxparError, match=r"is of 4 replicas .*, the job has one model") as caught:
        Store(tmp_path / "checkpoints", Checkpoints()).restore(step.abstract())
    assert 'checkpoint.replicas = "mean"' in caught.value.problems[0].fix
    store = Store(tmp_path / "checkpoints", Checkpoints(replicas="mean"), say=said.append)
    restored, at = store.restore(step.abstract())
    assert at == int(restored.step) == 3
    assert said == [f"step 3: the {OWN.get(name, 'mean')} of 4 replicas ({name}) goes on as one model"]
    assert_same_arrays(leaves_by_path(restored.params), of_papers(name, state), 1e-6)
    moments = jax.tree.map(lambda x: x.astype(jnp.float32).mean(0), jax.device_get(state.optimizer))
    assert_same_arrays(restored.optimizer, moments, 1e-6)
    step(restored, batch(3))


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def squares(model, batch):
    return jnp.sum((model(batch["x"]) - 1) ** 2), batch["x"].shape[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "exchange",
    [pytest.param(jp.Exchange("diloco", every=2), marks=pytest.mark.slow), jp.Exchange("sign", smallest=8)],
    ids=lambda each: each.name,
)
def test_statistics_of_replicas_are_their_mean(exchange, tmp_path):
    sgd, rng = optax.sgd(0.01), np.random.default_rng(0)
    layout, other = (
        jp.compose(Normed, jp.Parallel(**each)) for each in (dict(data=8, exchange=exchange), dict(data=8))
    )
    step, state = jp.train_step(layout, squares, sgd), jp.init_state(layout, sgd)
    for _ in range(3):
        state, _ = step(state, {"x": rng.normal(size=(32, 4)).astype(np.float32)})
    saved(tmp_path, layout, state)
    begun, _ = start(Checkpoints(start_from=str(tmp_path)), jp.init_state(other, sgd), other, sgd)
    means = {path: x.mean(0) for path, x in leaves_by_path(state.model_state).items() if x.dtype == jnp.float32}
    assert means
    assert_same_arrays({path: leaves_by_path(begun.model_state)[path] for path in means}, means, 1e-6)
    x = {"x": rng.normal(size=(32, 4)).astype(np.float32)}
    want = jp.train_step(other, squares, sgd).evaluate(begun, x)["loss"]
    np.testing.assert_allclose(step.evaluate(state, x)["loss"], want, rtol=1e-5)


@pytest.mark.spread(0)
def test_replicas_begin_with_a_run_of_one_model(trained, tmp_path):
    """All with its parameters, which the model of the exchange begins with too."""
    name, layout, step, _ = trained
    plain = composed({"fsdp": 4}, jp.Exchange("all_reduce"))
    one = jp.init_state(plain, CHAIN, seed=5)
    jp.save(tmp_path, one)
    begun, _ = start(Checkpoints(start_from=str(tmp_path)), jp.init_state(layout, CHAIN), layout, CHAIN)
    want = {path: np.stack([x] * 4) for path, x in leaves_by_path(jax.device_get(one.params)).items()}
    assert_same_arrays(leaves_by_path(begun.params), want, 0)
    assert_same_arrays(of_papers(name, begun), leaves_by_path(one.params), 1e-6)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, begun, jp.init_state(layout, CHAIN)))
    step(begun, batch(0))


@pytest.mark.parametrize("exchange", ["ensemble"])
def test_several_models_do_not_leave_as_one(exchange, tmp_path):
    layout = composed(SIZES, jp.Exchange(exchange))
    saved(tmp_path, layout, jp.init_state(layout, CHAIN))
    other = composed({"fsdp": 4}, jp.Exchange("all_reduce"))
    with pytest.raises(JaxparError, match="'ensemble', which are several models"):
        start(Checkpoints(start_from=str(tmp_path)), jp.init_state(other, CHAIN), other, CHAIN)
    with pytest.raises(JaxparError, match="'ensemble', which are several models"):
        Store(tmp_path / "checkpoints", Checkpoints(replicas="mean")).restore(
            jp.train_step(other, loss, CHAIN).abstract()
        )


JOB = """
[mesh]
devices = 8
[parallel]
data = 4
fsdp = 2
exchange = {name = "NAME", every = 4}
[model]
layers = 1
dim = 16
heads = 2
[data]
source = "text"
path = "text.txt"
seq = 16
[optimizer]
decay = "constant"
[train]
steps = 6
global_batch = 8
[checkpoint]
every = 3
"""


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("diloco", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("local", "easgd", "streaming")),
    ],
)
def test_a_trained_job_is_sampled_exported_and_gone_on_with(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXPAR_NO_HUGE_PAGES", "1")  # which would start the tests anew
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "job.toml").write_text(JOB.replace("NAME", name))

    def ran(*words):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            status = main([*words])
        assert status == 0, out.getvalue()
        return out.getvalue()

    ran("train", "job.toml", "run.dir=run")
    which = f"the {OWN.get(name, 'mean')} of 4 replicas ({name})"
    assert which in ran("sample", "run", "--prompt", "the ", "--tokens", "3")
    ran("checkpoint", "export", "run", "--format", "safetensors", "--to", "folder")
    want = of_papers(name, jp.restore("run", build(load("job.toml")).step))["embed"]
    exported = entries(tmp_path / "folder" / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_allclose(exported.view(), want, rtol=1e-6)
    one = ["parallel.data=1", "parallel.exchange={name='all_reduce'}", "mesh.devices=2"]
    assert which in ran("train", "job.toml", "run.dir=next", "checkpoint.start_from=run", "train.steps=2", *one)
    assert main(["check", "job.toml", "run.dir=other", "checkpoint.start_from=run", *one]) == 0
    again = ["run.dir=run", "train.steps=8", "checkpoint.replicas=mean", *one]
    for refused in (again, again[:2] + again[3:] + [changed := "run.changed=['parallel.exchange']"]):
        assert main(["check", "job.toml", *refused]) == main(["train", "job.toml", *refused]) == 1
    assert main(["check", "job.toml", *again, changed]) == 0
    assert f"{which} goes on as one model" in ran("train", "job.toml", *again, changed)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 9)]
