"""zero=2 in a pipeline adds up shards of gradients, and trains as one device does.

What it saves and sends is read off compiled programs, in pipeline/test_compiled.py.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from tiny import Staged, assert_same_arrays, on_one_device, train

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import JAXPAR
from jaxpar.plan.memory import memory
from jaxpar.plan.model.layer_bytes import device_layer_parameters, stage_parameters
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import JAXPAR as BYTES
from jaxpar.plan.techniques import sharding

MODEL = partial(Staged, layers=4, tied=False)
MESHES = {
    "data": {"pipe": 2, "data": 2, "fsdp": 2},
    "tensor": {"pipe": 2, "fsdp": 2, "tensor": 2},
}


@cache
def alone():
    return on_one_device(MODEL, steps=3)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        pytest.param("tensor", jp.Pipeline(schedule="1f1b_phased", keep="residuals"), marks=pytest.mark.full),
        ("data", jp.Pipeline(schedule="zb_h1")),
        pytest.param("data", jp.Pipeline(layers=(3, 1)), marks=pytest.mark.full),
    ],
    ids=["a phased table and tensor", "a mixed table and replicas", "uneven stages"],
)
def test_zero_2_in_a_pipeline_equals_one_device(mesh, pipeline):
    losses, state, step = train(MODEL, jp.Parallel(zero=2, **MESHES[mesh], pipeline=pipeline), steps=3)
    assert step.gradients.shardings.shards.dims  # there is something to cut
    np.testing.assert_allclose(losses, alone()[0], rtol=1e-5)
    assert_same_arrays(state.params, alone()[1].params)


@pytest.mark.full
def test_zero_2_cuts_a_bias_that_tensor_splits_too():
    """Both axes on one dim: which of them counts first is a matter of order, and a wrong one permutes the gradient."""
    shape = {"vocab": 32, "seq": 8, "layers": 2, "dim": 16, "heads": 4, "hidden": 32}
    model, given = (
        partial(jp.Decoder, jp.DecoderConfig(**shape, use_bias=True)),
        {"loss": jp.next_token_loss, "steps": 2},
    )
    losses, state, step = train(model, jp.Parallel(zero=2, **MESHES["tensor"]), **given)
    assert step.layout.placements["blocks/mlp/up_bias"].sharded[1] == ("tensor", "fsdp")
    want, expected, _ = on_one_device(model, **given)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_same_arrays(state.params, expected.params)


@pytest.mark.nightly
def test_zero_2_with_pieces_of_sequences_equals_one_device():
    settings = jp.DecoderConfig(vocab=32, seq=8, layers=2, dim=16, heads=4, hidden=32)
    given = {"loss": jp.next_token_loss, "steps": 2}
    parallel = jp.Parallel(pipe=2, fsdp=2, context=2, zero=2)
    losses, state, _ = train(partial(jp.Decoder, settings), parallel, **given)
    want, expected, _ = on_one_device(partial(jp.Decoder, settings), **given)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_same_arrays(state.params, expected.params)


def test_zero_2_with_a_spread_head_is_refused_once():
    parallel = jp.Parallel(pipe=2, fsdp=4, zero=2, pipeline=jp.Pipeline(head="spread"))
    with pytest.raises(JaxparError, match='head="spread" with fsdp=4, zero=2') as error:
        jp.compose(MODEL, parallel, jax.devices())
    assert len(error.value.problems) == 1


def test_the_planner_counts_shards_and_what_they_cost_to_make():
    """Shards of fewer bytes; a scatter in each of the M + P - 1 ticks that make them.

    Where ticks mix ops, the gradients of a tick are whole until they are scattered; else they are a layer at a time, as
    they are in stage 1 too.
    """
    shape = Shape(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, gated=True, vocab=128256, seq=8192)
    one = Candidate(pipe=4, fsdp=8, zero=1, schedule="1f1b_phased", microbatches=8, remat="full")
    two = replace(one, zero=2)
    count = stage_parameters(shape, one, "last", spmd=True)
    before, after = memory(shape, one, JAXPAR), memory(shape, two, JAXPAR)
    assert before.gradients - after.gradients == pytest.approx(BYTES.gradients * count * 7 / 8)
    assert after.working == before.working
    mixed = [memory(shape, replace(each, schedule="1f1b"), JAXPAR).working for each in (one, two)]
    assert mixed[1] - mixed[0] == pytest.approx(BYTES.gradients * 8 * device_layer_parameters(shape, 1))
    (_, once), (each, after) = (sharding.fsdp_seconds(count, c, HARDWARE["h100"], JAXPAR, layers=8) for c in (one, two))
    assert 8 * each == pytest.approx((8 + 4 - 1) * (once - after))
