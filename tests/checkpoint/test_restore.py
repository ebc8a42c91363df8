"""A checkpoint of one layout is restored under any other, and the next losses are those of an undisturbed run.

Marked full: each row of tests/contracts/layout_table.py is restored under one other layout, and back.
"""

import functools
import itertools
import math

import jax
import numpy as np
import pytest
from tiny import batches, optimizer

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store

pytestmark = pytest.mark.xdist_group("restore")  # one worker, so that each layout is compiled once

SETTINGS = jp.DecoderConfig(vocab=32, seq=8, layers=4, dim=16, heads=4, hidden=32, tied=True)
LAYOUTS = {
    "one device": {},
    "data 8": {"data": 8},
    "zero 1": {"fsdp": 8, "zero": 1},
    "zero 2, four devices": {"fsdp": 4, "zero": 2},
    "HSDP": {"data": 2, "fsdp": 4},
    "tensor, context": {"data": 2, "context": 2, "tensor": 2},
    "1f1b, zero 1": {"pipe": 2, "fsdp": 2, "tensor": 2, "zero": 1, "pipeline": {"schedule": "1f1b"}},
    "interleaved, zero 3": {"pipe": 2, "fsdp": 2, "tensor": 2, "pipeline": {"schedule": "interleaved", "chunks": 2}},
    "zb_v, four devices": {"pipe": 2, "data": 2, "pipeline": {"schedule": "zb_v"}},
    "uneven": {"pipe": 2, "data": 4, "pipeline": {"layers": (3, 1)}},
}
ALL = list(itertools.product(LAYOUTS, LAYOUTS))


@functools.cache
def step_of(name):
    settings = dict(LAYOUTS[name])
    if "pipeline" in settings:
        settings["pipeline"] = jp.Pipeline(microbatches=4, **settings["pipeline"])
    count = math.prod(size for axis, size in settings.items() if axis not in ("zero", "pipeline"))
    layout = jp.compose(functools.partial(jp.Decoder, SETTINGS), jp.Parallel(**settings), jax.devices()[:count])
    return jp.train_step(layout, jp.next_token_loss, OPTIMIZER)


OPTIMIZER = optimizer()
BATCHES = list(batches(4))


@functools.cache
def initial():
    alone = jp.compose(functools.partial(jp.Decoder, SETTINGS), jp.Parallel(), jax.devices()[:1])
    return jax.device_get(jp.init_state(alone, OPTIMIZER, seed=1))


def go_on(name, state, until):
    losses = []
    for index in range(int(state.step), until):
        state, metrics = step_of(name)(state, {k: v for k, v in BATCHES[index].items() if k != "mask"})
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout to (store with a checkpoint of step 2, losses of steps 3 and 4 without a stop); each made once."""
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def made(name):
        store = Store(folder / name.replace(" ", "_"), Checkpoints())
        _, state = go_on(name, jax.device_put(initial(), step_of(name).shardings), 2)
        store.save(2, state, {})
        store.finish()
        return store, go_on(name, state, 4)[0]

    return made


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [pytest.param(*pair, id=" to ".join(pair)) for pair in ALL])
def test_every_layout_goes_on_under_every_layout(before, after, saved):
    store, want = saved(before)
    state, step = store.restore(step_of(after).abstract())
    assert step == int(state.step) == 2
    got, _ = go_on(after, state, 4)
    if before == after:
        assert got == want
    else:
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=0)


def test_there_are_more_than_forty_pairs():
    assert len(ALL) >= 40
