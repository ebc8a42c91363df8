"""Input that no specs can be found for, or no step can follow, is refused with one message; the user's names win."""

import dataclasses
import io
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_loop
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import load
from jaxpar.job.run import train
from jaxpar.specs import trace

BATCH = {"x": np.ones((8, 64), np.float32)}
SGD = optax.sgd(0.1)
TENSOR = jp.Parallel(tensor=8)


class Net(nnx.Module):
    def __init__(self, rngs, between=None, dim=64):
        self.up, self.down = nnx.Linear(dim, 4 * dim, rngs=rngs), nnx.Linear(4 * dim, dim, rngs=rngs)
        self.between = between

    def __call__(self, x):
        x = nnx.gelu(self.up(x))
        return self.down(self.between(x) if self.between else x)


UP = f"test_specs_input.py:{Net.__call__.__code__.co_firstlineno + 1}"


def squares(model, batch):
    losses = model(batch["x"]) ** 2
    return losses.sum(), jnp.float32(losses.size)


def find(parallel=TENSOR, model=Net, batch=BATCH, **options):
    return jp.find_specs(model, squares, batch, parallel, **options)


def step(parallel):
    layout = jp.compose(Net, parallel)
    return jp.train_step(layout, squares, SGD)(jp.init_state(layout, SGD), BATCH)


def compose(model=Net, **sizes):
    return jp.compose(model, jp.Parallel(**sizes))


REFUSED = {
    "another way of finding": (partial(compose, tensor=8, specs="other"), "specs='other'", "found"),
    "no line": (partial(compose, tensor=8, activations={"nonsense": ("batch",)}), "nonsense", "model.py:31"),
    "no names": (partial(compose, tensor=8, activations={UP: "batch"}), "'batch'", "model.py:31"),
    "no mapping": (partial(compose, tensor=8, activations=[UP]), "activations=", "model.py:31"),
    "a line that computes nothing": (
        lambda: step(jp.Parallel(tensor=8, activations={"test_specs_input.py:9999": ("batch", "mlp")})),
        "test_specs_input.py:9999",
        "for the lines of today's source",
    ),
    "an array of other rank": (
        lambda: step(jp.Parallel(tensor=8, activations={UP: ("batch", None, "mlp")})),
        "no such array of 3 dims",
        "for the lines of today's source",
    ),
    "an array of other sizes": (
        lambda: step(jp.Parallel(tensor=8, activations={f"{UP} [..., 13]": ("batch", "mlp")})),
        "[..., 13]",
        "for the lines of today's source",
    ),
    "a path rule that matches nothing": (
        lambda: find(jp.Parallel(tensor=8, paths={"middle/kernel": (None, "mlp")})),
        "path rule 'middle/kernel' matches no parameter of Net",
        "kernel",
    ),
    "an axis of one device": (lambda: find(jp.Parallel(data=8)), "for data=8", "tensor=4"),
    "no axis": (lambda: find(jp.Parallel()), "for no axis", "tensor=4"),
    "height": (lambda: find(jp.Parallel(tensor=4, height=2)), "height=2", "tensor=4"),
    "pipe": (lambda: find(jp.Parallel(tensor=4, pipe=2)), "pipe=2", "tensor=4"),
    "expert": (lambda: find(jp.Parallel(tensor=4, axes={"expert": 2})), "expert=2", "tensor=4"),
    "examples that do not divide": (
        lambda: find(jp.Parallel(tensor=2, data=2, fsdp=2), batch={"x": np.ones((6, 64), np.float32)}),
        "6 examples over data x fsdp = 4",
        "a batch of 8 examples",
    ),
    "an example of one row": (
        partial(compose, jp.from_nnx(Net, jnp.zeros((1, 64))), data=2, tensor=4, specs="found"),
        "for Net and an example of its inputs, input 0 [1, 64], over data x fsdp = 2",
        "inputs of the shapes of a global batch in jp.from_linen(module, inputs) or jp.from_nnx(function, inputs): "
        "dim 0 a multiple of 2",
    ),
    "an input without examples": (
        partial(compose, jp.from_nnx(Net, BATCH["x"], jnp.zeros((1, 64))), fsdp=2, tensor=4, specs="found"),
        "input 0: 8, input 1: 1 examples",
        "make it in the model or loss",
    ),
    "inputs of several sizes": (
        partial(compose, jp.from_nnx(Net, {"nodes": BATCH["x"], "edges": BATCH["x"][:4]}), tensor=8, specs="found"),
        "input 0['edges']: 4, input 0['nodes']: 8 examples",
        "repeat it per example",
    ),
    "dicts in a batch": (lambda: find(batch={"in": BATCH}), "batch['in'] is a dict of x", "flatten_dict(batch"),
    "no batch": (lambda: find(batch={}), "0 examples", "a batch of 1 examples"),
    "a batch of lists": (lambda: find(batch={"x": [[1.0]]}), "batch['x']", "ShapeDtypeStruct"),
    "a scalar": (lambda: find(batch={**BATCH, "scale": np.float32(1)}), "batch['scale']", "ShapeDtypeStruct"),
    "arrays of other examples": (
        lambda: find(batch={**BATCH, "mask": np.ones((64, 64), np.float32)}),
        "x: 8, mask: 64 examples",
        "repeat it per example",
    ),
    "an activation without a rule": (
        lambda: step(jp.Parallel(tensor=8, activations={UP: ("batch", "channles")})),
        "names a dim 'channles' that has no rule",
        "did you mean 'channels'?",
    ),
    "no names of a batch": (lambda: find(batch=BATCH["x"]), "batch=", "ShapeDtypeStruct"),
    "no declaration": (lambda: find({"tensor": 8}), "parallel=", "jp.Parallel"),
    "a size to be inferred": (lambda: find(jp.Parallel(tensor=4, data=-1)), "data=-1", "data=2"),
    "an axis of experts": (
        lambda: find(jp.Parallel(expert=4)),
        "finding specs for expert=4",
        "jp.Parallel(expert=4) without specs, whose experts are read from the model's use or named by paths; or "
        'jp.Parallel(tensor=4, specs="found"), which splits experts',
    ),
    "a frozen path of no parameter": (
        lambda: find(frozen=["up/kernle"]),
        "frozen: 'up/kernle' matches nothing",
        "did you mean 'up/kernel'?",
    ),
    "a frozen word": (lambda: find(frozen="kernel"), "frozen: 'kernel' matches nothing", "did you mean '*/kernel'?"),
    "a frozen number": (lambda: find(frozen=[3]), "frozen: 3", '"blocks/0*"'),
    "a word for examples": (lambda: find(examples="no"), "examples='no'", "examples=True"),
    "an unknown precision": (lambda: find(precision="bf61"), "precision='bf61'", "bf16"),
    "an unknown chip": (lambda: find(chip="h101"), "chip='h101'", "h100"),
    "no chip": (lambda: find(chip=None), "chip=None", "h100"),
    "memory as text": (lambda: find(memory="1GiB"), "memory='1GiB'", "2**30"),
    "too little memory": (lambda: find(memory=10), "10 B per device", "MiB"),
    "a bare factory": (partial(compose, tensor=8, specs="found"), "inputs are unknown", "jp.from_nnx(Net, inputs)"),
    "a loss that fails": (
        lambda: jp.find_specs(Net, lambda model, batch: model(batch["y"]), BATCH, TENSOR),
        "no entry 'y'",
        "change the line of the model or the loss above",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_input_is_refused_with_one_message(case):
    act, got, fix = REFUSED[case]
    with pytest.raises(JaxparError) as refusal:
        act()
    assert len(refusal.value.problems) == 1
    assert got in refusal.value.problems[0].got
    assert fix in refusal.value.problems[0].fix


def test_a_program_that_is_too_large_is_refused_with_what_stays_whole(monkeypatch):
    monkeypatch.setattr(trace, "LARGEST", 10)
    with pytest.raises(JaxparError, match=r"Net in \d+ equations: no specs were found") as refusal:
        find()
    assert "scan over equal layers" in refusal.value.problems[0].fix


def twice(x):
    return jnp.concatenate([jax.lax.top_k(x, x.shape[-1] // 2)[0]] * 2, -1)


def on_the_host(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x * jax.pure_callback(np.asarray, shape, jax.lax.stop_gradient(x))


@pytest.mark.parametrize(
    ("between", "operation"),
    [(twice, "top_k"), (on_the_host, "pure_callback"), (lambda x: jnp.fft.fft(x).real, "fft")],
)
def test_operations_that_are_not_followed_are_named_and_leave_dims_whole(between, operation):
    result = find(model=lambda rngs: Net(rngs, between))
    assert operation in result.unknown
    assert f"whose arrays are not split: {', '.join(result.unknown)}" in result.explain()
    assert result.specs.activations[f"{UP} [..., 256]"] == ("batch", None)


@pytest.mark.parametrize("between", [partial(jnp.sort, axis=-1), lambda x: jnp.cumsum(x, -1)])
def test_dims_along_which_entries_move_stay_whole(between):
    result = find(model=lambda rngs: Net(rngs, between))
    assert result.unknown == ()
    assert result.specs.activations[f"{UP} [..., 256]"] == ("batch", None)


def test_an_array_without_entries_is_followed():
    def add_rest(x):  # as `lax.associative_scan` does at the end of its recursion
        return x + x[8:].reshape(1, 0, 256).sum((0, 1))

    result = find(model=lambda rngs: Net(rngs, add_rest))
    assert result.specs.activations[f"{UP} [..., 256]"] == ("batch", "mlp")


def test_a_loop_of_unknown_length_is_followed():
    def halve(x):
        return x * jax.lax.while_loop(lambda y: jnp.sum(y) > 1, lambda y: y / 2, jax.lax.stop_gradient(x))

    result = find(model=lambda rngs: Net(rngs, halve))
    assert result.specs.activations[f"{UP} [..., 256]"] == ("batch", "mlp")


def test_a_model_without_matmuls_has_nothing_to_split():
    class Scale(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(3))

        def __call__(self, x):
            return x * self.scale[...].sum()

    assert find(model=Scale).specs.names == {}


def test_an_axis_that_splits_only_what_the_loss_does_not_use_splits_the_matmuls():
    """So a classifier ignores the predictor of a pretrained model, whose update is cheaper if it is split."""

    class Unused(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.head = nnx.Param(jnp.ones((64, 512)))

    found = find(model=Unused)
    assert "tensor=8 costs more than it saves" in found.note
    assert found.specs.paths["up/kernel"] == (None, "mlp")
    assert found.specs.paths["down/kernel"] == ("mlp", None)


@pytest.mark.slow
def test_work_that_found_specs_leave_whole_is_predicted_and_named_with_ways_out():
    """XLA computes whole what a line's names leave whole, though it reads a split parameter there."""
    model, inputs = (
        partial(Net, between=partial(jnp.cumsum, axis=-1), dim=62),
        jnp.ones((8, 62)),
    )  # 4 does not divide 62
    found = find(jp.Parallel(tensor=4, data=2), model, {"x": inputs})
    assert "each device computes 2.20 times its share" in found.explain()
    layout = jp.compose(jp.from_nnx(model, inputs), jp.Parallel(tensor=4, data=2, specs="found"))
    assert "times its share" in layout.explain()
    with pytest.warns(UserWarning, match="2.20 times its share") as warned:
        jp.train_step(layout, squares, SGD)(jp.init_state(layout, SGD), {"x": inputs})
    message = str(warned[0].message)
    assert f"the names of {UP}" in message
    assert "tensor=1 and data=8" in message
    assert "or the constraint gone" not in message


OWN = {
    "a path": ({"paths": {"up/kernel": ("mlp", None)}}, "paths 'up/kernel': mlp, - (found: -, mlp)"),
    "a pattern": ({"paths": {"kernel": (None, None)}}, "paths 'kernel': -, - (found:"),
    "a line": ({"activations": {UP: ("batch", None)}}, f"activations '{UP} [..., 256]' (found: batch, mlp)"),
    "a rule": ({"rules": {"mlp": None}}, "rules 'mlp': None"),
}


@pytest.mark.parametrize("case", OWN)
def test_names_of_the_users_own_win_and_are_named(case):
    own, words = OWN[case]
    result = find(jp.Parallel(tensor=8, **own))
    ((key, names),) = own.items()
    given = getattr(result.parallel, key)
    assert next(iter(given)) == next(iter(names)) or key != "paths"  # the first pattern that matches decides
    assert {**given, **names} == given
    assert not any(line.startswith(f"{UP} ") for line in given) or case != "a line"
    assert words in result.explain()
    assert words in result.sentence


@pytest.mark.parametrize("sizes", [{"tensor": 8}, {"context": 2, "tensor": 4}], ids=["one axis", "two axes"])
def test_names_that_were_found_before_do_not_differ(sizes):
    """A job that `jaxpar specs --write` wrote has all names of its own, and these are the ones found."""
    first = find(jp.Parallel(**sizes))
    again = find(first.parallel)
    assert first.parallel.activations
    assert again.differing == ()
    assert again.parallel == first.parallel


def test_a_layout_says_which_names_of_the_users_own_won():
    model = jp.from_nnx(Net, BATCH["x"])
    text = jp.compose(model, jp.Parallel(tensor=8, specs="found", paths={"up/kernel": (None, None)})).explain()
    assert 'specs="found": tensor splits' in text
    assert "paths 'up/kernel': -, - (found: -, mlp)" in text


class Batches:
    fingerprint = "ones"

    def batch(self, step, size):
        return {"x": np.ones((size, 64), np.float32)}


JOB = """
[run]
dir = "{to}/run"
[mesh]
simulate = 8
[parallel]
fsdp = 2
tensor = 4
specs = "{specs}"
[model]
name = "test_specs_input:Net"
[data]
source = "test_specs_input:Batches"
[train]
steps = 3
global_batch = 8
loss = "test_specs_input:squares"
[optimizer]
name = "sgd"
learning_rate = 0.1
decay = "constant"
beta1 = 0.0
clip = 0.0
"""


def written(folder, specs):
    path = folder / "job.toml"
    path.write_text(JOB.format(to=folder, specs=specs))
    return path


def placed(job):
    from jaxpar.job.parts.models import resolve_loss, resolve_model

    layout = jp.compose(resolve_model(job, resolve_loss(job)), job.effective_parallel)
    return {path: layout.describe(path) for path in layout.placements}, layout


def test_a_job_with_problems_is_refused_with_all_of_them(tmp_path, capsys):
    job = written(tmp_path, "").read_text().replace("steps = 3", "stesp = 3").replace("fsdp = 2", "fdsp = 2")
    (tmp_path / "job.toml").write_text(job)
    assert main(["specs", str(tmp_path / "job.toml"), "--allow-import"]) == 1
    words = capsys.readouterr().err
    assert "stesp" in words
    assert "fdsp" in words


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("specs", ["", "found"])
def test_a_written_job_is_checked_trains_and_has_the_layout_that_was_found(specs, tmp_path, capsys):
    job, new, facts = written(tmp_path, specs), tmp_path / "found.toml", tmp_path / "facts.json"
    assert main(["specs", str(job), "--allow-import", "--write", str(new), "--json", str(facts)]) == 0
    assert "operations without a rule" not in capsys.readouterr().out
    facts = json.loads(facts.read_text())
    assert {"paths", "activations", "traffic", "gap"} <= facts.keys()
    assert main(["check", str(new), "--allow-import"]) == 0
    pasted, found = load(new, [], allow_import=True), load(job, ["parallel.specs=found"], allow_import=True)
    assert pasted.parallel.specs == ""
    assert placed(pasted)[0] == placed(found)[0]
    assert "mlp/tensor" in placed(pasted)[0]["up/kernel"]
    losses, _ = plain_loop.train(Net, Net, squares, optax.sgd(0.1), BATCH)
    for each in (pasted, found):
        folder = dataclasses.replace(each.run, dir=str(tmp_path / f"run{each.parallel.specs}"))
        train(dataclasses.replace(each, run=folder), stream=io.StringIO())
        rows = [json.loads(row) for row in (Path(folder.dir) / "metrics.jsonl").read_text().splitlines()]
        np.testing.assert_allclose([row["loss"] for row in rows if "loss" in row][-1], losses[-1], rtol=1e-5)


def test_a_rule_of_the_user_that_is_the_default_one_does_not_differ():
    found = jp.find_specs(Net, squares, BATCH, jp.Parallel(tensor=8, rules={"mlp": "tensor"}))
    assert not found.differing
    keys = {UP: ("batch", "mlp"), f"{UP} [..., 256]": ("batch", "mlp")}
    assert not jp.find_specs(Net, squares, BATCH, jp.Parallel(tensor=8, activations=keys)).differing


class Annotated(nnx.Module):
    """Its first matrix is split by rows, where columns cost less."""

    def __init__(self, rngs, axes=("model", None)):
        rows = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
        self.up = nnx.Linear(64, 256, kernel_init=rows, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def test_names_of_the_model_that_found_ones_replace_are_said():
    found = jp.find_specs(Annotated, squares, BATCH, TENSOR)
    assert found.replaced == ("up/kernel: model, - (found: -, mlp)",)
    assert "the names that were found replace those of the model: up/kernel" in found.explain()
    assert "in place of the model's own names: up/kernel" in found.sentence


def test_names_of_the_model_that_split_the_same_dims_are_not():
    same = partial(Annotated, axes=(None, "model"))
    assert not jp.find_specs(same, squares, BATCH, TENSOR).replaced
