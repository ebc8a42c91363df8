"""Gradients that travel as products of thin matrices: what they mean, what travels, what is refused."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import some
from test_compressed_gradients import COUNTING, trained
from test_seams_exchange import CHAIN, asked, batch, composed, loss, over_data, saved
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.exchange.low_rank_matrices import Matrix, matrix
from jaxpar.mesh.collective import ShardShape
from jaxpar.parallel.layout import replica_messages

ALONE, WHOLE, EVERY = {"data": 4}, {"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}


def power(rank, **settings):
    return jp.Exchange("powersgd", rank=rank, smallest=64, **settings)


def factors(rank, **settings):
    return jp.Exchange("factors", rank=rank, smallest=64, **settings)


@partial(jax.jit, static_argnums=0)
def every(exchange, given, last):
    one = lambda x: exchange.low_rank_mean({"w": x[None]}, {"w": last[None]})  # noqa: E731
    return jax.vmap(one, axis_name="data")(given)


def agreed(exchange, given, last):
    """What replicas [replica, rows, columns] make of it: their mean, and what each lost."""
    mean, missed = every(exchange, given, last)
    np.testing.assert_array_equal(mean["w"][0], mean["w"][-1])
    return mean["w"][0, 0], missed["w"][:, 0]


def gradients(seed=0, shape=(4, 24, 16)):
    """Matrices whose singular values fall, so that few columns say most."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=shape[1:]) * 0.5 ** np.arange(shape[2])
    return jnp.asarray(common + 0.01 * rng.normal(size=shape), jnp.float32)


def test_a_gradient_is_cut_where_it_is_most_square():
    assert matrix(ShardShape((16, 32), "float32")) == Matrix(1, 16, 32)
    assert matrix(ShardShape((3, 3, 64, 128), "float32")) == Matrix(1, 576, 128)
    assert matrix(ShardShape((12, 512, 8, 64), "float32", layers=True)) == Matrix(12, 512, 512)
    assert matrix(ShardShape((12, 512), "float32", layers=True)) is None
    assert matrix(ShardShape((512,), "float32")) is None


@pytest.mark.nightly
def test_at_full_rank_nothing_is_lost():
    for shape in ((4, 24, 16), (4, 16, 24)):
        given = gradients(shape=shape) if shape[1] > shape[2] else gradients().swapaxes(1, 2)
        for last in (jnp.zeros(shape[1:]), given[0].at[3:].set(0)):  # also from a start that has few rows
            mean, missed = agreed(power(16), given, last)
            np.testing.assert_allclose(mean, given.mean(0), atol=1e-5)
            np.testing.assert_allclose(missed.mean(0), 0, atol=1e-5)


def test_what_is_sent_and_what_is_lost_is_all_there_was():
    given = gradients()
    mean, missed = agreed(power(2), given, jnp.zeros((24, 16)))
    np.testing.assert_allclose(mean + missed.mean(0), given.mean(0), atol=1e-5)
    assert np.linalg.matrix_rank(np.asarray(mean), tol=1e-4) == 2


@pytest.mark.slow
def test_a_warm_start_comes_to_the_best_of_its_rank():
    """Of equal gradients the power method finds the largest singular values; drawn anew each time it does not."""
    given = gradients()
    u, s, v = np.linalg.svd(given.mean(0))
    best = np.linalg.norm((u[:, 2:16] * s[2:]) @ v[2:])
    last = jnp.zeros((24, 16))
    errors = []
    for _ in range(8):
        last, _ = agreed(power(2), given, last)
        errors.append(float(jnp.linalg.norm(last - given.mean(0))) / best)
    assert errors[0] > 1.05
    assert errors[-1] == pytest.approx(1, abs=1e-3)


@pytest.mark.nightly
def test_factors_of_few_examples_are_the_gradient():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 3, 24)), rng.normal(size=(4, 3, 16))
    given = jnp.asarray(np.einsum("rbm,rbn->rmn", x, y), jnp.float32)
    mean, missed = agreed(factors(3), given, jnp.zeros((24, 16)))
    np.testing.assert_allclose(mean, given.mean(0), atol=1e-4)
    np.testing.assert_allclose(missed, 0, atol=1e-4)
    mean, missed = agreed(factors(2), given, jnp.zeros((24, 16)))
    np.testing.assert_allclose(mean + missed.mean(0), given.mean(0), atol=1e-5)
    assert np.abs(missed).max() > 0.1


def test_the_published_example_of_factors():
    """VGG's fc6 of 32 examples on each of 8 devices: 27 times fewer numbers than a ring all-reduce sends."""
    parts = {"fc6": ShardShape((25088, 4096), jnp.float32, total_size=25088 * 4096)}
    sent = [each.collective for each in jp.Exchange("factors", rank=32).traffic(parts, 8)]
    numbers = sum(each.step_wire for each in sent) / 4
    assert numbers == 7 * 32 * (25088 + 4096)
    whole = sum(each.collective.step_wire for each in jp.Exchange("all_reduce").traffic(parts, 8)) / 4
    assert round(numbers / 1e6, 1) == 6.5
    assert round(whole / 1e6) == 180
    assert int(whole / numbers) == 27


# steps


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("exchange", "sizes"),
    [
        pytest.param(power(16), ALONE, marks=pytest.mark.full, id="powersgd"),
        pytest.param(factors(4), ALONE, id="factors"),
        pytest.param(power(8), EVERY, marks=pytest.mark.full, id="powersgd of parts"),
    ],
)
def test_what_loses_nothing_trains_as_an_all_reduce(exchange, sizes):
    _, expected = trained(jp.Exchange("all_reduce"), 3, sizes=sizes)
    _, losses = trained(exchange, 3, sizes=sizes)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(WHOLE, marks=pytest.mark.slow),
        pytest.param({"data": 4, "fsdp": 2, "zero": 1}, marks=pytest.mark.full),
        pytest.param(EVERY, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_all_that_was_sent_and_all_that_is_remembered_is_all_there_was(sizes):
    true, _ = trained(jp.Exchange("all_reduce"), 5, sizes=sizes, optimizer=COUNTING)
    sent, _ = trained(power(2), 5, sizes=sizes, optimizer=COUNTING)
    for path in ("up", "down"):
        lost = np.asarray(sent.exchange["lost"][f"{path}/kernel"], np.float64)
        got, want = (np.asarray(state.optimizer[path]["kernel"], np.float64) for state in (sent, true))
        assert np.abs(got - want).max() > 0.01 * np.abs(want).max()
        np.testing.assert_allclose(got + lost.mean(0), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.nightly
def test_a_run_goes_on_from_its_warm_start(tmp_path):
    state, _ = trained(power(2), 3)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(state.exchange))
    with saved(tmp_path, state, 3) as store:
        restored, _ = store.restore(jp.train_step(composed(WHOLE, power(2)), loss, CHAIN).abstract())
        assert_same_arrays(restored, state, 0)
        assert trained(power(2), 2, state=restored, first=3)[1] == trained(power(2), 5)[1][3:]


# what travels

SENT = list(itertools.product([power(2), factors(2)], [WHOLE, EVERY]))


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "sizes"), some(SENT, [], [SENT[2]]), ids=str)
def test_products_travel_as_said_and_gradients_do_not(exchange, sizes):
    layout = composed(sizes, exchange, jp.target_devices("h100:1x8"))
    shapes = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in batch(0).items()}
    found = over_data(jp.inspect(jp.train_step(layout, loss, CHAIN), shapes))
    payload = lambda entries, kind: sum(each.step_payload for each in entries if each.kind == kind)  # noqa: E731
    said = [each.collective for each in replica_messages(layout)]
    assert {each.dtype for each in found} == {"f32"}
    for kind in ("all-gather", "all-reduce"):
        assert payload(said, kind) <= payload(found, kind) <= payload(said, kind) + 64  # and the sums of the loss
    assert "compressed: down/kernel, up/kernel; whole: down/bias, up/bias" in layout.explain()


# what is refused


@pytest.mark.parametrize(
    ("exchange", "said"),
    [
        (power(17), "rank = 17 and down/kernel, of which a device has a matrix of 32 x 16"),
        (power(2, whole=("*",)), ") compresses nothing: the largest parameter has 512 elements"),
        (factors(12), ") compresses nothing between 4 replicas"),
    ],
)
def test_a_rank_that_no_matrix_has_is_refused(exchange, said):
    with pytest.raises(JaxparError) as caught:
        composed(ALONE, exchange)
    assert said in str(caught.value)


def test_a_plan_which_knows_no_shapes_does_not_price_products():
    with pytest.raises(JaxparError, match="a plan with exchange powersgd"):
        asked("parallel.exchange.name=powersgd").legal()
