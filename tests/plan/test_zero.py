"""ZeRO's table is the published one, says what it assumes, and jaxpar's is what jaxpar keeps."""

import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.optim.optax_chain import build
from jaxpar.optim.optimizer import Optimizer
from jaxpar.parallel.state_specs import gradient_specs
from jaxpar.plan.model import state_bytes

MODEL = jp.DecoderConfig(vocab=64, layers=2, dim=32, heads=4, hidden=64, seq=8)


@pytest.mark.parametrize(
    ("parameters", "shards", "gigabytes", "half_a_digit"),
    [
        (7.5e9, 64, (120, 31.4, 16.6, 1.88), (0.5, 0.05, 0.05, 0.0051)),
        (1e12, 1024, (16_000, 4_012, 2_014, 15.6), (0.5, 0.5, 0.5, 0.05)),
    ],
)
def test_the_published_table(parameters, shards, gigabytes, half_a_digit):
    for one, published, off in zip(
        state_bytes.table(parameters, shards=shards, recipe=state_bytes.PAPER), gigabytes, half_a_digit, strict=True
    ):
        assert one.total / 1e9 == pytest.approx(published, abs=off)


def test_every_number_says_which_bytes_it_assumes():
    said = [one.formula for one in state_bytes.table(1.0, shards=64, recipe=state_bytes.PAPER)]
    assert said == ["2 + 2 + 12", "2 + 2 + 12 / 64", "2 + (2 + 12) / 64", "(2 + 2 + 12) / 64"]
    said = [one.formula for one in state_bytes.table(1.0, shards=64)]  # jaxpar keeps no parameter whole between steps
    assert said == ["4 + 4 + 8", "4 + (4 + 8) / 64", "(4 + 4 + 8) / 64", "(4 + 4 + 8) / 64"]
    assert "18 bytes per parameter = parameters 2 + gradients 4 + optimizer 12" in str(state_bytes.MEGATRON)
    assert "16 bytes per parameter = parameters 4 + gradients 4 + optimizer 8" in str(state_bytes.JAXPAR)


@given(parameters=st.floats(0, 1e15), shards=st.integers(1, 10_000), name=st.sampled_from(sorted(state_bytes.RECIPES)))
def test_the_arithmetic_that_is_shown_is_the_one_that_is_done(parameters, shards, name):
    found = state_bytes.table(parameters, shards=shards, recipe=state_bytes.RECIPES[name])
    for one in found:
        assert one.total == pytest.approx(parameters * eval(one.formula))
        assert one.total == pytest.approx(one.between_steps + one.gradients)
    totals = [one.total for one in found]
    assert totals == sorted(totals, reverse=True)
    assert totals[3] == pytest.approx(totals[0] / shards)


def test_the_distributed_optimizer_of_megatron_is_six_bytes_and_a_share_of_twelve():
    assert state_bytes.state(1.0, stage=1, shards=8, recipe=state_bytes.MEGATRON).total == 6 + 12 / 8


def bytes_of(tree, part=lambda leaf: leaf.ndim > 0):
    """Bytes of one device, of all arrays but counters."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if part(leaf)
    )


def composed(stage, optimizer, **numerics):
    layout = jp.compose(lambda rngs: jp.Decoder(MODEL, rngs=rngs), jp.Parallel(fsdp=8, zero=stage))
    step = jp.train_step(layout, jp.next_token_loss, optimizer, **numerics)
    return layout, step.abstract()


@pytest.mark.parametrize("stage", state_bytes.STAGES)
def test_jaxpar_keeps_the_bytes_that_its_recipe_says(stage):
    layout, state = composed(stage, build(Optimizer(), 10), precision="bf16")
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    found = state_bytes.state(count, stage=stage, shards=8)
    assert bytes_of(state.params) == found.parameters
    assert bytes_of(state.optimizer) == found.optimizer
    gradients = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout.sharding(spec)),
        state.params,
        gradient_specs(layout),
    )
    assert bytes_of(gradients) == found.gradients


@pytest.mark.parametrize("name", ["adam", "sgd", "lion", "lamb", "lars"])
def test_the_state_of_each_optimizer_is_what_its_recipe_says(name):
    _, state = composed(1, build(Optimizer(name=name), 10))
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert (
        bytes_of(state.optimizer)
        == state_bytes.state(count, stage=1, shards=8, recipe=state_bytes.recipe(name)).optimizer
    )


def test_sgd_without_momentum_keeps_nothing():
    _, state = composed(1, build(Optimizer(name="sgd", beta1=0.0), 10))
    assert bytes_of(state.optimizer) == state_bytes.recipe("sgd", momentum=False).optimizer == 0


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_a_state_that_depends_on_shapes_has_no_bytes_per_parameter(name):
    _, state = composed(0, build(Optimizer(name=name), 10))
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert bytes_of(state.optimizer) / count not in (0, 4, 8)
    with pytest.raises(JaxparError, match="depends on the shapes"):
        state_bytes.recipe(name)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: state_bytes.state(1e9, stage=4, shards=8), "ZeRO stage 4"),
        (lambda: state_bytes.state(1e9, stage=True, shards=8), "ZeRO stage True"),
        (lambda: state_bytes.state(1e9, stage=1, shards=0), "0 shards"),
        (lambda: state_bytes.state(-1, stage=1, shards=8), "-1 parameters"),
        (lambda: state_bytes.state(math.nan, stage=1, shards=8), "nan parameters"),
        (lambda: state_bytes.recipe("adamww"), "did you mean 'adamw'"),
        (lambda: state_bytes.Recipe(name="", parameters=-2, gradients=0, optimizer=0, dtypes=""), "parameters = -2"),
    ],
)
def test_what_is_no_state_is_refused(call, said):
    with pytest.raises(JaxparError, match=said) as caught:
        call()
    assert len(caught.value.problems) == 1
