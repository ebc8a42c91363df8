"""Deep models as their authors write them, in a pipeline: no dim is named, and one line says where the layers are."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import assert_same_arrays, on_one_device, train
from written import DIM, Stacked, ViT

import jaxpar as jp
from jaxpar.pipeline.jaxprs.shorten import shortened
from jaxpar.sharding.names import Leaf
from jaxpar.sharding.stacks import bare_stack


def images(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {
            "image": rng.random((16, 8, 8, 1)).astype(np.float32),
            "label": rng.integers(0, 10, 16).astype(np.int32),
        }


def image_loss(model, batch):
    logits = model(batch["image"], train=model.training)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.sum(), losses.size


LAYOUTS = {
    "pipe 4 x data 2": {"pipe": 4, "data": 2},
    "pipe 2 x fsdp 2 x tensor 2": {"pipe": 2, "fsdp": 2, "tensor": 2},
}
MODELS = {
    "nnx.vmap": (Stacked, {}),
    "nn.scan with a length": (
        jp.linen(ViT(), jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.float32)), {"loss": image_loss, "data": images}
    ),
}  # fmt: skip


@cache
def alone(kind):
    model, settings = MODELS[kind]
    return on_one_device(model, steps=3, **settings)


def assert_equals(got, want):
    assert_same_arrays((got[0], got[1].params), (want[0], want[1].params))


def cases(kind):
    """Each layout once with one schedule, and the other way round in slow runs."""
    for name, often in zip(LAYOUTS, ("1f1b_phased", "1f1b"), strict=True):
        for schedule in ("1f1b_phased", "1f1b"):
            marks = [] if schedule == often else [pytest.mark.slow]
            yield pytest.param(kind, name, schedule, id=f"{kind}, {name}, {schedule}", marks=marks)


@pytest.mark.parametrize(("kind", "layout", "schedule"), [case for kind in MODELS for case in cases(kind)])
def test_losses_and_parameters_equal_one_device(kind, layout, schedule):
    parallel = jp.Parallel(**LAYOUTS[layout], pipeline=jp.Pipeline(schedule=schedule))
    model, settings = MODELS[kind]
    assert_equals(train(model, parallel, steps=3, **settings), alone(kind))


def test_dropout_inside_of_the_layers_equals_one_device():
    """Each layer keeps a key and a count of its own, also where another stage runs it."""
    made = partial(Stacked, layers=2, rate=0.2)
    got, want = train(made, jp.Parallel(pipe=2), jax.devices()[:2], steps=3), on_one_device(made, accumulate=4, steps=3)
    assert_equals(got, want)
    assert_same_arrays(got[1].model_state, want[1].model_state)


@pytest.mark.parametrize("metadata", [None, {nnx.PARTITION_NAME: "layers"}])
def test_biases_and_norms_of_a_bare_stack_are_spread_over_the_stages(metadata):
    layout = jp.compose(partial(Stacked, metadata=metadata), jp.Parallel(pipe=2, fsdp=2, tensor=2))
    assert {path for path in layout.placements if path.startswith("blocks/")} == set(layout.stacked)
    assert layout.describe("blocks/attn/query/kernel") == "f32[layers/pipe, embed/fsdp, heads/tensor, head_dim]"
    assert layout.describe("blocks/ln_1/scale") == f"f32[layers/pipe, {DIM}/fsdp]"


def leaves(**shapes):
    return {path.replace("__", "/"): Leaf(shape, jnp.float32, None) for path, shape in shapes.items()}


TOWERS = leaves(
    vision__blocks__w=(4, 8, 8), vision__norm=(8,), text__blocks__w=(4, 16, 16), text__blocks__b=(4, 16), head=(16, 4)
)


def test_the_largest_stack_is_found():
    assert bare_stack(TOWERS, 2, {}) == {"text/blocks/w", "text/blocks/b"}


@pytest.mark.parametrize(
    ("found", "parts", "patterns"),
    [
        (TOWERS, 3, {}),  # four layers on three stages
        (TOWERS, 2, {"head": ("layers", None)}),  # the user knows better
        (leaves(embed=(32, 16), attn__q=(16, 4, 4), attn__k=(16, 4, 4), attn__scale=(4,), attn__o=(4, 4, 16)), 2, {}),
    ],
)
def test_what_is_no_stack_is_not_taken_for_one(found, parts, patterns):
    assert not bare_stack(found, parts, patterns)


def twelve(each, params, x):
    return jax.lax.scan(lambda x, one: (jnp.tanh(x @ one[0]) + one[1], None), x, (params, each))[0]


def test_layers_that_count_themselves_run_with_a_stage_s_own():
    params, x, none = jnp.linspace(-1, 1, 48).reshape(12, 2, 2), jnp.ones((3, 2)), jnp.zeros(12)

    def layers(params, x):
        return jax.lax.scan(lambda x, one: (jnp.tanh(x @ one), None), x, params, length=12)[0]

    got = shortened(layers, 12, "Net")(params[3:6], x)
    assert (got == twelve(none[3:6], params[3:6], x)).all()


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (lambda params, x: twelve(jnp.arange(12.0), params, x), "scan over float32[12], which is no parameter"),
        (lambda params, x: x @ params.sum(0), "reads them in `reduce_sum`"),
        (lambda params, x: twelve(jnp.zeros(12), params, twelve(jnp.zeros(12), params, x)), "float32[12]"),
        (lambda params, x: x, "runs 0 scans over them"),
    ],
)
def test_layers_that_cannot_be_shortened_are_refused(layers, words):
    with pytest.raises(jp.JaxparError, match=re.escape(words)):
        shortened(layers, 12, "Net")(jnp.zeros((3, 2, 2)), jnp.ones((3, 2)))
