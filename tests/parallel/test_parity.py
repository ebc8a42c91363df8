"""The promise: losses and parameters after five steps equal one device, whatever the layout, model and step.

Each technique has a row in tests/contracts/layout_table.py, which is compared with Flax and optax alone.

SOME    in CI, and FEW of it in every run: each layout, and each pair of model and variant
PAIRS   marked full, the first to run where a layout is new: each pair of model, variant and layout
EVERY   marked full beyond SOME: models x variants x layouts
"""

import itertools
from contextlib import nullcontext
from functools import cache

import jax
import numpy as np
import pytest
from layouts import LAYOUTS, kept_bytes, on_device
from pairwise import covering, some
from tiny import assert_same_arrays, batches, models, on_one_device, optimizer, token_loss, train

import jaxpar as jp

VARIANTS = {"accumulation": {"accumulate": 2}, "remat": {"remat": "full"}}
MODELS = ("annotated", "bare", "linen")


@cache
def blueprint(kind):
    return models()[kind]


@cache
def alone(kind, variant):
    losses, state, _ = on_one_device(blueprint(kind), **VARIANTS[variant])
    return losses, state


EVERY = list(itertools.product(MODELS, VARIANTS, LAYOUTS))
SOME = covering(EVERY, lambda kind, variant, layout: {(kind, variant), layout})
PAIRS = covering(EVERY, lambda *each: {*itertools.combinations(each, 2)})
FEW = [("annotated", "accumulation", "zero1"), ("annotated", "remat", "2x2x2 zero3")]


def case_of(each):
    # two in every run; in CI each kind of step and each layout once; every pair and the rest with -m ""
    rarely = [] if each in FEW else [pytest.mark.slow if each in SOME else pytest.mark.full]
    return pytest.param(*each, id=", ".join(each), marks=[pytest.mark.xdist_group(" ".join(each[:2])), *rarely])


def test_the_cases_of_every_run_have_each_layout_and_each_kind_of_step():
    assert {each[:2] for each in SOME} == set(itertools.product(MODELS, VARIANTS))
    assert {each[2] for each in SOME} == set(LAYOUTS)
    assert len(SOME) == len(LAYOUTS)
    assert {pair for each in PAIRS for pair in itertools.combinations(each, 2)} == {
        pair for each in EVERY for pair in itertools.combinations(each, 2)
    }


@pytest.mark.spread(3)
@pytest.mark.parametrize(("kind", "variant", "layout"), [case_of(each) for each in EVERY])
def test_losses_and_parameters_equal_one_device(kind, variant, layout):
    want, reference = alone(kind, variant)
    unnamed = LAYOUTS[layout].sequence and kind != "linen"  # names too few activations for it, and is told so
    with pytest.warns(UserWarning, match="sequence=True, but") if unnamed else nullcontext():
        got, state, step = train(blueprint(kind), LAYOUTS[layout], **VARIANTS[variant])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays((state.params, state.model_state), (reference.params, reference.model_state))
    assert_bytes_follow_zero(step.layout, state)


def assert_bytes_follow_zero(layout, state):
    """Bytes on one device equal ZeRO's formula: Adam keeps twice the parameters, and its count."""
    kept = kept_bytes(layout)
    assert on_device(state.params) == kept
    counts = [x for x in jax.tree.leaves(state.optimizer) if x.ndim == 0]
    assert on_device(state.optimizer) == 2 * kept + sum(x.nbytes for x in counts)


# copies of one stacked matrix that the loop over microbatches carries: (whole, sharded), parameter and accumulator
CARRIED = {0: (2, 0), 1: (2, 0), 2: (1, 1), 3: (0, 2)}


@pytest.mark.parametrize("stage", some(CARRIED, [2], [1]))
def test_the_accumulator_of_gradients_is_sharded_as_zero_says(stage):
    """Read off the compiled program: what the loop carries is what lives through it.

    In stage 1 ZeRO keeps gradients whole. Left to itself XLA keeps only the shard that the optimizer reads, and
    gathers it for every microbatch.
    """
    chain = optimizer()
    layout = jp.compose(blueprint("annotated"), jp.Parallel(fsdp=8, zero=stage))
    step = jp.train_step(layout, token_loss, chain, accumulate=2)
    text = step.lower(jp.init_state(layout, chain), step.put(next(batches(1)))).compile().as_text()
    carried = max((line for line in text.splitlines() if " while(" in line), key=len).split(" while(")[0]
    layers, rows, columns = layout.placements["blocks/up/kernel"].leaf.shape
    whole = carried.count(f"f32[{layers},{rows},{columns}]")
    shards = carried.count(f"f32[{layers},{rows // 8},{columns}]") + carried.count(
        f"f32[{layers},{rows},{columns // 8}]"
    )
    assert (whole, shards) == CARRIED[stage]
