"""A run goes on with as many replicas as it had, to the bit; with another number only as it is told to."""

from functools import cache

import jax
import numpy as np
import pytest
from test_compressed_gradients import CODES
from test_seams_exchange import CHAIN, composed, loss, trained
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.errors import JaxparError

DILOCO = jp.Exchange("diloco", every=2)
FOUR, TWO = {"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 2}


def like(sizes, exchange):
    return jp.train_step(composed(sizes, exchange), loss, CHAIN).abstract()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns a function of an exchange to the folder of a checkpoint after three steps, and its state."""

    @cache
    def made(name, exchange):
        state, _ = trained(FOUR, 3, exchange=exchange)
        store = Store(tmp_path_factory.mktemp(name), Checkpoints())
        store.save(3, state, {})
        store.close()
        return store.folder, jax.device_get(state)

    return made


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("how", ["mean", pytest.param("broadcast", marks=pytest.mark.slow)])
def test_replicas_that_differ_go_on_as_their_mean_or_as_the_first(how, folders):
    folder, before = folders("diloco", DILOCO)
    said = []
    state, step = Store(folder, Checkpoints(replicas=how), say=said.append).restore(like(TWO, DILOCO))
    assert step == 3
    assert said == [
        f"step 3: 4 replicas go on as another number, all with the {dict(mean='mean of them').get(how, 'first')}"
    ]
    one = {"mean": lambda x: x.mean(0), "broadcast": lambda x: x[0]}[how]
    assert_same_arrays(state.params, jax.tree.map(lambda x: np.stack([one(x)] * 2), before.params), 1e-6)
    assert_same_arrays(state.exchange, before.exchange, 0)  # the anchor is everyone's
    moments = [x for x in jax.tree.leaves(before.optimizer) if x.ndim > 1]
    assert_same_arrays(
        [x for x in jax.tree.leaves(state.optimizer) if x.ndim > 1], [np.stack([one(x)] * 2) for x in moments], 1e-6
    )
    _, losses = trained(TWO, 2, exchange=DILOCO, state=state, first=3)
    assert np.isfinite(losses).all()


@pytest.mark.slow
def test_errors_that_replicas_remember_become_their_mean(folders):
    folder, before = folders("sign", CODES["sign"])
    state, _ = Store(folder, Checkpoints(replicas="mean"), say=lambda text: None).restore(like(TWO, CODES["sign"]))
    for path, lost in before.exchange["lost"].items():
        np.testing.assert_allclose(state.exchange["lost"][path], np.stack([lost.mean(0)] * 2), atol=1e-7)
    assert_same_arrays(state.params, before.params, 0)


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "exchange", [DILOCO, pytest.param(CODES["sign"], marks=pytest.mark.slow)], ids=["diloco", "sign"]
)
def test_without_a_word_another_number_of_replicas_is_refused(exchange, folders):
    folder, before = folders(exchange.name, exchange)
    with pytest.raises(JaxparError, match="the checkpoint is of 4 replicas, the job has 2") as caught:
        Store(folder, Checkpoints()).restore(like(TWO, exchange))
    assert 'checkpoint.replicas = "mean"' in caught.value.problems[0].fix
    for how in ("same", "mean"):  # the same number, whatever is said, to the bit
        state, _ = Store(folder, Checkpoints(replicas=how)).restore(like(FOUR, exchange))
        assert_same_arrays(state, before, 0)
