"""Exchanges beside every form of context parallelism: equal to their definition, or refused when they are declared."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from pairwise import some

import jaxpar as jp
from jaxpar.exchange.table import EXCHANGES
from jaxpar.job.check import check
from jaxpar.job.file.parse import loads
from jaxpar.job.plan import question

SETTINGS = jp.DecoderConfig(vocab=64, seq=32, layers=1, dim=32, heads=4)
JOB = """
mesh.simulate = 8
parallel = {{ data = 2, context = 4, context_by = "{by}"{more} }}
model = {{ layers = 1, dim = 32, heads = 4, vocab = 256, seq = 32 }}
data = {{ seq = 32 }}
train = {{ global_batch = 4, steps = 3 }}
metrics = {{ noise_every = {every} }}
"""


@pytest.mark.parametrize("by", ["ring", "ulysses", "auto"])
@pytest.mark.parametrize("name", some(sorted(EXCHANGES), ["all_reduce"]))
def test_an_exchange_says_beside_which_form_it_does_not_step(name, by):
    exchange = jp.Exchange(name)
    if not exchange.per_replica:
        return  # XLA sums its gradients: as tested with every form
    with pytest.raises(jp.JaxparError, match=r"context_by='gather'"):
        jp.compose(partial(jp.Decoder, SETTINGS), jp.Parallel(data=2, context=4, context_by=by, exchange=exchange), 8)


@pytest.mark.full
def test_diloco_beside_gathered_keys_is_diloco_without_context():
    def losses(**sizes):
        layout = jp.compose(
            lambda rngs: jp.Decoder(SETTINGS, rngs=rngs),
            jp.Parallel(**sizes, exchange=exchange),
            jax.devices()[: np.prod([*sizes.values()])],
        )
        chain = optax.adam(1e-3)
        state, step = jp.init_state(layout, chain), jp.train_step(layout, jp.next_token_loss, chain)
        tokens = np.random.default_rng(0).integers(0, 64, (4, 33)).astype(np.int32)
        found = []
        for _ in range(5):
            state, metrics = step(state, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
            found.append(float(metrics["loss"]))
        return found

    exchange = jp.Exchange("diloco", every=2)
    np.testing.assert_allclose(losses(data=2, context=4), losses(data=2), rtol=1e-5)


@pytest.mark.parametrize("by", ["ring", "ulysses"])
def test_check_finds_it_and_noise_too(by):
    for more, every, said in ((', exchange = { name = "diloco" }', 0, "exchange"), ("", 2, "noise of gradients")):
        (problem,) = check(loads(JOB.format(by=by, more=more, every=every)))
        assert said in problem.got
        assert "gather" in problem.fix


def test_a_plan_proposes_none_that_is_refused():
    job = loads(JOB.format(by="gather", more=', exchange = { name = "diloco" }', every=0), ["train.precision=bf16"])
    given = dict.fromkeys(("inside", "between", "memory", "attention"))
    found = question(job, devices=8, chip="h100", per_node=None, options=given).legal()
    assert {*np.broadcast_to(found.context_by, np.shape(found.data))[found.context > 1]} <= {"gather"}
