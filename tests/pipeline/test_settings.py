"""Settings of a pipeline that change where things are, and never what they are: one device is the judge."""

import functools

import jax
import numpy as np
import optax
import pytest
from pairwise import some
from tiny import assert_same_arrays, batches, train

import jaxpar as jp

MODELS = {
    "tied": jp.DecoderConfig(vocab=32, seq=8, layers=4, dim=16, heads=4, hidden=32, tied=True),
    "untied": jp.DecoderConfig(vocab=32, seq=8, layers=4, dim=16, heads=4, hidden=32),
    "seven layers": jp.DecoderConfig(vocab=32, seq=8, layers=7, dim=16, heads=4, hidden=32, dropout=0.1),
}
CASES = {
    "each layer gathered where it runs": (
        "tied", {"pipe": 2, "fsdp": 2, "tensor": 2}, {"gather": "tick"}),  # with jp.next_token_loss
    "gathered where it runs, HSDP, what the backward reads kept": (
        "untied", {"pipe": 2, "data": 2, "fsdp": 2}, {"gather": "tick", "keep": "residuals"}),
    "seven layers on four stages": (
        "seven layers", {"pipe": 4}, {"layers": (2, 2, 2, 1)}),
    "seven layers on 2 x 2, split backward": (
        "seven layers", {"pipe": 2, "tensor": 2}, {"layers": (5, 2), "schedule": "zb_h1"}),
    "the head spread, tied": (
        "tied", {"pipe": 2, "fsdp": 2, "tensor": 2}, {"head": "spread"}),
    "the head spread, HSDP": (
        "untied", {"pipe": 2, "data": 2, "fsdp": 2}, {"head": "spread"}),
    "the head spread, interleaved, sequence": (
        "untied", {"pipe": 2, "tensor": 2, "sequence": True}, {"head": "spread", "schedule": "interleaved_phased"}),
}  # fmt: skip


@functools.cache
def alone(model):
    losses, state, step = train(
        blueprint(model), jp.Parallel(), jax.devices()[:1], accumulate=4, loss=jp.next_token_loss
    )
    return losses, state, evaluated(step, state)


def blueprint(model):
    return functools.partial(jp.Decoder, MODELS[model])


def evaluated(step, state):
    total, count = step.evaluate(state, next(batches(1)))["loss"]
    return float(total / count)


@pytest.mark.spread(0)
@pytest.mark.parametrize("case", some(CASES, [], ["seven layers on 2 x 2, split backward"]))
def test_losses_parameters_and_evaluation_equal_one_device(case):
    model, sizes, settings = CASES[case]
    parallel = jp.Parallel(**sizes, pipeline=jp.Pipeline(**{"microbatches": 4, **settings}))
    devices = jax.devices()[: int(np.prod([size for size in sizes.values() if size is not True]))]
    want, reference, evaluation = alone(model)
    got, state, step = train(blueprint(model), parallel, devices, loss=jp.next_token_loss)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays(state.params, reference.params)
    np.testing.assert_allclose(evaluated(step, state), evaluation, rtol=1e-5)


REFUSED = {
    "gather tick without shards": ({"pipe": 2, "data": 4}, {"gather": "tick"}, "zero=3"),
    "a spread head in a mixed table": ({"pipe": 2, "data": 4}, {"head": "spread", "schedule": "1f1b"}, "1f1b_phased"),
    "a spread head without a flush": ({"pipe": 2, "data": 4}, {"head": "spread", "weights": "stash"}, "flush"),
    "layers that are not all": ({"pipe": 2, "data": 4}, {"layers": (2, 1)}, "2 numbers that sum to 4"),
    "layers of three stages on two": ({"pipe": 2, "data": 4}, {"layers": (2, 1, 1)}, "2 numbers"),
    "uneven and interleaved": ({"pipe": 2, "data": 4}, {"layers": (3, 1), "schedule": "interleaved"}, "one chunk"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_go_together_are_refused(case):
    sizes, settings, fix = REFUSED[case]
    with pytest.raises(jp.JaxparError) as error:
        jp.compose(blueprint("untied"), jp.Parallel(**sizes, pipeline=jp.Pipeline(**{"microbatches": 4, **settings})))
    (problem,) = error.value.problems
    assert fix in f"{problem.rule} {problem.fix}"


@pytest.mark.nightly
def test_what_is_stored_knows_no_schedule():
    """The same shapes, names and order of layers, whatever the schedule: what a checkpoint holds."""
    shapes = set()
    for sizes, settings in (
        ({"data": 8}, {}),
        ({"pipe": 2, "data": 4}, {"microbatches": 4}),
        ({"pipe": 2, "fsdp": 4}, {"microbatches": 4, "schedule": "zb_v"}),
    ):
        layout = jp.compose(blueprint("untied"), jp.Parallel(**sizes, pipeline=jp.Pipeline(**settings)))
        shapes.add(tuple((path, place.leaf.shape) for path, place in layout.placements.items()))
        made = jp.init_state(layout, optax.sgd(0.1), seed=3).params["blocks"]["mlp"]["up"]
        np.testing.assert_array_equal(made, reference_up())
    assert len(shapes) == 1


@functools.cache
def reference_up():
    layout = jp.compose(blueprint("untied"), jp.Parallel(), jax.devices()[:1])
    return np.asarray(jp.init_state(layout, optax.sgd(0.1), seed=3).params["blocks"]["mlp"]["up"])
