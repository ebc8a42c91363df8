"""Deep models as their authors write them, in a pipeline: no dim is named, and one line says where the layers are."""

import itertools
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from deep_models import DIM, GPT2, SEQ, Block, DenseFirst, Listed, Seq2seq, Stacked, ViT
from flax import nnx
from pairwise import some
from tiny import assert_same_arrays, on_one_device, trace, train

import jaxpar as jp
from jaxpar.jaxprs.shorter_scan import shorten_scan
from jaxpar.sharding.infer_stacks import longest_list, unnamed_layers, unnamed_stack
from jaxpar.sharding.names import Leaf


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


def listed_in_linen(**settings):
    return jp.from_linen(GPT2(**settings), jax.ShapeDtypeStruct((2, SEQ), jnp.int32))


MODELS = {
    "nnx.vmap": lambda: (Stacked, {}),
    "nn.scan with a length": lambda: (
        jp.from_linen(ViT(), jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.float32)), {"loss": image_loss, "data": images}
    ),
    "nnx.List": lambda: (Listed, {}),
    "a list of setup": lambda: (listed_in_linen(), {}),
    "two stacks": lambda: (partial(Seq2seq, layers=4), {}),
    "a first layer of another kind": lambda: (DenseFirst, {}),
}  # fmt: skip


@cache
def alone(kind):
    model, settings = MODELS[kind]()
    return on_one_device(model, steps=3, **settings)


def assert_equals(got, want):
    assert_same_arrays((got[0], got[1].params), (want[0], want[1].params))


CASES = list(itertools.product(MODELS, LAYOUTS, ("1f1b_phased", "1f1b")))


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("kind", "layout", "schedule"),
    some(
        CASES,
        [],
        [("nnx.vmap", "pipe 4 x data 2", "1f1b"), ("a first layer of another kind", "pipe 4 x data 2", "1f1b")],
    ),
)
def test_losses_and_parameters_equal_one_device(kind, layout, schedule):
    parallel = jp.Parallel(**LAYOUTS[layout], pipeline=jp.Pipeline(schedule=schedule))
    model, settings = MODELS[kind]()
    assert_equals(train(model, parallel, steps=3, **settings), alone(kind))


SETTINGS = {
    "gathered per tick": ({"fsdp": 4, "zero": 3}, {"gather": "tick", "keep": "residuals"}),
    "summed per tick": ({"fsdp": 4, "zero": 2}, {"keep": "residuals"}),
    "uneven": ({"data": 4}, {"layers": (3, 1)}),
    "interleaved": ({"fsdp": 2, "tensor": 2, "zero": 1}, {"schedule": "interleaved_phased"}),
    "spread": ({"data": 4}, {"head": "spread"}),
    "zero bubble": ({"data": 2, "tensor": 2}, {"schedule": "zb_h1"}),
}


BARE = ["nnx.vmap", "nn.scan with a length", "nnx.List", "a list of setup"]


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("kind", "setting"), some(itertools.product(BARE, SETTINGS), [], [("nnx.vmap", "gathered per tick")])
)
def test_settings_of_the_pipeline_equal_one_device(kind, setting):
    sizes, pipeline = SETTINGS[setting]
    if setting == "spread" and kind == "nn.scan with a length":
        pytest.skip("no vocabulary to spread")
    model, settings = MODELS[kind]()
    parallel = jp.Parallel(pipe=2, **sizes, pipeline=jp.Pipeline(microbatches=4, **pipeline))
    assert_equals(train(model, parallel, steps=3, **settings), alone(kind))


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        lambda **settings: partial(Stacked, **settings),
        pytest.param(lambda **settings: partial(Listed, **settings), marks=pytest.mark.full),
        pytest.param(listed_in_linen, marks=pytest.mark.full),
    ],
    ids=["nnx.vmap", "nnx.List", "a list of setup"],
)
def test_dropout_inside_of_the_layers_equals_one_device(kind):
    """Each layer has keys of its own, also where another stage runs it."""
    made = kind(layers=2, rate=0.2)
    got, want = train(made, jp.Parallel(pipe=2), jax.devices()[:2], steps=3), on_one_device(made, accumulate=4, steps=3)
    assert_equals(got, want)
    assert_same_arrays(got[1].model_state, want[1].model_state)


@pytest.mark.parametrize("metadata", [None, {nnx.PARTITION_NAME: "layers"}])
def test_biases_and_norms_of_a_bare_stack_are_spread_over_the_stages(metadata):
    layout = jp.compose(partial(Stacked, metadata=metadata), jp.Parallel(pipe=2, fsdp=2, tensor=2))
    assert {path for path in layout.placements if path.startswith("blocks/")} == set(layout.stacked_paths)
    assert layout.describe("blocks/attn/query/kernel") == "f32[layers/pipe, embed/fsdp, heads/tensor, head_dim]"
    assert layout.describe("blocks/ln_1/scale") == f"f32[layers/pipe, {DIM}/fsdp]"


def leaves(**shapes):
    return {path.replace("__", "/"): Leaf(shape, jnp.float32, None) for path, shape in shapes.items()}


TOWERS = leaves(
    vision__blocks__w=(4, 8, 8), vision__norm=(8,), text__blocks__w=(4, 16, 16), text__blocks__b=(4, 16), head=(16, 4)
)


def test_the_largest_stack_is_found():
    assert unnamed_stack(TOWERS, 2, {}) == {"text/blocks/w", "text/blocks/b"}


@pytest.mark.parametrize(
    ("found", "parts", "patterns"),
    [
        (TOWERS, 3, {}),  # four layers on three stages
        (TOWERS, 2, {"head": ("layers", None)}),  # the user knows better
        (leaves(embed=(32, 16), attn__q=(16, 4, 4), attn__k=(16, 4, 4), attn__scale=(4,), attn__o=(4, 4, 16)), 2, {}),
    ],
)
def test_what_is_no_stack_is_not_taken_for_one(found, parts, patterns):
    assert unnamed_layers(found, parts, patterns) == (frozenset(), {})


def twelve(each, params, x):
    return jax.lax.scan(lambda x, one: (jnp.tanh(x @ one[0]) + one[1], None), x, (params, each))[0]


def test_layers_that_count_themselves_run_with_a_stage_s_own():
    params, x, none = jnp.linspace(-1, 1, 48).reshape(12, 2, 2), jnp.ones((3, 2)), jnp.zeros(12)

    def layers(params, x):
        return jax.lax.scan(lambda x, one: (jnp.tanh(x @ one), None), x, params, length=12)[0]

    got = shorten_scan(layers, 12, "Net")(params[3:6], x)
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
        shorten_scan(layers, 12, "Net")(jnp.zeros((3, 2, 2)), jnp.ones((3, 2)))


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("made", "stack"),
    [pytest.param(lambda: Listed, "h/*/ln_1/scale", marks=pytest.mark.slow), (listed_in_linen, "h_*/ln_1/scale")],
    ids=["nnx.List", "a list of setup"],
)
def test_a_list_of_layers_keeps_its_names(made, stack):
    """So a checkpoint of one device is one of a pipeline; a device has its share of the bytes."""
    model = made()
    layout, one = jp.compose(model, jp.Parallel(pipe=4), 4), jp.compose(model, jp.Parallel(), 1)
    assert {path: place.leaf for path, place in layout.placements.items()} == {
        path: place.leaf for path, place in one.placements.items()
    }
    assert layout.lists[stack] == tuple(stack.replace("*", str(i)) for i in range(4))
    assert layout.describe(layout.lists[stack][0]) == f"f32[{DIM}/pipe]"


FIRST = leaves(
    wte=(8, 4), h__0__w=(4, 8), h__1__w=(4, 4), h__1__b=(4,), h__2__w=(4, 4), h__2__b=(4,), a_0__w=(2, 2), a_1__w=(2, 2)
)


def test_the_largest_list_of_equal_layers_is_found():
    """Not from the first layer on, if that is of another kind."""
    assert longest_list(FIRST, 2) == {"h/*/w": ("h/1/w", "h/2/w"), "h/*/b": ("h/1/b", "h/2/b")}
    assert not longest_list(FIRST, 3)


@pytest.mark.parametrize("names", ["blocks/{}", "blocks_{}", "blocks.{}", "block{}", "layer_{}/unit"])
def test_a_list_is_found_by_any_word_that_ends_with_a_number(names):
    found = {f"{names.format(i)}/w": Leaf((8, 8), jnp.float32, None) for i in range(4)}
    assert longest_list(found, 2) == {f"{names.format('*')}/w": tuple(found)}


class Looped(Listed):
    def __call__(self, tokens):
        def layers(x):
            for block in self.h:
                x = block(x)
            return x

        return self.wte.attend(jp.pipelined(layers, self.wte(tokens)))


class Some(Listed):
    def __call__(self, tokens):
        return self.wte.attend(jp.pipelined(self.h[:2], self.wte(tokens)))


class Scaled(Listed):
    def __call__(self, tokens):
        layers = [lambda x, block=block, i=i: block(x) / (i // 2 + 1) for i, block in enumerate(self.h)]
        return self.wte.attend(jp.pipelined(layers, self.wte(tokens)))


class Crossed(Listed):
    def __call__(self, tokens):
        layers = [self.h[1], self.h[0], self.h[2], self.h[3]]
        return self.wte.attend(jp.pipelined(layers, self.wte(tokens)))


class Encoded(Seq2seq):
    def __call__(self, tokens):
        return self.wte.attend(jp.pipelined(self.encoded, self.wte(tokens)))


class Twofold(Stacked):
    def layers(self, x):
        return super().layers(super().layers(x))


class Hybrid(nnx.Module):
    """Two kinds of layers in turns, of which one has parameters that look like a stack."""

    def __init__(self, rngs):
        self.blocks = nnx.List([(Wide if i % 2 else nnx.Linear)(16, 16, rngs=rngs) for i in range(4)])

    def __call__(self, tokens):
        return jp.pipelined(self.blocks, nnx.one_hot(tokens, 16))


class Wide(nnx.Module):
    def __init__(self, inputs, outputs, *, rngs):
        self.w = nnx.Param(jnp.ones((2, inputs, outputs)))
        self.b = nnx.Param(jnp.ones((2, 1, outputs)))

    def __call__(self, x):
        return x + jnp.sum(jnp.tanh(jnp.einsum("btd,sde->sbte", x, self.w[...]) + self.b[...][:, None]), axis=0)


class StackInTurn(Stacked):
    def __call__(self, tokens):
        return self.lm_head(jp.pipelined([Block(DIM, 2 * DIM, nnx.Rngs(0))], self.wte(tokens)))


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param(
            Looped,
            "gives jp.pipelined a function, and its largest list of equal layers is h/0 ... h/3, 4 of them",
            marks=pytest.mark.full,
        ),
        pytest.param(Some, "gives jp.pipelined 2 layers, and its largest list", marks=pytest.mark.slow),
        pytest.param(Scaled, "layer 2 of h/0 ... h/3 is another program than layer 0", marks=pytest.mark.full),
        pytest.param(Crossed, "layer 1 of h/0 ... h/3 is another program than layer 0", marks=pytest.mark.full),
        pytest.param(Encoded, "and its largest stack of layers is decoder", marks=pytest.mark.slow),
        pytest.param(
            Twofold, "the layers of Twofold go through a stack, and then through one again", marks=pytest.mark.slow
        ),
        pytest.param(StackInTurn, "gives jp.pipelined 1 layers, and its largest is a stack", marks=pytest.mark.slow),
        (Hybrid, "layers of 2 kinds in turns as one callable for each turn: jp.pipelined([lambda x, a=a, b=b: b(a(x))"),
    ],
)
def test_layers_that_are_not_the_largest_that_are_equal_are_refused(model, words):
    with pytest.raises(jp.JaxparError, match=re.escape(words)):
        trace(model, jp.Parallel(pipe=2), jax.devices()[:2])
