"""Dropless mixtures: buffers that experts share, the sums of plain loops and of all tokens, one device's training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts.mixtures import EXPERTS, K, Model, by_hand, gated
from experts.test_decoder_of_experts import OPTIMIZER, ROWS, assert_same_training, batch_of, decoder, trained
from experts.test_mixture import assert_trains_as_on_one_device, example, in_an_implementation
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import jaxpar as jp
from jaxpar.hlo.flop import forward_flop
from jaxpar.models.blocks.dispatch import assign_slots
from jaxpar.models.settings.experts import ExpertsConfig
from jaxpar.parallel.techniques.expert_slots import in_blocks

SPILL = {"count": 8, "per_token": 2, "hidden": 16, "dispatch": "dropless", "imbalance": 1.0, "overflow": "spill"}
REFUSE = SPILL | {"overflow": "refuse"}


def to_one_expert(choices):
    """All tokens choose expert 5 first."""
    return np.stack([np.r_[5, row[row != 5]][: len(row)] for row in choices.reshape(-1, choices.shape[-1])]).reshape(
        choices.shape
    )


@pytest.mark.spread(3)
@pytest.mark.nightly
@pytest.mark.parametrize("run", [jp.mixture, in_an_implementation], ids=["loop", "buffers"])
@pytest.mark.parametrize(("imbalance", "buffers", "spare"), [(1.0, 4, 0), (1.0, 2, 3), (1.25, 8, 2)])
def test_sums_and_counts_are_those_of_plain_loops(imbalance, buffers, spare, run):
    with jax.enable_x64(True):
        params, x, choices, weights = example(0, spare=spare)
        choices[0] = to_one_expert(choices[0])
        y, load = run(
            gated, jax.tree.map(jnp.asarray, params), x, choices, jnp.asarray(weights), imbalance=imbalance,
            buffers=buffers,
        )  # fmt: skip
        slots = int(np.ceil(imbalance * K * x.shape[1] / buffers))
        for row in range(len(x)):
            expected, counts = by_hand(params, x[row], choices[row], weights[row], slots, EXPERTS // buffers)
            np.testing.assert_allclose(y[row], expected, rtol=1e-9, atol=1e-9)
            for name, count in counts.items():
                np.testing.assert_array_equal(getattr(load, name)[row], count, err_msg=name)


@pytest.mark.nightly
def test_a_large_bound_gives_the_sums_and_gradients_of_all_tokens_at_their_experts():
    with jax.enable_x64(True):
        params, x, choices, weights = example(1)
        choices[0] = to_one_expert(choices[0])
        target = np.random.default_rng(2).normal(size=x.shape)

        def total(run, **bound):
            def one(params, x, weights):
                y, load = run(gated, params, x, jnp.asarray(choices), weights, **bound)
                return jnp.sum(target * y), (y, load.kept)

            return jax.jit(jax.value_and_grad(one, (0, 1, 2), has_aux=True))(params, x, weights)

        expected = total(jp.mixture)
        for buffers in (1, 2, 4):
            ours = total(in_an_implementation, imbalance=float(buffers), buffers=buffers)
            for value, other in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
                np.testing.assert_allclose(value, other, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(place=arrays.arrays(np.int32, 12, elements=st.integers(0, 4)))
def test_blocks_compute_each_token_by_its_expert_for_any_load(place):
    params, tokens = jnp.array([2.0, 3.0, 5.0, 7.0]), jnp.arange(1.0, 13.0).reshape(1, 3, 4, 1)
    y = BLOCKS(params, tokens, jnp.asarray(place).reshape(1, 3, 4, 1))
    np.testing.assert_array_equal(y[0, ..., 0].ravel(), np.r_[params, 0][place] * np.arange(1, 13))


BLOCKS = jax.jit(lambda *arguments: in_blocks(lambda params, x: params * x, *arguments))


@pytest.mark.nightly
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), skew=st.floats(0, 5))
def test_buffers_of_as_many_slots_drop_no_more_than_those_of_single_experts(seed, skew):
    scores = np.random.default_rng(seed).gumbel(size=(16, 8)) + skew * np.arange(8) / 8
    choices = jnp.asarray(np.argsort(-scores, axis=-1)[:, :2].astype(np.int32))
    dropped = [
        int(assign_slots(choices, per_token=2, experts=8, capacity=4 * n, sharing=n).load.dropped.sum()) for n in (1, 4)
    ]
    assert dropped[1] <= dropped[0]


@pytest.mark.parametrize(("imbalance", "buffers"), [(1.0, 2), (1.5, 4), (2.0, 2)])
def test_experts_compute_five_quarters_of_the_slots_at_most(imbalance, buffers):
    params, x, choices, weights = example(0, rows=8, seq=64)

    def flop(**bound):
        return forward_flop(lambda *arguments: in_an_implementation(gated, *arguments, **bound), params, x, choices,
                            weights)  # fmt: skip

    capacity = flop(capacity=imbalance)
    assert capacity == imbalance * x.shape[0] * x.shape[1] * K * 3 * 2 * x.shape[2] * params["up"].shape[2]
    assert capacity < flop(imbalance=imbalance, buffers=buffers) <= 1.25 * capacity


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"expert": 4, "data": 2}, {"imbalance": 1.0, "spare": 2, "buffers": 4}),
        ({"expert": 2, "fsdp": 2, "tensor": 2}, {"imbalance": 1.1, "buffers": 2}),
        pytest.param({"expert": 8}, {"imbalance": 1.25, "spare": 2, "buffers": 8}, marks=pytest.mark.slow),
        pytest.param({"expert": 2, "context": 2, "data": 2}, {"imbalance": 1.0, "spare": 1}, marks=pytest.mark.slow),
        pytest.param({"expert": 2, "fsdp": 4, "zero": 2}, {"imbalance": 1.0, "buffers": 4}, marks=pytest.mark.slow),
        pytest.param({"expert": 4, "fsdp": 2, "zero": 1}, {"imbalance": 4.0, "buffers": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_a_dropless_mixture_trains_as_on_one_device(sizes, options):
    row = assert_trains_as_on_one_device(Model, sizes, options)
    assert row["sent"] == row["kept"] + row["spilled"] + row["dropped"]
    assert (row["kept"] < row["sent"]) == (options["imbalance"] < 4)


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [{"pipe": 2, "expert": 2, "fsdp": 2}, {"expert": 2, "tensor": 2, "data": 2}], ids=str)
def test_a_decoder_of_dropless_experts_trains_as_on_one_device(sizes):
    assert_same_training(SPILL | {"buffers": 2}, sizes)


@pytest.mark.nightly
def test_a_run_ends_where_choices_are_refused(tmp_path):
    layout = jp.compose(decoder(REFUSE), jp.Parallel(), jax.devices()[:1])
    step = jp.train_step(layout, jp.next_token_loss, OPTIMIZER)
    with pytest.raises(jp.JaxparError, match=r"the loss of step 1 is nan: experts refuse 0\.\d+ of the choices"):
        jp.fit(step, batch_of(), steps=2, batch=ROWS, run=tmp_path / "run", held_out=0)


@pytest.mark.nightly
def test_nothing_is_refused_within_the_bound():
    fits, _, _ = trained(REFUSE | {"imbalance": 4.0, "buffers": 4}, jp.Parallel(), jax.devices()[:1], steps=1)
    plain, _, _ = trained(SPILL | {"dispatch": "capacity", "capacity": 0.0}, jp.Parallel(), jax.devices()[:1], steps=1)
    assert fits[0].pop("refused") == plain[0].pop("dropped") == 0
    assert fits[0] == pytest.approx(plain[0], rel=1e-5)


@pytest.mark.parametrize(
    ("got", "fix", "options"),
    [
        ("imbalance=0.5, buffers=0 of 8 experts", "imbalance=1", {"imbalance": 0.5}),
        ("imbalance=2, buffers=3 of 8 experts", "buffers=", {"imbalance": 2, "buffers": 3}),
        ("imbalance=2, buffers=0, capacity=1.0 of 8", "imbalance=2", {"imbalance": 2, "capacity": 1.0}),
    ],
)
def test_bounds_that_no_buffers_can_have_are_refused(got, fix, options):
    params, *arrays = example(0)
    with pytest.raises(jp.JaxparError, match=got) as caught:
        jp.mixture(gated, params, *arrays, **options)
    assert fix in str(caught.value)


@pytest.mark.parametrize("wrong", [{"overflow": "drop"}, {"buffers": 3}], ids=str)
def test_settings_of_a_decoder_that_drops_or_whose_buffers_differ_are_refused(wrong):
    with pytest.raises(jp.JaxparError, match=r'experts\.dispatch = "dropless", overflow = ') as caught:
        ExpertsConfig(**SPILL | wrong)
    assert 'overflow = "spill"' in str(caught.value)


@pytest.mark.slow
def test_fewer_buffers_than_devices_are_refused():
    with pytest.raises(jp.JaxparError, match="expert=4 for experts that share 2 buffers") as caught:
        trained(SPILL | {"buffers": 2}, jp.Parallel(expert=4, data=2))
    assert "buffers=4" in str(caught.value)
