"""`jp.model("runs/mine")`: the model of a run of `jaxpar train`, from its folder alone, is the one that was trained."""

import io
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.job.build import build
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.names import model_settings
from jaxpar.job.run import train

JOB = """
model = {{layers = 1, dim = 16, heads = 4}}
data = {{source = "text", path = "{folder}/text.txt", seq = 16, tokenizer = "bpe", vocab = 280}}
train = {{steps = 4, global_batch = 8}}
optimizer = {{learning_rate = 0.1}}
checkpoint = {{every = 2}}
mesh = {{simulate = 8}}
parallel = {{data = 2, fsdp = 2, tensor = 2}}
run = {{dir = "{folder}/run"}}
"""
TOKENS = np.arange(32).reshape(2, 16) % 29


@nnx.jit
def logits(model):
    return model(TOKENS)


def plain(job, params):
    """Returns the decoder that Flax alone makes, with these arrays."""
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(lambda: jp.Decoder(model_settings(job), rngs=nnx.Rngs(3))))
    values = {tuple(key.key for key in keys): np.asarray(x) for keys, x in jax.tree_util.tree_leaves_with_path(params)}
    flat = [(path, leaf.replace(values[tuple(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


@pytest.mark.nightly
def test_the_folder_alone_gives_the_trained_model(tmp_path):
    (tmp_path / "text.txt").write_text("the day after Monday is Tuesday. " * 200)
    job = loads(JOB.format(folder=tmp_path))
    train(job, stream=io.StringIO())
    step = build(job).step
    last, early = (plain(job, jp.restore(tmp_path / "run", step, at=at).params) for at in (4, 2))
    (tmp_path / "text.txt").unlink()
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    folder = tmp_path / "elsewhere"
    model = jp.model(folder)
    assert {x.devices() == {jax.devices()[0]} for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {True}
    np.testing.assert_allclose(logits(model), logits(last), rtol=1e-4, atol=5e-5)
    np.testing.assert_allclose(logits(jp.model(str(folder), at=2)), logits(early), rtol=1e-4, atol=5e-5)
    assert abs(logits(last) - logits(early)).max() > 0.01
    sharded = jp.model(folder, parallel=jp.Parallel(fsdp=8))
    assert max(len(x.devices()) for x in jax.tree.leaves(nnx.state(sharded, nnx.Param))) == 8
    np.testing.assert_allclose(logits(sharded), logits(last), rtol=1e-4, atol=5e-5)


def test_a_folder_without_such_a_run_is_refused_with_a_way_out(tmp_path):
    layout = jp.compose(lambda rngs: nnx.Linear(8, 8, rngs=rngs), jp.Parallel(data=8))
    (tmp_path / "job.toml").write_text(JOB.format(folder=tmp_path))
    for call, message in (
        (lambda: jp.model(tmp_path / "none"), "it is no folder"),
        (lambda: jp.model(tmp_path.parent), "jp.restore(folder, step)"),
        (lambda: jp.model(tmp_path), "no good checkpoint"),
        (lambda: jp.model(tmp_path, replica=0), "jp.model(folder)"),
        (lambda: jp.model(layout), "jp.model(layout, state), or jp.model('runs/mine')"),
        (lambda: jp.model(layout, at=3), "with at=3"),
    ):
        with pytest.raises(JaxparError) as error:
            call()
        assert message in str(error.value)
