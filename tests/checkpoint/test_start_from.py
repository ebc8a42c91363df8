"""A new run begins with parameters of another: which are taken, under which names, and what is refused."""

import io
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import nnx

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store, manifest, start_from
from jaxpar.checkpoint.differences import differences, problems
from jaxpar.checkpoint.manifest import SavedArray
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.parse import loads


def array(*shape, dtype="float32"):
    return SavedArray(shape, dtype, 4 * int(np.prod(shape)))


SAVED = {
    "embed/embedding": array(32, 16),
    "encoder/blocks/mlp/up": array(4, 16, 32),
    "encoder/blocks/mlp/down": array(4, 32, 16),
    "encoder/norm/scale": array(16),
    "head/kernel": array(16, 32),
}
WANTED = {
    "embed/embedding": array(32, 16),
    "blocks/mlp/up": array(4, 16, 32),
    "blocks/mlp/down": array(4, 32, 16),
    "norm/scale": array(16),
    "head/kernel": array(16, 10),
}


def planned(wanted=WANTED, saved=SAVED, **settings):
    return start_from.plan(Checkpoints(start_from="runs/a", **settings), "runs/a/checkpoints/000200", saved, wanted)


def test_names_are_changed_where_they_begin_and_every_origin_is_said():
    take = ("embed/*", "blocks/*", "norm/*")
    origin = planned(take=take, rename={"encoder/blocks": "blocks", "encoder/norm/": "norm"})
    assert origin.source_paths == {
        "embed/embedding": "embed/embedding",
        "blocks/mlp/up": "encoder/blocks/mlp/up",
        "blocks/mlp/down": "encoder/blocks/mlp/down",
        "norm/scale": "encoder/norm/scale",
    }
    assert str(origin) == (
        "4 arrays taken from runs/a/checkpoints/000200; 3 of them renamed; 1 new (head/kernel); "
        "1 of it not used (head/kernel)"
    )


RENAMED = {"encoder/blocks": "blocks", "encoder/norm": "norm"}
REFUSED = {
    "another shape": ({"rename": RENAMED}, ["head/kernel is [16, 32] in the checkpoint, [16, 10] in the job",
        'take = ["blocks/*", "embed/*", "norm/*"]']),
    "not there": ({"take": ("embed/*", "blocks/*")}, ["blocks/mlp/down is in the job and not in the checkpoint",
        "and 1 more", 'take = ["embed/*"], or rename']),
    "a pattern of nothing": ({"take": ("embd/*",)}, ["'embd/*' matches nothing", "did you mean 'embed'?"]),
    "a longer pattern of nothing": ({"take": ("blocks/mpl/*",)}, ["matches nothing", "did you mean 'blocks/mlp'?"]),
    "a name of nothing": ({"take": ("embed/*",), "rename": {"encoder/block": "blocks"}}, [
        "nothing in runs/a/checkpoints/000200 begins with 'encoder/block'", "did you mean 'encoder/blocks'?"]),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(settings, words):
    with pytest.raises(JaxparError) as caught:
        planned(**settings)
    (problem,) = caught.value.problems
    assert not [word for word in words if word not in str(problem)], str(problem)


def test_a_name_takes_all_below_it():
    assert set(planned(take=("embed",)).source_paths) == {"embed/embedding"}
    assert len(planned(take=("blocks/mlp/", "*norm/scale"), rename=RENAMED).source_paths) == 3


def test_another_dtype_is_taken_only_where_it_is_asked_for():
    half = WANTED | {"embed/embedding": array(32, 16, dtype="bfloat16")}
    with pytest.raises(JaxparError, match=r"is float32 in the checkpoint, bfloat16 in the job\n.*\n.*cast = true"):
        planned(half, take=("embed/*",))
    assert planned(half, take=("embed/*",), cast=True).source_paths == {"embed/embedding": "embed/embedding"}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('take = ["a/*"]', "without checkpoint.start_from"),
        ('rename = {a = "b"}', "without checkpoint.start_from"),
        ("cast = true", "without checkpoint.start_from"),
        ('start_from = "x"\ntake = []', "at least one pattern"),
        ('start_from = "x"\nrename = {a = "/"}', "neither is empty"),
        ('start_from = "x"\nrename = {a = 1}', "checkpoint.rename.a = 1"),
    ],
)
def test_keys_that_make_no_sense_are_refused(table, words):
    with pytest.raises(JaxparError, match=re.escape(words)):
        loads(f"[checkpoint]\n{table}\n")


def test_the_keys_are_read_back_as_written():
    job = loads('[checkpoint]\nstart_from = "a"\ntake = ["b/*"]\nrename = {"c/d" = "e"}\ncast = true\n')
    assert loads(dumps(job)) == job


def test_another_model_is_a_few_lines_and_not_two_hundred():
    chains = [f"optimizer/1/0/{moment}/" for moment in ("mu", "nu")]
    saved = {part + name: each for part in ("params/", *chains) for name, each in SAVED.items()}
    wider = {path: SavedArray((*each.shape[:-1], 64), each.dtype, 0) for path, each in saved.items()}
    found = differences(saved, wider)
    assert len(found) == 15
    (problem,) = problems(found, "runs/a")
    assert problem.got.startswith("embed/embedding is [32, 16] in the checkpoint, [32, 64] in the job, and 4 more par")
    plain = {path: each for path, each in saved.items() if path.startswith("params/")}
    (problem,) = problems(differences(saved, plain | {"optimizer/0/trace/a": array(1)}), "runs/a")
    assert problem.got == (
        "another optimizer: optimizer/1/0/mu/embed/embedding (10 arrays) in the checkpoint and optimizer/0/trace/a "
        "(1 array) in the job"
    )


class Old(jp.Decoder):
    """A decoder whose blocks have another name."""

    def __init__(self, settings, *, rngs):
        super().__init__(settings, rngs=rngs)
        self.encoder = self.blocks
        del self.blocks


SETTINGS = jp.DecoderConfig(vocab=32, seq=8, layers=2, dim=16, heads=2, hidden=32)


def created(model, optimizer, **sizes):
    """Returns a layout and its first state."""
    count = int(np.prod(list(sizes.values())))
    layout = jp.compose(model, jp.Parallel(**sizes), jax.devices()[:count])
    return layout, jp.init_state(layout, optimizer, seed=count)


@pytest.mark.nightly
def test_parameters_are_taken_onto_another_layout_and_the_optimizer_begins_with_them(tmp_path):
    chain = optax.contrib.schedule_free_adamw(1e-3)  # its state holds a copy of the parameters
    _, trained = created(lambda rngs: Old(SETTINGS, rngs=rngs), optax.sgd(0.1), data=1)
    store = Store(tmp_path / "checkpoints", Checkpoints())
    store.save(7, trained, {})
    store.finish()
    layout, fresh = created(lambda rngs: jp.Decoder(SETTINGS, rngs=rngs), chain, fsdp=4)
    placed = jax.tree.map(lambda leaf: leaf.sharding, fresh)
    head = jax.device_get(fresh.params["head"])
    spec = Checkpoints(start_from=str(tmp_path), take=("embed", "blocks/*"), rename={"encoder": "blocks"})
    state, origin = start_from.start(spec, fresh, layout, chain)
    assert int(state.step) == 0
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b, a.ndim), state, placed))
    assert _same(state.params["blocks"], trained.params["encoder"])
    assert _same(state.params["head"], head)
    assert not _same(trained.params["head"], head)
    kept = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.shape == state.params["embed"].shape]
    assert any(_same(leaf, trained.params["embed"]) for leaf in kept)
    assert "head" in str(origin)
    assert "not used" in str(origin)


def _same(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), one, other))


JOB = """
[model]
name = "mlp"
inputs = 64
dim = 8
layers = 1
classes = 10
[data]
source = "arrays"
path = "{data}"
[train]
steps = 2
global_batch = 16
loss = "classify"
[run]
dir = "{folder}"
[parallel]
data = -1
"""


@pytest.mark.nightly
def test_a_job_starts_from_another_run_and_goes_on_from_its_own(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "ok.npz", inputs=rng.random((32, 64), np.float32), labels=np.arange(32) % 10)
    job = JOB.format(data=tmp_path / "ok.npz", folder="{}")

    def trained(name, *overrides):
        out = io.StringIO()
        done = run.train(loads(job.format(tmp_path / name), overrides), stream=out)
        return done, out.getvalue()

    trained("first")
    start = f"checkpoint.start_from={tmp_path}/first"
    done, out = trained("second", start)
    assert (done["resumed_from"], done["step"]) == (0, 2)
    assert re.search(r"\d arrays taken from .*/first/checkpoints/000002; 0 new", out)
    done, out = trained("second", start, "train.steps=3")
    assert done["resumed_from"] == 2
    assert "taken from" not in out
    with pytest.raises(JaxparError, match="another optimizer") as caught:
        trained("first", "optimizer.name=sgd", "train.steps=3")
    assert f"start_from = '{tmp_path}/first'" in str(caught.value)
    newest = tmp_path / "second" / "checkpoints" / "000003"
    next((newest / "arrays").iterdir()).unlink()
    assert manifest.check(newest)
    done, out = trained("second", start, "train.steps=3")  # with 4 its third step would have another rate
    assert done["resumed_from"] == 2
    assert "is missing; step 2 is used instead; it is called 000003.damaged now" in out


DECODER = """
[model]
name = "decoder"
dim = 16
layers = 2
heads = 2
hidden = 32
[data]
source = "text"
path = "{data}"
seq = 8
[train]
steps = 2
global_batch = 8
[run]
dir = "{folder}"
[parallel]
fsdp = -1
"""


@pytest.mark.nightly
def test_a_decoder_leaves_as_safetensors_and_comes_back_bit_for_bit(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 40)

    def trained(name, *overrides):
        out = io.StringIO()
        job = DECODER.format(data=tmp_path / "text.txt", folder=tmp_path / name)
        return run.train(loads(job, overrides), stream=out)["last"]["loss"], out.getvalue()

    trained("first")
    assert main(["checkpoint", "export", str(tmp_path / "first"), "--format", "safetensors", "--to",
                 str(tmp_path / "llama")]) == 0  # fmt: skip
    again, said = trained("again", f"checkpoint.start_from={tmp_path / 'llama'}")
    assert "arrays taken from" in said
    assert again == trained("direct", f"checkpoint.start_from={tmp_path / 'first'}")[0]
    with pytest.raises(JaxparError, match=r"\[model\] of the job has rope_base = 500.0"):
        trained("other", f"checkpoint.start_from={tmp_path / 'llama'}", "model.rope_base=500.0")
    part, said = trained("part", f"checkpoint.start_from={tmp_path / 'llama'}", 'checkpoint.take=["embed"]')
    assert "1 arrays taken from" in said
    assert part == trained("half", f"checkpoint.start_from={tmp_path / 'first'}", 'checkpoint.take=["embed"]')[0]
    assert main(["checkpoint", "export", str(tmp_path / "first"), "--format", "onnx", "--to", str(tmp_path / "x")]) == 1
    assert "a format is jaxpar, safetensors" in capsys.readouterr().err


@pytest.mark.nightly
def test_statistics_are_taken_with_the_parameters(tmp_path):
    chain, parallel = optax.sgd(0.1), jp.Parallel(data=8)
    _, state, step = tiny.train(tiny.models()["bare"], parallel, steps=1, chain=chain)
    store = Store(tmp_path / "checkpoints", Checkpoints())
    store.save(1, state, {})
    store.wait()
    begun = jp.init_state(step.layout, chain, seed=7)
    made, _ = start_from.start(Checkpoints(start_from=str(tmp_path)), begun, step.layout, chain)
    for taken, trained in zip(jax.tree.leaves(made.model_state), jax.tree.leaves(state.model_state), strict=True):
        if np.issubdtype(taken.dtype, np.floating):
            np.testing.assert_array_equal(taken, trained)


def test_tables_that_the_model_makes_are_its_own(tmp_path):
    class Model(nnx.Module):
        def __init__(self, base, *, rngs):
            self.table, self.out = base ** -jnp.arange(8.0), nnx.Linear(8, 4, rngs=rngs)

    chain = optax.sgd(0.1)
    one, other = (jp.compose(partial(Model, base), jp.Parallel(data=8)) for base in (2.0, 3.0))
    store = Store(tmp_path / "checkpoints", Checkpoints())
    store.save(1, jp.init_state(one, chain), {})
    store.wait()
    begun = jp.init_state(other, chain, seed=7)
    assert other.blueprint.constants == {"table"}
    made, origin = start_from.start(Checkpoints(start_from=str(tmp_path)), begun, other, chain)
    assert set(origin.source_paths) == {"out/kernel", "out/bias"}
    np.testing.assert_array_equal(made.model_state["table"], 3.0 ** -jnp.arange(8.0))
