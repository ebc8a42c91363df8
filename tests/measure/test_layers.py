"""A model is measured layer by layer, and `jaxpar partition` reads what that writes."""

import json
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tiny import Annotated, Staged, batches, token_loss

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.measure import layer_times as bench
from jaxpar.measure.layer_times import Pieces
from jaxpar.models.classifiers import MLP
from jaxpar.models.settings.classifiers import MLPConfig
from jaxpar.parallel.compose import as_blueprint
from jaxpar.partition.chain import Node, Profile, dumps, linearise, load
from jaxpar.plan.model.shape import Shape, count_parameters, step_flop
from jaxpar.plan.model.work_depth import WorkDepth
from jaxpar.step.losses import classification_loss
from jaxpar.step.numerics import Numerics

ROWS, SEQ, DIM, VOCAB = 4, 16, 32, 48
SETTINGS = jp.DecoderConfig(vocab=VOCAB, seq=SEQ, layers=3, dim=DIM, heads=4)
TOKENS = jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)
BATCH = {"inputs": TOKENS, "targets": TOKENS}
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    monkeypatch.setattr(bench, "LONGEST", 0.0)


def measured(settings=SETTINGS, **numerics):
    return bench.measure(partial(jp.Decoder, settings), jp.next_token_loss, BATCH, Numerics(**numerics), note="here")


@pytest.fixture(scope="module")
def profile():
    return measured()


def assert_bytes(profile, settings, width):
    words = [node.layer for node in profile.nodes]
    assert words == ["Input: here", "Embedding", "Block 0", "Block 1", "Block 2", "Head and loss"]
    flowing = ROWS * SEQ * DIM * width
    assert [node.activations for node in profile.nodes] == [2 * ROWS * SEQ * 4, *[flowing] * 4, 4]
    leaves = as_blueprint(partial(jp.Decoder, settings)).leaves.values()
    table = VOCAB * DIM * 4
    assert sum(node.parameters for node in profile.nodes) == sum(leaf.bytes for leaf in leaves) + settings.tied * table
    assert profile.nodes[1].parameters == table


@pytest.mark.nightly
def test_bytes_are_exact(profile):
    assert_bytes(profile, SETTINGS, 4)


@pytest.mark.nightly
def test_bytes_of_another_precision_and_a_table_that_is_the_head_too():
    other = replace(SETTINGS, tied=not SETTINGS.tied)
    assert_bytes(measured(other, precision="bf16", remat="full"), other, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_a_layer_stores_its_parameters_its_activations_and_a_gradient_of_each(profile, precision):
    """w + f + grad w + grad o, three times: by the planner's formulas, as counted, and of `jax.vjp`'s own arrays."""
    shape, width = Shape.from_settings(SETTINGS), {"fp32": 4, "bf16": 2}[precision]
    profile = profile if precision == "fp32" else measured(precision=precision)
    flowing = ROWS * SEQ * DIM * width
    for node in profile.nodes[2:-1]:
        assert node.storage == 2 * 4 * count_parameters(shape).layer + 2 * flowing
    assert profile.nodes[1].storage == 2 * 4 * count_parameters(shape).embedding + 2 * flowing
    pieces = Pieces.from_model(partial(jp.Decoder, SETTINGS), jp.next_token_loss, Numerics(precision=precision))
    shared, one = jax.eval_shape(pieces.arrays)
    known = (jax.eval_shape(lambda key: pieces.blueprint.init(key)[1], jax.random.key(0)), BATCH)
    x, each = jax.eval_shape(pieces.embed, shared, known)
    mine = jax.eval_shape(lambda each: jax.tree.map(lambda leaf: leaf[:1], each), each)

    def pulled(one, known, mine, x):
        y, pull = jax.vjp(lambda one: pieces.block(one, known, mine, x), one)
        gradient = jnp.ones_like(y)
        return one, y, pull(gradient), gradient

    arrays = jax.tree.leaves(jax.eval_shape(pulled, one, known, mine, x))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in arrays) == profile.nodes[2].storage


def test_layers_one_after_the_other_do_what_the_model_does():
    work = bench.count_work(partial(jp.Decoder, SETTINGS), jp.next_token_loss, BATCH, Numerics())
    assert len(work) == 5
    matmuls = step_flop(Shape.from_settings(SETTINGS), ROWS) // 3
    assert matmuls < reduce(WorkDepth.then, work).work < 1.3 * matmuls  # what is elementwise comes on top
    assert work[1] == work[2] == work[3]
    assert work[1].depth > 4 * (1 + 5)  # four matmuls at least, of sums of 32


@pytest.mark.nightly
def test_times_are_of_what_runs(profile):
    assert all(node.forward > 0 for node in profile.nodes[1:])
    assert all(node.backward >= 0 for node in profile.nodes)
    assert profile.nodes[0].forward == profile.nodes[0].backward == 0
    blocks = {(node.forward, node.backward) for node in profile.nodes[2:-1]}
    assert len(blocks) == 1  # one is measured


@pytest.mark.nightly
def test_pieces_one_after_the_other_are_the_model():
    pieces = Pieces.from_model(partial(jp.Decoder, SETTINGS), jp.next_token_loss, Numerics())
    params, model_state = jax.jit(pieces.blueprint.init)(jax.random.key(0))
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in
            jax.tree_util.tree_leaves_with_path(params)}  # fmt: skip
    shared = {path: value for path, value in flat.items() if path not in pieces.stacked}
    batch = {name: jax.random.randint(jax.random.key(1), leaf.shape, 0, VOCAB) for name, leaf in BATCH.items()}
    block = jax.jit(pieces.block)
    x, each = jax.jit(pieces.embed)(shared, (model_state, batch))
    for layer in range(3):
        one = {path: flat[path][layer : layer + 1] for path in pieces.stacked}
        mine = jax.tree.map(lambda leaf, layer=layer: leaf[layer : layer + 1], each)
        x = block(one, (model_state, batch), mine, x)
    whole = pieces.blueprint.bind(params, model_state, lambda path, value: value, pieces.compute)
    want = jax.jit(lambda batch: jp.next_token_loss(whole, batch)["loss"][0])(batch)
    assert jax.jit(pieces.head)(shared, (model_state, batch), x) == pytest.approx(want, rel=1e-5)


@pytest.mark.nightly
def test_a_users_own_model_and_loss():
    batch = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in next(batches(1)).items()}
    profile = bench.measure(partial(Staged, layers=2, rate=0.1), token_loss, batch, Numerics())
    assert [node.layer for node in profile.nodes] == ["Input", "Embedding", "Block 0", "Block 1", "Head and loss"]


@pytest.mark.slow
def test_a_profile_is_read_back_as_it_was_written(profile, tmp_path):
    path = tmp_path / "own.graph.txt"
    path.write_text(dumps(profile))
    found = load(path)
    assert found.edges == profile.edges
    for got, want in zip(found.nodes, profile.nodes, strict=True):
        assert (got.name, got.layer, got.activations, got.parameters) == (
            want.name, want.layer, want.activations, want.parameters
        )  # fmt: skip
        assert (got.forward, got.backward) == pytest.approx((want.forward, want.backward), abs=1e-6)
    assert dumps(found) == dumps(profile)
    assert linearise(found).crossing[1:] == (*[ROWS * SEQ * DIM * 4.0] * 4, 0.0)


@pytest.mark.parametrize("name", ["vgg16", "alexnet", "resnet50", "gnmt_large"])
def test_published_profiles_survive_being_written(name, tmp_path):
    """Its layers without time, which are read so, are written so."""
    profile = load(Path(__file__).parents[1] / "partition" / "pipedream" / f"{name}.graph.txt")
    path = tmp_path / "again.txt"
    path.write_text(dumps(profile))
    assert load(path) == profile


@pytest.mark.parametrize("words", ["a -- b", "a\nb", " a"])
def test_words_that_would_end_their_column_are_refused(words):
    with pytest.raises(JaxparError, match="name is one line"):
        dumps(Profile((Node("node0", words, 1.0, 1.0, 1.0, 1.0),), ()))


@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        (Annotated, token_loss, "Annotated never says where its layers are"),
        (partial(MLP, MLPConfig()), classification_loss, "MLP has 0 stacks of layers"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model, loss, said):
    batch = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in next(batches(1)).items()}
    with pytest.raises(JaxparError, match=said):
        bench.measure(model, loss, batch, Numerics())


def test_simulated_devices_are_not_measured():
    with pytest.raises(JaxparError, match="8 simulated devices"):
        bench.layers(partial(jp.Decoder, SETTINGS), jp.next_token_loss, BATCH, Numerics())


@pytest.mark.slow
def test_the_verb_writes_a_profile_that_the_partitioner_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "is_simulated", lambda devices: False)
    profile, result = tmp_path / "own.graph.txt", tmp_path / "layers.json"
    small = ["model.layers=2", "model.dim=32", "data.seq=16", "train.global_batch=2"]
    words = ["measure", "layers", str(CONFIGS / "quickstart.toml"), *small, "--write", str(profile)]
    assert main([*words, "--json", str(result)]) == 0
    said = capsys.readouterr().out
    assert "Input: 2 rows, fp32, remat none; measured on one cpu" in said
    assert "say nothing about a GPU" in said
    found = json.loads(result.read_text())
    assert found["how"] == {"times": "measured", "bytes": "exact"}
    assert all(node["work"] > node["depth"] > 0 for node in found["layers"][1:])
    assert "an average parallelism of" in said
    assert [node["layer"] for node in found["layers"]][1:] == ["Embedding", "Block 0", "Block 1", "Head and loss"]
    assert main(["partition", str(profile), "2@10Gb/s"]) == 0
    said = capsys.readouterr().out
    assert "Input: 2 rows, fp32, remat none; measured on one cpu" in said
    assert "as fast as data parallel" in said
    assert main(words) == 1  # it is there already
    assert "a file that does not exist yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["layers"], "the following arguments are required: JOB"),
        (["gemm", "job.toml"], "unrecognized arguments: job.toml"),
        (["layers", "job.toml", "--rounds", "3"], "unrecognized arguments: --rounds 3"),
    ],
)
def test_each_bench_takes_what_is_its_own(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["measure", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_job_that_is_not_there_is_refused(capsys):
    assert main(["measure", "layers", "nothing.toml"]) == 1
    assert "nothing.toml" in capsys.readouterr().err
