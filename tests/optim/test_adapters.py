"""Low-rank adapters beside matrices of any model: trained alone, split as their matrices, merged, and refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_freeze import ADAM, absent
from tiny import SEQ, Linen, Staged, assert_same_arrays, batches, models, token_loss, train

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.jaxprs.low_rank_path import separate_low_rank
from jaxpar.models.low_rank import low_rank_sum
from jaxpar.sharding.names import Compute, leaves_by_path

ONLY = jp.freeze(ADAM, ["*"], but=["adapters"])
PATHS = {"annotated": ["blocks/*"], "bare": ["attention/*", "logits"], "linen": ["blocks/up", "logits"]}
CUBE = jp.Parallel(data=2, fsdp=2, tensor=2)
# x A is as large as the rank: a sixteenth of these models' width, which devices of one `tensor` each compute
FEW = pytest.mark.filterwarnings("ignore:.*each device computes")


def bits(tree):
    return {path: np.asarray(leaf).tobytes() for path, leaf in leaves_by_path(jax.device_get(tree)).items()}


def base(params):
    return {path: value for path, value in bits(params).items() if not path.startswith("adapters/")}


def logits(layout, params, batch):
    """Returns what the model computes of these parameters."""
    _, rest = layout.blueprint.init(jax.random.key(1))
    call = lambda params: layout.blueprint.bind(params, rest, lambda _, x: x, Compute(train=False))(batch["inputs"])  # noqa: E731
    return np.asarray(jax.jit(call)(params))


@pytest.mark.nightly
@FEW
@pytest.mark.parametrize(
    "name", ["annotated", pytest.param("bare", marks=pytest.mark.full), pytest.param("linen", marks=pytest.mark.full)]
)
def test_adapters_are_trained_over_a_cube_as_on_one_device_and_the_base_keeps_its_bits(name):
    model = jp.add_lora(models()[name], rank=2, alpha=8, paths=PATHS[name])
    losses, state, step = train(model, CUBE, chain=ONLY, steps=3)
    want, expected, _ = train(model, jp.Parallel(), jax.devices()[:1], chain=ONLY, steps=3)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert losses[-1] != losses[0]
    assert_same_arrays(state.params, expected.params)
    begun = jp.init_state(step.layout, ONLY, seed=1)
    assert base(state.params) == base(begun.params)
    assert not set(bits(begun.params["adapters"]).items()) & set(bits(state.params["adapters"]).items())
    for path, place in step.layout.placements.items():
        if path.startswith("adapters/"):
            matrix = step.layout.placements[path.removeprefix("adapters/").rpartition("/")[0]]
            at = place.leaf.shape.index(2) if path.endswith("first") else None
            assert "tensor" not in str(matrix.whole) or at is None or place.names[:at] == matrix.names[:at]
    moments = {path for path, leaf in leaves_by_path(state.optimizer).items() if leaf.ndim}
    assert all("/adapters/" in path for path in moments)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [pytest.param("annotated", marks=pytest.mark.slow), pytest.param("bare", marks=pytest.mark.full), "linen"]
)
def test_what_is_merged_computes_the_same_without_adapters(name):
    model = models()[name]
    plain, layout = (
        jp.compose(each, jp.Parallel(), 1) for each in (model, jp.add_lora(model, rank=2, alpha=8, paths=PATHS[name]))
    )
    params, _ = layout.blueprint.init(jax.random.key(1))
    rng = np.random.default_rng(0)
    params["adapters"] = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params["adapters"])
    made, batch = jp.merge_lora(layout, params), next(batches(1))
    assert leaves_by_path(made).keys() == plain.placements.keys()
    got = logits(plain, made, batch)
    np.testing.assert_allclose(got, logits(layout, params, batch), rtol=1e-5, atol=1e-5)
    untouched, _ = plain.blueprint.init(jax.random.key(1))
    assert np.abs(got - logits(plain, untouched, batch)).max() > 0.1
    changed = {path for path, value in bits(made).items() if value != bits(untouched)[path]}
    assert changed == set(layout.blueprint.adapters)


class Sliced(nnx.Module):
    """Reads its stack whole, and scans over what it has read."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (3, 4, 4)))

    def __call__(self, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, self.w[...])[0]


@pytest.mark.slow
def test_a_stack_that_is_read_whole_has_its_layers_corrections():
    plain, layout = (jp.compose(each, jp.Parallel(), 1) for each in (Sliced, jp.add_lora(Sliced, rank=2, paths=["w"])))
    params, _ = layout.blueprint.init(jax.random.key(1))
    params["adapters"] = jax.tree.map(lambda x: x + 0.5, params["adapters"])
    batch = {"inputs": jnp.ones((2, 4))}
    got = logits(layout, params, batch)
    np.testing.assert_allclose(got, logits(plain, jp.merge_lora(layout, params), batch), rtol=1e-5)
    assert np.abs(got - logits(plain, {"w": params["w"]}, batch)).max() > 0.1


@pytest.mark.nightly
def test_corrections_of_several_matrices_at_once_are_added():
    """Of experts, say: what is multiplied over the outputs is as wide as the rank, so that only the dims tell."""
    w, a, b, y = (
        jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(4, 4, 5), (4, 4, 5), (4, 5, 5), (2, 5)])
    )

    def run(a, b):
        return jnp.einsum("bo,eio->bei", y, jax.vmap(low_rank_sum)(w, a, b))

    np.testing.assert_allclose(separate_low_rank(run)(a, b), run(a, b), rtol=1e-5)


RNG = np.random.default_rng(0)  # not by JAX, which would compile while tests are collected
X, W, A, B = (jnp.asarray(RNG.normal(size=s).astype(np.float32)) for s in [(5, 6), (6, 2, 4), (6, 3), (3, 2, 4)])
TALL = jnp.asarray(np.ones((5, 6, 4), np.float32))


def scanned(w):
    """Returns what a scan over the rows of X reads, inside of what is rematerialized."""
    body = jax.checkpoint(lambda carry, row: (carry + jnp.einsum("i,iok->ok", row, w()), None))
    return jax.lax.scan(body, jnp.zeros((2, 4)), X)[0]


BESIDE = {
    "x @ W": lambda w: jnp.einsum("bi,iok->bok", X, w()),
    "W @ x": lambda w: jnp.einsum("iok,bi->okb", w(), X),
    "over its outputs": lambda w: jnp.einsum("bok,iok->bi", X[:, :2, None] * jnp.ones(4), w()),
    "in half precision": lambda w: X.astype(jnp.bfloat16) @ w().astype(jnp.bfloat16)[:, 0],
    "in a scan, rematerialized": scanned,
    "in a branch": lambda w: jax.lax.cond(X[0, 0] > 9, lambda: TALL[:, :2], lambda: jnp.einsum("bi,iok->bok", X, w())),
}
ADDED = {
    "looked up": lambda w: w()[jnp.array([0, 3])] * X[:2, :2, None],
    "one of its inputs apart": lambda w: jnp.einsum("bik,iok->bio", TALL, w()),
    "half of it": lambda w: jnp.einsum("bi,iok->bok", X, w()[:, :1]),
}
ADDED["in half precision"] = BESIDE.pop("in half precision")  # of which it takes a part


@pytest.mark.nightly
@pytest.mark.parametrize("read", BESIDE | ADDED)
def test_a_correction_beside_its_matrix_is_what_is_added_to_it(read):
    def loss(a, b, *, made):
        return jnp.sum(jnp.square(made(lambda a, b: (BESIDE | ADDED)[read](lambda: low_rank_sum(W, a, b)))(a, b)))

    got, want = (
        jax.value_and_grad(lambda a, b, m=m: loss(a, b, made=m).astype("float32"), (0, 1))(A, B)
        for m in (separate_low_rank, lambda function: function)
    )
    rough = 3e-2 if "half" in read else 1e-5
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=rough, atol=rough * float(jnp.abs(other).max()))
    assert ("low_rank_sum" in str(jax.make_jaxpr(lambda a: loss(a, B, made=separate_low_rank))(A))) == (read in ADDED)


def traffic(layout, model, chain):
    """Returns bytes of reduced gradients and FLOP of a device, as compiled for GPUs that are not there."""
    composed = jp.compose(model, layout, jp.target_devices("h100:1x8"))
    made = jp.inspect(jp.train_step(composed, token_loss, chain), next(batches(1)))
    kinds = ("all-reduce", "reduce-scatter")
    return sum(entry.step_payload for entry in made.ledger if entry.kind in kinds and entry.step_payload > 4096)


@absent
@pytest.mark.nightly
def test_on_gpus_only_the_gradients_of_adapters_travel():
    def model(rngs):
        return Staged(rngs, layers=2, dim=256, hidden=512, vocab=256, tied=False)

    tuned = jp.add_lora(model, rank=4, paths=["blocks/*"])
    sizes = 4 * 2 * 2 * 4 * (256 + 512)  # float32, layers, matrices, rank, and both of their sides
    assert traffic(jp.Parallel(data=8), tuned, ONLY) == pytest.approx(sizes, rel=0.02)
    assert traffic(jp.Parallel(data=8), model, ADAM) >= 4 * (2 * 2 * 256 * 512 + 2 * 256 * 256)


@FEW
@pytest.mark.nightly
def test_adapters_of_a_stack_are_trained_in_a_pipeline_as_on_one_device():
    model = jp.add_lora(Staged, rank=2, paths=["blocks/*"])
    runs = [
        train(model, layout, devices, chain=ONLY, steps=2)
        for layout, devices in ((jp.Parallel(pipe=4, data=2), None), (jp.Parallel(), jax.devices()[:1]))
    ]
    (got, state, _), (want, expected, _) = runs
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays(state.params, expected.params)


@FEW
@pytest.mark.nightly
def test_adapters_are_trained_in_half_precision_in_stage_2():
    model = jp.add_lora(models()["annotated"], rank=2, paths=["blocks/*"])
    losses, state, step = train(model, jp.Parallel(fsdp=8, zero=2), chain=ONLY, steps=3, precision="bf16")
    want, expected, _ = train(model, jp.Parallel(), jax.devices()[:1], chain=ONLY, steps=3)
    np.testing.assert_allclose(losses, want, rtol=2e-2)
    assert base(state.params) == base(jp.init_state(step.layout, ONLY, seed=1).params)
    assert_same_arrays(state.params["adapters"], expected.params["adapters"], 5e-2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(
            {"rank": 4, "paths": ["block/*"]},
            ("'block/*' matches nothing", "did you mean 'blocks'"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"rank": 4, "paths": ["blocks/up/bias"]},
            ("'blocks/up/bias' matches nothing", "at least one matrix"),
            marks=pytest.mark.slow,
        ),
        ({"rank": 4, "paths": []}, ("train.adapters.rank = 4 with paths = []",)),
        ({"rank": 4, "paths": "blocks"}, ("train.adapters.paths = 'blocks'", "a list of text")),
        pytest.param(
            {"rank": -1, "paths": ["blocks"]}, ("train.adapters.rank = -1", "at least 0"), marks=pytest.mark.slow
        ),
        pytest.param({"ranks": 4}, ("Adapters(ranks=4)", "did you mean 'rank'"), marks=pytest.mark.slow),
        pytest.param(
            {"rank": 4, "paths": ["blocks"], "also": ["blocks"]},
            ("has an adapter and is trained itself",),
            marks=pytest.mark.slow,
        ),
        ({"rank": 4, "paths": ["blocks"], "also": ["hed"]}, ("train.adapters.also: 'hed' matches nothing",)),
    ],
)
def test_adapters_that_make_no_sense_are_refused(given, said):
    with pytest.raises(JaxparError) as caught:
        jp.add_lora(models()["annotated"], **given)
    assert not [word for word in said if word not in str(caught.value)], str(caught.value)


def test_a_model_has_adapters_once():
    with pytest.raises(JaxparError, match="has adapters once"):
        jp.add_lora(jp.add_lora(models()["annotated"], rank=2, paths=["blocks"]), rank=2, paths=["embed"])


def test_freezing_keeps_bits_and_refuses_what_matches_nothing():
    params = {"embed": {"table": jnp.array([-0.0, 1.0])}, "head": jnp.ones(2)}
    chain = jp.freeze(optax.adamw(0.1, weight_decay=0.1), ["embed"])
    state = chain.init(params)
    updates, _ = chain.update(jax.tree.map(jnp.ones_like, params), state, params)
    after = optax.apply_updates(params, updates)
    assert bits(after)["embed/table"] == bits(params)["embed/table"]
    assert bits(after)["head"] != bits(params)["head"]
    assert not [path for path in leaves_by_path(state) if "embed" in path]
    for patterns, but, said in (
        (["embd/*"], [], "did you mean 'embed'"),
        (["embed/tabel"], [], "did you mean 'embed/table'"),
        (["*"], [], "freezes all 2 parameters"),
        (["*"], ["hed"], "freeze, but: 'hed' matches nothing"),
    ):
        with pytest.raises(JaxparError, match="freeze") as caught:
            jp.freeze(optax.sgd(0.1), patterns, but=but).init(params)
        assert said in str(caught.value)


def test_linen_reads_adapters_where_it_reads_their_matrices():
    model = jp.add_lora(
        jp.from_linen(Linen(), jax.ShapeDtypeStruct((2, SEQ), jnp.int32)), rank=2, paths=["blocks", "logits"]
    )
    assert {path.split("/")[-2] for path in model.adapters} == {"up", "down", "logits"}
    assert [model.leaves[f"adapters/blocks/up/kernel/{part}"].shape for part in ("first", "second")] == [
        (2, 16, 2), (2, 2, 32),
    ]  # fmt: skip
