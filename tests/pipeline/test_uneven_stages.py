"""Stages that differ in their layers: one scan over those of the fullest, in no more memory than equal ones take."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_residuals import absent, compiled

import jaxpar as jp
from jaxpar.jaxprs.shorter_scan import masked_layers
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import JAXPAR_FUSED as JAXPAR
from jaxpar.plan.machine.software import TORCHTITAN
from jaxpar.plan.memory import memory
from jaxpar.plan.model.layer_bytes import device_layer_parameters
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model_protocol import Transformer
from jaxpar.plan.search import Question

DEPTH, DIM = 4, 3
PARAMS = jnp.asarray(np.random.default_rng(0).normal(size=(DEPTH, DIM, DIM)).astype(np.float32))
X = jnp.ones((2, DIM))


def layer(x, w):
    return jnp.tanh(x @ w) + x


def scanned(params, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0]


def recomputed(params, x):
    return jax.checkpoint(jax.jit(scanned))(params, x * 2) / 2


def summed(params, x):
    """A stack of results is read: of layers that a stage has not, too."""
    return jax.lax.scan(lambda x, w: (layer(x, w), x.sum()), x, params)[1].sum() + x


def one_by_one(params, x):
    for w in params:
        x = layer(x, w)
    return x


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("layers", [scanned, pytest.param(recomputed, marks=pytest.mark.slow)])
def test_layers_past_a_count_change_nothing_and_have_no_gradient(layers):
    run = masked_layers(layers, PARAMS, X)
    assert run is not None
    for count in (1, 3, DEPTH):
        value = lambda params, count=count: jnp.sum(run(jnp.int32(count), params, X) ** 2)  # noqa: E731
        want, gradient = jax.value_and_grad(lambda params: jnp.sum(layers(params, X) ** 2))(PARAMS[:count])
        got, found = jax.value_and_grad(value)(PARAMS)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        np.testing.assert_allclose(found[:count], gradient, rtol=1e-5, atol=1e-6)
        assert (found[count:] == 0).all()


@pytest.mark.parametrize("layers", [summed, one_by_one])
def test_layers_that_are_more_than_a_scan_are_not_counted(layers):
    assert masked_layers(layers, PARAMS, X) is None


def test_stages_of_different_depth_sum_gradients_over_the_dims_of_equal_ones():
    """`pipe` is on a dim that `fsdp` does not take: else a tick scatters what it has to gather over `tensor` first."""
    settings = {"dim": 64, "heads": 4, "hidden": 128, "vocab": 32, "seq": 8}
    placed = []
    for layers, how in ((4, {}), (3, {"layers": (2, 1)})):
        parallel = jp.Parallel(pipe=2, fsdp=2, tensor=2, zero=2, pipeline=jp.Pipeline(microbatches=4, **how))
        layout = jp.compose(lambda rngs, n=layers: jp.Decoder(jp.DecoderConfig(layers=n, **settings), rngs=rngs),
                            parallel)  # fmt: skip
        fsdp = {path: [entry in ("fsdp", ("pipe", "fsdp")) for entry in place.sharded]
                for path, place in layout.placements.items() if path.startswith("blocks")}  # fmt: skip
        placed.append({path: dims.index(True) for path, dims in fsdp.items()})
    assert placed[0] == placed[1]


@pytest.mark.full
@absent
@pytest.mark.parametrize("zero", [2, 3])
def test_uneven_stages_for_h100s_take_no_more_temporary_memory_than_even_ones(zero):
    settings = {"dim": 1024, "heads": 8, "hidden": 4096, "vocab": 1024, "seq": 256}
    taken = []
    for layers, how in ((8, {}), (7, {"layers": (2, 2, 2, 1)})):
        pipeline = jp.Pipeline(microbatches=8, keep="residuals", head="last", **how)
        parallel = jp.Parallel(pipe=4, fsdp=2, tensor=2, sequence=True, zero=zero, pipeline=pipeline)
        program = compiled(jp.DecoderConfig(layers=layers, **settings), parallel, "h100:2x8", microbatches=8)
        taken.append(program.temporary)
    assert taken[1] <= 1.02 * taken[0]


def test_layers_that_every_stage_would_store_whole_are_refused_and_not_planned():
    settings = jp.DecoderConfig(layers=4, dim=1024, heads=4, hidden=2048, vocab=32, seq=8)
    how = jp.Pipeline(microbatches=3, layers=(2, 1, 1))
    with pytest.raises(jp.JaxparError, match="stays whole on all 3 devices of pipe") as error:
        jp.compose(lambda rngs: jp.Decoder(settings, rngs=rngs), jp.Parallel(pipe=3, pipeline=how), jax.devices()[:3])
    assert {problem.got.split()[0].split("/")[1] for problem in error.value.problems} == {"attention", "mlp"}
    asked = Question(
        model=Transformer(shape=Shape.from_settings(settings)),
        devices=12,
        rows=12,
        hardware=HARDWARE["h100"],
        software=JAXPAR,
    )
    assert set(np.unique(asked.legal().pipe)) == {1, 2, 4}
    everyone = replace(asked, software=TORCHTITAN)
    assert 3 in everyone.legal().pipe


@pytest.mark.parametrize("zero", [1, 3])
def test_a_plan_counts_places_of_the_fullest_stage_and_state_in_equal_parts(zero):
    """126 layers on 16 stages are as 128 on 16 but for the state: 12 bytes of a parameter, over pipe, tensor, fsdp."""
    layout = Candidate(pipe=16, fsdp=4, tensor=8, zero=zero, sequence=True, microbatches=32, schedule="1f1b_phased")
    shapes = [
        Shape(layers=n, dim=16384, heads=128, kv_heads=8, hidden=53248, vocab=128256, seq=8192, gated=True)
        for n in (126, 128)
    ]
    some, more = (memory(shape, layout, JAXPAR).total for shape in shapes)
    assert more - some == pytest.approx(12 * 2 / 16 / 4 * device_layer_parameters(shapes[0], 8))
