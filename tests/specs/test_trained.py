"""Layouts that were found train as plain Flax and optax do on one device, and pasting their names changes nothing."""

import ast
import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_loop
import pytest
from flax import linen as nn
from flax import nnx
from pairwise import some
from specs import models

import jaxpar as jp
from jaxpar.parallel.compose import as_blueprint

SGD = optax.sgd(0.05)
ROWS, LENGTH = 8, 8
RNG = np.random.default_rng(0)
TEXTS = {"x": RNG.integers(0, 64, [ROWS, LENGTH], np.int32), "y": RNG.integers(0, 64, [ROWS, LENGTH], np.int32)}
PICTURES = {"x": RNG.normal(size=[ROWS, 32, 32, 3]).astype(np.float32), "y": RNG.integers(0, 16, ROWS, np.int32)}
PAIRS = {"x": TEXTS["x"], "pictures": RNG.normal(size=[ROWS, 6, 48]).astype(np.float32)}
SMALL = {"vocab": 64, "dim": 32, "hidden": 64}
CASES = {
    "gpt": (partial(models.Gpt, **SMALL, heads=4), models.next_token, TEXTS),
    "fused": (partial(models.Gpt2, **SMALL, heads=8), models.next_token, TEXTS),
    "fused, sliced": (partial(models.Gpt2, **SMALL, heads=8, parts="slice"), models.next_token, TEXTS),
    "fused, reshaped": (partial(models.Gpt2, **SMALL, heads=8, parts="reshape"), models.next_token, TEXTS),
    "gqa": (partial(models.Gpt, **SMALL, heads=8, kv_heads=4), models.next_token, TEXTS),
    "scanned": (partial(models.ScannedGpt, **SMALL, heads=4, layers=2), models.next_token, TEXTS),
    "mixture": (partial(models.Gpt, **SMALL, heads=4, experts=4, capacity=64), models.next_token, TEXTS),
    "pictures": (partial(models.AlexNet, width=8, dense=64, classes=16, size=32), models.classes, PICTURES),
    "lstm": (partial(models.Lstm, vocab=64, dim=32), models.next_token, TEXTS),
    "attending": (partial(models.Attending, dim=32, heads=4), models.next_token, TEXTS),
    "towers": (partial(models.TwoTowers, **SMALL, heads=4), models.contrastive, PAIRS),
}
LAYOUTS = {"tensor 4, fsdp 2": {"tensor": 4, "fsdp": 2}, "tensor 2, data 2": {"tensor": 2, "data": 2}}


@cache
def plain(case):
    model, loss, batch = CASES[case]
    return plain_loop.train(model, model, loss, SGD, batch)


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(64, 32)(x)
        x = x + nn.Dense(32)(nn.gelu(nn.Dense(64)(x)))
        return nn.Dense(64)(x)


def devices(sizes):
    return jax.devices()[: sizes.get("tensor", 1) * sizes.get("fsdp", 1) * sizes.get("data", 1)]


@cache
def found(case, layout, **options):
    model, loss, batch = CASES[case]
    return jp.find_specs(model, loss, batch, jp.Parallel(**LAYOUTS[layout]), **options)


def train(layout, case, **numerics):
    """Returns the losses of three steps and the parameters after them."""
    _, loss, batch = CASES[case]
    state, step, losses = jp.init_state(layout, SGD, seed=0), jp.train_step(layout, loss, SGD, **numerics), []
    for _ in range(plain_loop.STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state.params


def split_over_tensor(layout):
    return [path for path, place in layout.placements.items() if "tensor" in str(place.stored)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "layout"),
    some(
        [(case, layout) for case in CASES for layout in LAYOUTS],
        [("gpt", "tensor 4, fsdp 2")],
        [("mixture", "tensor 2, data 2"), ("lstm", "tensor 2, data 2")],
    ),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*each device computes")  # all experts' slots, whose number `data` does not split
def test_found_layouts_train_as_one_device_does(case, layout):
    composed = jp.compose(CASES[case][0], found(case, layout).parallel, devices(LAYOUTS[layout]))
    assert split_over_tensor(composed)
    plain_loop.assert_alike(train(composed, case), plain(case))


@pytest.mark.spread(0)
@pytest.mark.parametrize("numerics", some([{"accumulate": 2}, {"remat": "full"}], [], [{"accumulate": 2}]), ids=str)
def test_found_layouts_accumulate_and_recompute(numerics):
    composed = jp.compose(CASES["gpt"][0], found("gpt", "tensor 4, fsdp 2").parallel)
    plain_loop.assert_alike(train(composed, "gpt", **numerics), plain("gpt"))


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [{"tensor": 4, "fsdp": 2}, {"tensor": 2}], ids=["of two", "of one"])
def test_one_example_on_a_device_has_names_too(sizes):
    model, loss, _ = CASES["gpt"]
    batch = {key: value[: sizes.get("fsdp", 1)] for key, value in TEXTS.items()}
    specs = jp.find_specs(model, loss, batch, jp.Parallel(**sizes))
    assert specs.specs.activations
    assert all("batch" in names for names in specs.specs.activations.values())
    layout, losses = jp.compose(model, specs.parallel, devices(sizes)), []
    state, step = jp.init_state(layout, SGD, seed=0), jp.train_step(layout, loss, SGD)
    for _ in range(plain_loop.STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    plain_loop.assert_alike((losses, state.params), plain_loop.train(model, model, loss, SGD, batch))


class Masked(nnx.Module):
    """Reads where the tokens of a row begin from a mask, as decoders of padded rows do."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x, mask):
        angles = jnp.einsum("bt,k->btk", mask * jnp.arange(LENGTH), 1 / jnp.arange(1, 33))
        return self.down(nnx.gelu(self.up(x + jnp.sin(angles))))


def unmasked(model, batch):
    losses = (model(batch["x"], jnp.ones(batch["x"].shape[:2])) - batch["x"]) ** 2
    return losses.sum(), losses.size


def test_a_loss_may_pass_constants_where_the_example_call_has_inputs():
    batch = {"x": RNG.normal(size=[ROWS, LENGTH, 32]).astype(np.float32)}
    model = jp.from_nnx(Masked, batch["x"], np.ones([ROWS, LENGTH], np.float32))
    layout = jp.compose(model, jp.Parallel(tensor=4, data=2, specs="found"))
    assert [names for names in layout.parallel.activations.values() if "mlp" not in names]  # of what the mask decides
    result = plain_loop.steps(layout, unmasked, SGD, batch)
    plain_loop.assert_alike(result, plain_loop.train(Masked, Masked, unmasked, SGD, batch))


@pytest.mark.nightly
def test_a_decoder_keeps_the_constraints_of_its_own_layers():
    config = jp.DecoderConfig(vocab=64, seq=LENGTH, dim=32, layers=2, heads=4)
    batch = {"inputs": TEXTS["x"], "targets": TEXTS["y"]}
    specs = jp.find_specs(partial(jp.Decoder, config), jp.next_token_loss, batch, jp.Parallel(fsdp=4, tensor=2))
    assert specs.specs.paths["blocks/mlp/down"] == (None, "mlp", None)
    assert not specs.specs.activations
    step = jp.train_step(jp.compose(partial(jp.Decoder, config), specs.parallel), jp.next_token_loss, SGD)
    step.lower(jp.init_state(step.layout, SGD), batch)  # lines of these layers are others within a step


@pytest.mark.full
def test_found_layouts_train_in_bf16_as_one_device_does():
    specs = found("gpt", "tensor 4, fsdp 2", precision="bf16")
    losses, _ = train(jp.compose(CASES["gpt"][0], specs.parallel), "gpt", precision="bf16")
    alone, _ = train(jp.compose(CASES["gpt"][0], jp.Parallel(), jax.devices()[:1]), "gpt", precision="bf16")
    np.testing.assert_allclose(losses, alone, rtol=2e-3)


@pytest.mark.nightly
def test_examples_over_tensor_train_as_one_device_does():
    model, loss, batch = CASES["pictures"]
    specs = jp.find_specs(model, loss, batch, jp.Parallel(tensor=4, fsdp=2), examples=True)
    plain_loop.assert_alike(train(jp.compose(model, specs.parallel), "pictures"), plain("pictures"))


@pytest.mark.nightly
def test_a_model_with_an_example_finds_its_specs_in_compose():
    model, _, batch = CASES["gpt"]
    layout = jp.compose(jp.from_nnx(model, batch["x"]), jp.Parallel(tensor=4, fsdp=2, specs="found"))
    assert 'specs="found": tensor splits' in layout.explain()
    assert split_over_tensor(layout)
    plain_loop.assert_alike(train(layout, "gpt"), plain("gpt"))


@pytest.mark.nightly
def test_a_linen_model_with_an_example_finds_its_specs_in_compose():
    layout = jp.compose(jp.from_linen(LinenMlp(), TEXTS["x"]), jp.Parallel(tensor=4, fsdp=2, specs="found"))
    assert split_over_tensor(layout)
    alone = plain_loop.train(jp.from_linen(LinenMlp(), TEXTS["x"]), LinenMlp(), models.next_token, SGD, TEXTS)
    plain_loop.assert_alike(train(layout, "gpt"), alone)


@pytest.mark.nightly
def test_pasted_names_give_the_same_program():
    model, loss, batch = CASES["lstm"]
    finder = dataclasses.replace(
        as_blueprint(model), find_specs=lambda _: (found("lstm", "tensor 4, fsdp 2").parallel, "")
    )
    fields = ("tensor", "fsdp", "paths", "activations", "rules")
    shown = repr({name: getattr(found("lstm", "tensor 4, fsdp 2").parallel, name) for name in fields})
    layouts = [
        jp.compose(finder, jp.Parallel(tensor=4, fsdp=2, specs="found")),
        jp.compose(model, jp.Parallel(**ast.literal_eval(shown))),
    ]
    reports = [jp.inspect(jp.train_step(layout, loss, SGD), batch) for layout in layouts]
    assert [layout.placements for layout in layouts[:1]] == [layout.placements for layout in layouts[1:]]
    assert reports[0].by_axis == reports[1].by_axis
    assert reports[0].total == reports[1].total
